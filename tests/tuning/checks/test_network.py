"""What a run ends with when its time is over, a compiler does not end, or a function is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tests.journals import MemoryJournal
from tests.models.forms.test_alternatives import network_of, relu
from tests.tuning.checks.shared import (
    Clock,
    die,
    hang,
    idle,
    onnx_network,
    session_in,
    spend_all_on_compiling,
    tuned,
)
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import (
    TVM_VERSION,
    Database,
    IRModule,
    RPCConfig,
    Schedule,
    Target,
    TuningRecord,
    Workload,
    copy_record,
    memory_database,
    relax,
    workload_key,
)
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.errors import (
    OUT_OF_TIME,
    MachineError,
    OutOfTimeError,
    WorkerDiedError,
)
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.models import Network, extract, prepare, run_exported
from tvm_adaptive.models.compare_calls import ComparedCalls
from tvm_adaptive.models.compile import Coverage
from tvm_adaptive.models.frontend import with_sample
from tvm_adaptive.models.network import Original
from tvm_adaptive.runner.playoff.finalist import is_refutation
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import functions, library, peers
from tvm_adaptive.tuning.checks import network as network_check
from tvm_adaptive.tuning.checks.network import NetworkCheck
from tvm_adaptive.tuning.checks.untuned import UntunedBuild
from tvm_adaptive.tuning.native import identifier_of
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.values.forms import DIRECT, NO_FORM
from tvm_adaptive.workers.pool import Outcome, WorkerPool

pytestmark = pytest.mark.usefixtures("brief_timings")


def on_farm(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session whose devices link what they run; here, that only copies it."""

    def local_pool(_cores: int, server: Any, _farm: Any, **_options: Any) -> WorkerPool:
        return WorkerPool(1, server=server)

    monkeypatch.setattr(library, "finalist_pool", local_pool)
    monkeypatch.setattr(library, "save_linked", shutil.copyfile)
    return dataclasses.replace(session, farm=RPCConfig("nowhere", 1, "board", 1, 5))


def shorts(folder: Path) -> list[str]:
    events = read_journal(folder / "journal.jsonl")
    return [event["what"] for event in events if event["event"] == "short"]


@pytest.mark.parametrize("case", ["compiler-hangs", "compiler-dies", "no-time", "in-time"])
def test_a_run_ends_with_a_library_that_was_checked(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    clock = Clock()
    budget = Budget(1000.0, clock)
    with session_in(tmp_path, budget) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check.shortfall == ""
            if case == "compiler-hangs":
                clock.now = 999.0
                # A second is left, and one of overtime.
                monkeypatch.setattr("tvm_adaptive.tuning.budget._OVERTIME_SHARE", 1e-3)
                monkeypatch.setattr(network_check, "export_module", hang)
            elif case == "compiler-dies":
                monkeypatch.setattr(network_check, "export_module", die)
            elif case == "no-time":
                clock.now = 1000.0
            comparison = check.measure_tuned(database)
    library = check.library
    assert library == tmp_path / f"{network.name}.so"
    inputs = network.random_inputs()
    (found,) = run_exported(library, inputs)
    assert np.isfinite(found).all()
    assert (comparison is not None) == (case == "in-time")
    assert (check.n_tuned, bool(check.failure)) == (
        int(case == "in-time"),
        case == "compiler-dies",
    )
    assert check.is_compiled == (case == "in-time")
    assert bool(check.shortfall) == (case in ("compiler-hangs", "no-time"))
    assert shorts(tmp_path) == ([check.shortfall] if check.shortfall else [])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"journal.jsonl", library.name}


