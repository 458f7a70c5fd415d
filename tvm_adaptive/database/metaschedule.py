"""A record store as MetaSchedule's ``database=``, and MetaSchedule's records as rows of it."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    TVM_VERSION,
    Database,
    IRModule,
    PyDatabase,
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
from tvm_adaptive.database.repair import copy_readable
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import proven, sound
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.values.trial import median_sec
from tvm_adaptive.workers.environment import Environment
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)


def target_text(target: Target) -> str:
    """Return a target's JSON, the same for equal targets."""
    return json.dumps(json.loads(str(target)), sort_keys=True)


def task_of(mod: IRModule, target: Target | str, name: str) -> StoredTask:
    """Return the stored task of a workload on a target."""
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
    """Return the stored trial of a record; without a valid time it is a failure."""
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


def record_of(trial: StoredTrial, workload: Workload) -> TuningRecord | None:
    """Return a stored trial as MetaSchedule's record; log an unreadable one and return None."""
    try:
        return TuningRecord.from_json(json.loads(trial.record), workload)
    except Exception:  # TVM's parser may raise anything
        logger.warning("a record of the store cannot be read and is left out", exc_info=True)
        return None


def readable_database(work_dir: Path) -> RunDatabase:
    """Return the readable part of a JSON database that a run may be writing to.

    Records that TVM cannot apply are left out when they are read. Raises InvalidOptionError
    where another version of TVM has written programs that the present one does not know.
    """
    copy = ScratchFolder("database")
    has_records = copy_readable(work_dir, copy.path)
    database = RunDatabase(work_dir, copy)
    if has_records and not database.readable_workloads:
        raise InvalidOptionError(
            f"TVM {TVM_VERSION} cannot read the records in {work_dir}: another version has "
            "written their programs. Use that one."
        )
    return database


@derived_object
class StoreDatabase(PyDatabase):  # type: ignore[misc]
    """Let MetaSchedule read and write a record store's records of one target.

    The records of a workload are read when MetaSchedule first queries it, without
    disqualified candidates. A compiler's queries (``query_schedule`` and its like) return the
    winner of a play-off, and nothing without one: the function is then compiled untuned. A
    search's query (``get_top_k``) returns all records. Committed records are in the store
    when the call returns.

    Parameters
    ----------
    store : RecordStore
        Stays open as long as this object is used. Records of other environments than the
        store's are left out; without one, it is the target's on this machine.
    target : Target
        Its records only: MetaSchedule does not distinguish records by target.
    run : str, default ""
        Run id of the records that are committed.
    checked_only : bool, default True
        False lets a compiler have the fastest record of a workload without a play-off
        winner, as MetaSchedule's own databases do; its results are unchecked.
    """

    def __init__(
        self, store: RecordStore, target: Target, run: str = "", *, checked_only: bool = True
    ) -> None:
        super().__init__()
        is_bound = store.environment is not None
        self._store = store if is_bound else store.at(Environment.current(target))
        self._target = target_text(target)
        self._run = run
        self._checked_only = checked_only
        self._inner: Database = memory_database()
        # The play-off winner of each workload.
        self._proven: Database = memory_database()
        # The tasks of the workloads that were read, by their keys.
        self._tasks: dict[str, StoredTask] = {}
        self._lock = threading.RLock()  # a compiler may ask from several threads

    def has_workload(self, mod: IRModule) -> bool:
        """Return whether a workload is in the store."""
        with self._lock:
            self._load(mod)
            return bool(self._inner.has_workload(mod))

    def commit_workload(self, mod: IRModule) -> Workload:
        """Return MetaSchedule's object for a workload; it is stored with its first record."""
        with self._lock:
            self._load(mod)
            return self._inner.commit_workload(mod)

    def commit_tuning_record(self, record: TuningRecord) -> None:
        """Write a record; raise a StoreError when that fails."""
        with self._lock:
            task = self._load(record.workload.mod)
            self._store.add(task, [trial_of(record, run=self._run)])
            copy_record(record, self._inner)

    def get_top_k(self, workload: Workload, top_k: int) -> list[TuningRecord]:
        """Return the fastest records of a workload, fastest first."""
        with self._lock:
            self._load(workload.mod)
            return list(self._inner.get_top_k(self._inner.commit_workload(workload.mod), top_k))

    def get_all_tuning_records(self) -> list[TuningRecord]:
        """Return all records of the target."""
        with self._lock:
            for task in self._store.tasks(target=self._target):
                try:
                    workload = Workload.from_json(json.loads(task.workload))
                except Exception:  # TVM's parser may raise anything
                    logger.warning("a workload of the store cannot be read", exc_info=True)
                else:
                    self._load(workload.mod)
            return list(self._inner.get_all_tuning_records())

    def query_tuning_record(
        self, mod: IRModule, target: Target, workload_name: str | None = None
    ) -> TuningRecord | None:
        """Return the record of a workload to compile, None without one."""
        with self._lock:
            self._load(mod)
            is_proven = self._checked_only or self._proven.has_workload(mod)
            database = self._proven if is_proven else self._inner
            return database.query_tuning_record(mod, target, workload_name or "main")

    def __len__(self) -> int:
        """Return the number of the target's records."""
        tasks = [each for each in self._store.stats() if each.task.target == self._target]
        return sum(each.n_trials for each in tasks)

    def _load(self, mod: IRModule) -> StoredTask:
        """Read the records of a workload, once; return its task."""
        key = workload_key(mod)
        if key in self._tasks:
            return self._tasks[key]
        task = task_of(mod, self._target, "main")
        finals = self._store.finals(task)
        best = proven(finals)
        trials = sound(finals, self._store.latest(task))
        # From here on nothing asks the store, which may fail: the next query would ask again.
        self._tasks[key] = task
        for trial in trials:
            record: Any = record_of(trial, self._inner.commit_workload(mod))
            if record is not None:
                self._inner.commit_tuning_record(record)
        record = None if best is None else record_of(best, Workload(mod))
        if record is not None:
            copy_record(record, self._proven)
        return task
