"""Keep what a run measures in record stores, batch by batch."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    MeasureCandidate,
    PyMeasureCallback,
    TuneContext,
    TuningRecord,
    Workload,
    derived_object,
)
from tvm_adaptive.asides import LastLesson, Lesson
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError, essence
from tvm_adaptive.measure_callback.journal import JournalWriter

logger = logging.getLogger(__name__)

# A store that refused so often in a row is left alone for the rest of the run.
_MAX_FAILURES = 3
# What MetaSchedule writes for a failed trial.
_FAILED_SEC = 1e10


class _Shelf:
    """One store, and what it could not take yet."""

    def __init__(self, store: RecordStore, journal: JournalWriter) -> None:
        self._store = store
        self._journal = journal
        self._waiting: list[tuple[StoredTask, list[StoredTrial]]] = []
        self._n_failures = 0

    def put(self, task: StoredTask, trials: list[StoredTrial]) -> None:
        """Write a batch, after what waits."""
        if self._n_failures >= _MAX_FAILURES:
            return
        self._waiting.append((task, trials))
        while self._waiting:
            try:
                self._store.add(*self._waiting[0])
            except StoreError as error:
                self._n_failures += 1
                logger.warning("%s", error)
                self._journal.write("error", where="store", message=str(error))
                return
            self._n_failures = 0
            del self._waiting[0]


@derived_object
class Keeper(PyMeasureCallback):  # type: ignore[misc]
    """Append every measured batch to record stores; a store that fails costs no trial.

    What could not be written is tried again with the next batch. MetaSchedule's own
    database in the run's folder has it in any case.

    Parameters
    ----------
    stores : sequence of RecordStore
    contexts : sequence of TuneContext
        In the scheduler's order.
    run : str
        Names the run.
    lessons : LastLesson
        What the cost model learned of the batch, if it says so.
    journal : JournalWriter
        Gets an ``"error"`` event when the store fails.
    """

    def __init__(
        self,
        stores: Sequence[RecordStore],
        contexts: Sequence[TuneContext],
        run: str,
        lessons: LastLesson,
        journal: JournalWriter,
    ) -> None:
        super().__init__()
        self._shelves = [_Shelf(store, journal) for store in stores]
        self._contexts = list(contexts)
        self._run = run
        self._lessons = lessons
        self._journal = journal
        self._tasks: dict[int, StoredTask] = {}
        self._workloads: dict[int, Workload] = {}

    def apply(
        self,
        _task_scheduler: Any,
        task_id: int,
        measure_candidates: Sequence[MeasureCandidate],
        builder_results: Sequence[Any],
        runner_results: Sequence[Any],
    ) -> None:
        """Take in one round; whatever goes wrong here must not end the run."""
        try:
            lesson = self._lessons.take(len(measure_candidates))
            trials = [
                self._trial(task_id, candidate, built.error_msg or run.error_msg, run.run_secs)
                for candidate, built, run in zip(
                    measure_candidates, builder_results, runner_results, strict=True
                )
            ]
            for shelf in self._shelves:
                shelf.put(self._task(task_id), with_lesson(trials, lesson))
        except Exception as error:
            logger.exception("a round is not in the record store")
            self._journal.write("error", where="keeper", task_id=task_id, message=repr(error))

    def _task(self, task_id: int) -> StoredTask:
        if task_id not in self._tasks:
            context = self._contexts[task_id]
            self._tasks[task_id] = task_of(context.mod, context.target, str(context.task_name))
        return self._tasks[task_id]

    def _trial(
        self, task_id: int, candidate: MeasureCandidate, message: Any, run_secs: Any
    ) -> StoredTrial:
        context = self._contexts[task_id]
        if task_id not in self._workloads:
            self._workloads[task_id] = Workload(context.mod)
        record = TuningRecord(
            candidate.sch.trace,
            self._workloads[task_id],
            [_FAILED_SEC] if message is not None else [float(sec) for sec in run_secs or ()],
            context.target,
            candidate.args_info,
        )
        failure = "" if message is None else essence(str(message))
        return trial_of(record, failure=failure, run=self._run)


def with_lesson(trials: Sequence[StoredTrial], lesson: Lesson | None) -> list[StoredTrial]:
    """Return trials with the features and timing errors that a cost model learned of them."""
    if lesson is None:
        return list(trials)
    errors = np.full(len(trials), np.nan) if lesson.errors is None else lesson.errors
    return [
        dataclasses.replace(trial, features=row, error=None if math.isnan(error) else float(error))
        for trial, row, error in zip(trials, lesson.rows, errors, strict=True)
    ]
