"""The pages: every block of code runs, every command is understood, every name is there.

=================  ===============================================================================
blocks             what is done with them
=================  ===============================================================================
python             run
sh                 run from top to bottom, page after page of ``WALK`` (slow); parsed
cpp                compiled
py                 only shown, as they take minutes: parsed, and arguments compared with signatures
console, bash      only shown, as they need other machines: parsed by bash, our commands by us
dockerfile, toml   parsed, and compared with what the package needs
=================  ===============================================================================
"""

from __future__ import annotations

import argparse
import ast
import html
import importlib
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import tvm_adaptive
from tvm_adaptive import cli
from tvm_adaptive._tvm import Target
from tvm_adaptive.models.frontend import FORMATS
from tvm_adaptive.report.demo import read_demo
from tvm_adaptive.report.page import page as report_page
from tvm_adaptive.search_strategy import AdaptiveSearch
from tvm_adaptive.tuning import native, torch_backend
from tvm_adaptive.tuning.config import PRESETS
from tvm_adaptive.tuning.config_file import parse_config
from tvm_adaptive.tuning.manifest import Interface, TensorInfo
from tvm_adaptive.values.moved import MODULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "tvm_adaptive" / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PROJECT = (ROOT / "pyproject.toml").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages with commands that run here, each in the folder that those before it have left.
WALK = ("quickstart", "report", "servers", "shared_store", "cpp")
# Blocks that commands are shown in.
SHELLS = ("sh", "console", "bash", "dockerfile")
OUR_COMMAND = re.compile(
    r"(?<![\w/-])tvm-adaptive ((?:tune|apply|report|show|db|doctor)\b[^|;&\n]*)"
)
# A page says "tvm-adaptive", which the environment of the tests has as a module.
SHELL = """
pip() { :; }
python() { "$PYTHON" "$@"; }
tvm-adaptive() { "$PYTHON" -m tvm_adaptive "$@"; }
"""


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        texts = [text for of, text in BLOCK.findall(page.read_text()) if of == language]
        found += [pytest.param(text, id=f"{page.stem}-{place}") for place, text in enumerate(texts)]
    return found


