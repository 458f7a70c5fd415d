"""Make MetaSchedule's JSON database readable again after a crash.

MetaSchedule reads a file of JSON lines as a whole: half a last line, which is what a
killed process leaves, makes every record unreadable, an empty line ends the reading
process with a segmentation fault, and a time of NaN is written in a form that no JSON
reader takes.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"
# What could not be read is moved here, never deleted.
DAMAGED_SUFFIX = ".damaged"


def repair_database(work_dir: Path) -> int:
    """Drop unreadable lines of a JSON database, keeping a copy of them.

    Parameters
    ----------
    work_dir : Path
        Holds the two files of the database; missing ones are fine.

    Returns
    -------
    int
        Lines that were moved to a file with the suffix ``.damaged``.
    """
    # A record names its workload by line number, so a lost workload line would give the
    # records behind it to other workloads: they go, too.
    n_before = _count_lines(work_dir / WORKLOAD_FILE)
    moved = _repair(work_dir / WORKLOAD_FILE, keep_after_damage=False)
    n_workloads = _count_lines(work_dir / WORKLOAD_FILE)
    limit = n_workloads if n_workloads < n_before or moved else None
    return moved + _repair(work_dir / RECORD_FILE, keep_after_damage=True, n_workloads=limit)


def _repair(path: Path, *, keep_after_damage: bool, n_workloads: int | None = None) -> int:
    if not path.exists():
        return 0
    text = path.read_bytes()
    lines = text.split(b"\n")
    good: list[bytes] = []
    damaged: list[bytes] = []
    for line in lines:
        if not line.strip():
            continue
        intact = _is_intact(line, n_workloads) and (keep_after_damage or not damaged)
        (good if intact else damaged).append(line)
    repaired = b"".join(line + b"\n" for line in good)
    if repaired == text:
        return 0
    if damaged:
        with open(path.with_name(path.name + DAMAGED_SUFFIX), "ab") as file:
            file.write(b"".join(line + b"\n" for line in damaged))
        logger.warning("%s: moved %d unreadable lines to *%s", path, len(damaged), DAMAGED_SUFFIX)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(repaired)
    os.replace(temporary, path)
    return len(damaged)


def _is_intact(line: bytes, n_workloads: int | None) -> bool:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except ValueError:
        return False
    if n_workloads is None:
        return True
    return isinstance(value, list) and isinstance(value[0], int) and value[0] < n_workloads


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    return sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
