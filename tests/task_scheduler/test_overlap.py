"""Where the runner does not wait for its results, neither does the scheduler."""

from __future__ import annotations

import pytest

from tvm_adaptive import AdaptiveScheduler, AdaptiveSearch
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Decision

SMALL = {"population_size": 16, "genetic_num_iters": 1, "init_min_unmeasured": 4}


@pytest.fixture
def late(world):
    world.is_late = True
    return world


def scheduler_in(world, policy, **options):
    return AdaptiveScheduler(policy, journal=world.journal, clock=world.clock, **options)


def log_of(world):
    return [f"{what} {size}" for what, size in world.runner._inst.log]


def test_the_next_task_is_built_while_the_last_is_measured(late, turns):
    policy = turns()
    scheduler = scheduler_in(late, policy)
    late.tune(scheduler, trials=40)
    assert log_of(late) == [
        *("run 16", "run 32", "result 16", "run 64", "result 32", "run 16", "result 64"),
        *("run 32", "result 16", "result 32"),
    ]
    assert [arm.n_trials for arm in scheduler.arms] == [16, 16, 8]
    assert [arm.best_ms for arm in scheduler.arms] == pytest.approx([1.0, 2.0, 8.0])
    assert len(late.database) == 40
    # The one that is being measured is out of the choice.
    assert [[arm.finished for arm in arms] for arms in policy.seen[:3]] == [
        [False, False, False],
        [True, False, False],
        [False, True, False],
    ]


def test_every_slot_is_closed_with_its_results(late, turns):
    late.tune(scheduler_in(late, turns()), trials=40)
    ends = late.journal.of("slot-end")
    assert [(end["task"], end["n_trials"]) for end in ends] == [
        (f"matmul{size}", 8) for size in (16, 32, 64, 16, 32)
    ]
    assert ends[-1]["weighted_ms"] == pytest.approx(1.0 + 2 * 2.0 + 3 * 8.0)


def test_every_second_is_charged_once(late, turns):
    scheduler = scheduler_in(late, turns())
    start_sec = late.clock.now
    late.tune(scheduler, trials=40)
    assert sum(arm.spent_sec for arm in scheduler.arms) == late.clock.now - start_sec == 40.0


def test_a_single_task_waits_for_its_results(late, turns):
    late.tune(scheduler_in(late, turns()), sizes=(16,), trials=24)
    assert log_of(late) == ["run 16", "result 16"] * 3


def test_within_a_slot_of_several_rounds_results_are_waited_for(late, turns):
    late.tune(scheduler_in(late, turns(), slot_rounds=2), sizes=(16, 32), trials=32)
    assert log_of(late) == [
        *("run 16", "result 16", "run 16", "run 32", "result 16", "result 32", "run 32"),
        "result 32",
    ]


def test_a_slot_ahead_is_played_while_the_others_are_measured(late, turns):
    late.tune(scheduler_in(late, turns(), n_lanes=2), sizes=(16, 32), trials=32)
    assert log_of(late) == [
        *("run 16", "run 32", "result 16", "run 16", "result 32", "run 32"),
        *("result 16", "result 32"),
    ]


def test_the_global_limit_is_kept(late, turns):
    scheduler = scheduler_in(late, turns(n_trials=3))
    late.tune(scheduler, strategy=AdaptiveSearch(**SMALL), trials=10)
    assert late.batches == [3, 3, 3, 1]
    assert sum(arm.n_trials for arm in scheduler.arms) == len(late.database) == 10


def test_if_nothing_else_is_left_the_policy_is_asked_again(late, script):
    decisions = [0, Decision(None, "nothing-else"), 0, Decision(None, "done")]
    scheduler = scheduler_in(late, script(decisions))
    late.tune(scheduler)
    assert log_of(late) == ["run 16", "result 16"] * 2
    assert [arm.n_trials for arm in scheduler.arms] == [16, 0, 0]


def test_a_result_that_cannot_be_taken_in_ends_its_task_alone(late, turns):
    late.latency_ms = lambda size, number: ValueError("no result") if size == 32 else size / number
    scheduler = scheduler_in(late, turns())
    late.tune(scheduler, trials=56)
    assert [arm.finished for arm in scheduler.arms] == [False, True, False]
    assert [arm.n_trials for arm in scheduler.arms] == [24, 0, 24]


FOUR = (16, 32, 64, 128)


def test_as_many_batches_wait_as_there_are_devices(late, turns):
    policy = turns()
    scheduler = scheduler_in(late, policy, max_waiting=2)
    late.tune(scheduler, sizes=FOUR, trials=48)
    assert log_of(late)[:9] == [
        *("run 16", "run 32", "run 64", "result 16", "run 128", "result 32", "run 16"),
        *("result 64", "run 32"),
    ]
    assert [arm.n_trials for arm in scheduler.arms] == [16, 16, 8, 8]
    assert len(late.database) == 48
    # No two batches of one task are under way.
    assert [[k for k, arm in enumerate(arms) if arm.finished] for arms in policy.seen[:5]] == [
        *([], [0], [0, 1], [1, 2], [2, 3]),
    ]


@pytest.mark.parametrize("max_waiting", [2, 3, 8])
def test_with_many_under_way_slots_and_seconds_are_right(late, turns, max_waiting):
    scheduler = scheduler_in(late, turns(), max_waiting=max_waiting)
    start_sec = late.clock.now
    late.tune(scheduler, sizes=FOUR, trials=72)
    assert sum(arm.spent_sec for arm in scheduler.arms) == late.clock.now - start_sec == 72.0
    ends = late.journal.of("slot-end")
    assert [end["n_trials"] for end in ends] == [8] * 9
    assert sum(end["seconds"] for end in ends) == 72.0
    assert len(late.journal.of("slot")) == 9
    assert ends[-1]["weighted_ms"] == pytest.approx(
        sum((1.0 + k) * arm.best_ms for k, arm in enumerate(scheduler.arms))
    )


def test_when_every_task_waits_the_oldest_is_taken_in(late, turns):
    scheduler = scheduler_in(late, turns(), max_waiting=8)
    late.tune(scheduler, sizes=(16, 32), trials=48)
    assert log_of(late) == [
        *("run 16", "run 32", "result 16", "run 16", "result 32", "run 32"),
        *("result 16", "run 16", "result 32", "run 32", "result 16", "result 32"),
    ]


@pytest.mark.parametrize(
    ("policy", "max_waiting"),
    [
        ("default", 3),
        ("paper", 3),
        ("round-robin", 3),
        ("random", 1),
        *(
            pytest.param(policy, n, marks=pytest.mark.slow)
            for policy, n in (("default", 1), ("paper", 1), ("round-robin", 1), ("random", 3))
        ),
    ],
)
def test_policies_by_name_go_on_to_the_end(late, policy, max_waiting):
    scheduler = scheduler_in(late, policy, seed=1, max_waiting=max_waiting)
    late.tune(scheduler, sizes=FOUR, strategy=AdaptiveSearch(**SMALL), trials=72)
    assert sum(arm.n_trials for arm in scheduler.arms) == 72
    assert not late.journal.of("error")


def test_at_least_one_may_wait():
    with pytest.raises(InvalidOptionError, match="max_waiting must be at least 1 but got 0"):
        AdaptiveScheduler(max_waiting=0)
