"""Files of starter records: what a new user's runs begin with, in place of earlier runs.

A file is JSON lines, compressed with lzma: a header that says where the records come from,
then one line per task. Features are whole multiples of :data:`STEP`, by columns: most columns
of a task are constant, and the others are one text with a character for each number, which is
ten times faster to read than JSON's numbers. A file is read whole or not at all: every field
is checked as those of a record store are.
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
import numpy.typing as npt

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
# Features are base-2 logarithms of counts, in which candidates differ by whole factors. Forests
# of rounded features rank as well (pools of `benchmarks/micro/`, 64 samples, mean of eight
# splits): C2D 0.69 exact and 0.68 rounded, GMM 0.66 and 0.68, softmax 0.66 and 0.65, each with
# a standard error of 0.01 to 0.02. Steps of 1/64 and of 1/2 are no different.
STEP = 1 / 16
# The first character for numbers: from here on none is escaped or a line break in a file.
_ZERO = 0xA1
# A file of 200 tasks has 1 MB, and 10 MB when it is unpacked.
_MAX_FILE_BYTES = 4 << 20
_MAX_TEXT_BYTES = 64 << 20
# More tasks and samples would delay a run's start.
_MAX_TASKS = 1024
_MAX_ROWS = 256
_MAX_WIDTH = MAX_FEATURE_BYTES // 4
# No logarithm of a count of operations or bytes is larger, and no more characters are in a row.
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
        json.dumps(line, separators=(",", ":"), allow_nan=False, ensure_ascii=False) + "\n"
        for line in lines
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
    first, *lines = text.removesuffix("\n").split("\n")
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
    steps = np.rint(task.rows / STEP).astype(np.int64).T
    lowest = steps.min(axis=1, initial=_MAX_STEPS)
    is_varying = steps.max(axis=1, initial=0) > lowest
    is_constant = ~is_varying & (lowest != 0) & bool(len(task.rows))
    columns = np.flatnonzero(is_varying)
    codes = steps[columns] - lowest[columns, None] + _ZERO
    return {
        "family": task.family,
        "key": task.workload_key,
        "name": task.name,
        "records": [[trace, _rounded(seconds)] for trace, seconds in task.records],
        "seconds": [_rounded(each) for each in task.seconds.tolist()],
        "width": int(task.rows.shape[1]),
        "constant": [np.flatnonzero(is_constant).tolist(), lowest[is_constant].tolist()],
        "varying": [columns.tolist(), lowest[columns].tolist(), _text_of(codes)],
    }


def _text_of(codes: npt.NDArray[np.int64]) -> str:
    return codes.astype("<u2").tobytes().decode("utf-16-le")


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
    columns, values = _columns(_list(line, "constant", 2), width)
    rows[:, columns] = values.T * STEP
    *varying, text = _list(line, "varying", 3)
    columns, values = _columns(varying, width)
    rows[:, columns] = (values + _steps_of(text, len(columns), len(seconds))).T * STEP
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


def _columns(given: list[Any], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return places of columns, of shape (k,), and their values, of shape (k, 1)."""
    if not all(isinstance(each, list) for each in given) or len(given[0]) != len(given[1]):
        _fail("a feature is missing")
    places = [_int(each, 0, width - 1) for each in given[0]]
    values = [_int(each, -_MAX_STEPS, _MAX_STEPS) for each in given[1]]
    return np.array(places, dtype=np.int64), np.array(values, dtype=np.int64)[:, None]


def _steps_of(text: Any, n_columns: int, n_rows: int) -> npt.NDArray[np.int64]:
    """Return the numbers in a text, of shape (n_columns, n_rows)."""
    if not isinstance(text, str) or len(text) != n_columns * n_rows:
        _fail("a feature is missing")
    # "surrogatepass": JSON's escapes may be halves of characters.
    codes = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), dtype="<u2")
    steps = codes.astype(np.int64) - _ZERO
    # A character beyond 16 bits is two codes.
    if len(steps) != len(text) or ((steps < 0) | (steps > 2 * _MAX_STEPS)).any():
        _fail("a feature is out of range")
    return steps.reshape(n_columns, n_rows)


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail("a line is no mapping")
    return value


def _list(line: dict[str, Any], name: str, length: int | None = None) -> list[Any]:
    value = line.get(name)
    if not isinstance(value, list) or length not in (None, len(value)):
        _fail(f"{name} is no list, or of another length")
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
