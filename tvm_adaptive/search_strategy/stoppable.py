"""Search strategies around another one, such as the one that ends on request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import (
    MeasureCandidate,
    PySearchStrategy,
    RunnerResult,
    TuneContext,
    derived_object,
    search_hooks,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.values.trial import Promise

logger = logging.getLogger(__name__)


class DelegatingSearch(PySearchStrategy):  # type: ignore[misc]
    """Passes every call on to an inner strategy; the hooks, if it has any."""

    def __init__(self, inner: Any, journal: JournalWriter | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.journal: JournalWriter = journal or NullJournal()

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        self.inner._initialize_with_tune_context(context)

    def pre_tuning(self, *args: Any, **options: Any) -> None:
        """Start the inner strategy."""
        self.inner.pre_tuning(*args, **options)

    def post_tuning(self) -> None:
        """End the inner strategy."""
        self.inner.post_tuning()

    def promise(self) -> Promise | None:
        """Return the inner strategy's promise."""
        return search_hooks(self.inner).promise()

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Limit the inner strategy's next batch."""
        search_hooks(self.inner).limit_next_batch(n_trials)

    def begin_next_batch(self) -> None:
        """Let the inner strategy begin its next batch in another process."""
        search_hooks(self.inner).begin_next_batch()

    def is_ready(self) -> bool:
        """Say whether the inner strategy's next batch is available at once."""
        return search_hooks(self.inner).is_ready()

    def forget_task(self) -> None:
        """Let the inner strategy release its task."""
        search_hooks(self.inner).forget_task()

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the inner strategy's next batch; None ends the task."""
        batch: list[MeasureCandidate] | None = self.inner.generate_measure_candidates()
        return batch

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Let the inner strategy learn the results."""
        self.inner.notify_runner_results(measure_candidates, results)


@derived_object
class StoppableSearch(DelegatingSearch):
    """Ends its task when ``should_stop`` returns True, or the inner strategy fails.

    MetaSchedule itself counts trials only. A strategy that returns no batch ends its task;
    ``on_end`` gets the names of tasks that end before the run should.
    """

    def __init__(
        self,
        inner: Any,
        should_stop: Callable[[], bool],
        journal: JournalWriter | None = None,
        *,
        on_round: Callable[[], None] = lambda: None,
        on_end: Callable[[str], None] = lambda _name: None,
    ) -> None:
        super().__init__(inner, journal)
        self.should_stop = should_stop
        self.on_round = on_round
        self.on_end = on_end
        self.task_name = "?"
        self._has_failed = False  # before its first batch

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        self.task_name = str(context.task_name)
        super()._initialize_with_tune_context(context)

    def pre_tuning(self, *args: Any, **options: Any) -> None:
        """Start the inner strategy; if that fails, its task ends."""
        self._has_failed = False
        try:
            super().pre_tuning(*args, **options)
        except InvalidOptionError:  # it holds for all tasks
            raise
        except Exception as error:
            self._has_failed = True
            self._report(error, "this task is not searched")

    def post_tuning(self) -> None:
        """End the inner strategy, if it has begun."""
        if not self._has_failed:
            super().post_tuning()

    def promise(self) -> Promise | None:
        """Return the inner strategy's promise; None if it has not begun."""
        return None if self._has_failed else super().promise()

    def begin_next_batch(self) -> None:
        """Let the inner strategy begin its next batch, unless none will be needed."""
        if not self._has_failed and not self.should_stop():
            super().begin_next_batch()

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the inner strategy's next batch; None ends the task."""
        self.on_round()
        if self.should_stop():
            return None
        batch = None
        try:
            if not self._has_failed:
                batch = super().generate_measure_candidates()
        except Exception as error:
            # MetaSchedule would end the run, and with it every other task.
            self._report(error, "this task ends")
        if batch is None and not self.should_stop():  # a search on lanes ends with the budget
            self.on_end(self.task_name)
        return batch

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Let the inner strategy learn the results."""
        try:
            super().notify_runner_results(measure_candidates, results)
        except Exception as error:
            self._report(error, "it learns nothing from this round")

    def clone(self) -> Any:
        """Return the same around a clone of the inner strategy."""
        return StoppableSearch(
            self.inner.clone(),
            self.should_stop,
            self.journal,
            on_round=self.on_round,
            on_end=self.on_end,
        )

    def _report(self, error: Exception, consequence: str) -> None:
        logger.exception("%s: the search failed; %s", self.task_name, consequence)
        self.journal.write("error", task=self.task_name, where="search", message=repr(error))
