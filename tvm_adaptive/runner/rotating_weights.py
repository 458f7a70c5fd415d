"""Weights for timings that are not in a core's own cache, as in a network.

There the weights of all other layers pass through the caches between two calls of a layer.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.values.agreement import Array, random_array

# Twice the cache that the cores of a chip share (32 MiB is common; tenants of rented machines
# share it, too), so that weights come from memory, as in a network with more weights than that.
ROTATION_BYTES = 64 << 20
# Less than that is back in the cache at once.
LEAST_BYTES = 64 << 10
# Drawn once, and repeated: kernels take no longer with values that differ everywhere, and drawing
# 64 MiB of them takes half a second.
_DRAWN_BYTES = 1 << 20
# TVM's kernels assume that every argument starts at a cache line.
_ALIGNMENT_BYTES = 64


class Arena:
    """Memory with random values that all kernels share for their weights, of any layout."""

    def __init__(self, n_bytes: int = ROTATION_BYTES, seed: int = 0) -> None:
        self._n_bytes = n_bytes
        self._rng = np.random.default_rng(seed)
        self._memory: dict[str, Array] = {}

    def rotation(self, buffers: Sequence[tuple[str, tuple[int, ...]]]) -> list[list[Array]]:
        """Return as many sets of arrays as fill the memory; the last may exceed it."""
        offsets: list[int] = []
        used: dict[str, int] = {}  # items of one set
        for dtype, shape in buffers:
            offsets.append(used.get(dtype, 0))
            used[dtype] = offsets[-1] + _pitch(dtype, shape)
        set_bytes = sum(np.dtype(dtype).itemsize * n_items for dtype, n_items in used.items())
        n_sets = math.ceil(self._n_bytes / set_bytes)
        memory = {
            dtype: self._memory_of(dtype, n_sets * n_items) for dtype, n_items in used.items()
        }

        def array(number: int, index: int) -> Array:
            dtype, shape = buffers[index]
            first = number * used[dtype] + offsets[index]
            return memory[dtype][first : first + math.prod(shape)].reshape(shape)

        return [[array(number, i) for i in range(len(buffers))] for number in range(n_sets)]

    def _memory_of(self, dtype: str, n_items: int) -> Array:
        """Return the memory of one type, replaced if it is too small."""
        known = self._memory.get(dtype)
        if known is None or len(known) < n_items:
            item_bytes = np.dtype(dtype).itemsize
            n_wanted = max(n_items, self._n_bytes // item_bytes)
            drawn = random_array(self._rng, (_DRAWN_BYTES // item_bytes,), dtype)
            known = self._memory[dtype] = _repeated(drawn, n_wanted)
        return known


def is_worth_rotating(buffers: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    """Say whether weights are too large for a cache, and of types that numpy shares."""
    try:
        kinds = [np.dtype(dtype) for dtype, _ in buffers]
    except TypeError:
        return False
    n_bytes = sum(
        kind.itemsize * math.prod(shape) for kind, (_, shape) in zip(kinds, buffers, strict=True)
    )
    # Other kinds, such as bfloat16, cannot be shared without a copy.
    return all(kind.kind in "fiu" for kind in kinds) and n_bytes >= LEAST_BYTES


def _pitch(dtype: str, shape: Sequence[int]) -> int:
    """Return the items from one array to the next, in whole cache lines."""
    per_line = _ALIGNMENT_BYTES // np.dtype(dtype).itemsize
    return max(1, math.ceil(math.prod(shape) / per_line)) * per_line


def _repeated(values: Array, n_items: int) -> Array:
    """Return memory of so many items, filled with the values again and again."""
    memory = mmap.mmap(-1, max(1, n_items * values.itemsize))
    # numpy asks for pages of 2 MiB, TVM for none: in a network, weights lie in small ones.
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    found: Array = np.frombuffer(memory, values.dtype, n_items)
    for start in range(0, n_items, len(values)):
        part = found[start : start + len(values)]
        part[:] = values[: len(part)]
    return found
