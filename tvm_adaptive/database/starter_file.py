"""Files of starter records: what a new user's runs begin with, in place of earlier runs.

A file is JSON lines, compressed with lzma: a header that says where the records come from,
then one line per task. Features are whole multiples of :data:`STEP`, by columns, because most
columns of a task are constant. A file is read whole or not at all: every field is checked as
those of a record store are.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tvm_adaptive.database.records import (
    MAX_FEATURE_BYTES,
    MAX_SEC,
    MAX_TEXT_CHARS,
    MIN_SEC,
    is_record,
    parsed,
)
from tvm_adaptive.errors import StoreError
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray

FORMAT_VERSION = 1
# Features are base-2 logarithms of counts: candidates differ by whole factors, most of them by
# more than the 4 % of a step.
STEP = 1 / 16
# A file of 200 tasks has 1 MB, and 10 MB when it is unpacked.
_MAX_FILE_BYTES = 4 << 20
_MAX_TEXT_BYTES = 64 << 20
# More tasks and samples would delay a run's start.
_MAX_TASKS = 1024
_MAX_ROWS = 256
_MAX_WIDTH = MAX_FEATURE_BYTES // 4
# No logarithm of a count of operations or bytes is larger.
_MAX_STEPS = round(1024 / STEP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StarterHeader:
    """Where starter records come from."""

    instruction_set: str  # of the processor that they are for: "avx2" or "avx512"
    n_threads: int  # of the kernels
    tvm: str  # version of apache-tvm
    processor: str  # that measured them
    mcpu: str  # LLVM's name of what was compiled for
    date: str
    command: str  # that made them
    workloads: tuple[str, ...]  # names of the networks that were tuned


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StarterTask:
    """The best records and some samples of one task."""

    family: str
    workload_key: str
    name: str
    # Traces in JSON and seconds of one run, the best first.
    records: tuple[tuple[Any, float], ...]
    rows: Rows  # features, of shape (n, d)
    seconds: FloatArray  # of shape (n,), of one run each


def write_starter(path: Path, header: StarterHeader, tasks: Iterable[StarterTask]) -> None:
    """Write a file of starter records."""
    first = {"format": FORMAT_VERSION, "step": STEP, **dataclasses.asdict(header)}
    # Related tasks side by side compress better.
    ordered = sorted(tasks, key=lambda task: (task.family, task.name, task.workload_key))
    lines = [first, *(_line_of(task) for task in ordered)]
    text = "".join(
        json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines
    )
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read_starter(
    path: Path, families: Callable[[str], bool] = lambda _: True
) -> tuple[StarterHeader, list[StarterTask]]:
    """Read a file of starter records.

    Parameters
    ----------
    path : Path
    families : callable
        Says of a family whether its tasks are wanted.

    Returns
    -------
    StarterHeader
    list of StarterTask
        Of the wanted families, in the order of the file.

    Raises
    ------
    StoreError
        When the file is damaged, of another format, or cannot be read; it says which.
    """
    try:
        text = _unpacked(path.read_bytes())
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError, _InvalidError) as error:
        raise StoreError(f"The starter records {path.name} cannot be read: {error}.") from error
    first, *lines = text.splitlines() or [""]
    try:
        header = _header_of(_dict(parsed(first)))
        if len(lines) > _MAX_TASKS:
            _fail("too many tasks")
        found = (_dict(parsed(line)) for line in lines)
        wanted = [each for each in found if families(_text(each, "family"))]
        return header, [_task_of(each) for each in wanted]
    except _InvalidError as error:
        raise StoreError(f"The starter records {path.name} are not valid: {error}.") from error


class _InvalidError(Exception):
    """A field is not what it must be."""


def _unpacked(packed: bytes) -> str:
    if len(packed) > _MAX_FILE_BYTES:
        _fail("the file is too large")
    unpacker = lzma.LZMADecompressor(memlimit=1 << 28)
    raw = unpacker.decompress(packed, _MAX_TEXT_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        _fail("it is cut off, or too large")
    return raw.decode()


def _line_of(task: StarterTask) -> dict[str, Any]:
    steps = np.rint(task.rows / STEP).astype(np.int64)
    constant, varying = {}, {}
    for column, values in enumerate(steps.T.tolist()):
        if len(set(values)) > 1:
            varying[column] = values
        elif values and values[0]:
            constant[column] = values[0]
    return {
        "family": task.family,
        "key": task.workload_key,
        "name": task.name,
        "records": [[trace, _rounded(seconds)] for trace, seconds in task.records],
        "seconds": [_rounded(each) for each in task.seconds.tolist()],
        "width": int(task.rows.shape[1]),
        "constant": constant,
        "varying": varying,
    }


def _rounded(seconds: float) -> float:
    """Return seconds with the four digits that a timer can tell."""
    return float(f"{seconds:.4g}")


def _header_of(line: dict[str, Any]) -> StarterHeader:
    if line.get("format") != FORMAT_VERSION or line.get("step") != STEP:
        _fail("they have another format")
    workloads = _list(line, "workloads")
    if not all(isinstance(each, str) for each in workloads):
        _fail("a workload has no name")
    names = ("instruction_set", "tvm", "processor", "mcpu", "date", "command")
    texts = {name: _text(line, name) for name in names}
    return StarterHeader(
        n_threads=_int(line.get("n_threads"), 1, 1 << 16), workloads=tuple(workloads), **texts
    )


def _task_of(line: dict[str, Any]) -> StarterTask:
    seconds = [_sec(each) for each in _list(line, "seconds")]
    if len(seconds) > _MAX_ROWS:
        _fail("too many samples")
    width = _int(line.get("width"), 0, _MAX_WIDTH)
    rows = np.zeros((len(seconds), width), dtype=np.float32)
    for name, is_constant in (("constant", True), ("varying", False)):
        for column, values in _dict(line.get(name)).items():
            place = _int(int(column) if column.isdecimal() else None, 0, width - 1)
            given = [values] * len(seconds) if is_constant else values
            if not isinstance(given, list) or len(given) != len(seconds):
                _fail("a feature is missing")
            rows[:, place] = [_int(each, -_MAX_STEPS, _MAX_STEPS) * STEP for each in given]
    records = []
    for record in _list(line, "records"):
        if not isinstance(record, list) or len(record) != 2 or not is_record(record):
            _fail("a record is no trace with its time")
        records.append((record[0], _sec(record[1])))
    return StarterTask(
        family=_text(line, "family"),
        workload_key=_text(line, "key"),
        name=_text(line, "name"),
        records=tuple(records),
        rows=rows,
        seconds=np.array(seconds, dtype=np.float64),
    )


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail("a line is no mapping")
    return value


def _list(line: dict[str, Any], name: str) -> list[Any]:
    value = line.get(name)
    if not isinstance(value, list):
        _fail(f"{name} is no list")
    return value


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        _fail(f"{name} is no text")
    return value


def _int(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _fail("a number is out of range")
    return value


def _sec(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not MIN_SEC <= value <= MAX_SEC:
        _fail("a time is implausible")
    return float(value)


def _fail(problem: str) -> NoReturn:
    raise _InvalidError(problem)
