from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.search_strategy.knobs import Choice, Knob, KnobSpace, Point, Tile, Undrawn
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    TransferPool,
    TransferRecord,
    fit,
    fit_split,
)

UNROLL = Choice((0.25, 0.25, 0.25, 0.25))


def sketch(rows: int, columns: int) -> tuple[Knob, ...]:
    """Return the knobs of a matrix product: two loops in four parts, one in two, two others."""
    return (Tile(rows, 4), Tile(columns, 4, 64), Tile(128, 2), UNROLL, Undrawn())


SMALL, LARGE = sketch(64, 64), sketch(256, 96)
GOOD = (4, 2, 4, 2, 2, 1, 2, 16, 32, 4, 3, 7)


def finding(seconds: float = 1.0, vector: tuple[int, ...] = GOOD) -> TransferRecord:
    return TransferRecord("0", SMALL, vector, seconds)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("extent", "bound", "parts", "fitted"),
    [
        (64, -1, (4, 2, 4, 2), (4, 2, 4, 2)),  # fits as it is
        (256, -1, (4, 2, 4, 2), (16, 2, 4, 2)),  # the outermost part takes the rest
        (8, -1, (4, 2, 4, 2), (1, 1, 4, 2)),  # inner parts first
        (49, -1, (4, 2, 8, 2), (7, 1, 7, 1)),  # the nearest divisors, as ratios
        (64, 16, (1, 1, 2, 32), (2, 1, 2, 16)),  # what may not be wider is not
        (1, -1, (4, 2, 4, 2), (1, 1, 1, 1)),
        (13, -1, (1, 1, 1, 8), (1, 1, 1, 13)),
    ],
)
def test_inner_parts_are_kept_as_far_as_the_extent_allows(
    extent: int, bound: int, parts: tuple[int, ...], fitted: tuple[int, ...]
) -> None:
    assert fit_split(Tile(extent, 4, bound), parts) == fitted


@given(
    extent=st.integers(1, 5000),
    bound=st.sampled_from([-1, 1, 8, 64]),
    parts=st.lists(st.integers(1, 4096), min_size=2, max_size=5),
)
def test_whatever_is_fitted_is_a_split_of_the_tile(
    extent: int, bound: int, parts: list[int]
) -> None:
    fitted = fit_split(Tile(extent, len(parts), bound), parts)
    assert len(fitted) == len(parts)
    assert math.prod(fitted) == extent
    assert bound < 0 or fitted[-1] <= bound


@given(seed=st.integers(0, 1000))
def test_a_task_of_the_same_extents_gets_the_decisions_unchanged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = KnobSpace([SMALL])
    point = space.draw(rng)
    assert fit(TransferRecord("0", SMALL, point.vector, 1.0), space, rng) == point


def test_knobs_of_another_size_are_fitted_and_other_knobs_are_copied(
    rng: np.random.Generator,
) -> None:
    point = fit(finding(), KnobSpace([LARGE]), rng)
    assert point == Point(0, (16, 2, 4, 2, 3, 1, 2, 16, 32, 4, 3, 7))


def test_what_a_relative_has_no_knob_for_is_drawn(rng: np.random.Generator) -> None:
    more = (*LARGE, Choice((1.0, 0.0)), UNROLL)
    point = fit(finding(), KnobSpace([more]), rng)
    assert point is not None
    assert point.vector[:12] == (16, 2, 4, 2, 3, 1, 2, 16, 32, 4, 3, 7)
    assert point.vector[12] == 0
    assert point.vector[13] in range(4)


def test_nothing_fits_where_loops_are_split_otherwise(rng: np.random.Generator) -> None:
    assert fit(finding(), KnobSpace([(Tile(64, 4), Tile(64, 4))]), rng) is None
    assert fit(finding(), KnobSpace([(UNROLL, Undrawn())]), rng) is None


def test_without_loops_to_split_all_knobs_must_be_alike(rng: np.random.Generator) -> None:
    plain = TransferRecord("0", (UNROLL, Undrawn()), (2, 5), 1.0)
    assert fit(plain, KnobSpace([(UNROLL, Undrawn())]), rng) == Point(0, (2, 5))
    assert fit(plain, KnobSpace([(UNROLL, UNROLL)]), rng) is None