def commands() -> list[list[str]]:
    """Return each different command of this package, with its arguments."""
    texts = [block.values[0].replace("\\\n", " ") for each in SHELLS for block in blocks(each)]
    found = [shlex.split(each) for text in texts for each in OUR_COMMAND.findall(text)]
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def test_there_are_pages() -> None:
    assert {page.stem for page in PAGES} >= {"index", "quickstart", "newcomers", "reference"}
    assert len(blocks("python")) >= 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all blocks, so that their runs can share a server of workers."""
    return tmp_path_factory.mktemp("blocks")


@pytest.mark.parametrize("text", blocks("python"))
def test_every_block_of_code_runs(text: str, folder: Path, monkeypatch: Any) -> None:
    if "import torch" in text:
        pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # dataclasses look for their module
    exec(compile(text, "page", "exec"), page.__dict__)


def test_there_are_commands() -> None:
    assert len(commands()) >= 25
    assert {command[0] for command in commands()} >= {"tune", "apply", "report", "db", "doctor"}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_is_understood(command: list[str]) -> None:
    assert cli._parser().parse_args(command).run is not None


@pytest.mark.parametrize("text", [*blocks("console"), *blocks("bash"), *blocks("sh")])
def test_bash_reads_what_is_shown(text: str) -> None:
    script = re.sub(r"^\$ ", "", text, flags=re.MULTILINE)
    subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("torch_for_commands")
def test_the_pages_work_from_top_to_bottom(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHON", sys.executable)
    for name in WALK:
        if name == "cpp" and shutil.which("cmake") is None:
            continue
        for language, text in BLOCK.findall(text_of(name)):
            if text.startswith("# my_model.py"):
                (tmp_path / "my_model.py").write_text(text)
            if language != "sh":
                continue
            # Minutes are for readers; so few trials suffice for what follows.
            script = SHELL + re.sub(r"--budget \w+", "--trials 8", text)
            done = subprocess.run(
                ["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            # A machine may have a problem, which is not the page's.
            allowed = {0, 1} if "doctor" in text else {0}
            assert done.returncode in allowed, (name, text, done.stdout, done.stderr)
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
    assert (tmp_path / "deploy" / "example.cc").exists()


def test_the_walk_passes_all_pages_with_commands_that_run() -> None:
    assert {block.id.rpartition("-")[0] for block in blocks("sh")} == set(WALK)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("text", blocks("cpp"))
def test_programs_compile(text: str, tmp_path: Path) -> None:
    tensors = (TensorInfo("values", (1, 8), "float32"),)
    target = Target({"kind": "llvm", "num-cores": 2})
    header = native.model_header("net.so", target, Interface(tensors, tensors), {}, 2)
    (tmp_path / "net_model.h").write_text(header)
    (tmp_path / "program.cc").write_text(text)
    options = ["-std=c++17", "-Wall", "-Wpedantic", "-Werror", "-fsyntax-only"]
    subprocess.run(
        ["c++", *options, f"-I{native._TEMPLATES}", "program.cc"], cwd=tmp_path, check=True
    )


@pytest.mark.parametrize("text", blocks("py"))
def test_calls_that_are_only_shown_have_arguments_that_exist(text: str) -> None:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    n_known = 0
    for call in calls:
        given = {each.arg: each.value for each in call.keywords}
        module, _, function = ast.unparse(call.func).rpartition(".")
        if module == "tvm_adaptive":
            n_known += 1
            assert set(given) <= set(inspect.signature(getattr(tvm_adaptive, function)).parameters)
        elif "backend" in given:
            n_known += 1
            assert ast.literal_eval(given["backend"]) == torch_backend.tvm_adaptive.__name__
            assert set(ast.literal_eval(given["options"])) <= set(torch_backend._OPTIONS)
    assert n_known


@pytest.mark.parametrize("text", blocks("toml"))
def test_options_of_a_file_exist(text: str) -> None:
    assert parse_config(text) not in PRESETS.values()


@pytest.mark.parametrize("text", blocks("dockerfile"))
def test_an_image_has_what_the_package_needs(text: str) -> None:
    (python,) = re.findall(r"^FROM python:([\d.]+)", text, re.MULTILINE)
    (supported,) = re.findall(r'^requires-python = "(.+)"$', PROJECT, re.MULTILINE)
    assert SpecifierSet(supported).contains(python)
    assert "gcc" in text.split("apt-get install", 1)[1].split("\n", 1)[0].split()


def test_what_pip_is_asked_for_exists() -> None:
    pages = "\n".join(map(text_of, (page.stem for page in PAGES)))
    extras = PROJECT.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    asked = ",".join(re.findall(r"tvm-adaptive\[([\w,]+)\]", pages)).split(",")
    assert set(asked) <= set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    known = {name: versions.split(", ") for name, versions in rows_of(text_of("versions"))[1:]}
    pins = re.findall(r"(apache-tvm(?:-ffi)?)==([\w.]+)", pages)
    assert pins
    assert all(version in known[name] for name, version in pins)


def test_a_file_needs_the_version_of_its_extra() -> None:
    extras = PROJECT.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    formats = [each for each in FORMATS.values() if each.package]
    assert {each.package for each in formats} == {"onnx", "torch"}
    for each in formats:
        (wanted,) = re.findall(rf"^{each.package} = (.+)$", extras, re.MULTILINE)
        least = ".".join(map(str, each.least_version))
        assert f'"{each.package}>={least}"' in wanted
        assert each.install == f"'tvm-adaptive[{each.package}]'"


def test_the_programs_of_tvm_exist() -> None:
    modules = {each for page in PAGES for each in re.findall(r"-m (tvm\.[\w.]+)", page.read_text())}
    assert modules
    assert all(importlib.util.find_spec(module) is not None for module in modules)


def test_the_page_on_the_report_has_all_its_sections() -> None:
    titles = re.findall(r"<h2[^>]*>(.+?)</h2>", report_page([read_demo()]))
    assert len(titles) >= 10
    assert [each for each in map(html.unescape, titles) if each not in text_of("report")] == []


def events_written() -> set[str]:
    """Return the events that the package's code writes to journals."""
    calls = (
        call
        for path in (ROOT / "tvm_adaptive").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and call.args and call.keywords
    )
    return {
        call.args[0].value
        for call in calls
        if getattr(call.func, "attr", "") in ("write", "_write", "_log")
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def test_the_page_on_the_report_has_all_events() -> None:
    section = (DOCS / "report.md").read_text().partition("## Events of the journal")[2]
    named = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall("`([a-z-]+)`", line.split("|")[1])
    }
    assert len(named) > 30
    assert named == events_written()


