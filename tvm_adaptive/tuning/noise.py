"""How much the times of one and the same kernel differ on this machine."""

from __future__ import annotations

import time

import numpy as np

from tvm_adaptive._tvm import device, parallel_product, tensor
from tvm_adaptive.models import compile_tir
from tvm_adaptive.runner.measure import give_threads_cores
from tvm_adaptive.tuning.target import resolve_target

# Where nine of ten timings of one kernel differ by more than that, differences between
# candidates of less than that are noise, too.
NOISY_SPREAD = 0.1
# Long against the timer and the scheduler's tick, short against what hosts do for seconds.
SAMPLE_MS = 20
_SIZE = 128


def time_fixed_kernel(seconds: float) -> list[float]:
    """Return milliseconds of one run of a matrix product, one figure per 20 ms.

    All cores take part, as in what is tuned: their disturbances count. Call it in a
    process of its own.
    """
    module = compile_tir(parallel_product(_SIZE), resolve_target("cpu"))
    cpu = device("cpu", 0)
    rng = np.random.default_rng(0)
    args = [tensor(rng.random((_SIZE, _SIZE), np.float32), cpu) for _ in range(3)]
    give_threads_cores()
    evaluator = module.time_evaluator(
        module.entry_name, cpu, number=1, repeat=1, min_repeat_ms=SAMPLE_MS
    )
    evaluator(*args)
    samples: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not samples:
        samples.append(float(evaluator(*args).mean) * 1e3)
    return samples


def spread_of(samples: list[float]) -> float:
    """Return by what share nine of ten figures differ: 90th over 10th percentile, less one."""
    low, high = np.quantile(samples, [0.1, 0.9])
    return float(high / low - 1.0)
