"""What the play-off's worker process does: run a kernel, check a kernel, time a kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_adaptive._tvm import from_dlpack, tensor
from tvm_adaptive.runner.measure import give_threads_cores
from tvm_adaptive.runner.playoff.rotating_weights import Arena, is_worth_rotating
from tvm_adaptive.values.agreement import (
    Array,
    disagreement,
    disturbed,
    is_float,
    item_bytes,
    numpy_dtype,
    random_array,
    tells_nothing,
)
from tvm_adaptive.workers import device_session


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A built candidate and what it takes."""

    artifact_path: str
    device_type: str  # E.g. ``"cpu"`` or ``"cuda"``
    buffers: tuple[tuple[str, tuple[int, ...]], ...]  # type and shape of each argument
    device_index: int = 0
    weights: tuple[int, ...] = ()  # which arguments are the same at every inference of a network

    @property
    def n_bytes(self) -> int:
        """Bytes of all arguments."""
        return sum(item_bytes(dtype) * math.prod(shape) for dtype, shape in self.buffers)


@dataclasses.dataclass
class _Loaded:
    module: Any
    device: Any
    args: list[Any]
    n_runs: int = 0
    rotation: Iterator[list[Any]] | None = None  # the same arguments with other weights


_POSITIVE = "positive"
_NEIGHBOURS = ".neighbours"
# Three opposite pairs: of a thousand integers that another order of additions changes, they
# miss none in most cases; see the size of a disturbance.
_N_PAIRS = 3
# What was loaded on a device that has been given back is of no use. Each task's reference
# comes first, and with it the end of what the task before has loaded.
_loaded: dict[tuple[int, Kernel], _Loaded] = {}
_arena = Arena()


def warm_up() -> None:
    """Do nothing; unpickling it in a fresh worker has imported TVM."""


def run_reference(kernel: Kernel, seed: int, path: str) -> None:
    """Run the reference on random values and save what its buffers hold afterwards."""
    _loaded.clear()
    for positive in (False, True):
        start = _start_values(kernel, seed, positive)
        end = _run(kernel, start)
        if not tells_nothing(start, end):
            _save(Path(path), positive, end)
            return
    raise ValueError("the reference gives NaN or infinity for random values")


class Checked(NamedTuple):
    """What came of a check."""

    problem: str | None = None
    may_be_rounding: bool = False


def check(kernel: Kernel, seed: int, path: str, rtol: float, atol: float | None) -> Checked:
    """Run a kernel on the values that the reference had, and compare what it computes."""
    expected, positive = _saved(Path(path))
    found = _run(kernel, _start_values(kernel, seed, positive))
    neighbours = _saved_neighbours(Path(path), expected)
    problem = disagreement(expected, found, rtol=rtol, atol=atol, neighbours=neighbours)
    if problem is None or neighbours or rtol == 0.0:
        return Checked(problem)
    floats = [pair for pair in zip(expected, found, strict=True) if is_float(pair[0].dtype)]
    rounded = [list(each) for each in zip(*floats, strict=True)]
    may_be_rounding = bool(floats) and disagreement(*rounded, rtol=rtol, atol=atol) is None
    return Checked(problem, may_be_rounding)


def run_neighbours(kernel: Kernel, seed: int, path: str, rtol: float) -> None:
    """Run the reference on values that differ by rounding; save its integers."""
    _, positive = _saved(Path(path))
    start = _start_values(kernel, seed, positive)
    integers: dict[str, Array] = {}
    for pair in range(_N_PAIRS):
        rng = np.random.default_rng([seed, len(start), pair])
        for way, values in enumerate(disturbed(start, rtol, rng)):
            for number, each in enumerate(_run(kernel, values)):
                if not is_float(each.dtype):
                    integers[f"{2 * pair + way}.{number}"] = _as_bytes(each)
    with Path(path + _NEIGHBOURS).open("wb") as file:
        np.savez(file, allow_pickle=False, **integers)


def time_once(kernel: Kernel, seed: int, repeat_ms: float) -> float:
    """Return the mean seconds of one run over about ``repeat_ms`` of runs.

    On this machine's CPU every run gets other weights, see
    :mod:`tvm_adaptive.runner.playoff.rotating_weights`.
    """
    key = (device_session.n_moves(), kernel)
    if key not in _loaded:
        is_cpu_here = kernel.device_type == "cpu" and not device_session.is_elsewhere()
        if is_cpu_here:
            give_threads_cores()
        _loaded[key] = _load(kernel, _start_values(kernel, seed, False))
        if is_cpu_here:
            _loaded[key].rotation = _rotation(kernel, _loaded[key].args)
    loaded = _loaded[key]
    if loaded.n_runs == 0:
        once = max(_mean_sec(loaded, 1), 1e-9)  # a clock too coarse reads zero
        loaded.n_runs = max(1, math.ceil(repeat_ms * 1e-3 / once))
    return _mean_sec(loaded, loaded.n_runs)


