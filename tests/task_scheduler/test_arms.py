import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.task_scheduler.arms import Arm, PriorTrials
from tvm_adaptive.task_scheduler.forecast.belief import forecast
from tvm_adaptive.task_scheduler.policy import DynaTunePolicy

NAN = math.nan
trials = st.lists(st.floats(0.1, 10.0) | st.just(NAN), max_size=12)


def arm(latencies, earlier=(), *, flop=1e9):
    return Arm("arm", 1.0, flop, np.array(latencies), 1, 1.0, prior=PriorTrials(earlier))


def test_a_history_is_in_multiples_of_the_incumbent():
    assert arm([NAN, 4.0, 8.0, 2.0]).throughput_history().tolist() == [0.0, 0.5, 0.5, 1.0]


def test_what_earlier_runs_did_comes_first():
    history = arm([2.0], [NAN, 8.0, 2.0, 4.0]).throughput_history()
    assert history.tolist() == [0.0, 0.25, 1.0, 1.0, 1.0]


def test_a_slower_hour_is_no_step_back():
    # The best, 2 ms then, takes 6 ms today; then something better is found.
    history = arm([6.0, 9.0, 3.0], [4.0, 2.0]).throughput_history()
    assert history.tolist() == [0.25, 0.5, 0.5, 0.5, 1.0]


def test_the_second_verified_may_be_the_best_and_the_third_is_news():
    assert arm([6.0, 3.0], [2.0]).throughput_history().tolist() == [1.0, 1.0, 1.0]
    assert arm([NAN, 6.0, 3.0, 1.0], [2.0]).throughput_history()[0] == pytest.approx(1 / 3)


def test_a_task_of_weight_0_takes_nothing_once_it_has_a_result():
    shares = [Arm("arm", 0.0, 1e9, np.array(each), 1, 1.0).share_ms for each in ([2.0], [NAN], [])]
    assert shares == [0.0, math.inf, math.inf]


def test_earlier_runs_without_a_success_say_nothing():
    assert arm([2.0, 1.0], [NAN, NAN]).throughput_history().tolist() == [0.5, 1.0]


@given(trials.filter(lambda own: np.isfinite(own).any()), trials)
def test_a_history_never_falls_and_ends_with_the_incumbent(own, earlier):
    history = arm(own, earlier).throughput_history()
    assert len(history) in (len(own), len(own) + len(earlier))
    assert (np.diff(history) >= 0).all()
    assert history[0] >= 0
    assert history[-1] == pytest.approx(1.0)


def test_who_was_tuned_for_long_has_less_to_gain(rng):
    # Both were measured twice by this run; of the second it is known how it came there.
    search = np.concatenate([np.geomspace(4.0, 1.02, 20), np.full(180, 1.0)])
    arms = [arm([1.0, 1.1]), arm([1.0, 1.1], search.tolist())]
    drops = [forecast(each.throughput_history(), 16, rng=rng).expected_drop for each in arms]
    assert drops[1] < 0.2 * drops[0]
    for order in (arms, arms[::-1]):
        assert order[DynaTunePolicy().choose(order, rng).arm or 0] is arms[0]
