"""A work directory from another machine, or from another version of TVM.

Its times do not compare with those of this machine, so a run refuses to continue there.
Where the user allows it, the records are moved to a folder of their own, and the best of them
are measured again like any other candidate.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from tvm_adaptive._tvm import TuneContext, anchor_of, json_database, record_as_json, workload_key
from tvm_adaptive.database.repair import RECORD_FILE, repair_database
from tvm_adaptive.database.verdicts import disqualified_in, trace_key
from tvm_adaptive.errors import summary_line
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    TransferPool,
    TransferRecord,
    transfer_record_of,
)
from tvm_adaptive.values.trial import median_sec

logger = logging.getLogger(__name__)

_FOLDER = "other-machine-"
# Files with times: MetaSchedule's database, the run's own store with SQLite's files beside it,
# the play-offs' verdicts, and the database of their winners.
_TIMED = ("database_*.json*", "records.db*", "verdicts*", "final")


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
    best: dict[str, list[TransferRecord]] = {}
    folders = sorted(work_dir.glob(f"{_FOLDER}*"))
    lost = disqualified_in(work_dir, *folders)
    for folder in folders:
        for key, transfer_records in _transfer_records(folder, lost).items():
            best.setdefault(key, []).extend(transfer_records)
    seeded = []
    for context in contexts:
        transfer_records = best.get(workload_key(context.mod), [])
        if transfer_records:
            name = str(context.task_name)
            fastest_first = sorted(transfer_records, key=lambda each: each.seconds)
            transfer_pool.remember(anchor_of(context.mod), name, fastest_first[:KEPT_PER_TASK])
            seeded.append(name)
    return seeded


def _transfer_records(
    folder: Path, lost: Mapping[str, Container[str]]
) -> dict[str, list[TransferRecord]]:
    """Return a JSON database's transfer records by workload; none if it cannot be read."""
    found: dict[str, list[TransferRecord]] = {}
    if not (folder / RECORD_FILE).is_file():
        return found
    try:
        repair_database(folder)
        for record in json_database(folder).get_all_tuning_records():
            seconds, fields = median_sec(record.run_secs), record_as_json(record)
            key = workload_key(record.workload.mod)
            transfer_record = transfer_record_of(fields, seconds)
            is_lost = key in lost and trace_key(fields[0]) in lost[key]
            if transfer_record is not None and not math.isnan(seconds) and not is_lost:
                elsewhere = dataclasses.replace(transfer_record, is_here=False)
                found.setdefault(key, []).append(elsewhere)
    except Exception as error:  # TVM's parser may raise anything for another TVM's traces
        logger.warning(
            "%s cannot be read, the search begins without: %s", folder, summary_line(error)
        )
    return found
