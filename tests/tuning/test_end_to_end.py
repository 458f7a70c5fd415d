"""What a run ends with when its time is over, or a compiler does not end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from benchmarks.faults.injection import without_bodies
from tests.database.conftest import make_record
from tests.journals import MemoryJournal
from tests.models.forms.test_alternatives import network_of, relu
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
    functions_as_tasks,
    memory_database,
    workload_key,
)
from tvm_adaptive._tvm import te_workload as operator
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.errors import (
    OUT_OF_TIME,
    InvalidOptionError,
    OutOfTimeError,
    WorkerDiedError,
)
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.models import Network, extract, prepare, run_exported, transformer
from tvm_adaptive.models.compare_calls import ComparedCalls
from tvm_adaptive.models.compile import Coverage
from tvm_adaptive.models.frontend import load, with_sample
from tvm_adaptive.tuning import (
    build_check,
    library_check,
    network_check,
    peers,
    source_of_difference,
    untuned_build,
)
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.library_check import Measurement, OperatorCheck
from tvm_adaptive.tuning.network_check import NetworkCheck
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunOptions, Session, open_session
from tvm_adaptive.values.forms import DIRECT, NO_FORM
from tvm_adaptive.workers.pool import Outcome, WorkerPool

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Clock:
    """Stands still until a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hang(*_args: Any, **_options: Any) -> None:
    time.sleep(1000.0)


def die(*_args: Any, **_options: Any) -> None:
    os._exit(5)


def refuse(*_args: Any, **_options: Any) -> None:
    raise RuntimeError("no such instruction")


@contextlib.contextmanager
def session_in(
    folder: Path,
    budget: Budget,
    observer: Notes | None = None,
    peer_list: str = "",
    *,
    resume: bool = False,
) -> Iterator[Session]:
    options = RunOptions(
        what="net",
        work_dir=folder,
        budget_sec=budget.seconds,
        trials=1,
        seed=0,
        config=DEFAULT.replace(store="none", peers=peer_list),
        observer=observer or Notes(),
        resume=resume,
    )
    with open_session(options, budget=budget) as session:
        yield session


@pytest.fixture(scope="module")
def network() -> Network:
    return transformer(sequence=16, layers=1, hidden=32, heads=4, inner=64)


def tuned(network: Network, session: Session) -> tuple[Any, Database]:
    """Return a network and a record of one of its functions."""
    prepared = prepare(network, session.target)
    database = memory_database()
    mod = extract(prepared, session.target)[0].dispatched[0]
    copy_record(make_record(mod, session.target, 1e-3), database)
    return prepared, database


