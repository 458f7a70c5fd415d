"""Measure what this machine's cores reach together: operations and bytes per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from tvm_adaptive.values.roofline import Roofline

# Large enough for the full rate, and a few milliseconds: some are not disturbed.
_PRODUCT_SIZE = 512
# Per thread, read and written: more than a core's own cache, less than its share of the last.
_COPIED_BYTES = 2 << 20
_COPIES = 20
# Of each of the two: dozens of products.
_SEC = 0.2


def measure_roofline(n_threads: int) -> Roofline:
    """Time products of float32 matrices and copies between caches; the fastest of each counts."""
    left = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), np.float32)
    right, product = left.copy(), left.copy()
    with threadpool_limits(n_threads, user_api="blas"):
        product_sec = _least_sec(lambda: np.matmul(left, right, out=product))
    arrays = [np.ones((2, _COPIED_BYTES), np.uint8) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as threads:
        copies_sec = _least_sec(lambda: list(threads.map(_copy, arrays)))
    n_bytes = 2.0 * _COPIED_BYTES * _COPIES * n_threads
    return Roofline(2.0 * _PRODUCT_SIZE**3 / product_sec, n_bytes / copies_sec)


def _copy(pair: npt.NDArray[np.uint8]) -> None:
    for _ in range(_COPIES):
        np.copyto(pair[0], pair[1])


def _least_sec(work: Callable[[], object]) -> float:
    least_sec, end_sec = np.inf, time.perf_counter() + _SEC
    while True:
        start_sec = time.perf_counter()
        work()
        now_sec = time.perf_counter()
        least_sec = min(least_sec, now_sec - start_sec)
        if now_sec >= end_sec:
            return float(least_sec)
