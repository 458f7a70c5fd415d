"""A record store as MetaSchedule's ``database=``, and MetaSchedule's records as rows of it."""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

from tvm_adaptive._tvm import (
    Database,
    IRModule,
    PyDatabase,
    Schedule,
    Target,
    TuningRecord,
    Workload,
    anchor_of,
    copy_record,
    derived_object,
    memory_database,
    record_as_json,
    workload_key,
)
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import FLATTERY, chosen, sound
from tvm_adaptive.records import median_sec

logger = logging.getLogger(__name__)


def target_text(target: Target) -> str:
    """Return a target's JSON, the same for equal targets."""
    return json.dumps(json.loads(str(target)), sort_keys=True)


def task_of(mod: IRModule, target: Target | str, name: str) -> StoredTask:
    """Return what a record store calls a workload on a target.

    Parameters
    ----------
    mod : IRModule
        Not scheduled, normalised as in a tuning context.
    target : Target or str
        Or its text.
    name : str
    """
    return StoredTask(
        workload_key=workload_key(mod),
        target=target if isinstance(target, str) else target_text(target),
        family=anchor_of(mod),
        name=name,
        workload=json.dumps(Workload(mod).as_json()),
    )


def trial_of(
    record: TuningRecord, *, failure: str = "", unix_sec: float | None = None, run: str = ""
) -> StoredTrial:
    """Return a record as a row; one without a believable time is a failure."""
    seconds = median_sec(record.run_secs)
    if math.isnan(seconds):
        failure = failure or "failed"
    return StoredTrial(
        record=json.dumps(record_as_json(record)),
        seconds=None if failure else seconds,
        failure=failure,
        unix_sec=time.time() if unix_sec is None else unix_sec,
        run=run,
    )


@derived_object
class StoreDatabase(PyDatabase):  # type: ignore[misc]
    """Let MetaSchedule read and write a record store, one target's records of it.

    Records are read per workload when MetaSchedule first asks for it, without those that a
    play-off found out; what one has proven is the best, unless something else was recorded as
    faster by more than luck. What is committed is in the store when the call returns.

    Parameters
    ----------
    store : RecordStore
        Stays open as long as this object is used.
    target : Target
        MetaSchedule does not tell records of one workload apart by target.
    run : str, default ""
        Names whoever writes.
    """

    def __init__(self, store: RecordStore, target: Target, run: str = "") -> None:
        super().__init__()
        self._store = store
        self._target = target_text(target)
        self._run = run
        self._inner: Database = memory_database()
        # By workload: what is better asked for the best than all records.
        self._chosen: dict[str, tuple[Database, float]] = {}
        self._loaded: set[str] = set()

    def has_workload(self, mod: IRModule) -> bool:
        """Say whether a workload is in the store."""
        self._load(mod)
        return bool(self._inner.has_workload(mod))

    def commit_workload(self, mod: IRModule) -> Workload:
        """Return MetaSchedule's object for a workload; it is stored with its first record."""
        self._load(mod)
        return self._inner.commit_workload(mod)

    def commit_tuning_record(self, record: TuningRecord) -> None:
        """Write a record.

        Raises
        ------
        StoreError
            When it could not be written.
        """
        mod = record.workload.mod
        self._load(mod)
        trial = trial_of(record, run=self._run)
        self._store.add(task_of(mod, self._target, "main"), [trial])
        copy_record(record, self._inner)
        key = workload_key(mod)
        _, proven_sec = self._chosen.get(key, (None, 0.0))
        if trial.seconds is not None and trial.seconds < FLATTERY * proven_sec:
            del self._chosen[key]

    def get_top_k(self, workload: Workload, top_k: int) -> list[TuningRecord]:
        """Return the fastest records of a workload, fastest first."""
        self._load(workload.mod)
        return list(self._inner.get_top_k(self._inner.commit_workload(workload.mod), top_k))

    def get_all_tuning_records(self) -> list[TuningRecord]:
        """Return all records of the target."""
        for task in self._store.tasks(target=self._target):
            self._load(_workload_of(task).mod)
        return list(self._inner.get_all_tuning_records())

    def query_tuning_record(
        self, mod: IRModule, target: Target, workload_name: str | None = None
    ) -> TuningRecord | None:
        """Return the best record of a workload, None without one."""
        return self._best_of(mod).query_tuning_record(mod, target, workload_name or "main")

    def query_schedule(
        self, mod: IRModule, target: Target, workload_name: str | None = None
    ) -> Schedule | None:
        """Return the best schedule of a workload, None without one."""
        return self._best_of(mod).query_schedule(mod, target, workload_name or "main")

    def query_ir_module(
        self, mod: IRModule, target: Target, workload_name: str | None = None
    ) -> IRModule | None:
        """Return the workload as its best schedule leaves it, None without one."""
        return self._best_of(mod).query_ir_module(mod, target, workload_name or "main")

    def _best_of(self, mod: IRModule) -> Database:
        """Return what to ask for the best record of a workload."""
        self._load(mod)
        database, _ = self._chosen.get(workload_key(mod), (self._inner, 0.0))
        return database

    def __len__(self) -> int:
        """Return the number of the target's records."""
        tasks = [each for each in self._store.stats() if each.task.target == self._target]
        return sum(each.n_trials for each in tasks)

    def _load(self, mod: IRModule) -> None:
        key = workload_key(mod)
        if key in self._loaded:
            return
        self._loaded.add(key)
        task = task_of(mod, self._target, "main")
        trials = sound(self._store, task, self._store.latest(task))
        if not trials:
            return
        workload = self._inner.commit_workload(mod)
        for trial in trials:
            record = record_of(trial, workload)
            if record is not None:
                self._inner.commit_tuning_record(record)
        best = chosen(self._store, task)
        record = None if best is None else record_of(best, workload)
        if best is not None and best.seconds is not None and record is not None:
            database = memory_database()
            copy_record(record, database)
            self._chosen[key] = (database, best.seconds)


def record_of(trial: StoredTrial, workload: Workload) -> TuningRecord | None:
    """Return a row as MetaSchedule's record; None, which is logged, if it cannot be read."""
    try:
        return TuningRecord.from_json(json.loads(trial.record), workload)
    except Exception:  # what TVM's parser may raise is anything
        logger.warning("a record of the store cannot be read and is left out", exc_info=True)
        return None


def _workload_of(task: StoredTask) -> Any:
    return Workload.from_json(json.loads(task.workload))
