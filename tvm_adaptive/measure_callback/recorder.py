"""Record each round in the journal and for the display."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import PyMeasureCallback, derived_object
from tvm_adaptive.errors import is_machine_failure, summary_line
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal, finite
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.values.trial import Trial

logger = logging.getLogger(__name__)


@derived_object
class Recorder(PyMeasureCallback):  # type: ignore[misc]
    """Update a :class:`RunProgress` after each round, and journal the round."""

    def __init__(
        self,
        progress: RunProgress,
        on_round: Callable[[RunProgress], None] | None = None,
        journal: JournalWriter | None = None,
        build_sec_of: Callable[[Any], float] = lambda _candidate: math.nan,
    ) -> None:
        super().__init__()
        self.progress = progress
        self._build_sec_of = build_sec_of  # seconds of one candidate's build
        self.on_round = on_round
        self.journal: JournalWriter = journal or NullJournal()

    def apply(
        self,
        task_scheduler: Any,
        task_id: int,
        measure_candidates: Sequence[Any],
        builder_results: Sequence[Any],
        runner_results: Sequence[Any],
    ) -> None:
        """Record one round; an error here must not end the run."""
        try:
            flop = _flop_of(task_scheduler, task_id)
            task = self.progress.tasks[task_id]
            self._record(task, flop, measure_candidates, builder_results, runner_results)
        except Exception as error:
            logger.exception("the record of a round is incomplete")
            self.journal.write("error", where="recorder", task_id=task_id, message=repr(error))

    def _record(
        self,
        task: TaskProgress,
        flop: float | None,
        candidates: Sequence[Any],
        builder_results: Sequence[Any],
        runner_results: Sequence[Any],
    ) -> None:
        tried: list[Any] = []
        secs: list[float] = []
        errors: Counter[str] = Counter()
        n_machine_failures = 0  # for lack of processes, memory or disk space: no trials
        for candidate, built, run in zip(candidates, builder_results, runner_results, strict=True):
            trial = Trial.of(run, built)
            if trial.is_untried:
                n_machine_failures += is_machine_failure(trial.failure)
                continue
            tried.append(candidate)
            secs.append(trial.seconds)
            if math.isnan(trial.seconds):
                errors[summary_line(trial.failure or "no believable time")] += 1
        best_before = task.best_sec
        task.add_trials(secs)
        if improved := task.best_sec < best_before:
            task.build_sec = self._build_sec_of(tried[secs.index(task.best_sec)])
        self.progress.errors += errors
        self.progress.current = task.name
        self.journal.write(
            "measured",
            task=task.name,
            weight=task.weight,
            flop=flop,
            n_candidates=len(secs),
            latencies_ms=finite([1e3 * sec for sec in secs]),
            n_trials=task.n_trials,
            n_errors=task.n_errors,
            n_machine_failures=n_machine_failures,
            errors=dict(errors),
            best_ms=task.best_sec * 1e3,
            build_sec=task.build_sec,
            improved=improved,
            weighted_ms=self.progress.weighted_sec * 1e3,
            unix_sec=time.time(),
        )
        if self.on_round is not None:
            self.on_round(self.progress)


def _flop_of(task_scheduler: Any, task_id: int) -> float | None:
    """Return the task's operations as TVM counts them; None for a scheduler without records."""
    records = getattr(task_scheduler, "tasks_", None)
    return None if records is None else float(records[task_id].flop)
