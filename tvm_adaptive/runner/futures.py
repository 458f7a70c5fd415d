"""What MetaSchedule waits on: results that are there, and results that are to come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from tvm_adaptive._tvm import PyRunnerFuture, RunnerResult, derived_object
from tvm_adaptive.errors import OUT_OF_TIME


@derived_object
class FinishedFuture(PyRunnerFuture):  # type: ignore[misc]
    """A result that is there already."""

    def __init__(self, run_sec: float | None, error_msg: str | None) -> None:
        super().__init__()
        self._run_secs = None if run_sec is None else [run_sec]
        self._error_msg = error_msg

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> RunnerResult:
        """Return exactly one robust time, or an error."""
        return RunnerResult(self._run_secs, self._error_msg)


@derived_object
class PendingFuture(PyRunnerFuture):  # type: ignore[misc]
    """A candidate that waits for a device, or is being measured."""

    def __init__(
        self, answer: Future[FinishedFuture], time_left: Callable[[], float] | None = None
    ) -> None:
        super().__init__()
        self._answer = answer
        self._time_left = time_left

    def done(self) -> bool:
        """Say whether the candidate is measured."""
        return self._answer.done()

    def result(self) -> RunnerResult:
        """Wait for the candidate's result."""
        left_sec = math.inf if self._time_left is None else max(0.0, self._time_left())
        try:
            # A wait of as much as a lock can wait is no limit.
            return self._answer.result(min(left_sec, threading.TIMEOUT_MAX)).result()
        except FutureTimeoutError:
            return RunnerResult(None, OUT_OF_TIME)
        # It is waited for inside of MetaSchedule's loop, which an exception would end.
        except BaseException as error:
            return RunnerResult(None, f"the candidate could not be measured: {error!r}")
