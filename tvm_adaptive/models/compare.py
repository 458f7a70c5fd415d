"""Run and time compiled networks.

A tuned network can crash or hang. Everything here that takes a path can run in a worker
process: :func:`export` in the parent, :func:`run_exported` and :func:`time_exported` in
the child.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import VirtualMachine, tensor
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.compile import Compiled
from tvm_adaptive.values.agreement import Array
from tvm_adaptive.values.trial import FloatArray
from tvm_adaptive.workers import device_session

# Below this, reading the clock and starting the threads would be part of the result.
_MIN_REPEAT_MS = 50
# A median of fewer is moved by a single disturbance.
_MIN_REPEATS = 5
_TIMED = "timed"


def run_network(compiled: Compiled, inputs: Sequence[Array]) -> list[Array]:
    """Run one inference in this process."""
    return _run(compiled.executable, inputs, compiled.device_kind)


def time_network(compiled: Compiled, inputs: Sequence[Array], *, min_seconds: float = 1.0) -> float:
    """Return seconds per inference, the median of repeats; lower is better."""
    return float(np.median(_time(compiled.executable, inputs, compiled.device_kind, min_seconds)))


def export(compiled: Compiled, path: str | os.PathLike[str]) -> None:
    """Write a compiled network with its weights to a shared library, or to what makes one."""
    name = os.fspath(path)
    if not name.endswith((".so", ".tar")):
        raise InvalidOptionError(f"path must end in .so or .tar but got {name!r}.")
    with _silent_stderr():
        compiled.executable.export_library(name)


def run_exported(
    path: str | os.PathLike[str], inputs: Sequence[Array], device_kind: str = "cpu"
) -> list[Array]:
    """Run one inference of an exported network."""
    return _run(device_session.load_once(os.fspath(path)), inputs, device_kind)


def time_exported(
    path: str | os.PathLike[str],
    inputs: Sequence[Array],
    device_kind: str = "cpu",
    *,
    min_seconds: float = 1.0,
) -> list[float]:
    """Return the seconds per inference of each repeat of an exported network."""
    samples = _time(device_session.load_once(os.fspath(path)), inputs, device_kind, min_seconds)
    return [float(sample) for sample in samples]


def try_exported(
    path: str | os.PathLike[str],
    inputs: Sequence[Array],
    device_kind: str = "cpu",
    *,
    min_seconds: float = 1.0,
) -> tuple[list[Array], float]:
    """Run an exported network once for its outputs, then time it."""
    executable = device_session.load_once(os.fspath(path))
    start_sec = time.perf_counter()
    outputs = _run(executable, inputs, device_kind)
    first_sec = time.perf_counter() - start_sec
    # From elsewhere, that is the time to send the inputs, too.
    if first_sec >= min_seconds and not device_session.is_elsewhere():
        return outputs, first_sec
    return outputs, float(np.median(_time(executable, inputs, device_kind, min_seconds)))


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what C++ writes there: TVM warns once for each piece of memory that it saves."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _run(executable: Any, inputs: Sequence[Array], device_kind: str) -> list[Array]:
    where = device_session.place(device_kind)
    machine = VirtualMachine(executable, where)
    # Not called like a function: its outputs, if several, could not come from a device elsewhere.
    machine.set_input("main", *(tensor(value, device=where) for value in inputs))
    machine.invoke_stateful("main")
    result = machine.get_outputs("main")
    parts = [result] if hasattr(result, "numpy") else list(result)
    return [np.array(part.numpy()) for part in parts]


def _time(
    executable: Any, inputs: Sequence[Array], device_kind: str, min_seconds: float
) -> FloatArray:
    if not min_seconds > 0:
        raise InvalidOptionError(f"min_seconds must be positive but got {min_seconds!r}.")
    where = device_session.place(device_kind)
    machine = VirtualMachine(executable, where)
    values = [tensor(value, device=where) for value in inputs]
    machine.save_function("main", _TIMED, *values, include_return=False)

    def repeats(count: int) -> FloatArray:
        evaluator = machine.time_evaluator(
            _TIMED, where, number=1, repeat=count, min_repeat_ms=_MIN_REPEAT_MS
        )
        return np.asarray(evaluator().results, dtype=np.float64)

    first = repeats(1)
    if first[0] >= min_seconds:
        return first
    per_repeat_sec = max(float(first[0]), _MIN_REPEAT_MS / 1e3)
    return repeats(max(_MIN_REPEATS, math.ceil(min_seconds / per_repeat_sec)))
