"""Make MetaSchedule's JSON database readable again after a crash.

MetaSchedule reads a file of JSON lines as a whole. Half a last line, which a killed process
leaves, makes every record unreadable; an empty line ends the reading process with a
segmentation fault; and a time of NaN is written in a form that no JSON reader takes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tvm_adaptive.database.records import parsed
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE

logger = logging.getLogger(__name__)

# Unreadable lines are moved to a file with this suffix, never deleted.
DAMAGED_SUFFIX = ".damaged"
# A record is [index of its workload, [trace, seconds, target, arguments]].
_RECORD_FIELDS = 4


# Takes a line's index among the lines that are not empty, and the line.
_IsGood = Callable[[int, bytes], bool]


def repair_database(work_dir: Path) -> int:
    """Move unreadable lines of a JSON database to files beside it; return how many."""
    workloads, records = _line_tests(work_dir)
    return _repair(work_dir / WORKLOAD_FILE, workloads) + _repair(work_dir / RECORD_FILE, records)


def copy_readable(work_dir: Path, folder: Path) -> bool:
    """Copy the readable lines of a JSON database that a run may be writing to."""
    workloads, records = _line_tests(work_dir)
    _copy(work_dir / WORKLOAD_FILE, workloads, folder / WORKLOAD_FILE)
    return _copy(work_dir / RECORD_FILE, records, folder / RECORD_FILE) > 0


def _line_tests(work_dir: Path) -> tuple[_IsGood, _IsGood]:
    """Return the tests of readable lines, for the workloads and for the records."""
    # A record names its workload by line number. After a lost workload line the later records
    # would belong to other workloads, so they are moved, too.
    n_intact = sum(1 for _ in itertools.takewhile(_is_workload, lines_of(work_dir / WORKLOAD_FILE)))
    return (lambda index, _line: index < n_intact, lambda _index, line: _is_record(line, n_intact))


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines that are not empty, one at a time: a long run has a gigabyte of them."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield line.removesuffix(b"\n")


def _repair(path: Path, is_good: _IsGood) -> int:
    if not path.exists() or _is_sound(path, is_good):
        return 0
    damaged = path.with_name(path.name + DAMAGED_SUFFIX)
    n_damaged = _copy(path, lambda index, line: not is_good(index, line), damaged)
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
            line.endswith(b"\n") and bool(line.strip()) and is_good(index, line)
            for index, line in enumerate(file)
        )


def _copy(path: Path, is_wanted: _IsGood, to: Path) -> int:
    """Append wanted lines to a file, which is made for the first; return how many."""
    wanted = (line for index, line in enumerate(lines_of(path)) if is_wanted(index, line))
    n_copied = 0
    with contextlib.ExitStack() as stack:
        for line in wanted:
            if not n_copied:
                file = stack.enter_context(open(to, "ab"))
            file.write(line + b"\n")
            n_copied += 1
    return n_copied


def _is_workload(line: bytes) -> bool:
    value = parsed(line)
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _is_record(line: bytes, n_workloads: int) -> bool:
    value = parsed(line)
    if not isinstance(value, list) or len(value) != 2:
        return False
    index, fields = value
    names_workload = type(index) is int and 0 <= index < n_workloads
    return names_workload and isinstance(fields, list) and len(fields) == _RECORD_FIELDS
