"""The noise of this machine: how much timings of one kernel differ."""

from __future__ import annotations

import time

import numpy as np

from tvm_adaptive._tvm import device, parallel_product, tensor
from tvm_adaptive.models import compile_tir
from tvm_adaptive.runner.measure import give_threads_cores
from tvm_adaptive.tuning.target import resolve_target

# If nine of ten timings of one kernel differ by more than this, smaller differences between
# candidates are noise, too.
NOISY_SPREAD = 0.1
# Long against the timer and the scheduler's tick, short against disturbances of seconds.
_SAMPLE_MS = 20
_SIZE = 128


def time_fixed_kernel(seconds: float) -> list[float]:
    """Return milliseconds of one run of a matrix product, one sample per 20 ms.

    All cores take part, as in tuned kernels: their disturbances count. Call it in a
    separate process.
    """
    module = compile_tir(parallel_product(_SIZE), resolve_target("cpu"))
    cpu = device("cpu", 0)
    rng = np.random.default_rng(0)
    args = [tensor(rng.random((_SIZE, _SIZE), np.float32), cpu) for _ in range(3)]
    give_threads_cores()
    evaluator = module.time_evaluator(
        module.entry_name, cpu, number=1, repeat=1, min_repeat_ms=_SAMPLE_MS
    )
    evaluator(*args)
    samples: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not samples:
        samples.append(float(evaluator(*args).mean) * 1e3)
    return samples


def spread_of(samples: list[float]) -> float:
    """Return the spread of nine of ten samples: 90th over 10th percentile, minus one."""
    low, high = np.quantile(samples, [0.1, 0.9])
    return float(high / low - 1.0)
