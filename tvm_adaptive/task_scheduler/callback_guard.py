"""A run of MetaSchedule that measure callbacks cannot end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    PyMeasureCallback,
    RunnerResult,
    TaskScheduler,
    derived_object,
)


@derived_object
class CallbackGuard(PyMeasureCallback):  # type: ignore[misc]
    """Call other callbacks in turn; one that raises is reported and the rest still called.

    MetaSchedule passes such an exception up through its loop: the run ends, and the
    batch, though measured, is never counted.
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


_SIGNATURE = inspect.signature(TaskScheduler.tune)


def tune_guarded(self: Any, *args: Any, **options: Any) -> None:
    """Tune, as TVM's own ``TaskScheduler.tune``; the same object can be used again."""
    scheduler = self._inst
    call = _SIGNATURE.bind(self, *args, **options)
    given = call.arguments
    guard = CallbackGuard(given["measure_callbacks"], scheduler.results_in, scheduler.report)
    call.arguments["measure_callbacks"] = [guard]
    scheduler.begin(given["max_trials_global"], given["num_trials_per_iter"])
    try:
        TaskScheduler.tune(*call.args, **call.kwargs)
    except Exception as error:
        scheduler.report(None, "tuning", error, "the run ends")
        raise
    finally:
        scheduler.end()
