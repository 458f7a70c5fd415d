"""The measure callback that writes a run's trials to record stores, batch by batch."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from tvm_adaptive._tvm import (
    MeasureCandidate,
    PyMeasureCallback,
    TuneContext,
    TuningRecord,
    Workload,
    derived_object,
    module_key,
)
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.pending_writes import PendingWrites
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import summary_line
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.values.trial import Trial
from tvm_adaptive.values.trial_log import TrialLog

logger = logging.getLogger(__name__)


@derived_object
class StoreCallback(PyMeasureCallback):  # type: ignore[misc]
    """Append every measured batch to record stores; a store that fails costs no trial.

    The run's own store holds what the shared store could not take, and MetaSchedule's
    database in the run's folder holds it in any case.
    """

    def __init__(
        self,
        contexts: Sequence[TuneContext],
        *,
        own: RecordStore | None,
        shared: RecordStore | None,
        run: str,
        trial_log: TrialLog,
        journal: JournalWriter,
        clock: Any = time,
    ) -> None:
        super().__init__()
        self._own = None if own is None else PendingWrites(own, journal, clock, where="own store")
        self._shared = None if shared is None else PendingWrites(shared, journal, clock)
        self._contexts = list(contexts)
        self._run = run
        self._trial_log = trial_log
        self._journal = journal
        self._clock = clock
        self._tasks: dict[int, tuple[StoredTask, Workload]] = {}

    def apply(
        self,
        _task_scheduler: Any,
        task_id: int,
        measure_candidates: Sequence[MeasureCandidate],
        builder_results: Sequence[Any],
        runner_results: Sequence[Any],
    ) -> None:
        """Write one batch; an error is logged and does not end the run."""
        try:
            rounds = zip(measure_candidates, builder_results, runner_results, strict=True)
            batch = [
                self._stored(task_id, candidate, trial, is_built=built.error_msg is None)
                for candidate, built, run in rounds
                if not (trial := Trial.of(run, built)).is_untried
            ]
            if not batch:
                return
            task, _ = self._task(task_id)
            for pending in (self._own, self._shared):
                if pending is not None:
                    pending.put(task, batch)
        except Exception as error:
            logger.exception("a batch is not in the record store")
            self._journal.write("error", where="store", task_id=task_id, message=repr(error))

    def close(self, limit_sec: float) -> int:
        """Flush pending writes; return how many trials the shared store does not have."""
        end_sec = self._clock.monotonic() + limit_sec
        # What the run's own store lacks is in MetaSchedule's files, but for features and messages.
        for pending in (self._shared, self._own):
            if pending is not None:
                pending.flush(end_sec - self._clock.monotonic())
        return 0 if self._shared is None else self._shared.n_missing

    def _task(self, task_id: int) -> tuple[StoredTask, Workload]:
        if task_id not in self._tasks:
            context = self._contexts[task_id]
            task = task_of(context.mod, context.target, str(context.task_name))
            self._tasks[task_id] = task, Workload(context.mod)
        return self._tasks[task_id]

    def _stored(
        self, task_id: int, candidate: MeasureCandidate, trial: Trial, *, is_built: bool
    ) -> StoredTrial:
        """Return a trial as a row, with features and timing error if a cost model learned it."""
        record = TuningRecord(
            candidate.sch.trace,
            self._task(task_id)[1],
            trial.recorded_secs,
            self._contexts[task_id].target,
            candidate.args_info,
        )
        failure = "" if trial.failure is None else summary_line(trial.failure)
        stored = trial_of(record, failure=failure, run=self._run)
        logged = self._trial_log.get(module_key(candidate.sch.mod))
        if logged.features is None or not is_built:
            return stored
        error = None if math.isnan(logged.relative_error) else logged.relative_error
        return dataclasses.replace(stored, features=logged.features, error=error)
