"""The rules of README's "How it is built", read off the syntax trees."""

from __future__ import annotations

import ast
import functools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tvm_adaptive"
FILES = sorted(PACKAGE.rglob("*.py"))

# What stands below may be imported by what stands above, and not the other way round.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"values"}),
    frozenset({"_tvm"}),
    frozenset({"workers"}),
    frozenset({"measure_callback"}),
    frozenset({"models"}),
    frozenset({"search_strategy", "builder", "runner", "cost_model", "task_scheduler", "database"}),
    frozenset({"tuning"}),
    frozenset({"report"}),
    frozenset({"cli"}),
)
STAGES = FLOORS[6] | {"measure_callback"}
MAX_ENTRIES = 20
# The files of the stages that know TVM's classes; every other file there is pure. The set
# may only shrink.
ADAPTERS = {
    "builder/compile.py",
    "builder/persistent.py",
    "cost_model/family_model.py",
    "cost_model/model.py",
    "database/maintenance.py",
    "database/metaschedule.py",
    "database/run_database.py",
    "database/store_callback.py",
    "measure_callback/commit.py",
    "measure_callback/recorder.py",
    "runner/local.py",
    "runner/measure.py",
    "runner/playoff/finalist.py",
    "runner/playoff/modules.py",
    "runner/playoff/playoff.py",
    "runner/playoff/verifier.py",
    "runner/playoff/worker.py",
    "runner/rpc/lease.py",
    "runner/rpc/leased_worker.py",
    "runner/rpc/runner.py",
    "search_strategy/candidate_pool.py",
    "search_strategy/evolution_proposer.py",
    "search_strategy/proposer.py",
    "search_strategy/schedules.py",
    "search_strategy/gpu_limits.py",
    "search_strategy/sketches.py",
    "search_strategy/stoppable.py",
    "search_strategy/strategy.py",
    "search_strategy/surrogate_proposer.py",
    "task_scheduler/scheduler.py",
}

MAX_FILE_LINES = 520
MAX_MEDIAN_FILE_LINES = 150
MAX_FUNCTION_LINES = 60
MAX_P90_FUNCTION_LINES = 30

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield each imported module, and what is imported from it, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what a file depends on"
            module = node.module or ""
            yield module
            # Which may be a module, too: `from tvm_adaptive.tuning import registry`.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def stage_of(path: Path) -> str | None:
    folder = path.relative_to(PACKAGE).parts[0]
    return folder if folder in STAGES else None


