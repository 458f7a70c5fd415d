"""A model of one core for windows whose places share no operand: depthwise convolutions, pooling.

Each result has inputs of its own, which are used as often as a window has places. Multiply-adds are
few beside comparisons with the border of the image, sums that no register holds, and lines of the
first cache that evict each other. Of 20 to 150 random tilings each of seven depthwise convolutions
(AVX-512), the best of the first four by this model takes 1.24 x as long as the best of all, and
1.77 x by the model of products with shared operands; mean rank correlations are 0.51 and 0.37.
Constants half or twice as large change little.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from tvm_adaptive.search_strategy.tilings import (
    CHUNK_CYCLES,
    ITEM_BYTES,
    LATENCY_CYCLES,
    LINE_BYTES,
    PER_CYCLE,
    IntArray,
    Processor,
    Tilings,
    product,
)
from tvm_adaptive.values.trial import FloatArray

# A vector's comparison with the border of the image: a branch, or what is left of it where the
# places along a row are written out and the compiler knows most answers.
_BORDER_CYCLES = 1.0
_KNOWN_BORDER_CYCLES = 0.5
# A load and a store of a sum that no register holds, each of which waits for the other.
_SUM_CYCLES = 8.0
# A load from the second cache, others under way.
_MISS_CYCLES = 1.0
# Ways of the first cache that inputs of one tile can use before they evict each other or results.
_N_WAYS = 2


def has_windows(tilings: Tilings) -> bool:
    """Say whether results have several rows, and reductions along as many axes at most."""
    extents = _extents(tilings.reduction)
    n_axes = int((_extents(tilings.spatial)[:-1] > 1).sum())
    return 0 < int((extents > 1).sum()) <= n_axes


def window_cycles(tilings: Tilings, processor: Processor) -> FloatArray:
    """Return the cycles of each tiling on each of the threads, of shape (n,), lower is better."""
    spatial, n_steps = tilings.spatial, product(tilings.reduction, (1, 2))
    in_row: FloatArray = np.ceil(tilings.columns / processor.lanes)
    code = _written_out(tilings)
    n_sums = code.rows * code.columns * in_row
    n_weights = code.columns * in_row
    # As many loads start in a cycle as multiply-adds.
    step = np.maximum((n_sums + n_weights) / PER_CYCLE, LATENCY_CYCLES)
    border = np.where(code.knows_border, _KNOWN_BORDER_CYCLES, _BORDER_CYCLES)
    # Rows of three registers are loops over registers, see ``sketches``.
    is_vector = (tilings.columns & (tilings.columns - 1)) == 0
    step += border * code.rows * code.columns * np.where(is_vector, 1.0, in_row)
    n_spilled = np.maximum(0, n_sums + n_weights + 1 - processor.n_registers)
    step += _SUM_CYCLES * n_spilled
    n_results = product(spatial[:, :, 2]) * product(spatial[:, :-1, 3]) * in_row
    cycles = n_results / n_sums * n_steps * step
    # Sums are loaded and stored as often as the code around all their terms is left.
    cycles += n_results * n_steps / (code.steps * code.held_steps) * _SUM_CYCLES
    n_lines = _lines(tilings)
    is_evicted = n_lines > _N_WAYS * _sets(tilings, processor)
    cycles += np.where(is_evicted, _MISS_CYCLES * n_results * n_steps, 0.0)
    # Threads that share no rows, but have channels of their own, take pieces of far lines.
    is_sliced = (spatial[:, -1, 0] > 1) & (_first_axis(spatial)[:, 0] == 1)
    cycles += np.where(is_sliced, _MISS_CYCLES * n_lines * spatial[:, -1, 2] * in_row, 0.0)
    n_turns = np.ceil(product(spatial[:, :, 0]) / processor.n_threads)
    return np.asarray(n_turns * (product(spatial[:, :, 1]) * cycles + CHUNK_CYCLES))


@dataclasses.dataclass(frozen=True)
class _Code:
    """What is written out within the loops that remain, of each tiling."""

    rows: IntArray
    columns: IntArray  # vectors of a row's tile count as one
    steps: IntArray  # of the reductions
    held_steps: IntArray  # of loops around it, through which registers hold the sums
    knows_border: npt.NDArray[np.bool_]  # all places of a window along a row are in it


def _written_out(tilings: Tilings) -> _Code:
    """Return which loops of a tile are written out: the inner ones of few steps in all."""
    spatial, reduction = tilings.spatial, tilings.reduction
    n_axes, n_reduced = spatial.shape[1] - 1, reduction.shape[1]
    ones = np.ones(len(spatial), dtype=np.int64)
    rows, columns, steps, along_row, held, total = (ones.copy() for _ in range(6))
    is_open, is_held = (np.ones(len(spatial), dtype=bool) for _ in range(2))
    along = max((i for i, n in enumerate(_extents(reduction)) if n > 1), default=0)
    # From the innermost loop to the outermost one of a tile, "SRSR".
    loops = [(spatial[:, i, 3], "row", i) for i in reversed(range(n_axes))]
    loops += [(reduction[:, i, 1], "step", i) for i in reversed(range(n_reduced))]
    loops.append((spatial[:, -1, 2], "column", n_axes))
    loops += [(spatial[:, i, 2], "row", i) for i in reversed(range(n_axes))]
    loops += [(reduction[:, i, 0], "step", i) for i in reversed(range(n_reduced))]
    for extent, kind, axis in loops:
        is_open &= total * extent <= np.maximum(tilings.unrolled, 1)
        inside = np.where(is_open, extent, 1)
        total *= inside
        if kind == "step":
            steps *= inside
            along_row *= inside if axis == along else 1
            held *= np.where(is_held & ~is_open, extent, 1)
        else:
            sums = rows if kind == "row" else columns
            sums *= inside
            is_held &= is_open | (extent == 1)
    return _Code(rows, columns, steps, held, along_row == _extents(reduction)[along])


def _lines(tilings: Tilings) -> IntArray:
    """Return the places of the image that a tile reads, each with a line for each vector."""
    tile = tilings.spatial[:, :-1, 2] * tilings.spatial[:, :-1, 3]
    windows = [int(n) for n in _extents(tilings.reduction) if n > 1]
    axes = np.flatnonzero(_extents(tilings.spatial)[:-1] > 1)[-len(windows) :]
    wide = tile.copy()
    for axis, n in zip(axes, windows, strict=True):
        # The border of a small image is most of its window.
        wide[:, axis] = np.minimum(tile[:, axis] + n - 1, _extents(tilings.spatial)[axis])
    return product(wide)


def _sets(tilings: Tilings, processor: Processor) -> int:
    """Return in how many sets of the first cache the same channels of all places are."""
    way_bytes = processor.way_bytes
    place_bytes = ITEM_BYTES * int(_extents(tilings.spatial)[-1])
    return int(min(way_bytes // np.gcd(way_bytes, place_bytes), way_bytes // LINE_BYTES))


def _first_axis(spatial: IntArray) -> IntArray:
    """Return the parts of the outermost axis of the image."""
    first = int(np.argmax(_extents(spatial)[:-1] > 1))
    return spatial[:, first]


def _extents(parts: IntArray) -> IntArray:
    """Return the extent of each loop, which all tilings have in common."""
    return np.asarray(np.prod(parts[0], axis=1, dtype=np.int64))
