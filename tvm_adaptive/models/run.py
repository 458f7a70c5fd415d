"""Run and time compiled networks and functions.

A tuned network can crash or hang, so everything here that takes a path can run in a worker.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import VirtualMachine, tensor
from tvm_adaptive.models.compile import Compiled
from tvm_adaptive.values.agreement import random_array
from tvm_adaptive.workers import device_session

Array = npt.NDArray[Any]

# Below this, reading the clock and starting the threads would be part of the result.
NETWORK_REPEAT_MS = 50
# One call of a function's timer lasts at least this long, so that reading the clock is free.
_FUNCTION_REPEAT_MS = 20
# A function that takes this long is timed once.
_LONG_CALL_SEC = 0.5
# A median of fewer is moved by a single disturbance.
_REPEATS = 5
_TIMED = "timed"


def run_network(compiled: Compiled, inputs: Sequence[Array]) -> list[Array]:
    """Run one inference in this process."""
    return _run(compiled.executable, inputs, compiled.device_kind)


def run_exported(
    path: str | os.PathLike[str], inputs: Sequence[Array], device_kind: str = "cpu"
) -> list[Array]:
    """Run one inference of an exported network."""
    return _run(device_session.load_once(os.fspath(path)), inputs, device_kind)


def try_exported(
    path: str | os.PathLike[str],
    inputs: Sequence[Array],
    device_kind: str = "cpu",
    *,
    min_seconds: float = 1.0,
) -> tuple[list[Array], float]:
    """Run an exported network for its outputs; time it in seconds per inference."""
    executable = device_session.load_once(os.fspath(path))
    start_sec = time.perf_counter()
    outputs = _run(executable, inputs, device_kind)
    first_sec = time.perf_counter() - start_sec
    # On a device elsewhere, that includes the time to send the inputs.
    if first_sec >= min_seconds and not device_session.is_elsewhere():
        return outputs, first_sec
    return outputs, _time(executable, inputs, device_kind, min_seconds)


def time_exported(
    path: str | os.PathLike[str], inputs: Sequence[Array], device_kind: str, min_seconds: float
) -> float:
    """Time an exported network, in seconds per inference."""
    executable = device_session.load_once(os.fspath(path))
    return _time(executable, inputs, device_kind, min_seconds)


def try_function(
    path: str, args: Sequence[tuple[tuple[int, ...], str]], device_kind: str, seed: int
) -> tuple[list[Array], float]:
    """Run an exported function on random buffers and return them; time it in seconds."""
    module = device_session.load(path)
    where = device_session.device_of_kind(device_kind)
    rng = np.random.default_rng(seed)
    buffers = [tensor(random_array(rng, shape, dtype), device=where) for shape, dtype in args]
    name = module.entry_name
    module[name](*buffers)
    where.sync()
    results = [np.array(buffer.numpy()) for buffer in buffers]
    first = module.time_evaluator(name, where, number=1, repeat=1)(*buffers).mean
    if first >= _LONG_CALL_SEC:
        return results, float(first)
    timer = module.time_evaluator(
        name, where, number=1, repeat=_REPEATS, min_repeat_ms=_FUNCTION_REPEAT_MS
    )
    return results, float(np.median(timer(*buffers).results))


def _run(executable: Any, inputs: Sequence[Array], device_kind: str) -> list[Array]:
    where = device_session.device_of_kind(device_kind)
    machine = VirtualMachine(executable, where)
    # Not called like a function: several outputs could not be fetched from a device elsewhere.
    machine.set_input("main", *(tensor(value, device=where) for value in inputs))
    machine.invoke_stateful("main")
    result = machine.get_outputs("main")
    parts = [result] if hasattr(result, "numpy") else list(result)
    return [np.array(part.numpy()) for part in parts]


def _time(executable: Any, inputs: Sequence[Array], device_kind: str, min_seconds: float) -> float:
    """Return the median seconds per inference of repeats that last ``min_seconds`` in all."""
    where = device_session.device_of_kind(device_kind)
    machine = VirtualMachine(executable, where)
    values = [tensor(value, device=where) for value in inputs]
    machine.save_function("main", _TIMED, *values, include_return=False)

    def median_sec(repeats: int) -> float:
        timer = machine.time_evaluator(
            _TIMED, where, number=1, repeat=repeats, min_repeat_ms=NETWORK_REPEAT_MS
        )
        return float(np.median(timer().results))

    first_sec = median_sec(1)
    if first_sec >= min_seconds:
        return first_sec
    repeat_sec = max(first_sec, NETWORK_REPEAT_MS / 1e3)
    return median_sec(max(_REPEATS, math.ceil(min_seconds / repeat_sec)))
