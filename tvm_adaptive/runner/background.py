"""Measure batches in a thread, in the order they came, while the caller goes on.

For devices that are not where candidates are searched and built: there the next batch
may be made while the last one is measured. On the CPU that does both it would disturb
the times.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tvm_adaptive._tvm import PyRunnerFuture, RunnerResult, derived_object


@derived_object
class FinishedFuture(PyRunnerFuture):  # type: ignore[misc]
    """A result that is there already.

    Parameters
    ----------
    run_sec : float or None
        Seconds of one run, lower is better; None for a failure.
    error_msg : str or None
        What failed; None for a success.
    """

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
    """One of a batch that is being measured.

    Parameters
    ----------
    batch : concurrent.futures.Future
        Of the batch's futures.
    index : int
    """

    def __init__(self, batch: Future[list[FinishedFuture]], index: int) -> None:
        super().__init__()
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """Say whether the whole batch is measured."""
        return self._batch.done()

    def result(self) -> RunnerResult:
        """Wait for the batch and return the candidate's result."""
        try:
            return self._batch.result()[self._index].result()
        # It is waited for inside of MetaSchedule's loop, which an exception would end.
        except BaseException as error:
            return RunnerResult(None, f"the batch could not be measured: {error!r}")


class Background:
    """Measures batches one after the other: where they are asked for, or in a thread.

    Parameters
    ----------
    overlap : bool
        In a thread, while the caller goes on.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._threads: ThreadPoolExecutor | None = None

    def run(
        self, measure: Callable[[], list[FinishedFuture]], n: int
    ) -> list[FinishedFuture] | list[PendingFuture]:
        """Return the futures of ``n`` candidates that ``measure`` gives results of."""
        if not self._overlap:
            return measure()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="tvm-adaptive-runner")
        batch = self._threads.submit(measure)
        return [PendingFuture(batch, index) for index in range(n)]

    def close(self) -> None:
        """Wait for the batch that is being measured; what comes after it is not begun."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