def test_of_as_many_sketches_the_same_is_taken(rng: np.random.Generator) -> None:
    second = TransferRecord("1", SMALL, GOOD, 1.0)
    alike = fit(second, KnobSpace([LARGE, LARGE]), rng)
    fewer = fit(second, KnobSpace([LARGE]), rng)
    other = fit(second, KnobSpace([LARGE, (UNROLL,)]), rng)
    assert [point and point.sketch for point in (alike, fewer, other)] == [1, 0, 0]


def test_relatives_of_another_family_are_not_asked(rng: np.random.Generator) -> None:
    transfer_pool = TransferPool()
    transfer_pool.tell("matmul", "a", [finding()])
    assert transfer_pool.ask("conv2d", "b", KnobSpace([LARGE]), rng) == []
    assert len(transfer_pool.ask("matmul", "b", KnobSpace([LARGE]), rng)) == 1


def test_a_tasks_own_findings_of_this_run_are_no_news_to_it(rng: np.random.Generator) -> None:
    transfer_pool = TransferPool()
    transfer_pool.tell("matmul", "a", [finding()])
    assert transfer_pool.ask("matmul", "a", KnobSpace([SMALL]), rng) == []


def test_what_an_earlier_run_found_for_the_task_comes_first(rng: np.random.Generator) -> None:
    transfer_pool = TransferPool()
    other = (8, 1, 4, 2, 2, 1, 2, 16, 32, 4, 3, 7)
    transfer_pool.tell("matmul", "b", [finding(0.5, other)])
    transfer_pool.remember("matmul", "a", [finding(9.0)])
    seeds = transfer_pool.ask("matmul", "a", KnobSpace([SMALL]), rng)
    assert [(seed.point.vector, seed.is_own) for seed in seeds] == [(GOOD, True), (other, False)]


def test_the_nearest_relative_is_asked_first_and_all_of_them_before_any_second_best(
    rng: np.random.Generator,
) -> None:
    def found(knobs: tuple[Knob, ...], *choices: int) -> list[TransferRecord]:
        vectors = [KnobSpace([knobs]).draw(rng).vector[:10] for _ in choices]
        return [
            TransferRecord("0", knobs, (*vector, choice, 0), 1.0)
            for vector, choice in zip(vectors, choices, strict=True)
        ]

    transfer_pool = TransferPool()
    transfer_pool.tell("matmul", "far", found(sketch(2048, 2048), 0, 1))
    transfer_pool.tell("matmul", "near", found(sketch(128, 64), 2, 3))
    seeds = transfer_pool.ask("matmul", "mine", KnobSpace([SMALL]), rng)
    assert [seed.point.vector[10] for seed in seeds] == [2, 0, 3, 1]


@pytest.mark.parametrize("is_here", [True, False])
def test_an_equal_task_may_have_records_of_another_machine(
    rng: np.random.Generator, is_here: bool
) -> None:
    pool = TransferPool()
    pool.remember("matmul", "a", [TransferRecord("0", SMALL, GOOD, 1.0, is_here=is_here)])
    (seed,) = pool.ask("matmul", "b", KnobSpace([SMALL]), rng)
    assert seed.is_of_equal_task == is_here


def test_what_a_new_task_found_is_for_its_equals_only(rng: np.random.Generator) -> None:
    pool = TransferPool()
    pool.tell("matmul", "a", [finding()], is_new=True)
    assert [seed.point.vector for seed in pool.ask("matmul", "b", KnobSpace([SMALL]), rng)] == [
        GOOD
    ]
    assert pool.ask("matmul", "b", KnobSpace([LARGE]), rng) == []
    pool.tell("matmul", "a", [finding()])
    assert len(pool.ask("matmul", "b", KnobSpace([LARGE]), rng)) == 1


def test_the_best_of_a_few_trials_of_an_earlier_run_is_for_equals_only(
    rng: np.random.Generator,
) -> None:
    pool, later = TransferPool(), (8, 1, *GOOD[2:])
    small, large = KnobSpace([SMALL]), KnobSpace([LARGE])
    pool.remember("matmul", "a", [dataclasses.replace(finding(), is_of_few=True)])
    assert pool.ask("matmul", "b", large, rng) == []
    (equal,) = pool.ask("matmul", "b", small, rng)
    (own,) = pool.ask("matmul", "a", small, rng)
    assert (equal.point.vector, own.point.vector) == (GOOD, GOOD)
    assert (equal.is_of_equal_task, own.is_own, own.is_of_few) == (True, True, True)
    # Also after the first few trials of this run; after more, they take its place.
    pool.tell("matmul", "a", [finding()], is_new=True)
    assert pool.ask("matmul", "b", large, rng) == []
    pool.tell("matmul", "a", [finding(1.0, later)])
    assert len(pool.ask("matmul", "b", large, rng)) == 1
    (seed,) = pool.ask("matmul", "b", small, rng)
    assert seed.point.vector == later


