"""Weights as a kernel meets them in its network: not in a cache that it has for itself.

Between two calls of a layer the weights of all other layers pass through the caches.
Timed over and over with the same weights, a kernel finds them in its core's own cache and
looks faster than it will be, the more so the more often it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.values.agreement import Array, random_array

# Many times what a core has for itself (two MiB at the most today); behind that are caches
# that all cores and, on rented machines, all tenants share.
ROTATION_BYTES = 32 << 20
# Less than that returns to the cache in no time.
LEAST_BYTES = 64 << 10
# What TVM's kernels take for granted of every argument: whole cache lines.
_ALIGNMENT_BYTES = 64


class Arena:
    """Memory with random values, out of which weights of any shape are cut.

    Kernels take turns with the same memory, whatever layouts they want weights in: twenty
    kernels need no more of it than one.
    """

    def __init__(self, n_bytes: int = ROTATION_BYTES, seed: int = 0) -> None:
        self._n_bytes = n_bytes
        self._rng = np.random.default_rng(seed)
        self._memory: dict[str, Array] = {}

    def rotation(self, buffers: Sequence[tuple[str, tuple[int, ...]]]) -> list[list[Array]]:
        """Cut out one set of arrays after another until the memory is used up."""
        offsets: list[int] = []
        used: dict[str, int] = {}  # items of one set
        for dtype, shape in buffers:
            offsets.append(used.get(dtype, 0))
            used[dtype] = offsets[-1] + _pitch(dtype, shape)
        memory = {dtype: self._of(dtype, n_items) for dtype, n_items in used.items()}
        n_sets = min(len(memory[dtype]) // n_items for dtype, n_items in used.items())

        def cut(number: int, index: int) -> Array:
            dtype, shape = buffers[index]
            first = number * used[dtype] + offsets[index]
            return memory[dtype][first : first + math.prod(shape)].reshape(shape)

        return [[cut(number, i) for i in range(len(buffers))] for number in range(n_sets)]

    def _of(self, dtype: str, n_items: int) -> Array:
        """Return the memory of one type; larger than asked for before, it is made anew."""
        known = self._memory.get(dtype)
        if known is None or len(known) < n_items:
            n_wanted = max(n_items, self._n_bytes // np.dtype(dtype).itemsize)
            known = self._memory[dtype] = _aligned(random_array(self._rng, (n_wanted,), dtype))
        return known


def is_worth_rotating(buffers: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    """Say whether weights are large enough to leave a cache, and of types numpy shares."""
    try:
        kinds = [np.dtype(dtype) for dtype, _ in buffers]
    except TypeError:
        return False
    n_bytes = sum(
        kind.itemsize * math.prod(shape) for kind, (_, shape) in zip(kinds, buffers, strict=True)
    )
    # Other kinds, such as bfloat16, cannot be handed over without a copy.
    return all(kind.kind in "fiu" for kind in kinds) and n_bytes >= LEAST_BYTES


def _pitch(dtype: str, shape: Sequence[int]) -> int:
    """Return the items from one array to the next: whole cache lines."""
    per_line = _ALIGNMENT_BYTES // np.dtype(dtype).itemsize
    return max(1, math.ceil(math.prod(shape) / per_line)) * per_line


def _aligned(values: Array) -> Array:
    room = np.empty(values.nbytes + _ALIGNMENT_BYTES, np.uint8)
    first = -room.ctypes.data % _ALIGNMENT_BYTES
    found: Array = room[first : first + values.nbytes].view(values.dtype)
    found[:] = values
    return found
