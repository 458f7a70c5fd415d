"""Run and time single compiled functions; everything here can run in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import tensor
from tvm_adaptive.values.agreement import random_array
from tvm_adaptive.workers import device_session

Array = npt.NDArray[Any]

# One call of the timer lasts at least this long, so that reading the clock costs nothing.
_MIN_REPEAT_MS = 20
_REPEATS = 5


def try_function(
    path: str,
    args: Sequence[tuple[tuple[int, ...], str]],
    device_kind: str,
    seed: int,
    *,
    min_seconds: float = 0.5,
) -> tuple[list[Array], float]:
    """Run an exported function once for its buffers, then time it."""
    module = device_session.load(path)
    where = device_session.place(device_kind)
    rng = np.random.default_rng(seed)
    buffers = [tensor(random_array(rng, shape, dtype), device=where) for shape, dtype in args]
    function = module[module.entry_name]
    function(*buffers)
    where.sync()
    results = [np.array(buffer.numpy()) for buffer in buffers]
    first = module.time_evaluator(module.entry_name, where, number=1, repeat=1)(*buffers).mean
    if first >= min_seconds:
        return results, float(first)
    timer = module.time_evaluator(
        module.entry_name, where, number=1, repeat=_REPEATS, min_repeat_ms=_MIN_REPEAT_MS
    )
    return results, float(np.median(timer(*buffers).results))
