"""The futures that MetaSchedule waits on."""

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
    """A result that is known already."""

    def __init__(self, run_sec: float | None, error_msg: str | None) -> None:
        super().__init__()
        self._result = RunnerResult(None if run_sec is None else [run_sec], error_msg)

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> RunnerResult:
        """Return exactly one robust time, or an error."""
        return self._result


@derived_object
class PendingFuture(PyRunnerFuture):  # type: ignore[misc]
    """A candidate that is queued or being measured."""

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
        """Wait for the result; an error once no time is left."""
        left_sec = math.inf if self._time_left is None else max(0.0, self._time_left())
        try:
            # The longest wait of a lock stands for no limit.
            return self._answer.result(min(left_sec, threading.TIMEOUT_MAX)).result()
        except FutureTimeoutError:
            return RunnerResult(None, OUT_OF_TIME)
        # An exception would end MetaSchedule's loop, which calls this.
        except BaseException as error:
            return RunnerResult(None, f"the candidate could not be measured: {error!r}")