def on_farm(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session whose devices link what they run; here, that only copies it."""

    def local_pool(_cores: int, server: Any, _farm: Any, **_options: Any) -> WorkerPool:
        return WorkerPool(1, server=server)

    monkeypatch.setattr(library_check, "finalist_pool", local_pool)
    monkeypatch.setattr(library_check, "save_linked", shutil.copyfile)
    return dataclasses.replace(session, farm=RPCConfig("nowhere", 1, "board", 1, 5))


def shorts(folder: Path) -> list[str]:
    events = read_journal(folder / "journal.jsonl")
    return [event["what"] for event in events if event["event"] == "short"]


def test_the_untuned_network_is_compiled_beside_other_work(
    tmp_path: Path, network: Network
) -> None:
    with session_in(tmp_path, Budget()) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            assert check._before is None
            check.measure_untuned()
            assert check._before is not None
            assert 0.0 < check._compile_sec < check._build_sec
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl"}


@pytest.mark.parametrize("case", ["interrupted", "closed"])
def test_a_run_that_ends_stops_the_compilation_of_the_untuned_network(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(untuned_build, "export_module", hang)
    budget = Budget()
    with session_in(tmp_path, budget) as session:
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            if case == "interrupted":
                budget.interrupt()
                check.measure_untuned()
                assert check.measure_tuned(database) is None
        assert check._compiling is not None
        assert check._compiling.result() is None
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl"}


@pytest.mark.parametrize("case", ["refuses", "dies"])
def test_an_untuned_network_that_cannot_be_compiled_ends_the_run(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(untuned_build, "export_module", refuse if case == "refuses" else die)
    with session_in(tmp_path, Budget()) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            with pytest.raises(InvalidOptionError, match=f"TVM cannot compile {network.name}: "):
                check.measure_untuned()
    assert {path.name for path in tmp_path.iterdir()} == {"journal.jsonl"}


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
            compiled = check._compile

            def slowly(*args: Any) -> bool:
                found = compiled(*args)
                clock.now = 999.9
                return found

            monkeypatch.setattr(check, "_compile", slowly)
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


class Unbound:
    """``functools`` without an argument that the fake does not take."""

    @staticmethod
    def partial(function: Any, **_options: Any) -> Any:
        return function


def test_functions_that_there_is_no_time_for_have_no_library(tmp_path: Path) -> None:
    clock = Clock()
    with session_in(tmp_path, Budget(1000.0, clock)) as session:
        tasks = functions_as_tasks(operator("GMM"), session.target)
        database = memory_database()
        copy_record(make_record(tasks[0].dispatched[0], session.target, 1e-3), database)
        with OperatorCheck(session, tasks) as check:
            check.measure_untuned()
            assert check.end_costs().compile_sec > 0.0
            clock.now = 1000.0
            assert check.measure_tuned(database) is None
    assert check.libraries == {}
    assert check.n_tuned == 0
    assert check.shortfall == "no time was left to compile main.so"


def test_functions_are_compiled_before_any_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with session_in(tmp_path, Budget(1000.0, clock)) as session:
        tasks = functions_as_tasks(operator("GMM"), session.target)
        with OperatorCheck(session, tasks) as check:
            check.measure_untuned()
            compiled = check._compile

            def slowly(*args: Any) -> Any:
                found = compiled(*args)
                clock.now = 999.9
                return found

            monkeypatch.setattr(check, "_compile", slowly)
            assert check.measure_tuned(memory_database()) is None
    assert [path.is_file() for path in check.libraries.values()] == [True]
    assert "no time was left to run" in check.shortfall


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


def test_a_function_that_cannot_be_compiled_any_more_costs_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> Any:
        raise RuntimeError("the linker found no room")

    with session_in(tmp_path, Budget(1000.0, Clock())) as session:
        tasks = functions_as_tasks(operator("GMM"), session.target)
        database = memory_database()
        copy_record(make_record(tasks[0].dispatched[0], session.target, 1e-3), database)
        with OperatorCheck(session, tasks) as check:
            check.measure_untuned()
            monkeypatch.setattr(library_check, "schedule_tir", fail)
            assert check.measure_tuned(database) is None
    assert (check.n_tuned, check.libraries) == (0, {})
    assert check.coverage == "0 of 1 functions tuned"
    assert "the linker found no room" in check.failure


@pytest.mark.parametrize(
    ("comparison", "coverage"), [({"agree": True}, "one of all"), ({"agree": False}, ""), ({}, "")]
)
def test_an_earlier_library_whose_outputs_did_not_agree_goes(
    make_session: Any, comparison: dict[str, Any], coverage: str
) -> None:
    report = {"comparison": comparison, "coverage": "one of all"}
    session = make_session(history=History(library_report=report))
    assert library_check.coverage_of_earlier(session) == coverage


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


def onnx_network(folder: Path) -> Network:
    """Return a small ONNX model."""
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype("float32")
    nodes = [make.make_node("MatMul", ["x", "w"], ["z"]), make.make_node("Relu", ["z"], ["y"])]
    ends = [
        [make.make_tensor_value_info(name, kind, shape)]
        for name, shape in (("x", [16, 64]), ("y", [16, 32]))
    ]
    weights = [onnx.numpy_helper.from_array(weight, "w")]
    graph = make.make_graph(nodes, "net", *ends, weights)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(folder / "net.onnx"))
    found = load(str(folder / "net.onnx"))
    assert isinstance(found, Network)
    return found


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


@pytest.mark.parametrize("is_timed", [True, False])
def test_an_untuned_network_whose_latency_is_told_is_compiled_with_optimizations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    network = onnx_network(tmp_path)
    assert network.original is not None
    if not is_timed:
        original = dataclasses.replace(network.original, run=refuse)
        network = dataclasses.replace(network, original=original)
    with session_in(tmp_path / "run", Budget(1000.0, Clock())) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.begin_untuned()
            first = check._compiling
            assert first is not None
            assert first.is_quick
            check.measure_untuned()
            assert check._compiling is not None
            assert check._compiling.is_quick == is_timed
            assert check._before is not None


def test_without_a_record_the_library_is_compiled_with_optimizations(tmp_path: Path) -> None:
    network = onnx_network(tmp_path)
    with session_in(tmp_path / "run", Budget(1000.0, Clock())) as session:
        prepared, _ = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            before = check._untuned.read_bytes()
            check.measure_tuned(memory_database())
            assert check.library is not None
            assert check.library.read_bytes() != before
    assert check.shortfall == "nothing is tuned; the library is the untuned one"


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


@pytest.mark.parametrize(
    ("is_refused", "is_far"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_without_time_the_library_of_the_attempt_before_stays(
    tmp_path: Path,
    network: Network,
    is_refused: bool,
    is_far: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    with session_in(tmp_path, Budget(1000.0, clock)) as here:
        session = on_farm(here, monkeypatch) if is_far else here
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check.measure_tuned(database) is not None
        fields = {"comparison": {"agree": True}, "coverage": "one of all", "interrupted": False}
        session.journal.write("report", **fields)
    assert check.library is not None
    assert check.library.suffix == ".so"
    before = check.library.read_bytes()
    with session_in(tmp_path, Budget(1000.0, clock), resume=True) as here:
        session = on_farm(here, monkeypatch) if is_far else here
        prepared, database = tuned(network, session)
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            assert check._what_is_left() == "the library is the earlier one"
            if is_refused:  # it may be in that library
                mod = extract(prepared, session.target)[0].dispatched[0]
                record = make_record(mod, session.target, 1e-3)
                refused = trial_of(record, failure="its results are wrong", run=session.run_id)
                file = VerdictFile(tmp_path, str(TVM_VERSION))
                file.add(task_of(mod, session.target, "main"), [refused])
            clock.now = 1000.0
            assert check.measure_tuned(database) is None
    kind = "untuned" if is_refused else "earlier"
    assert check.shortfall.endswith(f"the library is the {kind} one")
    assert check.library is not None
    assert (check.library.read_bytes() == before) == (not is_refused)
    assert (check.coverage == "one of all") == (not is_refused)


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

        monkeypatch.setattr(build_check, "compare_builds", compare)
        with NetworkCheck(session, sampled, prepared) as check:
            check._compare_functions()
            assert all(np.ptp(each) > 0 for each in given)
            assert given


def test_single_functions_are_compared_as_in_play_offs(tmp_path: Path) -> None:
    """As of a logarithm of negative numbers."""
    with session_in(tmp_path, Budget()) as session:
        check = OperatorCheck(session, functions_as_tasks(operator("GMM"), session.target))
        values = np.array([np.nan, -np.inf, 1.0, 2.0, 3.0], "float32")
        other = np.array([np.nan, -np.inf, 1.0, 2.0, 4.0], "float32")
        before, wrong = Measurement([values], 2e-3), Measurement([other], 1e-3)
        agreed = check._compare([before], [Measurement([values], 1e-3)])
        assert agreed is not None
        assert agreed.agree
        assert (agreed.before_sec, agreed.after_sec) == (2e-3, 1e-3)
        elsewhere = check._compare([before], [Measurement([values], 1e-3, "farm:2")])
        assert elsewhere is not None
        assert elsewhere.agree
        assert (elsewhere.before_sec, elsewhere.after_sec) == (math.inf, 1e-3)
        differs = check._compare([before], [wrong])
        assert differs is not None
        assert differs.problem.startswith("main: ")


def test_other_play_offs_of_direct_forms_find_the_device_of_a_farm_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_in(tmp_path, Budget()) as session:
        check = OperatorCheck(session, [])
        check.uses_forms = True
        released: list[bool] = []
        monkeypatch.setattr(check, "release_device", lambda: released.append(check.is_direct))
        assert check.gives_up_forms(Comparison(1.0, 1.0, 1.0, 1.0, agree=False))
    assert released == [True]


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_disagreement_names_the_place_and_the_function(
    tmp_path: Path, network: Network, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    tuned_names = []

    def with_fault(*args: Any, **options: Any) -> Any:
        mod, coverage = schedule_network(*args, **options)
        (name,) = coverage.tuned
        tuned_names.append(name)
        variable = mod.get_global_var(name)
        idle = without_bodies(IRModule({variable: mod[name]}))
        return IRModule({**dict(mod.functions), variable: idle[name]}, attrs=mod.attrs), coverage

    schedule_network = network_check.schedule_network
    with session_in(tmp_path, Budget()) as session:
        prepared, database = tuned(network, session)
        task_name = extract(prepared, session.target)[0].task_name
        with NetworkCheck(session, network, prepared) as check:
            check.measure_untuned()
            monkeypatch.setattr(network_check, "schedule_network", with_fault)
            # What was in memory before must not be what is expected.
            assert check._before is not None
            check._before.outputs[0][0, 3, 5] += 100.0
            if not is_timed:
                monkeypatch.setattr(peers.Rivals, "time", lambda *_: [])
            comparison = check.measure_tuned(database)
    assert comparison is not None
    assert not comparison.agree
    assert math.isfinite(comparison.after_sec) == is_timed
    assert re.search(r"^output 0: \d+ of 512 values are wrong, first at \[0, ", comparison.problem)
    named = f"the first function whose outputs differ is {tuned_names[0]} (task {task_name}): "
    assert named in comparison.problem
    (event,) = [
        each for each in read_journal(tmp_path / "journal.jsonl") if each["event"] == "comparison"
    ]
    assert event["problem"] == comparison.problem


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
                variable: changes[names[name]](function, name) if name in names else function
                for variable, function in mod.functions.items()
                for name in [str(variable.name_hint)]
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


def idle(function: Any, name: str) -> Any:
    (found,) = without_bodies(IRModule({name: function})).functions.values()
    return found


def test_all_functions_that_are_sound_are_checked_and_compiled_once(
    tmp_path: Path, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, verdicts, database = checked(monkeypatch, {})
    assert verdicts == [""] * len(verdicts)
    assert len(verdicts) > 5
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
    check, verdicts, database = checked(monkeypatch, {2: idle, 4: idle})
    assert [i for i, each in enumerate(verdicts) if each] == [2, 4]
    assert None not in verdicts
    assert "is not finite" in verdicts[2]
    # Nothing is right for sure: compiled again, it is without the wrong ones.
    monkeypatch.undo()
    right = memory_database()
    for record in database.get_all_tuning_records()[5:]:
        copy_record(record, right)
    comparison = check.measure_tuned(right)
    assert comparison is not None
    assert comparison.agree
    assert check.n_tuned < len(verdicts)
    assert list(tmp_path.glob("*.so")) == [check._path]


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


@contextlib.contextmanager
def check_of_forms(folder: Path) -> Iterator[NetworkCheck]:
    with session_in(folder, Budget()) as session:
        prepared = prepare(network_of(relu), session.target, prepack=True, forms=True)
        with NetworkCheck(session, network_of(relu), prepared) as check:
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


def die_in(name: str) -> Any:
    def compare(
        *_args: Any, steps: Any, skipped: Sequence[str], progress_file: str
    ) -> ComparedCalls:
        assert not steps
        if name in skipped:
            return ComparedCalls({"g": 1}, {"h": "output 0 is wrong"})
        Path(progress_file).write_text(name)
        os._exit(5)

    return compare


@pytest.mark.parametrize(
    ("name", "problems"),
    [("f", {"h": "output 0 is wrong", "f": "crash: the worker process ended: exit code 5"})],
)
def test_a_crash_is_the_problem_of_the_function_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problems: dict[str, str]
) -> None:
    monkeypatch.setattr(build_check, "compare_calls", die_in(name))
    with session_in(tmp_path, Budget()) as session, contextlib.closing(pool_of(session)) as pool:
        builds = (("untuned.so", "net.so"), [], "cpu")
        found = build_check.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=60.0)
        assert found == ComparedCalls({"g": 1}, problems)
        monkeypatch.setattr(build_check, "compare_calls", die_in(""))
        with pytest.raises(WorkerDiedError):  # nobody knows what it was
            build_check.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=60.0)


def hang_in_f(*_args: Any, steps: Any, skipped: Sequence[str], progress_file: str) -> ComparedCalls:
    assert not steps
    if "f" in skipped:
        return ComparedCalls()
    Path(progress_file).write_text("f")
    time.sleep(1000.0)
    raise AssertionError


@pytest.mark.parametrize("left_sec", [100.0, 1.5])
def test_a_hang_is_told_from_the_end_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_sec: float
) -> None:
    monkeypatch.setattr(build_check, "compare_calls", hang_in_f)
    budget = Budget(left_sec, Clock())
    with session_in(tmp_path, budget) as session, contextlib.closing(pool_of(session)) as pool:
        builds = (("untuned.so", "net.so"), [], "cpu")

        def compare() -> ComparedCalls:
            return build_check.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=3.0)

        if left_sec < 3.0:
            with pytest.raises(OutOfTimeError, match="the time ended while"):
                compare()
        else:
            assert compare().problems["f"].startswith("hang: ")


def pool_of(session: Session) -> WorkerPool:
    return WorkerPool(1, server=session.server)


class Answer:
    """A pool that gives an answer."""

    def __init__(self, value: Any = None, error: WorkerDiedError | None = None) -> None:
        self.outcomes = [Outcome(value, error)]
        self.limits_sec: list[float] = []

    def map(self, _function: Any, _jobs: Any, limit_sec: float) -> list[Any]:
        self.limits_sec.append(limit_sec)
        return self.outcomes


@pytest.mark.parametrize(("left_sec", "limit_sec"), [(100.0, 60.0), (5.0, 6.0), (-1.0, 1.0)])
def test_what_is_compiled_is_checked_even_if_that_ends_after_the_budget(
    make_session: Any, left_sec: float, limit_sec: float
) -> None:
    budget = Budget(10.0, Clock(), spent_sec=10.0 - left_sec)
    session, pool = make_session(budget=budget), Answer(ComparedCalls())
    builds = (("untuned.so", "net.so"), [], "cpu")
    build_check.compare_builds(
        session, pool, builds, {}, rtol=1e-3, most_sec=60.0, in_overtime=True
    )
    assert pool.limits_sec == [limit_sec]


@pytest.mark.parametrize(
    ("pool", "left_sec", "text"),
    [
        (Answer(), 0.5, "no time was left to compare the functions one by one"),
        (Answer(ComparedCalls()), 20.0, "no function alone differs: small differences add up"),
        (Answer(error=WorkerDiedError("it crashed")), 20.0, "one by one: it crashed"),
        (
            Answer(ComparedCalls(problems={"f": "output 0 is wrong", "g": "output 1 is wrong"})),
            20.0,
            "differ is f (not tuned): output 0 is wrong",
        ),
        (Answer(ComparedCalls(unclear={"f": "one is wrong"})), 20.0, "(not tuned): one is wrong"),
    ],
)
def test_the_search_for_a_function_costs_no_more_than_its_part_of_the_message(
    make_session: Any, network: Network, pool: Answer, left_sec: float, text: str
) -> None:
    session = make_session(budget=Budget(left_sec, Clock()))
    builds = (("untuned.so", "net.so"), [], "cpu")

    def compare() -> ComparedCalls:
        return build_check.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=120.0)

    prepared = prepare(network, session.target)
    found = source_of_difference.source_of_difference(session, compare, prepared, tuned=())
    assert text in found
    assert pool.limits_sec == ([] if left_sec < 1 else [left_sec])
