"""Seeds of the family in the adaptive search, on two sizes of one matrix product."""

import dataclasses

import numpy as np
import pytest

from tests.journals import MemoryJournal
from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive._tvm import python_side
from tvm_adaptive.search_strategy.knobs import Tile
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.search_strategy.transfer import TransferPool, TransferRecord


@pytest.fixture
def transfer_pool():
    return TransferPool()


@pytest.fixture
def make(make_task, transfer_pool):
    def make(shape, journal=None, **options):
        model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
        strategy = AdaptiveSearch(
            n_samples=12, transfer_pool=transfer_pool, journal=journal, **options
        )
        return make_task(strategy, model, shape=shape)

    return make


def inner_parts(proposer, point):
    """Return the parts of all splits but the outermost ones."""
    knobs = proposer.candidates.space.sketches[point.sketch]
    parts, start = [], 0
    for knob in knobs:
        if isinstance(knob, Tile):
            parts.append(point.vector[start + 1 : start + knob.width])
        start += knob.width
    return parts


def test_a_task_begins_with_what_its_relative_found(make):
    first, journal = make(0), MemoryJournal()
    for _ in range(2):
        first.round()
    best = first.proposer._elites[0][1]
    second = make(2, journal)  # 512 x 512 instead of 128 x 128
    second.strategy.generate_measure_candidates()
    (event,) = journal.of("round")
    assert 1 <= event["n_seeded"] <= 8
    sent = list(second.proposer.candidates.sent.values())
    # Larger extents: all inner parts fit, and the outermost take the rest.
    assert inner_parts(first.proposer, best) in [inner_parts(second.proposer, p) for p in sent]


def test_without_relatives_a_task_may_begin_at_random(make_task, make):
    make(0).round()
    journal = MemoryJournal()
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    strategy = AdaptiveSearch(n_samples=12, n_analytical=0, journal=journal)
    alone = make_task(strategy, model, shape=2)
    alone.round()
    (event,) = journal.of("round")
    assert (event["n_seeded"], event["n_analytical"]) == (0, 0)
    assert event["n_random"] == event["n_candidates"]


@pytest.fixture
def donor(make, transfer_pool):
    """A task whose best are those of an earlier run, for one of the same extents."""
    donor = make(0)
    for _ in range(2):
        donor.round()
    family = donor.proposer.family
    transfer_pool.remember(family, "gmm", donor.proposer.elite_records())
    transfer_pool.tell(family, "gmm", [])
    return donor


def test_a_known_task_begins_with_its_two_best_and_nothing_else(make, donor):
    journal = MemoryJournal()
    later = make(0, journal)
    python_side(later.strategy).limit_next_batch(4)
    batch = later.round()
    (event,) = journal.of("round")
    assert (event["n_candidates"], event["n_seeded"], event["reason"]) == (2, 2, "recalled")
    points = [point for _, point in donor.proposer._elites[:2]]
    again = donor.proposer.candidates.sketches.replay(points, donor.proposer.rng)
    known = {key_of(schedule) for _, schedule in again}
    assert {key_of(candidate.sch) for candidate in batch} == known
    second = later.round()
    assert len(second) == 14
    assert not {key_of(candidate.sch) for candidate in second} & known


@pytest.mark.parametrize("doubt", [{"is_here": False}, {"is_of_few": True}])
def test_records_of_another_machine_or_few_trials_are_followed_by_what_suits_the_processor(
    make, donor, transfer_pool, doubt
):
    records = [dataclasses.replace(each, **doubt) for each in donor.proposer.elite_records()]
    transfer_pool.remember(donor.proposer.family, "gmm", records)  # before those of the fixture
    journal = MemoryJournal()
    later = make(0, journal)
    python_side(later.strategy).limit_next_batch(4)
    for _ in range(2):
        later.round()
    first, second = journal.of("round")
    assert (first["n_seeded"], first["n_analytical"], first["reason"]) == (2, 0, "recalled")
    assert second["n_analytical"] > 0


@pytest.mark.slow
def test_no_seed_is_measured_twice(make):
    first, second = make(0), make(2)
    seen = set()
    for _ in range(4):
        first.round()
        keys = {key_of(candidate.sch) for candidate in second.round()}
        assert not keys & seen
        seen |= keys