def _save(path: Path, positive: bool, end: Sequence[Array]) -> None:
    buffers = {f"buffer{i}": _as_bytes(each) for i, each in enumerate(end)}
    shapes = {f"shape{i}": np.array(each.shape, np.int64) for i, each in enumerate(end)}
    dtypes = np.array([str(each.dtype) for each in end])
    with path.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            **{_POSITIVE: np.array(positive), "dtypes": dtypes},
            **buffers,
            **shapes,
        )


def _as_bytes(values: Array) -> Array:
    """Return what is in an array as bytes: numpy's format does not know all of TVM's types."""
    return np.frombuffer(values.tobytes(), np.uint8)


def _saved(path: Path) -> tuple[list[Array], bool]:
    """Return what the reference's buffers held, and whether its values were positive."""
    with np.load(path, allow_pickle=False) as saved:
        buffers = [
            saved[f"buffer{i}"].view(numpy_dtype(str(name))).reshape(saved[f"shape{i}"])
            for i, name in enumerate(saved["dtypes"])
        ]
        return buffers, bool(saved[_POSITIVE])


def _saved_neighbours(path: Path, expected: Sequence[Array]) -> list[dict[int, Array]]:
    """Return the integers of each neighbour by the numbers of their buffers, if there are any."""
    neighbours: list[dict[int, Array]] = [{} for _ in range(2 * _N_PAIRS)]
    file = Path(f"{path}{_NEIGHBOURS}")
    if not file.exists():
        return []
    with np.load(file, allow_pickle=False) as saved:
        for key in saved.files:
            which, number = map(int, key.split("."))
            like = expected[number]
            neighbours[which][number] = saved[key].view(like.dtype).reshape(like.shape)
    return neighbours


def _rotation(kernel: Kernel, args: Sequence[Any]) -> Iterator[list[Any]] | None:
    """Return endless arguments of which the weights differ, if they are worth it."""
    buffers = [kernel.buffers[index] for index in kernel.weights]
    if not is_worth_rotating(buffers):
        return None
    sets = []
    for weights in _arena.rotation(buffers):
        shared = [from_dlpack(each) for each in weights]
        other = dict(zip(kernel.weights, shared, strict=True))
        sets.append([other.get(index, arg) for index, arg in enumerate(args)])
    return itertools.cycle(sets)


def _mean_sec(loaded: _Loaded, n_runs: int) -> float:
    if loaded.rotation is not None:
        return _mean_rotating_sec(loaded.module[loaded.module.entry_name], loaded.rotation, n_runs)
    # Without a minimum duration it makes one warm-up run and then exactly n_runs.
    name = loaded.module.entry_name
    evaluator = loaded.module.time_evaluator(name, loaded.device, number=n_runs, repeat=1)
    return float(evaluator(*loaded.args).mean)


def _mean_rotating_sec(
    function: Callable[..., None], rotation: Iterator[list[Any]], n_runs: int
) -> float:
    # TVM's evaluator repeats the same arguments. A call from here costs a microsecond more,
    # for all finalists alike.
    function(*next(rotation))
    start_sec = time.perf_counter()
    for args in itertools.islice(rotation, n_runs):
        function(*args)
    return (time.perf_counter() - start_sec) / n_runs


def _start_values(kernel: Kernel, seed: int, positive: bool) -> list[Array]:
    return [
        random_array(np.random.default_rng([seed, index]), shape, dtype, positive=positive)
        for index, (dtype, shape) in enumerate(kernel.buffers)
    ]


def _load(kernel: Kernel, values: list[Array]) -> _Loaded:
    place = device_session.place(kernel.device_type, kernel.device_index)
    module = device_session.load(kernel.artifact_path)
    return _Loaded(module, place, [tensor(value, place) for value in values])


def _run(kernel: Kernel, values: list[Array]) -> list[Array]:
    loaded = _load(kernel, values)
    loaded.module[loaded.module.entry_name](*loaded.args)
    loaded.device.sync()
    return [arg.numpy() for arg in loaded.args]
