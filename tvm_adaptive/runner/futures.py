"""What MetaSchedule waits on: results that are there, and results that are to come."""

from __future__ import annotations

from concurrent.futures import Future

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
    """A candidate that waits for a device, or is being measured.

    Parameters
    ----------
    answer : concurrent.futures.Future
        Of the candidate's :class:`FinishedFuture`.
    """

    def __init__(self, answer: Future[FinishedFuture]) -> None:
        super().__init__()
        self._answer = answer

    def done(self) -> bool:
        """Say whether the candidate is measured."""
        return self._answer.done()

    def result(self) -> RunnerResult:
        """Wait for the candidate's result."""
        try:
            return self._answer.result().result()
        # It is waited for inside of MetaSchedule's loop, which an exception would end.
        except BaseException as error:
            return RunnerResult(None, f"the candidate could not be measured: {error!r}")
