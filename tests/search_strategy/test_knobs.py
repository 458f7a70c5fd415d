"""The space of decisions: draws are valid, variations stay valid, encodings tell points apart."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.search_strategy.knobs import (
    OPEN,
    Choice,
    KnobSpace,
    Limit,
    Point,
    Tile,
    Undrawn,
    divisors,
    prime_factors,
)

tiles = st.builds(
    Tile,
    extent=st.integers(1, 4096),
    n_parts=st.integers(2, 5),
    max_innermost=st.sampled_from([-1, 1, 16, 64]),
)
seeds = st.integers(0, 2**32 - 1)


def is_valid(tile: Tile, parts: tuple[int, ...]) -> bool:
    within = tile.max_innermost < 0 or parts[-1] <= tile.max_innermost
    return len(parts) == tile.n_parts and math.prod(parts) == tile.extent and within


@given(tiles, seeds)
def test_every_split_that_is_drawn_or_varied_is_perfect_and_within_bounds(
    tile: Tile, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = tile.draw(rng)
    assert is_valid(tile, parts)
    for _ in range(8):
        parts = tile.vary(parts, rng)
        assert is_valid(tile, parts)


def test_a_variation_moves_one_factor_between_two_parts() -> None:
    rng = np.random.default_rng(1)
    tile = Tile(64, 4)
    parts = (4, 4, 2, 2)
    for _ in range(50):
        other = tile.vary(parts, rng)
        assert sum(a != b for a, b in zip(parts, other, strict=True)) == 2


def test_variations_reach_the_whole_space() -> None:
    rng = np.random.default_rng(2)
    tile = Tile(12, 3, 4)
    seen, parts = set(), (12, 1, 1)
    for _ in range(3000):
        parts = tile.vary(parts, rng)
        seen.add(parts)
    every = {
        (a, b, 12 // a // b) for a in divisors(12) for b in divisors(12 // a) if 12 // a // b <= 4
    }
    assert seen == every


@pytest.mark.parametrize(("tile", "only"), [(Tile(1, 4), (1, 1, 1, 1)), (Tile(7, 2, 1), (7, 1))])
def test_a_split_without_alternative_stays(tile: Tile, only: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    assert tile.draw(rng) == only
    assert tile.vary(only, rng) == only


def test_draws_of_a_split_are_spread_over_its_parts() -> None:
    rng = np.random.default_rng(4)
    draws = np.array([Tile(64, 4).draw(rng) for _ in range(2000)])
    # Each of the six factors goes to each of four parts alike: 1.5 of them on average.
    assert np.log2(draws).mean(axis=0) == pytest.approx([1.5] * 4, abs=0.1)


def test_a_choice_is_drawn_by_weight_and_varied_to_another() -> None:
    rng = np.random.default_rng(5)
    choice = Choice((0.1, 0.6, 0.3))
    counts = np.bincount([choice.draw(rng)[0] for _ in range(3000)], minlength=3)
    assert counts / 3000 == pytest.approx([0.1, 0.6, 0.3], abs=0.03)
    for index in range(3):
        others = {choice.vary((index,), rng)[0] for _ in range(50)}
        assert others == {0, 1, 2} - {index}
    assert Choice((1.0,)).vary((0,), rng) == (0,)


def test_what_only_the_compiler_can_draw_is_left_open() -> None:
    rng = np.random.default_rng(6)
    assert Undrawn(2).draw(rng) == (OPEN, OPEN)
    assert Undrawn().vary((5,), rng) == (OPEN,)


@pytest.fixture
def space() -> KnobSpace:
    return KnobSpace(
        [
            [Tile(64, 4, 64), Tile(48, 4, 64), Tile(32, 2, 64), Choice((0.5, 0.5)), Undrawn()],
            [Tile(64, 4, 64), Choice((0.25,) * 4)],
        ]
    )


def test_a_location_is_varied_to_those_that_the_compiler_has_drawn() -> None:
    rng = np.random.default_rng(5)
    knobs = (Undrawn(), Undrawn(2))
    space = KnobSpace([knobs, knobs])
    point = Point(0, (1, 3, 4))
    space.note_drawn(point)
    assert {space.vary(point, rng).vector[0] for _ in range(50)} <= {1, OPEN}
    # A sketch with the same knobs has the same locations.
    for location in (1, -1, OPEN, 5):
        space.note_drawn(Point(1, (location, 3, 4)))
    seen = {space.vary(point, rng).vector for _ in range(200)}
    assert {vector[0] for vector in seen} == {1, -1, 5}
    assert {vector[1:] for vector in seen} == {(3, 4), (OPEN, OPEN)}


def test_points_are_as_long_as_their_sketch(space: KnobSpace) -> None:
    rng = np.random.default_rng(7)
    lengths = {(point.sketch, len(point.vector)) for point in (space.draw(rng) for _ in range(99))}
    assert lengths == {(0, 12), (1, 5)}


def test_a_variation_of_a_point_changes_few_knobs(space: KnobSpace) -> None:
    rng = np.random.default_rng(8)
    distances = [
        space.distance(p, space.vary(p, rng)) for p in (space.draw(rng) for _ in range(400))
    ]
    assert max(distances) <= 5
    assert np.mean([d <= 1 for d in distances]) > 0.5


def test_a_cross_takes_every_knob_from_one_of_two(space: KnobSpace) -> None:
    rng = np.random.default_rng(9)
    one = Point(0, (64, 1, 1, 1, 48, 1, 1, 1, 32, 1, 0, 3))
    other = Point(0, (1, 1, 1, 64, 1, 1, 1, 48, 1, 32, 1, 5))
    seen = set()
    for _ in range(100):
        child = space.cross(one, other, rng)
        assert all(
            child.vector[a:b] in (one.vector[a:b], other.vector[a:b])
            for a, b in ((0, 4), (4, 8), (8, 10), (10, 11), (11, 12))
        )
        seen.add(child.vector)
    assert len(seen) > 20
    elsewhere = Point(1, (64, 1, 1, 1, 2))
    assert space.cross(one, elsewhere, rng) == one


def test_distance_counts_knobs_not_numbers(space: KnobSpace) -> None:
    one = Point(0, (64, 1, 1, 1, 48, 1, 1, 1, 32, 1, 0, 3))
    assert space.distance(one, one) == 0
    assert space.distance(one, Point(0, (8, 8, 1, 1, 48, 1, 1, 1, 32, 1, 0, 3))) == 1
    assert space.distance(one, Point(1, (64, 1, 1, 1, 0))) == 6


@pytest.fixture
def alike() -> KnobSpace:
    """Two sketches with the same knobs and one with others."""
    knobs = (Tile(64, 3), Choice((0.5, 0.5)), Undrawn())
    return KnobSpace([knobs, (Tile(64, 2),), knobs])


def test_variations_change_to_a_sketch_with_the_same_knobs(alike: KnobSpace) -> None:
    rng = np.random.default_rng(0)
    start = Point(0, (4, 4, 4, 1, 7))
    found = [alike.vary(start, rng) for _ in range(300)]
    assert {point.sketch for point in found} == {0, 2}
    assert any(point == Point(2, start.vector) for point in found)
    lonely = [alike.vary(Point(1, (8, 8)), rng) for _ in range(50)]
    assert {point.sketch for point in lonely} == {1}


def test_a_cross_of_sketches_with_the_same_knobs_mixes_them(alike: KnobSpace) -> None:
    rng = np.random.default_rng(0)
    one, other = Point(0, (64, 1, 1, 0, 1)), Point(2, (1, 1, 64, 1, 5))
    found = {alike.cross(one, other, rng) for _ in range(200)}
    assert len(found) == 16  # two sketches, three knobs
    assert alike.cross(one, Point(1, (8, 8)), rng) == one


def test_another_sketch_is_one_difference_if_its_knobs_are_the_same(alike: KnobSpace) -> None:
    one = Point(0, (64, 1, 1, 0, 1))
    assert alike.distance(one, Point(2, one.vector)) == 1
    assert alike.distance(one, Point(2, (1, 1, 64, 0, 1))) == 2
    assert alike.distance(one, Point(1, (8, 8))) == 4


def test_encodings_are_logs_and_how_much_lies_within_each_level(space: KnobSpace) -> None:
    point = Point(0, (2, 4, 8, 1, 3, 2, 8, 1, 16, 2, 1, 3))
    (row,) = space.encode([point])
    assert row[0] == 0
    logs = np.log2([2, 4, 8, 1, 3, 2, 8, 1, 16, 2])
    assert row[1:13] == pytest.approx([*logs, 1, 3])
    # Splits into two: within level 1. Splits into four: within levels 1, 2 and 3.
    within = np.log2([2, 4 * 8 * 1 * 2 * 8 * 1, 8 * 8, 1])
    assert row[13:] == pytest.approx(within)


def test_encodings_of_all_points_fit_together_and_differ(space: KnobSpace) -> None:
    rng = np.random.default_rng(10)
    points = list({space.draw(rng): None for _ in range(200)})
    rows = space.encode(points)
    assert rows.shape == (len(points), 17)
    assert np.isfinite(rows).all()
    assert len(np.unique(rows, axis=0)) == len(points)
    assert space.encode([]).shape == (0, 17)


def test_a_space_without_knobs_has_one_point() -> None:
    rng = np.random.default_rng(11)
    space = KnobSpace([[]])
    point = space.draw(rng)
    assert point == Point(0, ())
    assert space.vary(point, rng) == point
    assert space.encode([point]).shape == (1, 1)


@given(st.integers(1, 10**6))
def test_prime_factors_and_divisors(n: int) -> None:
    assert math.prod(prime_factors(n)) == n
    assert all(len(divisors(p)) == 2 for p in prime_factors(n))
    assert all(n % d == 0 for d in divisors(n))
    assert list(divisors(n)) == sorted(set(divisors(n)))


def test_all_points_of_a_small_space_are_what_draws_find() -> None:
    knobs = (Tile(12, 2, 4), Choice((1.0, 1.0, 1.0)))
    space = KnobSpace([knobs, (*knobs, Undrawn()), ()])
    points = space.all_points(40)
    assert len(points) == len(set(points)) == 4 * 3 + 4 * 3 + 1
    rng = np.random.default_rng(0)
    assert {space.draw(rng) for _ in range(2000)} == set(points)
    assert space.all_points(24) == []


def test_a_large_space_is_not_listed() -> None:
    space = KnobSpace([(Tile(2**20, 5), Tile(2**20, 5), Tile(2**20, 5))])
    assert space.all_points(256) == []


@given(tiles)
def test_each_decision_of_a_tile_is_listed_once(tile: Tile) -> None:
    listed = list(itertools.islice(tile.decisions(), 500))
    assert len(listed) == len(set(listed))
    assert all(is_valid(tile, parts) for parts in listed)


def test_limits_hold_for_listed_points() -> None:
    few = Limit((((((0,),)),),), 1, 2)  # the first part of the tile
    points = KnobSpace([(Tile(8, 2),)], limits=[[few]]).all_points(10)
    assert [point.vector for point in points] == [(1, 8), (2, 4)]