def test_what_others_found_for_a_task_of_few_trials_stays_for_all(
    rng: np.random.Generator,
) -> None:
    pool, there = TransferPool(), (8, 1, *GOOD[2:])
    pool.remember("matmul", "a", [dataclasses.replace(finding(9.0, there), is_here=False)])
    pool.remember("matmul", "a", [dataclasses.replace(finding(), is_of_few=True)])
    (seed,) = pool.ask("matmul", "b", KnobSpace([LARGE]), rng)
    assert seed.point == fit(finding(9.0, there), KnobSpace([LARGE]), rng)
    seeds = pool.ask("matmul", "b", KnobSpace([SMALL]), rng)
    assert {seed.point.vector for seed in seeds} == {GOOD, there}


def test_new_relatives_come_in_the_order_in_which_they_were_found(
    rng: np.random.Generator,
) -> None:
    """Not by the hashes of their names, which differ from process to process."""
    names = [f"task {number}" for number in range(12)]
    for order in (names, names[::-1]):
        pool = TransferPool()
        vectors = [KnobSpace([SMALL]).draw(rng).vector for _ in order]
        for name, vector in zip(order, vectors, strict=True):
            pool.tell("matmul", name, [finding(1.0, vector)], is_new=True)
        seeds = pool.ask("matmul", "mine", KnobSpace([SMALL]), rng)
        assert [seed.point.vector for seed in seeds] == list(dict.fromkeys(vectors))


def test_only_the_best_of_a_task_travel(rng: np.random.Generator) -> None:
    transfer_pool = TransferPool()
    space = KnobSpace([SMALL])
    transfer_pool.tell("matmul", "a", [finding(1.0, space.draw(rng).vector) for _ in range(20)])
    assert 1 <= len(transfer_pool.ask("matmul", "b", KnobSpace([LARGE]), rng)) <= KEPT_PER_TASK


def test_seeds_are_different(rng: np.random.Generator) -> None:
    transfer_pool = TransferPool()
    transfer_pool.tell("matmul", "a", [finding(), finding()])
    transfer_pool.tell("matmul", "b", [finding()])
    assert len(transfer_pool.ask("matmul", "c", KnobSpace([LARGE]), rng)) == 1


def test_hints_come_after_records_of_this_machine_that_are_as_near(
    rng: np.random.Generator,
) -> None:
    hinted, earlier = (2, 4, 4, 2, *GOOD[4:]), (8, 1, 4, 2, *GOOD[4:])
    pool = TransferPool()
    pool.hint("family", "hinted", [finding(1.0, hinted)])
    pool.remember("family", "earlier", [finding(2.0, earlier)])
    pool.tell("family", "now", [finding(3.0)])
    seeds = pool.ask("family", "mine", KnobSpace([SMALL]), rng)
    assert [seed.point.vector for seed in seeds] == [earlier, GOOD, hinted]


def test_a_hint_of_few_trials_is_for_equal_tasks_only(rng: np.random.Generator) -> None:
    pool = TransferPool()
    pool.hint("matmul", "a", [dataclasses.replace(finding(), is_of_few=True)])
    assert pool.ask("matmul", "b", KnobSpace([LARGE]), rng) == []
    assert len(pool.ask("matmul", "b", KnobSpace([SMALL]), rng)) == 1


def test_a_hint_for_the_same_task_is_first_but_not_its_own(rng: np.random.Generator) -> None:
    hinted = (2, 4, 4, 2, *GOOD[4:])
    pool = TransferPool()
    pool.tell("family", "now", [finding()])
    pool.hint("family", "mine", [finding(1.0, hinted)])
    seeds = pool.ask("family", "mine", KnobSpace([SMALL]), rng)
    assert [(seed.point.vector, seed.is_own) for seed in seeds] == [(hinted, False), (GOOD, False)]