def functions_of(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def lines_without_docstring(node: Function) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def for_each(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator that makes one test of a rule for files; a failure shows the file."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            for path in paths:
                rule(path)

        return test

    return decorate


each_file = for_each(FILES)
each_stage_file = for_each([path for path in FILES if stage_of(path)])


def test_the_lists_name_files_that_exist() -> None:
    assert len(FILES) > len(ADAPTERS)
    assert {name for name in ADAPTERS if not (PACKAGE / name).is_file()} == set()


def test_the_package_has_few_entries() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert len(entries) <= MAX_ENTRIES


@each_file
def test_only_the_door_imports_tvm(path: Path) -> None:
    found = {name for name in imports_of(tree_of(path)) if name.split(".")[0] in ("tvm", "tvm_ffi")}
    assert not found or relative(path).startswith("_tvm/"), (
        f"{relative(path)} imports {sorted(found)}; bind the names in _tvm instead"
    )


@each_stage_file
def test_only_adapters_use_the_door(path: Path) -> None:
    uses_door = any(name.startswith("tvm_adaptive._tvm") for name in imports_of(tree_of(path)))
    assert uses_door == (relative(path) in ADAPTERS), (
        f"{relative(path)}: keep the mathematics pure, or add or remove it in ADAPTERS"
    )


@each_stage_file
def test_pure_files_use_pure_files_only(path: Path) -> None:
    # The maintenance of stores is what the commands call; it composes the folder's files.
    if relative(path) in ADAPTERS or path.name in ("__init__.py", "maintenance.py"):
        return
    modules = {f"tvm_adaptive.{name[:-3].replace('/', '.')}" for name in ADAPTERS}
    assert modules.isdisjoint(imports_of(tree_of(path)))


def floor_of(folder: str) -> int | None:
    for floor, folders in enumerate(FLOORS):
        if folder in folders:
            return floor
    return None


@each_file
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    floor = floor_of(own)
    top = len(FLOORS) - 1
    if floor in (None, top):  # the commands, or the package itself and testing, which see the rest
        return
    imported = {name.split(".")[1] for name in imports_of(tree_of(path)) if "adaptive." in name}
    # What has no floor may see everything, so that only the commands may import it.
    floors = {folder: floor_of(folder) for folder in imported - {own}}
    wrong = {name for name, low in floors.items() if (top if low is None else low) >= max(floor, 1)}
    assert wrong == set(), "stages exchange values; what composes them stands above them"


@each_file
def test_nothing_imports_the_command_line(path: Path) -> None:
    if relative(path) == "__main__.py" or relative(path).startswith("cli/"):
        return
    assert not any(name.startswith("tvm_adaptive.cli") for name in imports_of(tree_of(path)))


def test_the_command_line_does_no_work() -> None:
    # What the commands for stores call.
    allowed = {"tvm_adaptive.database.maintenance"}
    for path in (PACKAGE / "cli").glob("*.py"):
        inside = {
            name
            for name in set(imports_of(tree_of(path))) - allowed
            if name.startswith("tvm_adaptive._")
            or (name.count(".") > 1 and name.split(".")[1] in STAGES - {"measure_callback"})
        }
        assert inside == set(), f"{relative(path)} reaches into {sorted(inside)}"


@each_file
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@each_file
def test_functions_are_short(path: Path) -> None:
    long = {
        node.name: lines_without_docstring(node)
        for node in functions_of(tree_of(path))
        if lines_without_docstring(node) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_most_files_and_functions_are_shorter() -> None:
    files = [len(path.read_text().splitlines()) for path in FILES if path.name != "__init__.py"]
    assert statistics.median(files) <= MAX_MEDIAN_FILE_LINES
    functions = [
        lines_without_docstring(node) for path in FILES for node in functions_of(tree_of(path))
    ]
    assert statistics.quantiles(functions, n=10)[-1] <= MAX_P90_FUNCTION_LINES


@each_file
def test_the_library_does_not_print(path: Path) -> None:
    if relative(path).startswith("cli/"):
        return
    names = {
        node.func.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "print" not in names


@each_file
def test_randomness_is_handed_in(path: Path) -> None:
    allowed = {"Generator", "default_rng", "SeedSequence", "PCG64", "BitGenerator"}
    tree = tree_of(path)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "random")
    }
    assert used <= allowed, f"{relative(path)} uses the global generator: {sorted(used - allowed)}"
    assert "random" not in set(imports_of(tree))


@each_file
def test_the_environment_is_no_configuration(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            # Only to pass the environment on to a child process, to say what is in it, or
            # to find a password.
            allowed = (
                "workers/fork_server.py",
                "workers/main.py",
                "tuning/doctor.py",
                "database/location.py",
            )
            assert relative(path) in allowed


@for_each([*FILES, *sorted((ROOT / "tests").rglob("*.py"))])
def test_nothing_is_left_for_later(path: Path) -> None:
    marks = re.findall("TO" + "DO|FIX" + "ME|XX" + "X", path.read_text())
    assert marks == []


def test_the_top_level_holds_nothing_else() -> None:
    expected = {"tvm_adaptive", "tests", "benchmarks", "pyproject.toml", "setup.cfg"}
    expected |= {"README.md", "LICENSE", "CHANGELOG.md"}
    # Left by building and by running; none of it is kept in version control.
    leftovers = {"build", "dist", "runs", "tvm_adaptive.egg-info"}
    present = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert present - leftovers == expected
