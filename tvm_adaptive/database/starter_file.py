"""Files of starter records: what a new user's runs begin with, in place of earlier runs.

A file is JSON lines, compressed with lzma: a header that says where the records come from,
then one line per task. Features are whole multiples of :data:`STEP`, by columns: most columns
of a task are constant, and the others are one text with a character for each number, which is
ten times faster to read than JSON's numbers. A file is read whole or not at all: its checksum
tells damage, and nobody but the package writes it.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """Read the header and the tasks of the wanted families; StoreError if that is impossible."""
    try:
        text = lzma.decompress(path.read_bytes(), lzma.FORMAT_XZ).decode()
        first, *lines = map(json.loads, text.removesuffix("\n").split("\n"))
        if (first.pop("format"), first.pop("step")) != (FORMAT_VERSION, STEP):
            raise ValueError("they have another format")
        header = StarterHeader(**{**first, "workloads": tuple(first["workloads"])})
        return header, [_task_of(line) for line in lines if families(line["family"])]
    except (OSError, lzma.LZMAError, EOFError, ValueError, TypeError, LookupError) as error:
        raise StoreError(f"The starter records {path.name} cannot be read: {error}.") from error


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


def _task_of(line: dict[str, Any]) -> StarterTask:
    seconds = np.array(line["seconds"], dtype=np.float64)
    rows = np.zeros((len(seconds), line["width"]), dtype=np.float32)
    columns, values = line["constant"]
    rows[:, columns] = np.array(values) * STEP
    columns, lowest, text = line["varying"]
    codes = np.frombuffer(text.encode("utf-16-le"), dtype="<u2").astype(np.int64) - _ZERO
    steps = codes.reshape(len(columns), len(seconds)) + np.array(lowest, dtype=np.int64)[:, None]
    rows[:, columns] = steps.T * STEP
    return StarterTask(
        family=line["family"],
        workload_key=line["key"],
        name=line["name"],
        records=tuple((trace, float(sec)) for trace, sec in line["records"]),
        rows=rows,
        seconds=seconds,
    )
