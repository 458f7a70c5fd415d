import math

from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.tuning.budget import Budget


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_without_a_limit_only_an_interrupt_stops():
    clock = Clock()
    budget = Budget(None, clock)
    clock.now += 1e9
    assert budget.left_sec == math.inf
    assert not budget.should_stop()
    budget.interrupt()
    assert budget.should_stop()


def test_the_reserve_and_one_more_round_are_kept_back():
    clock = Clock()
    budget = Budget(100.0, clock)
    budget.reserve_sec = 20.0
    budget.round_started()
    clock.now += 10.0
    budget.round_started()
    assert budget.next_round_sec == 10.0
    clock.now += 60.0  # 30 left: exactly the reserve and a round
    assert not budget.should_stop()
    clock.now += 0.1
    assert budget.should_stop()


def test_what_earlier_sittings_took_counts():
    clock = Clock()
    budget = Budget(100.0, clock)
    budget.spent_sec = 70.0
    clock.now += 20.0
    assert (budget.elapsed_sec, budget.left_sec) == (90.0, 10.0)
    assert not budget.should_stop()
    clock.now += 10.1
    assert budget.should_stop()


def test_an_old_slow_round_is_forgotten():
    clock = Clock()
    budget = Budget(1000.0, clock)
    for seconds in [50.0] + [1.0] * 8:
        budget.round_started()
        clock.now += seconds
    budget.round_started()
    assert budget.next_round_sec == 1.0


@given(st.lists(st.floats(0.1, 20.0), min_size=1, max_size=60), st.floats(1.0, 200.0))
def test_overshoot_is_at_most_one_round(rounds, seconds):
    clock = Clock()
    budget = Budget(seconds, clock)
    for duration in rounds:
        budget.round_started()
        if budget.should_stop():
            break
        clock.now += duration
    assert budget.elapsed_sec <= seconds + max(rounds)


def test_a_goal_that_is_reached_ends_the_search():
    budget = Budget(None)
    assert not budget.should_stop()
    budget.reach()
    assert budget.should_stop()
    assert not budget.interrupted


def test_what_has_ended_does_not_begin_again():
    clock = Clock()
    budget = Budget(100.0, clock)
    budget.reserve_sec = 60.0
    clock.now += 50.0
    assert budget.should_stop()
    budget.reserve_sec = 0.0
    assert budget.should_stop()


def test_what_the_search_has_left_is_without_what_is_kept_back():
    clock = Clock()
    budget = Budget(100.0, clock, spent_sec=10.0)
    budget.reserve_sec = 20.0
    clock.now += 30.0
    assert (budget.left_sec, budget.search_left_sec) == (60.0, 40.0)
    clock.now += 50.0
    assert (budget.left_sec, budget.search_left_sec) == (10.0, 0.0)
    assert Budget(None, clock).search_left_sec == math.inf
