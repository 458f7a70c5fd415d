"""Candidates from extents and the processor: the model's laws, and the points it prefers."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.search_strategy.analytical import analytical_points, forecast_cycles
from tvm_adaptive.search_strategy.knobs import OPEN, Choice, KnobSpace, Tile, Undrawn, slices_of
from tvm_adaptive.search_strategy.tilings import Processor, Tilings, tilings_of
from tvm_adaptive.search_strategy.windows import window_cycles

AVX2 = Processor(lanes=8, n_registers=16, n_threads=2)
UNROLL = Choice((0.25,) * 4)


def product_space(m=64, n=64, k=64, n_sketches=1):
    knobs = (Tile(m, 4, 64), Tile(n, 4, 64), Tile(k, 2, 64), UNROLL)
    return KnobSpace([knobs] * n_sketches)


def cycles_of(
    processor=AVX2,
    *,
    rows=6,
    columns=16,
    depth=8,
    unrolled=64,
    chunks=4,
    m=96,
    k=64,
    shares_operands=True,
):
    """Return the forecast of a product of m by 96 by k."""
    spatial = [[[chunks, m // chunks // rows, 1, rows], [1, 96 // columns, 1, columns]]]
    tilings = Tilings(np.array(spatial), np.array([[[k // depth, depth]]]), np.array([unrolled]))
    (cycles,) = forecast_cycles(tilings, processor, shares_operands=shares_operands)
    return cycles


def tiling_of(space, point):
    return tilings_of(space.sketches[point.sketch], np.array([point.vector]))


def test_a_register_tile_is_faster_than_one_that_spills_or_waits():
    best = cycles_of()
    assert best < cycles_of(rows=24)  # 48 sums in 16 registers
    assert best < cycles_of(rows=1, columns=8)  # one sum waits for itself
    assert best < cycles_of(columns=1)  # scalars
    assert best < cycles_of(unrolled=0)  # sums in memory
    assert best < cycles_of(depth=1)  # sums are stored after each step


def test_a_row_of_32_needs_registers_for_its_operands():
    # 4 x 32: sixteen registers of sums, and none is left.
    assert cycles_of(rows=4, columns=32) > 1.5 * cycles_of(rows=2, columns=32)


def test_a_row_that_is_no_power_of_two_is_taken_apart():
    assert cycles_of(rows=2, columns=20) > 2.0 * cycles_of(rows=2, columns=16)
    # Three whole registers are three vectors.
    assert cycles_of(rows=4, columns=24) < 1.1 * cycles_of(rows=4, columns=16)
    assert cycles_of(rows=2, columns=6) < 2.0 * cycles_of(rows=2, columns=8)


def test_a_row_that_fills_only_a_part_of_its_register_is_taken_apart_too():
    wide = Processor(lanes=16, n_registers=32, n_threads=2)
    filled, unfilled = (cycles_of(wide, columns=each) for each in (16, 12))
    assert unfilled > 1.2 * filled
    own = [cycles_of(wide, columns=each, shares_operands=False) for each in (16, 12)]
    assert own[1] > 2.0 * own[0]


def test_results_that_share_no_operand_load_one_each():
    shared, own = (cycles_of(columns=16, rows=6, shares_operands=each) for each in (True, False))
    assert own > 1.1 * shared  # 14 loads for 12 multiply-adds instead of 8


@pytest.mark.parametrize("reads_windows", [False, True])
def test_products_with_vectors_of_a_batch_are_no_windows(reads_windows):
    # Twelve vectors of 64 numbers, each with a matrix of its own: as many reductions as rows.
    spatial = np.array([[[2, 6, 1, 1], [1, 1, 1, 1], [1, 8, 1, 16]]])
    tilings = Tilings(spatial, np.array([[[8, 8]]]), np.array([64]))
    options = {"shares_operands": False, "reads_windows": reads_windows}
    (cycles,) = forecast_cycles(tilings, AVX2, **options)
    assert (cycles == window_cycles(tilings, AVX2)[0]) == reads_windows


def test_matrices_of_a_batch_share_nothing():
    def cycles(batch, rows, is_batch):
        # A batch of 32 products of 32 by 32: as many results in each tile.
        spatial = [[[2, 16 // batch, 1, batch], [1, 32 // rows, 1, rows], [1, 2, 1, 16]]]
        tilings = Tilings(np.array(spatial), np.array([[[4, 8]]]), np.array([64]), is_batch)
        return forecast_cycles(tilings, AVX2)[0]

    is_batch = (True, False, False)
    assert cycles(4, 1, is_batch) > 1.3 * cycles(1, 4, is_batch)
    # Rows are rows, whichever loop they are in.
    assert cycles(4, 1, ()) == pytest.approx(cycles(1, 4, ()), rel=0.05)


def test_points_of_a_batched_product_keep_its_matrices_apart():
    knobs = (Tile(36, 4, 64), Tile(16, 4, 64), Tile(64, 4, 64), Tile(64, 2, 64), UNROLL)
    space = KnobSpace([knobs])
    batches = {}
    for is_batch in (True, False):
        points = analytical_points(
            space, AVX2, 8, np.random.default_rng(0), is_batch=(is_batch, False, False)
        )
        batches[is_batch] = [point.vector[3] for point in points]
    assert batches[True].count(1) > 4 > batches[False].count(1)
    assert batches[True][0] == 1


def test_loops_around_a_tile_that_are_written_out_keep_its_sums_in_registers():
    def cycles(unrolled):
        # Six rows of three vectors, which are no part of the tile, at each step of the reduction.
        spatial = np.array([[[16, 1, 1, 6], [1, 5, 3, 16]]])
        tilings = Tilings(spatial, np.array([[[64, 1]]]), np.array([unrolled]))
        return forecast_cycles(tilings, Processor(16, 32, 2))[0]

    assert cycles(16) > 2.0 * cycles(64)


def test_weights_that_the_cache_cannot_keep_are_fetched_once_for_all_rows():
    def cycles(rows_outside, rows_inside):
        # 64 by 3072 by 768, the widest layer of a BERT: a thread's weights have 4.7 MB.
        spatial = [[[1, rows_outside, rows_inside, 2], [2, 12, 1, 32]]]
        tilings = Tilings(np.array(spatial), np.array([[[48, 64]]]), np.array([16]))
        return forecast_cycles(tilings, AVX2)[0]

    # Measured: 2.3 ms and more than 3 ms.
    assert cycles(32, 1) > 1.3 * cycles(1, 32)


def test_inputs_that_share_the_sets_of_a_cache_evict_each_other():
    def cycles(channels, window):
        # Seven results in a row, of a 3 x 3 window; outer or inner loops have its positions.
        spatial = np.array([[[7, 1, 1, 1], [1, 1, 1, 7], [64, 1, 1, 8]]])
        places = [3 // window, window]
        reduction = np.array([[places, places, [channels // (9 // window**2), 9 // window**2]]])
        return forecast_cycles(Tilings(spatial, reduction, np.array([64])), AVX2)[0] / channels

    assert cycles(512 * 9, window=3) > 3 * cycles(512 * 9, window=1)
    # As many channels and a few more are in other sets.
    assert cycles(513 * 9, window=3) < 1.5 * cycles(513 * 9, window=1)


def test_points_are_better_than_as_many_random_ones():
    space = product_space(64, 768, 3072)
    rng = np.random.default_rng(0)
    (knobs,) = space.sketches
    random = tilings_of(knobs, np.array([space.draw(rng).vector for _ in range(8192)]))
    best = forecast_cycles(random, AVX2).min()
    for seed in range(3):
        points = analytical_points(space, AVX2, 4, np.random.default_rng(seed))
        cycles = [forecast_cycles(tiling_of(space, each), AVX2)[0] for each in points]
        assert cycles[0] < 0.95 * best
        assert max(cycles) < 1.1 * best


def test_work_is_divided_among_threads():
    assert cycles_of(chunks=1) > 1.5 * cycles_of(chunks=2)
    assert cycles_of(chunks=2, m=576) < cycles_of(chunks=3, m=576)  # one thread has two of three
    assert cycles_of(chunks=4, k=8) < cycles_of(chunks=16, k=8)  # chunks cost, too


@given(
    st.integers(1, 8),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 512),
)
def test_a_forecast_is_positive_and_no_larger_on_a_larger_processor(rows, columns, depth, unrolled):
    tile = {"rows": rows, "columns": columns, "depth": depth, "unrolled": unrolled}
    cycles = cycles_of(**tile, chunks=1, m=rows * 8)
    assert 0 < cycles < math.inf
    for change in ({"n_registers": 32}, {"lanes": 16, "n_registers": 32}, {"l2_bytes": 2 << 20}):
        processor = dataclasses.replace(AVX2, **change)
        assert cycles_of(processor, **tile, chunks=1, m=rows * 8) <= cycles


@pytest.mark.parametrize("extents", [(64, 64, 64), (7, 60, 9), (1, 6625, 120), (3, 1, 1)])
def test_points_are_valid_distinct_and_repeatable(extents):
    space = product_space(*extents, n_sketches=2)
    points = analytical_points(space, AVX2, 8, np.random.default_rng(1))
    assert points == analytical_points(space, AVX2, 8, np.random.default_rng(1))
    assert 1 <= len(points) <= 8
    inner = [(point.sketch, *tiling_of(space, point).inner[0]) for point in points]
    assert len(set(inner)) == len(points)
    for point in points:
        knobs = space.sketches[point.sketch]
        for knob, where in zip(knobs, slices_of(knobs), strict=True):
            if isinstance(knob, Tile):
                assert math.prod(point.vector[where]) == knob.extent


def test_the_best_point_fills_vectors_and_registers():
    for lanes, n_registers in ((8, 16), (16, 32)):
        processor = Processor(lanes, n_registers, 2)
        space = product_space(192, 192, 192)
        (point, *_) = analytical_points(space, processor, 4, np.random.default_rng(0))
        found = tiling_of(space, point)
        assert found.columns[0] % lanes == 0
        assert n_registers / 4 <= found.rows[0] * found.columns[0] / lanes < n_registers
        assert found.spatial[0, :, 0].prod() % 2 == 0


def test_it_beats_random_points_by_its_own_forecast():
    space, rng = product_space(128, 96, 256), np.random.default_rng(3)

    def cycles(point):
        return forecast_cycles(tiling_of(space, point), AVX2)[0]

    points = analytical_points(space, AVX2, 4, rng)
    randoms = sorted(cycles(space.draw(rng)) for _ in range(100))
    assert max(map(cycles, points)) < randoms[2]
    assert cycles(points[0]) == min(map(cycles, points))


def test_sketches_take_turns_and_those_without_tilings_come_last():
    tiled, plain = (Tile(64, 4, 64), Tile(64, 4, 64), UNROLL), (Undrawn(), UNROLL)
    factored = (Tile(64, 2, 64), Undrawn(), UNROLL)
    space = KnobSpace([factored, plain, tiled, tiled])
    points = analytical_points(space, AVX2, 6, np.random.default_rng(0))
    assert [point.sketch for point in points[:4]] in ([2, 3, 1, 0], [3, 2, 1, 0])
    assert all(OPEN not in point.vector for point in points)


def test_sketches_whose_results_are_used_elsewhere_come_last():
    space = product_space(96, 96, 96, n_sketches=3)
    points = analytical_points(
        space, AVX2, 12, np.random.default_rng(0), is_fused=[True, False, True]
    )
    sketches = [point.sketch for point in points]
    assert set(sketches[:8]) == {0, 2}
    unknown = analytical_points(space, AVX2, 3, np.random.default_rng(0))
    assert {point.sketch for point in unknown} == {0, 1, 2}


def test_what_is_padded_is_read_through_where_each_number_is_used_a_few_times():
    knobs = (*product_space(64, 64, 9).sketches[0], Undrawn())
    for shares, place in ((True, -1), (False, -2)):
        points = analytical_points(
            KnobSpace([knobs]), AVX2, 4, np.random.default_rng(0), shares_operands=shares
        )
        assert {point.vector[-1] for point in points} == {place}


@pytest.mark.parametrize("extent", [240, 672, 48])
def test_vectors_are_found_in_extents_of_many_factors(extent):
    wide = Processor(lanes=16, n_registers=32, n_threads=2)
    space = product_space(96, extent, 240)
    points = analytical_points(space, wide, 4, np.random.default_rng(0))
    assert sum(tiling_of(space, point).columns[0] % 16 == 0 for point in points) >= 2


def test_long_loops_are_not_written_out():
    space = product_space(192, 192, 192)
    points = analytical_points(space, AVX2, 16, np.random.default_rng(0))
    assert 0 < max(tiling_of(space, point).unrolled[0] for point in points) <= 64


def test_a_task_without_decisions_has_one_point():
    assert analytical_points(KnobSpace([]), AVX2, 4, np.random.default_rng(0)) == []
    (point,) = analytical_points(KnobSpace([()]), AVX2, 4, np.random.default_rng(0))
    assert point.vector == ()
