"""What each task has to play for at the end of a run: its records, or what a store has proven."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

from tvm_adaptive._tvm import Database, ExtractedTask, IRModule, json_database, memory_database
from tvm_adaptive.database.metaschedule import record_of, task_of, trial_of
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import candidate_of, checked, proven
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback.recorder import RunProgress
from tvm_adaptive.runner.finalist_modules import sane_records
from tvm_adaptive.session import Session

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Contenders:
    """Of one task.

    Attributes
    ----------
    mod : IRModule
        Not tuned.
    name : str
    database : Database
        Holds the records: this run's or, without any, the one that earlier runs have proven.
    importance_sec : float
        Seconds of an inference that go into the task; 0 where nothing is known.
    is_proven : bool
        Whether the best of them was checked and timed by an earlier run's play-off, so that
        this run need not, if it has no time.
    """

    mod: IRModule
    name: str
    database: Database
    importance_sec: float
    is_proven: bool = False

    @property
    def is_due(self) -> bool:
        """Whether there is something to play for that nobody has checked yet."""
        return self.importance_sec > 0.0 and not self.is_proven


def contenders_of(
    session: Session, tasks: Sequence[ExtractedTask], progress: RunProgress
) -> list[Contenders]:
    """Return what each task has to play for; a store that fails costs what it knows.

    Parameters
    ----------
    session : Session
    tasks : sequence of ExtractedTask
    progress : RunProgress
        In the order of ``tasks``.
    """
    recorded = json_database(session.work_dir)
    store = session.store
    found = []
    for task, so_far in zip(tasks, progress.tasks, strict=True):
        has_result = math.isfinite(so_far.best_sec)
        importance_sec = so_far.weight * so_far.best_sec if has_result else 0.0
        mine = Contenders(task.dispatched[0], str(task.task_name), recorded, importance_sec)
        if store is not None:
            try:
                mine = _with_memory(mine, session, store, so_far.weight)
            except StoreError as error:
                logger.warning("%s What it knows is not used.", error)
                store = None
        found.append(mine)
    return found


def _with_memory(
    mine: Contenders, session: Session, store: RecordStore, weight: float
) -> Contenders:
    task = task_of(mine.mod, session.target, mine.name)
    if mine.importance_sec:
        known = checked(store, task)
        best = sane_records(mine.database, mine.mod, session.target)[:1] if known else []
        is_proven = any(candidate_of(trial_of(record)) in known for record in best)
        return dataclasses.replace(mine, is_proven=is_proven)
    winner = proven(store, task)
    if winner is None or winner.seconds is None:
        return mine
    database = memory_database()
    record = record_of(winner, database.commit_workload(mine.mod))
    if record is None:
        return mine
    database.commit_tuning_record(record)
    importance_sec = weight * winner.seconds
    return dataclasses.replace(
        mine, database=database, importance_sec=importance_sec, is_proven=True
    )
