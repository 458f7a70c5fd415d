"""A work directory from another machine, or from another version of TVM.

Its times do not compare with those of this machine, so a run refuses to continue there.
Where the user allows it, the records are moved to a folder of their own, and the best of them
are measured again like any other candidate. So are records of an unknown machine: without a
run's journal, such as those of stock MetaSchedule or of an export.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from tvm_adaptive._tvm import IRModule, TuneContext, anchor_of, record_as_json, workload_key
from tvm_adaptive.database.repair import repair_database
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.verdicts import disqualified_in, trace_key
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    TransferPool,
    TransferRecord,
    transfer_record_of,
)
from tvm_adaptive.values.run_folder import FINAL_DIR, RECORD_FILE
from tvm_adaptive.values.trial import median_sec

logger = logging.getLogger(__name__)

_FOLDER = "other-machine-"
# Files with times: MetaSchedule's database, the run's own store with SQLite's files beside it,
# the play-offs' verdicts, and the database of their winners.
_TIMED = ("database_*.json*", "records.db*", "verdicts*", FINAL_DIR)


def has_records(work_dir: Path) -> bool:
    """Return whether MetaSchedule's database in a directory has anything recorded."""
    path = work_dir / RECORD_FILE
    return path.is_file() and path.stat().st_size > 0


def set_aside(work_dir: Path) -> Path | None:
    """Move the files with times into a new folder; nothing is deleted."""
    found = sorted(path for pattern in _TIMED for path in work_dir.glob(pattern))
    if not found:
        return None
    number = 1
    while (folder := work_dir / f"{_FOLDER}{number}").exists():
        number += 1
    folder.mkdir()
    for path in found:
        os.replace(path, folder / path.name)
    return folder


def seed_from_set_aside(
    work_dir: Path, contexts: Sequence[TuneContext], transfer_pool: TransferPool
) -> list[str]:
    """Seed the search with the best records that were set aside; return the tasks' names."""
    folders = sorted(work_dir.glob(f"{_FOLDER}*"))
    databases = [found for each in folders if (found := _database_in(each)) is not None]
    lost = disqualified_in(work_dir, *folders)
    seeded = []
    for context in contexts:
        without = lost.get(workload_key(context.mod), set())
        transfer_records = [
            each
            for database in databases
            for each in _transfer_records(database, context.mod, without)
        ]
        if transfer_records:
            name = str(context.task_name)
            fastest_first = sorted(transfer_records, key=lambda each: each.seconds)
            transfer_pool.remember(anchor_of(context.mod), name, fastest_first[:KEPT_PER_TASK])
            seeded.append(name)
    return seeded


def _database_in(folder: Path) -> RunDatabase | None:
    """Return a folder's database; None without one that can be read."""
    if not (folder / RECORD_FILE).is_file():
        return None
    try:
        repair_database(folder)
        return RunDatabase(folder)
    except OSError as error:
        logger.warning("%s cannot be read, the search begins without: %s", folder, error)
        return None


def _transfer_records(
    database: RunDatabase, mod: IRModule, lost: Collection[str]
) -> list[TransferRecord]:
    """Return the best records of a workload as transfer records, without lost candidates."""
    if not database.has_workload(mod):
        return []
    found = []
    for record in database.get_top_k(database.commit_workload(mod), KEPT_PER_TASK + len(lost)):
        seconds, fields = median_sec(record.run_secs), record_as_json(record)
        transfer_record = transfer_record_of(fields, seconds)
        is_lost = trace_key(fields[0]) in lost
        if transfer_record is not None and not math.isnan(seconds) and not is_lost:
            found.append(dataclasses.replace(transfer_record, is_here=False))
    return found
