"""The comparison of two builds in a worker that may crash or hang."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.tuning.checks.shared import Answer, Clock, session_in
from tvm_adaptive.errors import (
    OutOfTimeError,
    WorkerDiedError,
)
from tvm_adaptive.models.compare_calls import ComparedCalls
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks import functions
from tvm_adaptive.tuning.session import Session
from tvm_adaptive.workers.pool import WorkerPool

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def die_in(name: str) -> Any:
    def compare(
        *_args: Any, steps: Any, skipped: Sequence[str], progress_file: str, rounding_sec: float
    ) -> ComparedCalls:
        assert not steps
        assert rounding_sec == (0.0 if skipped else 2.0)
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
    monkeypatch.setattr(functions, "compare_calls", die_in(name))
    with session_in(tmp_path, Budget()) as session, contextlib.closing(pool_of(session)) as pool:
        builds = (("untuned.so", "net.so"), [], "cpu")
        limits = {"most_sec": 60.0, "rounding_sec": 2.0}
        found = functions.compare_builds(session, pool, builds, {}, rtol=1e-3, **limits)
        assert found == ComparedCalls({"g": 1}, problems)
        monkeypatch.setattr(functions, "compare_calls", die_in(""))
        with pytest.raises(WorkerDiedError):  # nobody knows what it was
            functions.compare_builds(session, pool, builds, {}, rtol=1e-3, **limits)


def hang_in_f(
    *_args: Any, steps: Any, skipped: Sequence[str], progress_file: str, **_options: Any
) -> ComparedCalls:
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
    monkeypatch.setattr(functions, "compare_calls", hang_in_f)
    budget = Budget(left_sec, Clock())
    with session_in(tmp_path, budget) as session, contextlib.closing(pool_of(session)) as pool:
        builds = (("untuned.so", "net.so"), [], "cpu")

        def compare() -> ComparedCalls:
            return functions.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=3.0)

        if left_sec < 3.0:
            with pytest.raises(OutOfTimeError, match="the time ended while"):
                compare()
        else:
            assert compare().problems["f"].startswith("hang: ")


def pool_of(session: Session) -> WorkerPool:
    return WorkerPool(1, server=session.server)


@pytest.mark.parametrize(("left_sec", "limit_sec"), [(100.0, 60.0), (5.0, 6.0), (-1.0, 1.0)])
def test_what_is_compiled_is_checked_even_if_that_ends_after_the_budget(
    make_session: Any, left_sec: float, limit_sec: float
) -> None:
    budget = Budget(10.0, Clock(), spent_sec=10.0 - left_sec)
    session, pool = make_session(budget=budget), Answer(ComparedCalls())
    builds = (("untuned.so", "net.so"), [], "cpu")
    functions.compare_builds(session, pool, builds, {}, rtol=1e-3, most_sec=60.0, in_overtime=True)
    assert pool.limits_sec == [limit_sec]
