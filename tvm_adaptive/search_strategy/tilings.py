"""Tilings of one sketch, as arrays, and the processor that they run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tvm_adaptive.search_strategy.knobs import Choice, Knob, Tile, slices_of

IntArray = npt.NDArray[np.int64]

# Parts of a loop in MetaSchedule's tilings for CPUs, "SSRSRS": of spatial loops, of reductions.
N_SPATIAL = 4
N_REDUCTION = 2
# MetaSchedule's choices on CPUs: loops of no more steps are written out.
_UNROLLED = (0, 16, 64, 512)
# Multiply-adds that start in a cycle, and the cycles until a sum can be added to again.
PER_CYCLE = 2.0
LATENCY_CYCLES = 4.0
# Of nearly all cores' first-level caches.
L1_WAYS = 8
LINE_BYTES = 64
ITEM_BYTES = 4
# Each thread has its chunks at once: one more is a step of a loop. With 3000 cycles for each,
# as if each were handed out, the forecast ranks recorded candidates worse (0.53; 0.56 with this).
CHUNK_CYCLES = 100.0


@dataclasses.dataclass(frozen=True)
class Processor:
    """A core's registers and caches, and the threads that share the work."""

    lanes: int  # 32-bit numbers in a vector register
    n_registers: int  # vector registers
    n_threads: int
    # Of nearly all cores with vectors; where they are larger, blocks are smaller than they could.
    l1_bytes: int = 32 << 10
    l2_bytes: int = 512 << 10

    @property
    def way_bytes(self) -> int:
        """Addresses as far apart share a set of the first-level cache."""
        return self.l1_bytes // L1_WAYS


@dataclasses.dataclass(frozen=True)
class Tilings:
    """The decisions of some points of one sketch that the model knows."""

    spatial: IntArray  # (n, loops, 4): parts of each loop, the last of which is contiguous
    reduction: IntArray  # (n, loops, 2)
    unrolled: IntArray  # (n,): loops of no more steps are written out
    # Of each spatial loop, whether all operands depend on it: the matrices of a batch. None if
    # empty.
    is_batch: Sequence[bool] = ()

    @property
    def rows(self) -> IntArray:
        """Rows of the register tile."""
        return self.rows_of(3)

    @property
    def copies(self) -> IntArray:
        """Register tiles side by side, of matrices that share nothing."""
        return self.copies_of(3)

    @property
    def columns(self) -> IntArray:
        """Numbers in a row of the register tile."""
        return self.spatial[:, -1, 3]

    @property
    def depth(self) -> IntArray:
        """Steps of the innermost reduction."""
        return product(self.reduction[:, :, 1])

    def rows_of(self, part: int) -> IntArray:
        """Return the steps of a part of the loops along which operands are shared."""
        kept = [not each for each in self._is_batch[:-1]]
        return product(self.spatial[:, :-1, part][:, kept])

    def copies_of(self, part: int) -> IntArray:
        """Return the steps of a part of the loops that all operands depend on."""
        return product(self.spatial[:, :-1, part][:, self._is_batch[:-1]])

    @property
    def _is_batch(self) -> list[bool]:
        n_loops = self.spatial.shape[1]
        return list(self.is_batch) if len(self.is_batch) == n_loops else [False] * n_loops

    @property
    def inner(self) -> IntArray:
        """The innermost parts, by which candidates differ most; one row per point."""
        return np.concatenate([self.spatial[:, :, 3], self.reduction[:, :, 1]], axis=1)


def tilings_of(
    knobs: Sequence[Knob], vectors: IntArray, is_batch: Sequence[bool] = ()
) -> Tilings | None:
    """Return the tilings of points, one per row; None where loops are not split as on CPUs."""
    parts: dict[int, list[IntArray]] = {N_SPATIAL: [], N_REDUCTION: []}
    for knob, where in zip(knobs, slices_of(knobs), strict=True):
        if isinstance(knob, Tile) and knob.n_parts in parts:
            parts[knob.n_parts].append(vectors[:, where])
    if not parts[N_SPATIAL]:
        return None
    none: IntArray = np.ones((len(vectors), 0, N_REDUCTION), dtype=np.int64)
    reduction = np.stack(parts[N_REDUCTION], axis=1) if parts[N_REDUCTION] else none
    spatial = np.stack(parts[N_SPATIAL], axis=1)
    return Tilings(spatial, reduction, unrolled_of(knobs, vectors), tuple(is_batch))


def unrolled_of(knobs: Sequence[Knob], vectors: IntArray) -> IntArray:
    """Return of each point how many steps a loop may have that is written out."""
    for knob, where in zip(knobs, slices_of(knobs), strict=True):
        if isinstance(knob, Choice) and len(knob.weights) == len(_UNROLLED):
            return np.array(_UNROLLED)[vectors[:, where.start]]
    return np.zeros(len(vectors), dtype=np.int64)


def product(parts: IntArray, axis: int | tuple[int, ...] = 1) -> IntArray:
    """Return the product of parts along axes, as integers."""
    return np.asarray(np.prod(parts, axis=axis, dtype=np.int64))
