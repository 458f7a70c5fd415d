"""What the worker process of a play-off does: run, check and time kernels."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_adaptive._tvm import tensor
from tvm_adaptive.runner.evaluator import MISJUDGED_FACTOR, Timer
from tvm_adaptive.runner.measure import give_threads_cores
from tvm_adaptive.runner.timers import rotating_timer_of, timer_of
from tvm_adaptive.values.agreement import (
    N_PERTURBED_PAIRS,
    Array,
    differs_rarely,
    disagreement,
    hides_errors,
    is_float,
    is_mostly_not_finite,
    item_bytes,
    numpy_dtype,
    perturbed,
    random_array,
)
from tvm_adaptive.workers import device_session

# Nothing that runs beside a kernel makes it seem so long. Such a kernel is timed once: three
# more runs of it might exceed the deadline.
_LONG_RUN_SEC = 1.0
# Of floating-point values. Sums of a thousand products with a scale of 3e-4, as quantised
# convolutions have, are rounded to several numbers with the fifth.
_SCALES = tuple(4.0**power for power in range(7))
# Of that search: an untuned kernel may take seconds.
_SCALING_SEC = 10.0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A built candidate and its arguments."""

    artifact_path: str
    device_type: str  # e.g. "cpu" or "cuda"
    buffers: tuple[tuple[str, tuple[int, ...]], ...]  # type and shape of each argument
    weights: tuple[int, ...] = ()  # indices of arguments that every inference shares

    @property
    def n_bytes(self) -> int:
        """Bytes of all arguments."""
        return sum(item_bytes(dtype) * math.prod(shape) for dtype, shape in self.buffers)


class KernelCheck(NamedTuple):
    """The outcome of a check."""

    problem: str | None = None
    may_be_rounding: bool = False


@dataclasses.dataclass
class _Loaded:
    module: Any
    device: Any
    args: list[Any]
    timer: Timer
    n_runs: int = 0


