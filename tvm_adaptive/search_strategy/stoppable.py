"""A search strategy that ends when it is told to, around any other strategy.

MetaSchedule counts trials only. A strategy that returns no batch ends its task, and
that is the one place between two rounds where every task passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import (
    Database,
    MeasureCandidate,
    PySearchStrategy,
    RunnerResult,
    Schedule,
    TuneContext,
    derived_object,
)


@derived_object
class StoppableSearch(PySearchStrategy):  # type: ignore[misc]
    """Pass everything on to ``inner`` until ``should_stop`` says no more.

    Parameters
    ----------
    inner : SearchStrategy
        Stock or ours.
    should_stop : callable
        Asked before each round; True ends the task.
    """

    def __init__(self, inner: Any, should_stop: Callable[[], bool]) -> None:
        super().__init__()
        self.inner = inner
        self.should_stop = should_stop

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        """Hand the task on."""
        self.inner._initialize_with_tune_context(context)

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[Schedule],
        database: Database | None = None,
        cost_model: Any = None,
    ) -> None:
        """Start the inner strategy."""
        self.inner.pre_tuning(max_trials, num_trials_per_iter, design_spaces, database, cost_model)

    def post_tuning(self) -> None:
        """End the inner strategy."""
        self.inner.post_tuning()

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the inner strategy's next batch, or None when told to stop."""
        if self.should_stop():
            return None
        batch: list[MeasureCandidate] | None = self.inner.generate_measure_candidates()
        return batch

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Hand the results on."""
        self.inner.notify_runner_results(measure_candidates, results)

    def clone(self) -> Any:
        """Return the same around a clone of the inner strategy."""
        return StoppableSearch(self.inner.clone(), self.should_stop)
