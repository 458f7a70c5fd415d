"""A work directory that comes from another machine, or from another version of TVM.

Its times compare with none that are taken here. A run refuses to go on there; where the
user allows it, what was recorded is set aside, in a folder of its own, and the best of it
is measured again like any other candidate.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tvm_adaptive._tvm import (
    TuneContext,
    anchor_of,
    json_database,
    record_as_json,
    workload_key,
)
from tvm_adaptive.database.repair import RECORD_FILE, repair_database
from tvm_adaptive.errors import OtherMachineError, summary_line
from tvm_adaptive.measure_callback.history import differences
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    TransferPool,
    TransferRecord,
    transfer_record_of,
)
from tvm_adaptive.values.trial import median_sec
from tvm_adaptive.workers.environment import Environment

logger = logging.getLogger(__name__)

_FOLDER = "other-machine-"
# What holds times: MetaSchedule's database, the run's own store with what SQLite keeps
# beside it, what play-offs have shown, and the database of their winners.
_TIMED = ("database_*.json*", "records.db*", "verdicts*", "final")


def check_environment(before: Environment, now: Environment, work_dir: Path) -> None:
    """Refuse times that were taken elsewhere."""
    if found := differences(before, now):
        raise OtherMachineError(
            f"The times in {work_dir} were taken elsewhere ({'; '.join(found)}); choose another "
            "--work-dir, or measure its best records anew with --allow-other-machine."
        )


def set_aside(work_dir: Path) -> Path | None:
    """Move what holds times into a folder of its own; nothing is deleted."""
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


def recall_set_aside(
    work_dir: Path, contexts: Sequence[TuneContext], transfer_pool: TransferPool
) -> list[str]:
    """Let a search begin with the best that was set aside; their times are not believed."""
    best: dict[str, list[TransferRecord]] = {}
    for folder in sorted(work_dir.glob(f"{_FOLDER}*")):
        for key, transfer_records in _transfer_records(folder).items():
            best.setdefault(key, []).extend(transfer_records)
    known = []
    for context in contexts:
        transfer_records = best.get(workload_key(context.mod), [])
        if transfer_records:
            name = str(context.task_name)
            fastest_first = sorted(transfer_records, key=lambda finding: finding.seconds)
            transfer_pool.remember(anchor_of(context.mod), name, fastest_first[:KEPT_PER_TASK])
            known.append(name)
    return known


def _transfer_records(folder: Path) -> dict[str, list[TransferRecord]]:
    """Return what a JSON database found, by workload; nothing if it cannot be read."""
    found: dict[str, list[TransferRecord]] = {}
    if not (folder / RECORD_FILE).is_file():
        return found
    try:
        repair_database(folder)
        for record in json_database(folder).get_all_tuning_records():
            seconds = median_sec(record.run_secs)
            finding = transfer_record_of(record_as_json(record), seconds)
            if finding is not None and not math.isnan(seconds):
                found.setdefault(workload_key(record.workload.mod), []).append(finding)
    except Exception as error:  # of another TVM's traces, TVM's parser may raise anything
        logger.warning(
            "%s cannot be read, the search begins without: %s", folder, summary_line(error)
        )
    return found