def test_seeds_that_lead_to_no_program_are_dropped(make, transfer_pool, monkeypatch):
    journal = MemoryJournal()
    task = make(0, journal)
    space, family = task.proposer.candidates.space, task.proposer.family
    knobs = space.sketches[0]
    ones = tuple(1 for knob in knobs for _ in range(knob.width))
    transfer_pool.tell(family, "other", [TransferRecord("0", knobs, ones, 1.0)])
    (seed,) = transfer_pool.ask(family, "gmm", space, np.random.default_rng(0))
    sketches, asked = task.proposer.candidates.sketches, []
    replay = sketches.replay

    def without_it(points, rng):
        asked.extend(points)
        found = replay(points, rng)
        pairs = zip(points, found, strict=True)
        return [None if point == seed.point else program for point, program in pairs]

    monkeypatch.setattr(sketches, "replay", without_it)
    for _ in range(2):
        assert len(task.round()) == 16
    assert [event["n_seeded"] for event in journal.of("round")] == [0, 0]
    assert asked.count(seed.point) == 1


def test_a_seed_that_the_compiler_corrects_is_made_once_and_stays_a_seed(make, monkeypatch):
    donor = make(0)
    for _ in range(4):  # among the best is one whose last knob is not its first choice
        donor.round()
    proposer = make(2).proposer
    sketches, asked = proposer.candidates.sketches, []
    replay = sketches.replay

    def corrected(points, rng):  # the last knob: as TVM does with a location that is none
        asked.extend(points)
        closed = [dataclasses.replace(p, vector=(*p.vector[:-1], 0)) for p in points]
        return replay(closed, rng)

    monkeypatch.setattr(sketches, "replay", corrected)
    proposer._add_seeds()
    first, n_asked = list(proposer._seeds), len(asked)
    assert first
    assert any(point.vector[-1] for point in asked)
    proposer._add_seeds()
    assert (proposer._seeds, len(asked)) == (first, n_asked)


@pytest.mark.usefixtures("donor")
def test_seeds_of_one_program_are_sent_once(make, monkeypatch):
    later = make(0)
    sketches = later.proposer.candidates.sketches
    replay = sketches.replay
    monkeypatch.setattr(
        sketches, "replay", lambda points, rng: replay(points[:1] * len(points), rng)
    )
    assert len(later.round()) == 1


def test_what_a_task_found_is_passed_to_others(make, transfer_pool):
    task = make(0)
    task.round()
    task.round()
    found = transfer_pool._now[task.proposer.family]["gmm"]
    assert [finding.seconds for finding in found] == [sec for sec, _ in task.proposer._elites[:4]]
    assert task.proposer.family


def test_a_search_promises_what_its_model_expects(make):
    task = make(0)
    assert python_side(task.strategy).promise() is None
    for _ in range(4):
        task.round()
    promise = python_side(task.strategy).promise()
    assert 0.0 <= promise.expected_drop < 1.0
    assert -1.0 <= promise.accuracy <= 1.0


def test_evolution_promises_nothing(make):
    task = make(0, proposer="evolution", population_size=64, init_min_unmeasured=8)
    task.round()
    assert python_side(task.strategy).promise() is None


def test_without_relatives_a_task_begins_with_what_suits_the_processor(make_task):
    journal = MemoryJournal()
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(n_samples=12, journal=journal), model, batch=4)
    for _ in range(4):
        task.round()
    first, *later = journal.of("round")
    assert (first["n_candidates"], first["n_analytical"], first["n_random"]) == (4, 4, 0)
    # The others of the eight come before what a model of few trials prefers.
    assert [(each["n_analytical"], each["n_random"]) for each in later[:2]] == [(2, 2), (2, 2)]
    assert later[2]["n_analytical"] == 0


def test_a_task_that_goes_on_has_the_other_candidates_for_the_processor(make_task):
    journal, database = MemoryJournal(), None
    # A resumed run has the model that the first attempt has taught.
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    keys = []
    for _ in range(2):
        strategy = AdaptiveSearch(n_samples=12, journal=journal)
        task = make_task(strategy, model, batch=4, database=database)
        keys += [key_of(each.sch) for each in task.round()]
        database = task.database
    assert [each["n_analytical"] for each in journal.of("round")] == [4, 2]
    assert len(set(keys)) == 8


def test_relatives_and_the_processor_share_the_first_batch(make):
    make(0).round()
    journal = MemoryJournal()
    make(2, journal).round()
    (event,) = journal.of("round")
    assert event["n_seeded"] >= 1
    assert event["n_analytical"] >= 1
    assert event["n_seeded"] + event["n_analytical"] + event["n_random"] <= event["n_candidates"]