def test_the_functions_of_the_papers_exist() -> None:
    named = re.findall(r"`([\w/]+)\.py`: ((?:`[\w.]+`(?:, )?)+)", text_of("papers"))
    places = [(file, name) for file, names in named for name in re.findall(r"`([\w.]+)`", names)]
    assert len(places) >= 50
    for file, name in places:
        found: Any = importlib.import_module(f"tvm_adaptive.{file.replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def rows_of(markdown: str) -> list[list[str]]:
    """Return the cells of every row of every table, without the lines below headers."""
    rows = re.findall(r"^\|(.+)\|$", markdown, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows if "---" not in row]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command and of its actions."""
    for action in parser._actions:
        yield from action.option_strings
    for inner in subparsers(parser).values():
        yield from options_of(inner)


@pytest.mark.parametrize("command", sorted(subparsers(cli._parser())))
def test_each_option_has_a_help_text(command: str) -> None:
    parser = subparsers(cli._parser())[command]
    for each in (parser, *subparsers(parser).values()):
        without = [action.dest for action in each._actions if not action.help]
        assert without in ([], ["action"])  # the actions of db have their own


def section_of(command: str) -> str:
    return text_of("commands").split(f"\n## {command}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("command", sorted(subparsers(cli._parser())))
def test_the_options_are_those_of_the_command(command: str) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", " ".join(map(" ".join, rows_of(section_of(command))))))
    stated = set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", code))
    known = set(options_of(subparsers(cli._parser())[command]))
    assert stated == known - {"-h", "--help", "--quiet", "--verbose"}


def test_the_actions_are_those_of_the_command() -> None:
    named = {re.findall(r"`(\w+)", row[0])[0] for row in rows_of(section_of("db"))[2:]}
    assert named == set(subparsers(subparsers(cli._parser())["db"]))


def test_the_presets_are_named() -> None:
    (row,) = [row for row in rows_of(section_of("tune")) if "--preset" in row[0]]
    assert set(re.findall(r"`(\w+)`", row[1])) == set(PRESETS)


@pytest.mark.parametrize("rule", re.findall(r'rule="(\w+)"', text_of("papers")))
def test_the_rules_exist(rule: str) -> None:
    assert tvm_adaptive.AdaptiveRunner(rule=rule) is not None


@pytest.mark.parametrize("diversity", ["knobs", "medoids"])
def test_the_diversities_exist(diversity: str) -> None:
    assert f'"{diversity}"' in text_of("papers")
    assert AdaptiveSearch(diversity=diversity) is not None


def test_the_versions_are_those_that_pip_takes() -> None:
    wanted = {
        name: SpecifierSet(rest)
        for name, rest in re.findall(r'^  "(apache-tvm(?:-ffi)?)([<>=][^"]+)"', PROJECT, re.M)
    }
    stated = {name: versions.split(", ") for name, versions in rows_of(text_of("versions"))[1:]}
    tested = stated.pop("torch (optional)")
    assert tested == re.findall(r'deps = \["torch==([^"]+)"\]', PROJECT)
    assert set(wanted) == set(stated) == {"apache-tvm", "apache-tvm-ffi"}
    for name, versions in stated.items():
        assert all(wanted[name].contains(version) for version in versions)
        assert metadata.version(name) in versions


@pytest.mark.parametrize("page", ["tour", "papers", "extending"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", text_of(page)))
    assert len(named) >= (60 if page == "tour" else 3)
    folders = (ROOT / "tvm_adaptive", ROOT)
    missing = {name for name in named if not any((top / name).is_file() for top in folders)}
    assert missing - {"my_model.py"} == set()


def test_the_tour_passes_every_stage() -> None:
    stages = "search_strategy", "builder", "runner", "cost_model", "task_scheduler", "database"
    flow = text_of("tour").split("## One candidate", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{stage}/" in flow for stage in stages)


def test_the_changes_name_the_moved_modules() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    rows = rows_of(changes.split("### Moved modules", 1)[1].split("\n### ", 1)[0])
    names = [[cell.strip("`").removeprefix("tvm_adaptive.") for cell in row] for row in rows]
    assert dict(names[1:]) == MODULES  # type: ignore[arg-type]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / ".ci" / "mkdocs.yml").read_text()
    assert re.findall(r"^ +- (\w+)\.md$", navigation, re.MULTILINE)[0] == "index"
    assert set(re.findall(r"^ +- (\w+)\.md$", navigation, re.MULTILINE)) == {
        page.stem for page in PAGES
    }


@pytest.mark.parametrize(
    "name", re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
)
def test_the_reference_names_what_exists(name: str) -> None:
    try:
        documented: Any = importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        documented = getattr(importlib.import_module(module), attribute)
    assert documented.__doc__


def test_the_reference_names_public_things_as_users_import_them() -> None:
    page = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE))
    public = {name: getattr(tvm_adaptive, name) for name in tvm_adaptive.__all__}
    for name, value in public.items():
        if callable(value):
            others = {f"{value.__module__}.{value.__name__}"} - {f"tvm_adaptive.{name}"}
            assert not others & page, f"name it tvm_adaptive.{name}"
