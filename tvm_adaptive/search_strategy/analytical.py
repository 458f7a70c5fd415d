"""Candidates from a task's extents and the processor alone, before anything was measured.

Of some thousand points, random ones and combinations of the best of these, those are taken whose
tiling a model of one core forecasts to be the fastest: registers hold the sums, loads and
multiply-adds share a cycle, a block of each operand stays in a cache, and the outer loops are
divided among the threads. Roller (OSDI 2022) and Tuna (arXiv 2104.14641) choose tiles by such
models; the terms are those of a blocked matrix product (Goto and van de Geijn, ACM TOMS 34, 2008).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.search_strategy.knobs import (
    OPEN,
    Knob,
    KnobSpace,
    Point,
    Tile,
    divisors,
    slices_of,
)
from tvm_adaptive.search_strategy.tilings import (
    CHUNK_CYCLES,
    ITEM_BYTES,
    L1_WAYS,
    LATENCY_CYCLES,
    LINE_BYTES,
    N_REDUCTION,
    N_SPATIAL,
    PER_CYCLE,
    IntArray,
    Processor,
    Tilings,
    product,
    tilings_of,
    unrolled_of,
)
from tvm_adaptive.search_strategy.windows import has_windows, window_cycles
from tvm_adaptive.values.trial import FloatArray

# Of points of a sketch: their cycles, and by what their tiles differ.
_Forecast = Callable[[Sequence[Knob], IntArray], tuple[FloatArray, IntArray]]

# Written out, 512 steps take seconds to compile, up to half a minute. In 59 of 70 recorded
# tasks, the best with at most 64 was within 2 % of the best of all.
_MOST_UNROLLED = 64
# Decisions that are drawn of each knob but tiles, 20 microseconds each.
_N_DECISIONS = 32
# Random points, and points of the decisions of the best, some 200 nanoseconds each. The fourth
# tiling of some 30 tasks is forecast to take 10 % less than the fourth of 8192 random points.
_N_POINTS = 4096
_N_RECOMBINED = 2048
_N_ROUNDS = 2
_N_BEST = 256
# Of the narrowest vectors.
_LANES = 8
# Points whose tiles are compared, the best first: among as many are some hundred tiles.
_N_COMPARED = 512
# Two start in a cycle, and wait for each other: with 1.3 the forecast ranks some 5,000
# candidates of six networks (AVX2) better (0.66) than with 2 (0.645).
_LOADS_PER_CYCLE = 1.3
# A store, and a load that waits for it, of a sum that no register holds: with 8 the forecast
# ranks recorded candidates better (0.41) than with 1 (0.34), and more changes little.
_SPILL_CYCLES = 8.0
# LLVM takes rows apart that are longer than a register and no power of two, at each step. With
# this factor, 2,400 recorded candidates of six networks take what is forecast, on AVX-512 (20 and
# 24 numbers 1.2 x as long, 28 to 30 1.6 x; without it 1.7 to 2.5 x) and AVX2 (12 to 15 1.0; 2.5).
_UNEVEN_FACTOR = 4.0
# Rows that fill more than half a register, and not all of it, are loaded and stored in pieces: with
# 12 to 15 of 16 numbers, 2,500 candidates took 1.3 x as long, and where no operand is shared
# 1.3 to 2.9 x.
_UNFILLED_FACTOR = 1.3
_UNFILLED_OWN_FACTOR = 3.0
# Branch, counter and addresses of a loop, most of which run beside the multiply-adds.
_LOOP_CYCLES = 1.0
# A load from the second-level cache, while others are under way. Written out, a 3 x 3 window took 5
# to 8 x as long where its inputs evict each other.
_MISS_CYCLES = 4.0
# A core's share of the second-level cache's bandwidth, and of what lies beyond it. With 8 for the
# latter, the first of 68 tilings of each of three dense layers took 1.17 x as long as with 16.
_L2_BYTES_PER_CYCLE = 32.0
_FAR_BYTES_PER_CYCLE = 16.0
# Vector instructions in a row; more do not fit into the cache of decoded ones.
_MOST_IN_A_ROW = 1024
# Longer code takes seconds to build, which the first candidates must not: as many vector
# instructions count as much as a tenth of the cycles.
_LONG_CODE = 1024
# A padded input that is computed in full costs a pass; at most places within its user's loops
# it is computed again and again, number by number. A depthwise convolution needs each number a
# few times only, and is 1.4 x as fast where it takes them from the input, or zeros.
_AT_ROOT = -1
_INLINE = -2


def analytical_points(
    space: KnobSpace,
    processor: Processor,
    n: int,
    rng: np.random.Generator,
    *,
    shares_operands: bool = True,
    reads_windows: bool = False,
    is_batch: Sequence[bool] = (),
    is_fused: Sequence[bool] = (),
) -> list[Point]:
    """Return up to ``n`` points of different tilings, the most promising first.

    Sketches take turns: they differ in where results are collected, which the model does not
    know. Sketches that the model knows nothing of come last in a turn, the simplest first.
    ``is_fused`` says of each sketch whether the functions that follow are computed within its
    loops; those where they are not come after all others: 230 tilings took 1.6 x as long without.
    """

    def forecast(knobs: Sequence[Knob], vectors: IntArray) -> tuple[FloatArray, IntArray]:
        tilings = tilings_of(knobs, vectors, is_batch)
        assert tilings is not None  # other sketches are not forecast
        cycles = forecast_cycles(
            tilings, processor, shares_operands=shares_operands, reads_windows=reads_windows
        )
        return cycles, tilings.inner

    queues: list[tuple[bool, float, int, list[Point]]] = []
    decisions: dict[Knob, IntArray] = {}  # which sketches share
    for number, knobs in enumerate(space.sketches):
        vectors = _drawn(knobs, decisions, rng)
        vectors = vectors[unrolled_of(knobs, vectors) <= _MOST_UNROLLED]
        # Of sketches without tilings, one that factors no reduction is as fast on a few threads.
        cost, place = math.inf, _AT_ROOT
        has_tilings = tilings_of(knobs, vectors[:1], is_batch) is not None
        if has_tilings:
            vectors, cost = _most_promising(knobs, vectors, forecast, rng)
            place = _AT_ROOT if shares_operands else _INLINE
        vectors = np.where(vectors[:n] == OPEN, place, vectors[:n])
        n_splits = sum(isinstance(knob, Tile) for knob in knobs)
        points = [Point(number, tuple(vector)) for vector in vectors.tolist()]
        is_behind = has_tilings and any(is_fused) and not is_fused[number]
        queues.append((is_behind, cost, n_splits, list(dict.fromkeys(points))))
    queues.sort(key=lambda queue: queue[:-1])
    found: list[Point] = []
    for _, group in itertools.groupby(queues, key=lambda queue: queue[0]):
        turns = itertools.zip_longest(*(points for *_, points in group))
        found += [point for turn in turns for point in turn if point is not None]
    return found[:n]


def _most_promising(
    knobs: Sequence[Knob], vectors: IntArray, forecast: _Forecast, rng: np.random.Generator
) -> tuple[IntArray, float]:
    """Return points of different tiles, the best first, and the cycles of the best."""
    cycles, inner = forecast(knobs, vectors)
    for _ in range(_N_ROUNDS):
        more = _recombined(knobs, vectors[np.argsort(cycles)[:_N_BEST]], rng)
        more_cycles, more_inner = forecast(knobs, more)
        vectors = np.concatenate([vectors, more])
        cycles = np.concatenate([cycles, more_cycles])
        inner = np.concatenate([inner, more_inner])
    order = np.argsort(cycles, kind="stable")[:_N_COMPARED]
    _, first = np.unique(inner[order], axis=0, return_index=True)
    return vectors[order[np.sort(first)]], float(cycles[order[0]])


def forecast_cycles(
    tilings: Tilings,
    processor: Processor,
    *,
    shares_operands: bool = True,
    reads_windows: bool = False,
) -> FloatArray:
    """Return the cycles of each tiling on each of the threads, of shape (n,), lower is better.

    With ``shares_operands``, results in a row or column of a tile share an operand, as in
    products of matrices; without, each has one of its own, as in depthwise convolutions.
    ``reads_windows`` says whether these are windows; a product with a vector has none.
    """
    if reads_windows and not shares_operands and has_windows(tilings):
        factor = _uneven_factor(tilings.columns, processor.lanes, shares_operands)
        return np.asarray(window_cycles(tilings, processor) * factor)
    columns, depth, copies = tilings.columns, tilings.depth, tilings.copies
    n_inner = product(tilings.spatial[:, :, 2])
    # Where the loops around a tile are written out, too, registers hold the sums of the block.
    is_block = tilings.rows * copies * depth * n_inner <= tilings.unrolled
    more_rows = np.where(is_block, tilings.rows_of(2), 1)
    more_copies = np.where(is_block, tilings.copies_of(2), 1)
    more_columns = np.where(is_block, tilings.spatial[:, -1, 2], 1)
    rows, copies = tilings.rows * more_rows, copies * more_copies
    in_row = np.ceil(columns / processor.lanes)
    n_vectors = in_row * more_columns
    n_sums = copies * rows * n_vectors
    # LLVM widens a row of 20 numbers to 32, which take four registers of eight.
    n_held = np.where(columns % processor.lanes == 0, in_row, 2 ** np.ceil(np.log2(in_row)))
    n_held = copies * (rows + 1) * n_held * more_columns
    n_spilled = np.maximum(0, n_held + 1 - processor.n_registers)
    # A step of the innermost reduction: multiply-adds, loads, or the wait for the sums.
    n_loads = copies * (n_vectors + rows) if shares_operands else n_vectors + n_sums
    step = np.maximum(n_sums / PER_CYCLE, n_loads / _LOADS_PER_CYCLE)
    step = np.maximum(step, LATENCY_CYCLES)
    step += _SPILL_CYCLES * n_spilled
    if shares_operands:
        step += _missed_cycles(tilings, processor, rows * copies)
    step *= _uneven_factor(columns, processor.lanes, shares_operands)
    is_written_out = copies * rows * depth <= tilings.unrolled
    # Rows in a loop: no register can hold a sum from one step to the next.
    in_loop = np.where(copies * rows > np.maximum(tilings.unrolled, 1), n_sums, _LOOP_CYCLES)
    length = n_sums * np.where(is_written_out, depth, 1)
    decoding = np.where(length > _MOST_IN_A_ROW, n_sums / PER_CYCLE, 0.0)
    # A reduction that goes on in the next loop has that loop's cycles.
    step += np.where(is_written_out, decoding + _LOOP_CYCLES / depth, in_loop)
    n_steps = product(tilings.spatial, (1, 2)) * product(tilings.reduction, (1, 2))
    # Without loops between the reduction's two, sums stay in registers through both.
    is_held = is_block | (n_inner == 1)
    held = np.where(is_held, product(tilings.reduction, (1, 2)), depth)
    n_tiles = n_steps / (copies * rows * columns * more_columns * held)
    waiting = _waiting_cycles(tilings, processor) * more_copies * more_rows * more_columns
    per_tile = held * step + n_sums + _LOOP_CYCLES + waiting
    n_chunks = product(tilings.spatial[:, :, 0])
    n_turns = np.ceil(n_chunks / processor.n_threads)
    cycles = n_tiles * per_tile * n_turns / n_chunks + n_turns * CHUNK_CYCLES
    if shares_operands:
        cycles += _far_bytes(tilings, processor, n_turns) / _FAR_BYTES_PER_CYCLE
    return np.asarray(cycles * (1 + 0.1 * length / _LONG_CODE))


def _uneven_factor(columns: IntArray, lanes: int, shares_operands: bool) -> FloatArray:
    """Return how many times as long rows take that are no power of two."""
    # Whole registers are taken apart before LLVM sees them, see ``sketches``.
    is_uneven = (columns & (columns - 1) != 0) & (columns % lanes != 0)
    unfilled = _UNFILLED_FACTOR if shares_operands else _UNFILLED_OWN_FACTOR
    is_unfilled = (columns > lanes / 2) & (columns <= lanes)
    factor = np.where(columns > lanes, _UNEVEN_FACTOR, np.where(is_unfilled, unfilled, 1.0))
    return np.where(is_uneven, factor, 1.0)


def _missed_cycles(tilings: Tilings, processor: Processor, n_rows: IntArray) -> FloatArray:
    """Return the cycles that a step waits for the inputs of its rows.

    They evict each other where more lines are used than their sets keep. Rows, and positions of a
    window, are as far apart in memory as the last reduction is long: with 512 channels every second
    one is in the same set.
    """
    if not tilings.reduction.shape[1]:
        return np.zeros(len(tilings.reduction))
    inner = tilings.reduction[:, :, 1]
    n_lines = n_rows * product(inner[:, :-1])
    way_bytes = processor.way_bytes
    distance = ITEM_BYTES * product(tilings.reduction[:, -1])
    n_kept = L1_WAYS * (way_bytes // np.gcd(way_bytes, distance))
    # A line that was fetched serves the steps along it.
    share = np.ceil(inner[:, -1] * ITEM_BYTES / LINE_BYTES) / inner[:, -1]
    return np.where(n_lines > n_kept, n_rows * _MISS_CYCLES * share, 0.0)


def _waiting_cycles(tilings: Tilings, processor: Processor) -> FloatArray:
    """Return the cycles that a register tile waits for its operands.

    In a block, loops over rows are around those over columns. Weights that the first cache keeps
    are fetched once for all rows of the block, and inputs once for all of its columns.
    """
    depth, copies, block_columns = tilings.depth, tilings.copies, tilings.spatial[:, -1, 2]
    weights = ITEM_BYTES * copies * depth * tilings.columns
    is_kept = weights * block_columns <= processor.l1_bytes / 2
    n_uses = np.where(is_kept, tilings.rows_of(2), 1)
    inputs = ITEM_BYTES * copies * depth * tilings.rows / block_columns
    results = ITEM_BYTES * copies * tilings.rows * tilings.columns
    return np.asarray((weights / n_uses + inputs + results) / _L2_BYTES_PER_CYCLE)


def _far_bytes(tilings: Tilings, processor: Processor, n_turns: IntArray) -> FloatArray:
    """Return the bytes that a thread takes from beyond its second-level cache.

    Columns have weights, rows have inputs. Loops over rows are around those over columns, so
    that weights which the cache can't keep are fetched again for each row of blocks.
    """
    most_bytes = processor.l2_bytes / 2
    columns, extents = tilings.spatial[:, -1], np.prod(tilings.reduction, axis=2)
    # Of a convolution's reductions the longest are channels; the others are a window, whose
    # positions have most of their inputs in common.
    n_weights, n_inputs = product(extents), extents.max(axis=1, initial=1)
    copies = tilings.copies_of(1) * tilings.copies_of(2) * tilings.copies
    weights = ITEM_BYTES * n_weights * product(columns[:, 1:])
    all_weights = weights * copies * columns[:, 0] * tilings.copies_of(0)
    n_times = np.where(weights > most_bytes, tilings.rows_of(1), 1) * n_turns
    weight_bytes = np.where(all_weights > most_bytes, copies * weights * n_times, 0)
    block = ITEM_BYTES * n_inputs * tilings.rows_of(2) * tilings.rows
    inputs = block * tilings.rows_of(1)
    # Chunks in a row of blocks follow each other, and share its inputs.
    n_chunks = np.where(inputs > most_bytes, n_turns, np.ceil(n_turns / columns[:, 0]))
    input_bytes = copies * inputs * n_chunks * np.where(block > most_bytes, columns[:, 1], 1)
    return np.asarray(weight_bytes + input_bytes)


def _drawn(
    knobs: Sequence[Knob], decisions: dict[Knob, IntArray], rng: np.random.Generator
) -> IntArray:
    """Return random points; what only the compiler can draw stays open."""
    columns: list[IntArray] = [np.zeros((_N_POINTS, 0), dtype=np.int64)]
    for knob in knobs:
        if isinstance(knob, Tile):
            columns.append(_splits(knob, _N_POINTS, rng))
            continue
        if knob not in decisions:
            drawn = [knob.draw(rng) for _ in range(_N_DECISIONS)]
            decisions[knob] = np.array(drawn, dtype=np.int64)
        columns.append(decisions[knob][rng.integers(_N_DECISIONS, size=_N_POINTS)])
    return np.concatenate(columns, axis=1)


def _recombined(knobs: Sequence[Knob], vectors: IntArray, rng: np.random.Generator) -> IntArray:
    """Return points of which each decision is one of the points given."""
    columns = [
        vectors[rng.integers(len(vectors), size=_N_RECOMBINED), where] for where in slices_of(knobs)
    ]
    return np.concatenate(columns, axis=1)


def _splits(knob: Tile, n: int, rng: np.random.Generator) -> IntArray:
    """Draw splits of a loop; each divisor, and each that fills vectors, is as likely innermost.

    Draws of prime factors, as those of the search, hardly ever give all twos of an extent to
    one part, as vectors need: 16 of 240 in one of 500.
    """
    parts = np.ones((n, knob.n_parts), dtype=np.int64)
    left = np.full(n, knob.extent, dtype=np.int64)
    rest = 0 if knob.n_parts == N_REDUCTION else 1  # the part that takes what is left
    for place in (*range(knob.n_parts - 1, rest, -1), *range(rest)):
        is_innermost = place == knob.n_parts - 1
        is_half = rng.random(n) < 0.5
        # Half of the splits have no loops between the two parts of a reduction, half of these
        # only one part.
        is_drawn = ~is_half if place == knob.n_parts // 2 else np.ones(n, dtype=bool)
        # The innermost parts of half of them fill vectors, if any do.
        fills = is_half if place == N_SPATIAL - 1 else np.zeros(n, dtype=bool)
        for extent in np.unique(left):
            most = knob.max_innermost if is_innermost and knob.max_innermost > 0 else extent
            options = np.array([each for each in divisors(int(extent)) if each <= most])
            filling = options[options % _LANES == 0]
            for is_filled, each in ((False, options), (True, filling if filling.size else options)):
                where = np.flatnonzero((left == extent) & is_drawn & (fills == is_filled))
                parts[where, place] = rng.choice(each, size=len(where))
        left //= parts[:, place]
    parts[:, rest] = left
    return parts
