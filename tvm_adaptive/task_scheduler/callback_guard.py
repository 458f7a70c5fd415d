"""Measure callbacks that cannot end a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import PyMeasureCallback, RunnerResult, derived_object


@derived_object
class CallbackGuard(PyMeasureCallback):  # type: ignore[misc]
    """Call other callbacks in turn; one that raises is reported and the rest still called.

    MetaSchedule passes such an exception up through its loop: the run ends, and the
    batch, though measured, is never counted.

    Parameters
    ----------
    callbacks : sequence of MeasureCallback
        Stock or one's own.
    results_in : callable
        Called first, with the task's index and its results.
    report : callable
        Called with the task's index, where it happened, the exception and what it means.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        results_in: Callable[[int, list[RunnerResult]], None],
        report: Callable[[int, str, Exception, str], None],
    ) -> None:
        super().__init__()
        self.callbacks = list(callbacks)
        self.results_in = results_in
        self.report = report

    def apply(
        self,
        task_scheduler: Any,
        task_id: int,
        measure_candidates: Any,
        builder_results: Any,
        runner_results: Any,
    ) -> None:
        """Pass one round on."""
        self.results_in(int(task_id), list(runner_results))
        for callback in self.callbacks:
            try:
                callback.apply(
                    task_scheduler, task_id, measure_candidates, builder_results, runner_results
                )
            except Exception as error:
                kind = type(getattr(callback, "_inst", callback)).__name__
                self.report(int(task_id), "callback", error, f"{kind} missed this batch")