@dataclasses.dataclass
class _Reference:
    """What the untuned kernel computes, saved for the checks that follow."""

    is_positive: bool  # its start values
    scale: float  # of their floating-point numbers
    outputs: list[Array | None]  # None of what it only reads, which may be large
    # what it writes for perturbed inputs, by buffer number
    neighbours: list[dict[int, Array]] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> _Reference:
        reference = pickle.loads(Path(path).read_bytes())
        assert isinstance(reference, cls)
        return reference

    def write(self, path: str) -> None:
        # A part of a file would count against the kernels that are compared with it.
        fresh = Path(f"{path}.new")
        try:
            fresh.write_bytes(pickle.dumps(self))
            os.replace(fresh, path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


# A task's reference runs first and drops the kernels of the task before.
_loaded: dict[Kernel, _Loaded] = device_session.cache("kernels")


def run_reference(kernel: Kernel, seed: int, path: str) -> None:
    """Run a kernel on random values and save what its buffers hold afterwards.

    A kernel that rounds may give the same number for all values that are small:
    larger ones are taken until it does not.
    """
    _loaded.clear()
    found: _Reference | None = None
    start_sec = time.monotonic()
    scales = _SCALES if _may_be_scaled(kernel) else _SCALES[:1]
    for is_positive in (False, True):
        for scale in scales:
            start = _start_values(kernel, seed, is_positive, scale)
            end = _run(kernel, start)
            if is_mostly_not_finite(start, end):
                break
            outputs = _written(start, end)
            found = found or _Reference(is_positive, scale, outputs)
            if not hides_errors(start, end):
                found = _Reference(is_positive, scale, outputs)
                break
            if time.monotonic() - start_sec > _SCALING_SEC:
                break
        if found is not None:
            found.write(path)
            return
    raise ValueError("the reference gives NaN or infinity for random values")


def _written(start: Sequence[Array], end: Sequence[Array]) -> list[Array | None]:
    """Return what a kernel's buffers hold afterwards; None where that is what they held before."""
    pairs = zip(start, end, strict=True)
    return [None if np.array_equal(before, after) else after for before, after in pairs]


def _may_be_scaled(kernel: Kernel) -> bool:
    """Say whether larger values are possible: half-precision sums of them would overflow."""
    floats = [
        kind for kind in (numpy_dtype(dtype) for dtype, _ in kernel.buffers) if is_float(kind)
    ]
    return bool(floats) and all(kind.itemsize >= 4 for kind in floats)


def run_neighbours(kernel: Kernel, seed: int, path: str, rtol: float) -> None:
    """Run the reference on perturbed values and save what it writes, too."""
    reference = _Reference.read(path)
    start = _start_values(kernel, seed, reference.is_positive, reference.scale)
    for pair in range(N_PERTURBED_PAIRS):
        rng = np.random.default_rng([seed, len(start), pair])
        for values in perturbed(start, rtol, rng):
            end = _run(kernel, values)
            # What is written may be what was there before, once or the other time.
            pairs = enumerate(zip(reference.outputs, _written(values, end), strict=True))
            written = [i for i, pair in pairs if any(each is not None for each in pair)]
            reference.neighbours.append({i: end[i] for i in written})
    reference.write(path)


def check(kernel: Kernel, seed: int, path: str, rtol: float, atol: float | None) -> KernelCheck:
    """Run a kernel on the reference's start values and compare the results."""
    reference = _Reference.read(path)
    neighbours = reference.neighbours
    start = _start_values(kernel, seed, reference.is_positive, reference.scale)
    pairs = zip(start, reference.outputs, strict=True)
    expected = [before if after is None else after for before, after in pairs]
    found = _run(kernel, start)
    problem = disagreement(expected, found, rtol=rtol, atol=atol, neighbours=neighbours)
    if problem is None or neighbours or rtol == 0.0:
        return KernelCheck(problem)
    return KernelCheck(problem, differs_rarely(expected, found, rtol))


def time_once(kernel: Kernel, seed: int, repeat_ms: float) -> float:
    """Return the mean seconds of one run over about ``repeat_ms`` of runs."""
    if kernel not in _loaded:
        is_local_cpu = kernel.device_type == "cpu" and not device_session.is_elsewhere()
        if is_local_cpu:
            give_threads_cores()
        _loaded[kernel] = _load(kernel, _start_values(kernel, seed, False))
        if is_local_cpu:
            found = _loaded[kernel]
            rotating = rotating_timer_of(found.module, found.args, kernel.weights)
            found.timer = rotating or found.timer
    loaded = _loaded[kernel]
    if loaded.n_runs == 0:
        once = max(float(loaded.timer(1, 1)[0]), 1e-9)  # a coarse clock reads zero
        loaded.n_runs = max(1, math.ceil(repeat_ms * 1e-3 / once))
        if once > _LONG_RUN_SEC:
            return once
    seconds = float(loaded.timer(loaded.n_runs, 1)[0])
    if 0.0 < MISJUDGED_FACTOR * loaded.n_runs * seconds < repeat_ms * 1e-3:
        # Something else ran during the first one, which chose the number for all rounds.
        loaded.n_runs = math.ceil(repeat_ms * 1e-3 / seconds)
        seconds = float(loaded.timer(loaded.n_runs, 1)[0])
    return seconds


def _start_values(kernel: Kernel, seed: int, is_positive: bool, scale: float = 1.0) -> list[Array]:
    values = [
        random_array(np.random.default_rng([seed, index]), shape, dtype, positive=is_positive)
        for index, (dtype, shape) in enumerate(kernel.buffers)
    ]
    return [each * each.dtype.type(scale) if is_float(each.dtype) else each for each in values]


def _load(kernel: Kernel, values: list[Array]) -> _Loaded:
    place = device_session.device_of_kind(kernel.device_type)
    module = device_session.load(kernel.artifact_path)
    args = [tensor(value, place) for value in values]
    return _Loaded(module, place, args, timer_of(module, place, args))


def _run(kernel: Kernel, values: list[Array]) -> list[Array]:
    loaded = _load(kernel, values)
    loaded.module[loaded.module.entry_name](*loaded.args)
    loaded.device.sync()
    return [arg.numpy() for arg in loaded.args]
