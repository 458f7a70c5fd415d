"""Which library stays, and the check of single functions."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tests.tuning.checks.shared import Clock, session_in, spend_all_on_compiling
from tvm_adaptive._tvm import (
    Database,
    RPCConfig,
    copy_record,
    functions_as_tasks,
    memory_database,
)
from tvm_adaptive._tvm import te_workload as operator
from tvm_adaptive.errors import MachineError, WorkerDiedError, WorkerTaskError, WorkerTimeoutError
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import library, operators
from tvm_adaptive.tuning.checks.library import Measurement
from tvm_adaptive.tuning.checks.operators import OperatorCheck
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.values.roofline import Roofline
from tvm_adaptive.workers import device_session
from tvm_adaptive.workers.pool import Outcome
from tvm_adaptive.workers.roofline import measure_roofline


@contextlib.contextmanager
def one_recorded(tmp_path: Path, clock: Clock) -> Iterator[tuple[OperatorCheck, Database]]:
    """Yield a check of one function, and a database with a record of it."""
    with session_in(tmp_path, Budget(1000.0, clock)) as session:
        tasks = functions_as_tasks(operator("GMM"), session.target)
        database = memory_database()
        copy_record(make_record(tasks[0].dispatched[0], session.target, 1e-3), database)
        with OperatorCheck(session, tasks) as check:
            yield check, database


def test_functions_that_there_is_no_time_for_have_no_library(tmp_path: Path) -> None:
    clock = Clock()
    with one_recorded(tmp_path, clock) as (check, database):
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
            spend_all_on_compiling(check, clock, monkeypatch)
            assert check.measure_tuned(memory_database()) is None
    assert [path.is_file() for path in check.libraries.values()] == [True]
    assert "no time was left to run" in check.shortfall


def test_a_function_that_cannot_be_compiled_any_more_costs_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> Any:
        raise RuntimeError("the linker found no room")

    with one_recorded(tmp_path, Clock()) as (check, database):
        check.measure_untuned()
        monkeypatch.setattr(operators, "schedule_tir", fail)
        assert check.measure_tuned(database) is None
    assert (check.n_tuned, check.libraries) == (0, {})
    assert check.coverage == "0 of 1 functions tuned"
    assert "the linker found no room" in check.failure


def test_a_tuned_library_that_crashes_counts_after_an_untuned_one_that_was_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_recorded(tmp_path, Clock()) as (check, database):
        check.measure_untuned()
        check._report_shortfall("untuned, it takes more than 10 s")
        monkeypatch.setattr(operators, "try_function", crash)
        assert check.measure_tuned(database) is None
    assert check.shortfall == ""


def crash(*_arguments: Any, **_options: Any) -> None:
    os.abort()


class Farm(LeasingPool):
    """A farm whose tasks end with these errors and values, one after the other."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(RPCConfig("nowhere", 1, "board", 1, 5))
        self.ends = list(ends)
        self.limits_sec: list[float] = []

    def map(self, function: Any, tasks: Any, timeout_sec: float) -> list[Outcome]:
        self.limits_sec.append(timeout_sec)
        end = self.ends.pop(0)
        is_error = isinstance(end, Exception)
        return [Outcome(error=end) if is_error else Outcome(end)]


LATE, DIED = WorkerTimeoutError("no answer"), WorkerDiedError("killed")


@pytest.mark.parametrize(
    ("ends", "n_left", "is_found"),
    [
        ([7], 0, True),
        ([LATE, 7], 0, True),
        ([DIED, 7], 0, True),
        ([MachineError("No space left on device"), 7], 0, True),
        ([LATE, LATE, 7], 1, False),
        ([WorkerTaskError("its own fault"), 7], 1, False),
    ],
)
def test_a_library_runs_again_where_a_device_of_a_farm_was_lost_or_full(
    tmp_path: Path, ends: list[Any], n_left: int, is_found: bool
) -> None:
    with one_recorded(tmp_path, Clock()) as (check, _):
        check._pool.close()
        check._pool = farm = Farm(*ends)
        found = check._run(crash, (), Path("main.tar"), most_sec=60.0)
    assert (found == 7) is is_found
    assert len(farm.ends) == n_left
    assert set(farm.limits_sec) == {30.0}


@pytest.mark.parametrize("is_full", [False, True])
def test_a_library_is_fetched_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    session: Any = SimpleNamespace(
        upload=lambda *_: None, download_linked_module=lambda _: b"a library"
    )
    monkeypatch.setattr(device_session._CurrentDevice, "session", session)
    linked = tmp_path / "net.so"
    if is_full:

        def write_half(path: Path, content: bytes) -> int:
            path.write_text(content[:3].decode())
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="No space"):
            device_session.save_linked(str(tmp_path / "net.tar"), str(linked))
        assert not [*tmp_path.iterdir()]
    else:
        assert device_session.save_linked(str(tmp_path / "net.tar"), str(linked))
        assert [path.name for path in tmp_path.iterdir()] == ["net.so"]
        assert linked.read_bytes() == b"a library"


@pytest.mark.parametrize(
    ("comparison", "coverage"), [({"agree": True}, "one of all"), ({"agree": False}, ""), ({}, "")]
)
def test_an_earlier_library_whose_outputs_did_not_agree_goes(
    make_session: Any, comparison: dict[str, Any], coverage: str
) -> None:
    report = {"comparison": comparison, "coverage": "one of all"}
    session = make_session(history=History(library_report=report))
    assert library.coverage_of_earlier(session) == coverage


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


class Processor:
    """A pool that runs no library: what each would compute, and what the processor reaches."""

    REACHED = Roofline(2e12, 1e11)

    def __init__(self, outputs: list[Any], clock: Clock, end_sec: float) -> None:
        self._outputs, self._clock, self._end_sec = outputs, clock, end_sec

    def map(self, function: Any, _tasks: Any, _timeout_sec: float) -> list[Outcome]:
        if function is measure_roofline:
            return [Outcome(self.REACHED)]
        self._clock.now = self._end_sec
        return [Outcome((self._outputs, 1e-3))]

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("end_sec", "is_here", "n_events"),
    [(500.0, True, 1), (999.5, True, 0), (500.0, False, 0)],
)
def test_what_the_processor_reaches_is_measured_after_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end_sec: float, is_here: bool, n_events: int
) -> None:
    clock, outputs = Clock(), [np.arange(1.0, 9.0, dtype="float32")]
    with one_recorded(tmp_path, clock) as (check, database):
        assert check._is_here
        check._pool.close()
        pool: Any = Processor(outputs, clock, end_sec)
        check._pool, check._is_here = pool, is_here
        check._before = [Measurement(outputs, 2e-3)]
        monkeypatch.setattr(check, "_compile", lambda task, _database: check._path(task, ""))
        comparison = check.measure_tuned(database)
    assert comparison is not None
    assert comparison.agree
    events = read_journal(tmp_path / "journal.jsonl")
    found = [each for each in events if each["event"] == "roofline"]
    rates = [tuple(each[name] for name in Roofline._fields) for each in found]
    assert rates == n_events * [tuple(Processor.REACHED)]


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
