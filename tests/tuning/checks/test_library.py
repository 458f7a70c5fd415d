"""Which library stays, and the check of single functions."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tests.tuning.checks.shared import Clock, session_in, spend_all_on_compiling
from tvm_adaptive._tvm import (
    Database,
    copy_record,
    functions_as_tasks,
    memory_database,
)
from tvm_adaptive._tvm import te_workload as operator
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import library, operators
from tvm_adaptive.tuning.checks.library import Measurement
from tvm_adaptive.tuning.checks.operators import OperatorCheck
from tvm_adaptive.tuning.outcome import Comparison


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
