"""Points of the space of knobs become the schedules that they describe, and back."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive.search_strategy.knobs import OPEN, Choice, Point, Tile, Undrawn
from tvm_adaptive.search_strategy.schedules import key_of, knobs_of
from tvm_adaptive.search_strategy.sketches import Sketches


@pytest.fixture(scope="module")
def opened(make_context):
    context = make_context("C2D", num_threads=2)
    return Sketches(context, context.generate_design_space()), context


def test_the_knobs_are_the_decisions_of_the_sketch(opened):
    sketches, _ = opened
    assert len(sketches.space.sketches) > 1
    for knobs in sketches.space.sketches:
        kinds = [type(knob) for knob in knobs]
        assert kinds.count(Tile) == 7
        assert kinds.count(Choice) == 1
        assert kinds.count(Undrawn) == 1
        four = [knob for knob in knobs if isinstance(knob, Tile) and knob.n_parts == 4]
        assert [knob.extent for knob in four] == [1, 112, 112, 64]
        assert all(knob.max_innermost == 64 for knob in four)


def test_a_schedule_has_the_decisions_of_its_point(opened):
    sketches, _ = opened
    rng = np.random.default_rng(1)
    points = [sketches.space.draw(rng) for _ in range(12)]
    replayed = sketches.replay(points, rng)
    assert len(replayed) == 12
    for asked, (got, schedule) in zip(points, replayed, strict=True):
        assert got.sketch == asked.sketch
        assert OPEN not in got.vector[:-1]
        # All but the last, which the compiler drew.
        assert got.vector[:-1] == asked.vector[:-1]
        n_knobs = len(sketches.space.sketches[got.sketch])
        flat = [value for part in knobs_of(schedule)[:n_knobs] for value in part]
        assert tuple(flat) == got.vector


def test_a_replayed_point_gives_the_same_program_again(opened):
    sketches, _ = opened
    rng = np.random.default_rng(2)
    first = sketches.replay([sketches.space.draw(rng) for _ in range(6)], rng)
    again = sketches.replay([point for point, _ in first], np.random.default_rng(3))
    for (point, schedule), (same_point, same) in zip(first, again, strict=True):
        assert same_point == point
        assert key_of(same) == key_of(schedule)


def test_points_of_schedules_from_elsewhere_are_found(opened):
    sketches, _ = opened
    rng = np.random.default_rng(4)
    for point, schedule in sketches.replay([sketches.space.draw(rng) for _ in range(8)], rng):
        # As a database gives it back: through JSON, on another schedule.
        copy = Schedule(sketches._mods[0])
        Trace.apply_json_to_schedule(schedule.trace.as_json(), copy)
        assert sketches.point_of(copy) == point


def test_a_schedule_of_another_sketch_has_no_point(opened):
    sketches, context = opened
    assert sketches.point_of(Schedule(context.mod)) is None


def test_impossible_decisions_give_nothing_or_a_program_with_others(opened):
    sketches, _ = opened
    rng = np.random.default_rng(5)
    point = sketches.space.draw(rng)
    too_many = Point(point.sketch, (999, 7, 7, 7, *point.vector[4:]))
    no_value = Point(point.sketch, (*point.vector[:-2], 99, OPEN))
    corrected, refused = sketches.replay([too_many, no_value], rng)
    assert corrected is not None
    assert corrected[0] != too_many
    assert refused is None


def test_the_search_finds_what_the_database_knew(make_task):
    """A second search of the same task starts from the elites of the first."""
    database = ms.database.MemoryDatabase()
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    first = make_task(AdaptiveSearch(n_samples=12, n_initial=0), model, database=database)
    for _ in range(2):
        first.round()
    first.strategy.post_tuning()
    second = make_task(AdaptiveSearch(n_samples=12, n_initial=0), model, database=database)
    proposer = second.proposer
    assert len(proposer._elites) == 16
    assert len(proposer.excluded) == 32
    seconds = [sec for sec, _ in proposer._elites]
    assert seconds == sorted(seconds)
    before = set(proposer.excluded)
    batch = second.round()
    assert batch
    assert not {key_of(candidate.sch) for candidate in batch} & before


def test_a_point_with_an_open_decision_may_be_tried_again(make_task):
    task = make_task(AdaptiveSearch(n_samples=12), RFEICostModel(n_trees=8, seed=1, n_jobs=1))
    space = task.proposer.candidates.space
    closed = space.draw(np.random.default_rng(6))
    (key,) = task.proposer.candidates.add([closed])
    assert task.proposer.candidates.pool.knows_key(key)
    assert task.proposer.candidates.pool.knows(closed)
    # GMM has no such knob: one in place of its last.
    still_open = Point(closed.sketch, (*closed.vector[:-1], OPEN))
    task.proposer.candidates.add([still_open])
    assert not task.proposer.candidates.pool.knows(still_open)
