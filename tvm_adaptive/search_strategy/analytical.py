"""Candidates from a task's extents and the processor alone, before anything was measured.

Of some hundred random points the cheapest by a model of one core are taken: registers hold the
accumulators, loads and multiply-adds share a cycle, a block of each operand stays in a cache,
and the outer loops divide among the threads. Only tilings are modelled; other decisions stay as
they are drawn. Roller (OSDI 2022) and Tuna (arXiv 2104.14641) choose tiles by such models; the
terms are those of a blocked matrix product (Goto and van de Geijn, 2008), and the constants are
the processor's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.search_strategy.knobs import OPEN, Choice, Knob, KnobSpace, Point, Tile, slices_of

# Parts of a loop in MetaSchedule's tilings of CPUs, "SSRSRS": spatial ones, and reductions.
_N_SPATIAL = 4
_N_REDUCTION = 2
# Points that are drawn and scored, 20 microseconds each.
N_DRAWN = 768
# A multiply-add takes four cycles and two start in each: fewer accumulators wait for each other.
_LATENCY_CYCLES = 4.0
_PER_CYCLE = 2.0
# Branch, counter and addresses of a loop that is not unrolled.
_LOOP_CYCLES = 2.0
# From the second-level cache, and from beyond it: 64 bytes in 2 and in 8 cycles, a core's share.
_L2_CYCLES_PER_BYTE = 2 / 64
_FAR_CYCLES_PER_BYTE = 8 / 64
# Handing a chunk to a thread: about a microsecond.
_CHUNK_CYCLES = 3000.0
# More instructions in a row than the cache of decoded ones has: each is decoded again.
_MOST_UNROLLED = 1024
_ITEM_BYTES = 4
# A padded input that is computed in full costs one pass; at most places within the loops of its
# user it is computed several times, element by element.
_AT_ROOT = -1


@dataclasses.dataclass(frozen=True)
class Processor:
    """What the model knows of a core, and how many threads share the work."""

    lanes: int  # 32-bit numbers in a vector register
    n_registers: int  # vector registers
    n_threads: int
    l1_bytes: int = 32 << 10
    l2_bytes: int = 512 << 10


def processor_of(mcpu_features: Sequence[str], n_threads: int) -> Processor:
    """Return the processor with some vector extensions, as LLVM names them."""
    if "avx512f" in mcpu_features:
        return Processor(16, 32, n_threads)
    if "avx2" in mcpu_features or "avx" in mcpu_features:
        return Processor(8, 16, n_threads)
    # SSE, Neon
    return Processor(4, 32 if "neon" in mcpu_features else 16, n_threads)


def analytical_points(
    space: KnobSpace, processor: Processor, n: int, rng: np.random.Generator
) -> list[Point]:
    """Return up to ``n`` points, the most promising first, each of another inner tiling.

    Sketches take turns: they differ in where results are collected, which the model does not
    see. A sketch without tilings gives random points.
    """
    n_sketches = len(space.sketches)
    if not n_sketches:
        return []
    drawn = [_closed(space.draw(rng)) for _ in range(N_DRAWN)]
    cycles = [cycles_of(space.sketches[point.sketch], point, processor) for point in drawn]
    queues: list[list[Point]] = [[] for _ in range(n_sketches)]
    seen: set[tuple[int, ...]] = set()
    for i in np.argsort(cycles, kind="stable"):
        point = drawn[int(i)]
        inner = (point.sketch, *_inner_parts(space.sketches[point.sketch], point))
        if inner not in seen:
            seen.add(inner)
            queues[point.sketch].append(point)
    best_first = sorted((q for q in queues if q), key=lambda q: drawn.index(q[0]))
    found: list[Point] = []
    while len(found) < n and any(best_first):
        for queue in best_first:
            if queue and len(found) < n:
                found.append(queue.pop(0))
    return found


def cycles_of(knobs: Sequence[Knob], point: Point, processor: Processor) -> float:
    """Return the forecast cycles of a point on one of the threads, lower is better."""
    spatial, reduction, unroll = _split(knobs, point)
    if not spatial:
        return math.inf
    lanes, n_registers = processor.lanes, processor.n_registers
    vector = spatial[-1][3]
    n_vectors = math.ceil(vector / lanes)
    rows = math.prod(parts[3] for parts in spatial[:-1])
    depth = math.prod(parts[1] for parts in reduction)
    n_accumulators = rows * n_vectors
    # One step of the innermost reduction: multiply-adds, loads, or the wait for the sums.
    per_step = max(
        n_accumulators / _PER_CYCLE, (rows + n_vectors) / _PER_CYCLE, _LATENCY_CYCLES
    )
    n_spilled = max(0, n_accumulators + n_vectors + 1 - n_registers)
    per_step += n_spilled  # a store and a load
    is_unrolled = rows * depth <= unroll
    if not is_unrolled:
        # Sums that no register keeps across a loop are loaded and stored in each step.
        per_step += n_accumulators if rows > max(unroll, 1) else _LOOP_CYCLES
    if is_unrolled and rows * n_vectors * depth > _MOST_UNROLLED:
        per_step += n_accumulators / _PER_CYCLE
    per_tile = depth * per_step + n_accumulators + _LOOP_CYCLES
    n_tiles = math.prod(math.prod(parts) for parts in spatial) / (rows * vector)
    n_tiles *= math.prod(math.prod(parts) for parts in reduction) / depth
    cycles = n_tiles * (per_tile + _traffic_cycles(spatial, depth, processor))
    chunks = math.prod(parts[0] for parts in spatial)
    rounds = math.ceil(chunks / processor.n_threads)
    return cycles * rounds / chunks + rounds * _CHUNK_CYCLES


def _traffic_cycles(spatial: Sequence[Sequence[int]], depth: int, processor: Processor) -> float:
    """Return the cycles that an inner tile waits for its operands."""
    rows = math.prod(parts[3] for parts in spatial[:-1])
    vector = spatial[-1][3]
    block_rows = math.prod(parts[2] * parts[3] for parts in spatial[:-1])
    block_columns = spatial[-1][2] * vector
    # What the loops around an inner tile use again and again.
    block_bytes = _ITEM_BYTES * (
        depth * (block_rows + block_columns) + block_rows * block_columns
    )
    tile_bytes = _ITEM_BYTES * (depth * (rows + vector) + rows * vector)
    if block_bytes <= processor.l1_bytes / 2:
        # The block comes once, for all of its tiles.
        n_tiles = (block_rows // rows) * spatial[-1][2]
        return block_bytes / n_tiles * _L2_CYCLES_PER_BYTE
    if block_bytes <= processor.l2_bytes / 2:
        return tile_bytes * _L2_CYCLES_PER_BYTE
    return tile_bytes * _FAR_CYCLES_PER_BYTE


def _split(
    knobs: Sequence[Knob], point: Point
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Return the parts of spatial loops and of reductions, and the steps that are unrolled."""
    spatial, reduction, unroll = [], [], 0
    for knob, where in zip(knobs, slices_of(knobs), strict=True):
        parts = point.vector[where]
        if isinstance(knob, Tile) and knob.n_parts == _N_SPATIAL:
            spatial.append(parts)
        elif isinstance(knob, Tile) and knob.n_parts == _N_REDUCTION:
            reduction.append(parts)
        elif isinstance(knob, Choice) and len(knob.weights) == len(_UNROLLED):
            unroll = _UNROLLED[parts[0]]
    return spatial, reduction, unroll


# MetaSchedule's choices on CPUs.
_UNROLLED = (0, 16, 64, 512)


def _closed(point: Point) -> Point:
    """Compute at the root whatever the compiler would compute at a random place."""
    vector = tuple(_AT_ROOT if value == OPEN else value for value in point.vector)
    return Point(point.sketch, vector)


def _inner_parts(knobs: Sequence[Knob], point: Point) -> tuple[int, ...]:
    """Return the innermost parts, by which candidates differ most."""
    spatial, reduction, _ = _split(knobs, point)
    return tuple(parts[-1] for parts in (*spatial, *reduction))
