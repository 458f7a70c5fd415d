"""Make MetaSchedule's JSON database readable again after a crash.

MetaSchedule reads a file of JSON lines as a whole: half a last line, which is what a
killed process leaves, makes every record unreadable, an empty line ends the reading
process with a segmentation fault, and a time of NaN is written in a form that no JSON
reader takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"
# What could not be read is moved here, never deleted.
DAMAGED_SUFFIX = ".damaged"
# A record is [number of its workload, [trace, seconds, target, arguments]].
_RECORD_FIELDS = 4


# Says whether a line is readable, by its place among those that are not empty.
_IsGood = Callable[[int, bytes], bool]


def repair_database(work_dir: Path) -> int:
    """Drop unreadable lines of a JSON database, keeping a copy of them."""
    workloads, records = _good_lines(work_dir)
    return _repair(work_dir / WORKLOAD_FILE, workloads) + _repair(work_dir / RECORD_FILE, records)


def copy_readable(work_dir: Path, folder: Path) -> bool:
    """Copy what can be read of a JSON database, which may be written to meanwhile."""
    workloads, records = _good_lines(work_dir)
    _copy(work_dir / WORKLOAD_FILE, workloads, folder / WORKLOAD_FILE)
    return _copy(work_dir / RECORD_FILE, records, folder / RECORD_FILE) > 0


def _good_lines(work_dir: Path) -> tuple[_IsGood, _IsGood]:
    """Return which lines can be read, of the workloads and of the records."""
    # A record names its workload by line number, so a lost workload line would give the
    # records behind it to other workloads: they go, too.
    n_intact = sum(1 for _ in itertools.takewhile(_is_workload, _lines(work_dir / WORKLOAD_FILE)))
    return (
        lambda place, _line: place < n_intact,
        lambda _place, line: _is_record(line, n_intact),
    )


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that are not empty, one at a time: a long run has a gigabyte of them."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield line.removesuffix(b"\n")


def _repair(path: Path, is_good: _IsGood) -> int:
    if not path.exists() or _is_sound(path, is_good):
        return 0
    damaged = path.with_name(path.name + DAMAGED_SUFFIX)
    n_damaged = _copy(path, lambda place, line: not is_good(place, line), damaged)
    if n_damaged:
        logger.warning("%s: moved %d unreadable lines to *%s", path, n_damaged, DAMAGED_SUFFIX)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"")
    _copy(path, is_good, temporary)
    os.replace(temporary, path)
    return n_damaged


def _is_sound(path: Path, is_good: _IsGood) -> bool:
    with open(path, "rb") as file:
        return all(
            line.endswith(b"\n") and bool(line.strip()) and is_good(place, line)
            for place, line in enumerate(file)
        )


def _copy(path: Path, is_wanted: _IsGood, to: Path) -> int:
    """Append lines to a file, which is made if missing and there are any; return how many."""
    wanted = (line for place, line in enumerate(_lines(path)) if is_wanted(place, line))
    n_copied = 0
    with contextlib.ExitStack() as stack:
        for line in wanted:
            if not n_copied:
                file = stack.enter_context(open(to, "ab"))
            file.write(line + b"\n")
            n_copied += 1
    return n_copied


def _is_workload(line: bytes) -> bool:
    value = _parsed(line)
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _is_record(line: bytes, n_workloads: int) -> bool:
    value = _parsed(line)
    if not isinstance(value, list) or len(value) != 2:
        return False
    number, fields = value
    names_workload = type(number) is int and 0 <= number < n_workloads
    return names_workload and isinstance(fields, list) and len(fields) == _RECORD_FIELDS


def _parsed(line: bytes) -> Any:
    """Return what a line says, None if it is no JSON."""
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