def test_the_library_goes_before_the_comparison(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with session_in(tmp_path, Budget(1000.0, clock)) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            spend_all_on_compiling(check, clock, monkeypatch)
            assert check.measure_tuned(database) is None
    assert check.n_tuned == 1
    assert check.library is not None
    assert check.library.is_file()
    assert "no time was left to run" in check.shortfall


def test_an_untuned_network_that_runs_too_long_is_left_out(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(network_check, "try_exported", hang)
    monkeypatch.setattr(network_check, "functools", Unbound)
    with session_in(tmp_path, Budget(10.0, clock)) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()  # has a fifth of the ten seconds
    assert "untuned.so was stopped after the 2 s left" in check.shortfall
    assert "untuned" in shorts(tmp_path)[0]


def test_an_interrupt_that_has_ended_the_compiler_is_no_error(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(None)

    def ended(_build: Any) -> Outcome:
        budget.interrupt()
        return Outcome(error=MachineError("the process that workers are forked from has ended"))

    monkeypatch.setattr(UntunedBuild, "result", ended)
    with session_in(tmp_path, budget) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check.measure_tuned(database) is None
    assert check.library is None


class Unbound:
    """``functools`` without an argument that the fake does not take."""

    @staticmethod
    def partial(function: Any, **_options: Any) -> Any:
        return function


def test_records_are_not_applied_any_more_when_the_time_is_over(
    tmp_path: Path, network: Network
) -> None:
    from tvm_adaptive.models.compile import schedule_network

    def late() -> None:
        raise OutOfTimeError(OUT_OF_TIME)

    with session_in(tmp_path, Budget(1000.0, Clock())) as session:
        prepared, database = tuned(network, session)
        with pytest.raises(OutOfTimeError):
            schedule_network(prepared, database, session.target, check=late)


def test_the_journal_says_that_another_library_comes_before_it_does(
    make_session: Any, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_paths: Path) -> None:
        raise KeyboardInterrupt

    session = make_session(journal=MemoryJournal())
    prepared = prepare(network, session.target)
    with NetworkCheck(session, network, prepared) as check:
        monkeypatch.setattr(network_check.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            check._use(check._unchecked)
    assert session.journal.of("library") == [{"event": "library", "tuned": True}]


def test_what_describes_a_library_goes_before_another_one_comes(
    make_session: Any, network: Network
) -> None:
    """Of a killed ``apply``, programs would take the instruction sets of the library before."""
    session = make_session()
    names = [field.name for field in dataclasses.fields(RunContext)]
    context = RunContext(**{name: getattr(session, name) for name in names})
    with NetworkCheck(context, network, prepare(network, context.target)) as check:
        described = [
            context.work_dir / name
            for name in ("manifest.json", f"{identifier_of(check._path.name)}.h")
        ]
        for path in (*described, check._path, check._unchecked):
            path.write_text(path.name)
        check._use(check._unchecked)
        assert not any(path.exists() for path in described)
        assert check._path.read_text() == check._unchecked.name


@pytest.mark.parametrize(
    "case", ["quick", *(pytest.param(c, marks=pytest.mark.slow) for c in ("slow", "compiler-dies"))]
)
def test_an_imported_network_is_compared_with_its_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    network = onnx_network(tmp_path)
    monkeypatch.setattr(peers, "_ROUNDS", 3)
    if case == "slow":
        monkeypatch.setattr(network_check, "_SLOW_RUN_SEC", 1.0)
        monkeypatch.setattr(network_check, "try_exported", hang)
        monkeypatch.setattr(network_check, "functools", Unbound)
    observer = Notes()
    with session_in(tmp_path / "run", Budget(1000.0, Clock()), observer) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            if case == "compiler-dies":
                monkeypatch.setattr(network_check, "export_module", die)
            comparison = check.measure_tuned(database)
    assert comparison is not None
    assert check.n_tuned == (case != "compiler-dies")
    (timing,) = comparison.peers
    assert comparison.agree
    assert timing.agree
    assert comparison.framework == timing.framework
    assert comparison.framework.startswith("ONNX Runtime ")
    assert comparison.before_sec == sorted(timing.secs)[1]
    assert comparison.after_sec == sorted(timing.tuned_secs)[1]
    events = {event["event"]: event for event in read_journal(tmp_path / "run" / "journal.jsonl")}
    assert Comparison.from_fields(events["comparison"]) == comparison
    assert "untuned" not in events  # it was no reference
    is_slow = case == "slow"
    assert ("original" in events) != is_slow
    assert any("are first compared with ONNX Runtime" in note for note in observer.notes) == is_slow
    assert check.shortfall == ""


def test_an_untuned_network_that_nobody_would_run_is_no_reference(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_check, "_SLOW_RUN_SEC", 1.0)
    monkeypatch.setattr(network_check, "try_exported", hang)
    monkeypatch.setattr(network_check, "functools", Unbound)
    observer = Notes()
    with session_in(tmp_path, Budget(1000.0, Clock()), observer, "torch") as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check.measure_tuned(database) is None
    assert check.shortfall == (
        "untuned, an inference takes more than 1 s, and no other reference is there"
    )
    assert check.library is not None
    assert check.library.is_file()
    assert observer.notes[0].startswith("peers are left out")


@pytest.fixture(scope="module")
def first_attempt(
    brief_timings: None, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], Path]:
    """Return a function that makes a run's first attempt, here or on a farm; for copies of it."""

    @functools.cache
    def make(is_far: bool) -> Path:
        folder = tmp_path_factory.mktemp("attempt")
        with (
            pytest.MonkeyPatch.context() as patch,
            session_in(folder, Budget(1000.0, Clock())) as here,
        ):
            session = on_farm(here, patch) if is_far else here
            prepared, database = tuned(network, session)
            with NetworkCheck(session, network, prepared) as check:
                check.measure_untuned()
                assert check.measure_tuned(database) is not None
            fields = {"comparison": {"agree": True}, "coverage": "one of all", "interrupted": False}
            session.journal.write("report", **fields)
        assert check.library == folder / f"{network.name}.so"
        return folder

    return make


@pytest.mark.parametrize(
    ("is_refused", "is_far"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_without_time_the_library_of_the_attempt_before_stays(
    tmp_path: Path,
    network: Network,
    *,
    first_attempt: Callable[[bool], Path],
    is_refused: bool,
    is_far: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(first_attempt(is_far), tmp_path / "run"))
    before = (folder / f"{network.name}.so").read_bytes()
    clock = Clock()
    with session_in(folder, Budget(1000.0, clock), resume=True) as here:
        session = on_farm(here, monkeypatch) if is_far else here
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check._what_is_left() == "the library is the earlier one"
            if is_refused:  # it may be in that library
                mod = extract(prepared, session.target)[0].dispatched[0]
                record = make_record(mod, session.target, 1e-3)
                refused = trial_of(record, failure="its results are wrong", run=session.run_id)
                file = VerdictFile(folder, str(TVM_VERSION))
                file.add(task_of(mod, session.target, "main"), [refused])
            clock.now = 1000.0
            assert check.measure_tuned(database) is None
    kind = "untuned" if is_refused else "earlier"
    assert check.shortfall.endswith(f"the library is the {kind} one")
    assert check.library is not None
    assert (check.library.read_bytes() == before) == (not is_refused)
    assert (check.coverage == "one of all") == (not is_refused)


def test_a_library_that_arrives_in_part_is_not_the_result(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_in(tmp_path, Budget()) as here:
        session = on_farm(here, monkeypatch)
        monkeypatch.setattr(library, "save_linked", save_half)
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check.measure_tuned(database) is not None
    assert check.library is not None
    assert check.library.suffix == ".tar"
    assert check.library.is_file()


def save_half(path: str, linked: str) -> bool:
    content = Path(path).read_bytes()
    Path(linked).write_bytes(content[: len(content) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_latencies_of_two_devices_are_not_compared(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_in(tmp_path, Budget()) as here:
        session = on_farm(here, monkeypatch)
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check._before is not None
            check._before = dataclasses.replace(check._before, device="farm:1")
            comparison = check.measure_tuned(database)
    assert comparison is not None
    assert comparison.agree
    assert math.isinf(comparison.before_sec)
    assert math.isfinite(comparison.after_sec)


def test_a_sample_of_one_number_does_not_check_functions(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = {
        name: np.zeros(shape, network.input_dtypes[name])
        for name, shape in network.input_shapes.items()
    }
    with session_in(tmp_path, Budget()) as session:
        prepared, _ = tuned(network, session)
        sampled = with_sample(network, zeros, "inputs")
        assert not any(each.any() for each in sampled.inputs())
        assert all(np.ptp(each) > 0 for each in sampled.telling_inputs())
        given: list[Any] = []

        def compare(_context: Any, _pool: Any, builds: Any, *_: Any, **_options: Any) -> Any:
            given.extend(builds[1])
            return ComparedCalls()

        monkeypatch.setattr(functions, "compare_builds", compare)
        with NetworkCheck(session, sampled, prepared) as check:
            check._compare_functions()
            assert all(np.ptp(each) > 0 for each in given)
            assert given


def test_functions_are_compared_with_the_time_to_see_what_is_rounded(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, given_secs = Clock(), list[float]()

    def compare(*_: Any, rounding_sec: float, **_options: Any) -> Any:
        given_secs.append(rounding_sec)
        return ComparedCalls()

    monkeypatch.setattr(functions, "compare_builds", compare)
    budget = Budget(1000.0, clock)
    with session_in(tmp_path, budget) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            check._load_sec = 1.0
            budget.plan_reserve(session.config.finish, 1, check.end_costs())
            check.check_functions(database, [])
            clock.now = 1000.0 - budget.least_later_sec
            check._compare_functions()
    assert given_secs[0] == 3.0  # of the ten after which a function hangs
    assert given_secs[1] <= 0.0


@pytest.fixture
def checked(tmp_path: Path, network: Network) -> Iterator[Any]:
    """Return a function that checks all functions of a network, some of them changed."""

    def check_with(
        monkeypatch: pytest.MonkeyPatch, changes: dict[int, Any]
    ) -> tuple[NetworkCheck, list[str | None], Database]:
        database = memory_database()
        tasks = extract(prepared, session.target)
        for task in tasks:
            copy_record(split_record(task.dispatched[0], session.target), database)
        found = [check._names[workload_key(task.dispatched[0])][0] for task in tasks]
        names = {found[i]: i for i in changes}

        def with_faults(*args: Any, **options: Any) -> Any:
            mod, coverage = schedule_network(*args, **options)
            changed = {
                variable: changes[names[name]](function, name) if is_changed else function
                for variable, function in mod.functions.items()
                for name in [str(variable.name_hint)]
                for is_changed in [name in names and name in coverage.tuned]
            }
            return IRModule(changed, attrs=mod.attrs), coverage

        schedule_network = network_check.schedule_network
        monkeypatch.setattr(network_check, "schedule_network", with_faults)
        verdicts = check.check_functions(database, [task.dispatched[0] for task in tasks])
        assert all(0 < each.seconds < 60 for each in verdicts if each.problem == "")
        return check, [each.problem for each in verdicts], database

    with session_in(tmp_path, Budget()) as session:
        prepared = prepare(network, session.target, prepack=True)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            yield check_with


def split_record(mod: IRModule, target: Target) -> TuningRecord:
    """Return a record that splits a loop."""
    schedule = Schedule(mod, seed=1)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    loops = [loop for block in blocks for loop in schedule.get_loops(block)]
    schedule.split(loops[0], [None, 1])
    return TuningRecord(schedule.trace, Workload(mod), [1e-3], target)


def test_all_functions_that_are_sound_are_checked_and_compiled_once(
    tmp_path: Path, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, verdicts, database = checked(monkeypatch, {})
    assert verdicts == [""] * len(verdicts)
    assert len(verdicts) > 3  # attention has tasks of its own on some processors
    # Not yet under the name of the result.
    assert not check._path.exists()

    def fail(*_args: Any) -> None:
        raise AssertionError("it is compiled already")

    monkeypatch.setattr(check, "_compile_tuned", fail)
    comparison = check.measure_tuned(database)
    assert comparison is not None
    assert comparison.agree
    assert list(tmp_path.glob("*.so")) == [check._path]
    (event,) = events_of(tmp_path, "network-check")
    assert (event["n_compared"], event["problems"]) == (event["n_functions"], {})


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [each for each in read_journal(folder / "journal.jsonl") if each["event"] == name]


def test_what_is_wrong_is_named_and_is_not_in_the_result(
    tmp_path: Path, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, verdicts, database = checked(monkeypatch, {1: idle, 2: idle})
    assert [i for i, each in enumerate(verdicts) if each] == [1, 2]
    assert None not in verdicts
    assert any("is not finite" in verdicts[i] for i in (1, 2))
    # Nothing is right for sure: compiled again, it is without the wrong ones.
    monkeypatch.undo()
    right = memory_database()
    for record in database.get_all_tuning_records()[3:]:
        copy_record(record, right)
    comparison = check.measure_tuned(right)
    assert comparison is not None
    assert comparison.agree
    assert check.n_tuned < len(verdicts)
    assert list(tmp_path.glob("*.so")) == [check._path]


def bound_to_threads(function: Any, name: str) -> Any:
    """Return a function that LLVM refuses: processors have no threads of that kind."""
    schedule = Schedule(IRModule({name: function}), seed=1)
    block = schedule.get_child_blocks(schedule.get_sblock("root", name))[0]
    schedule.bind(schedule.get_loops(block)[0], "threadIdx.x")
    return schedule.mod[name]


def test_a_function_that_cannot_be_compiled_leaves_the_others_checked(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, verdicts, database = checked(monkeypatch, {1: bound_to_threads})
    assert [i for i, each in enumerate(verdicts) if each] == [1]
    assert verdicts[1].startswith("schedule: ")
    assert " cannot be compiled: " in verdicts[1]
    assert not is_refutation(verdicts[1])  # it may have been short of memory
    assert None not in verdicts
    assert check.n_tuned == len(verdicts) - 1
    compiled = set(check._objects.path.glob("*.o"))
    # Without it, hardly anything is compiled again.
    sound = memory_database()
    for i, record in enumerate(database.get_all_tuning_records()):
        if i != 1:
            copy_record(record, sound)
    comparison = check.measure_tuned(sound)
    assert comparison is not None
    assert comparison.agree
    assert len(set(check._objects.path.glob("*.o")) - compiled) <= 2


@pytest.mark.parametrize("is_checked", [False, True])
def test_after_a_check_the_little_that_is_left_is_compiled_also_when_the_time_is_over(
    tmp_path: Path, network: Network, *, is_checked: bool
) -> None:
    clock = Clock()
    with session_in(tmp_path, Budget(1000.0, clock)) as session:
        prepared = prepare(network, session.target, prepack=True)
        mods = [task.dispatched[0] for task in extract(prepared, session.target)]
        both, one = memory_database(), memory_database()
        for mod, databases in zip(mods, ((both, one), (both,)), strict=False):
            for database in databases:
                copy_record(split_record(mod, session.target), database)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            if is_checked:
                check.check_functions(both, mods[:2])
            clock.now += 1001.0
            check.measure_tuned(one)
    assert check.is_compiled == is_checked
    assert check.n_tuned == is_checked


@pytest.mark.parametrize(
    ("found", "is_tuned", "problem"),
    [
        ({"n_compared": {"f": 1}}, True, ""),
        (
            {"n_compared": {"f": 1}, "problems": {"f": "output 0 is wrong"}},
            True,
            "output 0 is wrong",
        ),
        ({"n_compared": {"f": 1}, "unclear": {"f": "one is wrong"}}, True, None),
        ({}, True, None),  # its results are not defined, say
        ({"n_compared": {"f": 1}}, False, None),  # another one was compared
    ],
)
def test_a_task_is_checked_where_its_tuned_function_was_compared_and_agreed(
    make_session: Any, network: Network, found: Any, is_tuned: bool, problem: str | None
) -> None:
    session = make_session()
    prepared = prepare(network, session.target)
    (mod,) = extract(prepared, session.target)[0].dispatched
    with NetworkCheck(session, network, prepared) as check:
        (name,) = check._names[workload_key(mod)]
        tuned, fallback = ({name: 1}, {}) if is_tuned else ({}, {name: 1})
        check.covered = Coverage(tuned, fallback, {})
        renamed = {kind: {name: each["f"]} for kind, each in found.items()}
        assert check._verdict(mod, ComparedCalls(**renamed)).problem == problem


def checked_in_form(check: NetworkCheck, form: str) -> list[str | None]:
    """Return what the check within the network finds of the functions of a form."""
    database, mods = memory_database(), []
    for task in extract(check._prepared, check._context.target):
        (mod,) = task.dispatched
        is_wanted = check.forms.get(str(task.task_name), NO_FORM).form == form
        mods += [mod] if is_wanted else []
        sec = 1e-6 if is_wanted else 1.0
        copy_record(split_record(mod, check._context.target), database, [sec])
    return [each.problem for each in check.check_functions(database, mods)]


def two_groups(builder: Any, y: Any, x: Any) -> Any:
    """Add a convolution of more channels, whose results are computed alike."""
    rng = np.random.default_rng(1)
    kernel, bias = (
        relax.const(rng.standard_normal(shape).astype("float32"))
        for shape in ((16, 32, 3, 3), (1, 16, 1, 1))
    )
    wide = builder.emit(relax.op.concat([builder.emit(relax.op.nn.relu(y)), x], 1))
    z = builder.emit(relax.op.nn.conv2d(wide, kernel, padding=1))
    return relax.op.nn.relu(builder.emit(relax.op.add(z, bias)))


@contextlib.contextmanager
def check_of_forms(folder: Path, build: Any = relu) -> Iterator[NetworkCheck]:
    with session_in(folder, Budget()) as session:
        network = network_of(build)
        prepared = prepare(network, session.target, prepack=True, forms=True)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            yield check


def with_faults(monkeypatch: pytest.MonkeyPatch, is_faulty: Callable[[str], bool]) -> None:
    schedule_network = network_check.schedule_network

    def schedule(*args: Any, **options: Any) -> Any:
        mod, coverage = schedule_network(*args, **options)
        functions = {
            variable: idle(each, variable.name_hint) if is_faulty(variable.name_hint) else each
            for variable, each in mod.functions.items()
        }
        return IRModule(functions, attrs=mod.attrs), coverage

    monkeypatch.setattr(network_check, "schedule_network", schedule)


@pytest.mark.parametrize("step", ["none", "input", "product", "output"])
def test_steps_of_another_form_are_compared_with_the_direct_convolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with_faults(monkeypatch, lambda name: step in name)
    with check_of_forms(tmp_path) as check:
        problems = checked_in_form(check, "winograd-4x4")
        assert check.uses_forms
    assert len(problems) == 3
    assert None not in problems
    # Which step it is, play-offs find out.
    assert all(problems) == any(problems) == (step != "none")
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.parametrize("step", ["none", "output"])
def test_equal_steps_of_two_groups_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A library has one function for both."""
    with_faults(monkeypatch, lambda name: step in name)
    with check_of_forms(tmp_path, two_groups) as check:
        problems = checked_in_form(check, "winograd-4x4")
        n_outputs = sum("output" in name for name in check.covered.tuned)
    assert (len(problems), n_outputs) == (6, 1)
    assert None not in problems
    assert all(problems) == any(problems) == (step != "none")


def residual(scale: float, bias: float) -> Any:
    """Return what builds a convolution with scaled weights, a number, and the input on top."""

    def build(builder: Any, y: Any, x: Any) -> Any:
        kernel = np.random.default_rng(1).standard_normal((16, 16, 3, 3)).astype("float32")
        z = builder.emit(relax.op.nn.conv2d(y, relax.const(scale * kernel), padding=1))
        z = builder.emit(relax.op.add(builder.emit(relax.op.add(z, x)), relax.const(bias)))
        return relax.op.nn.relu(z)

    return build


@pytest.mark.parametrize(
    ("scale", "bias", "is_told"),
    [
        (1.0, 0.0, True),
        (0.0, 0.0, False),  # of an untrained network: whatever the kernel reads, x is the result
        (1.0, -1e6, False),  # all results are 0
    ],
)
def test_a_function_whose_results_hide_errors_is_not_checked_within_the_network(
    tmp_path: Path, scale: float, bias: float, is_told: bool
) -> None:
    with check_of_forms(tmp_path, residual(np.float32(scale), np.float32(bias))) as check:
        problems = checked_in_form(check, DIRECT)
    assert "" in problems
    assert (None in problems) is not is_told


def test_a_wrong_kernel_is_found_where_right_results_are_all_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with check_of_forms(tmp_path, residual(np.float32(1.0), np.float32(-1e6))) as check:
        with_faults(monkeypatch, lambda name: check.forms.get(name, NO_FORM).form == DIRECT)
        problems = checked_in_form(check, DIRECT)
    assert all(problems)


def test_what_takes_the_place_of_other_forms_is_checked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with check_of_forms(tmp_path) as check:
        assert not any(checked_in_form(check, "winograd-4x4"))
        check.without_forms()
        with_faults(monkeypatch, lambda name: check.forms.get(name, NO_FORM).form == DIRECT)
        problems = checked_in_form(check, DIRECT)
    assert problems
    assert all(problems)


def test_what_gives_up_its_forms_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds are for the library that follows."""
    timed: list[bool] = []

    def time(*_arguments: Any) -> list[float]:
        timed.append(True)
        return [1e-3]

    check: Any = NetworkCheck.__new__(NetworkCheck)
    framework: Any = SimpleNamespace(expected=[np.zeros(3)], name="onnxruntime", has_rivals=True)
    framework.problem = lambda *_: "output 0 is wrong"
    framework.rivals = lambda: SimpleNamespace(timings=[], time=time)
    check._framework, check._inputs, check._device_kind, check._before = framework, [], "cpu", None
    check._untuned, check._path = Path("none.so"), Path("net.so")
    framework.latency_sec = lambda _rivals: math.inf
    monkeypatch.setattr(check, "_run", lambda *_arguments: [np.ones(3)])
    for uses_forms, may_round in ((True, False), (False, False), (True, True)):
        timed.clear()
        check.uses_forms, framework.may_round = uses_forms, may_round
        found = check._compare_tuned(Path("net.so"))
        gives_up = uses_forms and not may_round
        source = "" if gives_up else "; no function is tuned"
        assert (found.agree, found.problem) == (False, f"output 0 is wrong{source}")
        assert bool(timed) is not gives_up
        if not gives_up:
            assert not check.gives_up_forms(found)


@pytest.mark.parametrize("crashes", [False, True])
def test_a_library_that_crashes_after_some_rounds_is_no_result(
    monkeypatch: pytest.MonkeyPatch, crashes: bool
) -> None:
    """Its outputs agree, and its first round is timed."""

    def time(_outputs: Any, time_tuned: Callable[[float], float | None]) -> list[float]:
        secs = [time_tuned(0.2), time_tuned(0.2)]
        return [sec for sec in secs if sec is not None]

    def run(_function: Any, _task: Any, path: Path) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, WorkerDiedError):
            check._report_failure(path, answer)
            return None
        return answer

    last = WorkerDiedError("exit code 139") if crashes else 1e-3
    answers: list[Any] = [[np.ones(3)], 1e-3, last]
    check: Any = NetworkCheck.__new__(NetworkCheck)
    framework: Any = SimpleNamespace(expected=[np.ones(3)], name="onnxruntime", has_rivals=True)
    framework.problem = lambda *_: ""
    framework.rivals = lambda: SimpleNamespace(timings=[], time=time)
    framework.latency_sec = lambda _rivals: math.inf
    check._framework, check._inputs, check._device_kind, check._before = framework, [], "cpu", None
    check._path, check.uses_forms, check.run_failure = Path("net.so"), False, ""
    check._context = SimpleNamespace(observer=Notes(), journal=MemoryJournal())
    monkeypatch.setattr(check, "_run", run)
    found = check._compare_tuned(Path("net.so"))
    assert (found is None) == crashes
    assert not answers


def test_an_interrupted_run_begins_neither_its_framework_nor_a_compilation(
    make_session: Any, network: Network
) -> None:
    begun: list[bool] = []

    def run(_inputs: Any) -> list[Any]:
        begun.append(True)
        return []

    session = make_session()
    prepared = prepare(network, session.target)
    foreign = dataclasses.replace(network, original=Original("Other 1.0", run))
    session.budget.interrupt()
    with NetworkCheck(session, foreign, prepared) as check:
        check.measure_untuned()
        assert check._compiling is None
    assert begun == []


def test_an_interrupted_run_tells_the_coverage_of_the_library_that_is_there(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "compare_builds", lambda *_, **_options: ComparedCalls())
    for resume, coverage in ((False, ""), (True, "one of all")):
        budget = Budget(1000.0, Clock())
        with session_in(tmp_path, budget, resume=resume) as session:
            prepared, database = tuned(network, session)
            with NetworkCheck(session, network, prepared) as check:
                check.measure_untuned()
                check.check_functions(database, [])
                assert check.coverage.startswith("1 of ")
                budget.interrupt()
                assert check.measure_tuned(database) is None
            assert check.coverage == coverage
            # As of an earlier attempt, for the next one.
            check._path.write_bytes(b"a library")
            fields = {"comparison": {"agree": True}, "coverage": "one of all"}
            session.journal.write("report", **fields, interrupted=False)
