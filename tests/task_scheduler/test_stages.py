import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler import stages
from tvm_adaptive.task_scheduler.arms import Arm, PriorTrials
from tvm_adaptive.task_scheduler.stages import WarmUp, is_trivial

NAN = math.nan


def arm(latencies=(), *, weight=1.0, flop=1e9, n_slots=0, is_proven=False):
    latencies_ms = np.array(latencies, dtype=float)
    return Arm(
        "arm", weight, flop, latencies_ms, n_slots, 1.0, prior=PriorTrials(is_proven=is_proven)
    )


def test_big_ones_first_until_each_has_a_result():
    arms = [arm(), arm(flop=2e9), arm(weight=3.0), arm([1.0], flop=1e12)]
    assert WarmUp().next_arm(arms, [0, 1, 2, 3]) == 2
    assert WarmUp().next_arm(arms, [0, 1, 3]) == 1
    assert WarmUp().next_arm(arms, [3]) is None
    assert WarmUp().next_arm(arms, []) is None


def test_what_an_earlier_run_has_proven_can_wait():
    arms = [arm(flop=9e9, is_proven=True), arm(flop=1.0), arm(is_proven=True), arm([1.0])]
    assert WarmUp().next_arm(arms, [0, 1, 2, 3]) == 1
    assert WarmUp().next_arm(arms, [0, 2, 3]) == 0


def test_an_arm_that_failed_waits_until_the_others_have_had_a_slot():
    failed, fresh = arm([NAN] * 4, flop=9e9, n_slots=1), arm(flop=1e9, is_proven=True)
    assert WarmUp().next_arm([failed, fresh], [0, 1]) == 1
    again = arm([NAN] * 4, flop=1e9, n_slots=1)
    assert WarmUp().next_arm([failed, again], [0, 1]) == 0


def test_the_first_slot_is_small_and_later_ones_are_full():
    fresh, failed = arm(), arm([math.nan] * 4, n_slots=1)
    assert WarmUp(n_trials=4).trials_of([fresh, failed], 0) == 4
    assert WarmUp(n_trials=4).trials_of([fresh, failed], 1) is None
    assert WarmUp(n_trials=None).trials_of([fresh, failed], 0) is None


def test_a_trivial_task_gets_fewer_trials():
    arms = [arm([10.0], flop=1e9), arm(flop=1.0), arm(flop=1e8)]
    assert is_trivial(arms, 1)
    assert not is_trivial(arms, 2)
    assert not is_trivial([arm(flop=1.0)], 0)
    assert [WarmUp().trials_of(arms, k) for k in (1, 2)] == [2, 4]
    assert WarmUp(n_trials=1).trials_of(arms, 1) == 1


def test_a_task_of_weight_0_is_trivial_and_says_nothing_of_others():
    idle, cold = arm([5.0], weight=0.0), arm(weight=0.0)
    arms = [arm([10.0], flop=1e9), arm(flop=1.0), arm(flop=1e8)]
    assert [k for k in range(5) if is_trivial([*arms, idle, cold], k)] == [1, 3, 4]
    assert not is_trivial([idle, *arms[1:]], 1)
    assert stages.end_to_end_ms([*arms, idle, cold]) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("latencies", "n_slots", "hopeless"),
    [
        ([math.nan] * 63, 5, False),
        ([math.nan] * 64, 5, True),
        ([math.nan] * 63 + [1.0] + [math.nan] * 64, 5, False),
        ([], 7, False),
        ([], 8, True),
    ],
)
def test_who_never_succeeds_is_given_up(latencies, n_slots, hopeless):
    assert WarmUp().is_hopeless(arm(latencies, n_slots=n_slots)) is hopeless


@pytest.mark.parametrize("name", ["n_trials", "give_up_trials", "give_up_slots"])
def test_bad_options_are_refused(name):
    with pytest.raises(InvalidOptionError, match=f"{name} must be at least 1.*got 0"):
        WarmUp(**{name: 0})


def test_end_to_end_is_the_weighted_sum_of_those_that_have_a_result():
    arms = [arm([3.0, 2.0], weight=2.0), arm([NAN]), arm([5.0]), arm()]
    assert stages.end_to_end_ms(arms) == pytest.approx(9.0)
    assert stages.end_to_end_ms([]) == 0.0


@pytest.mark.parametrize(
    ("latencies", "n_trials"),
    [([], 0), ([NAN, NAN], 2), ([2.0], 0), ([2.0, 3.0, NAN], 2), ([NAN, 3.0, 2.0, 2.0], 1)],
)
def test_patience_counts_from_the_incumbent(latencies, n_trials):
    assert stages.trials_since_improvement(arm(latencies)) == n_trials
    if np.isfinite(latencies).any():
        assert stages.is_spent(arm(latencies), WarmUp(), n_trials + 1) is False
        assert stages.is_spent(arm(latencies), WarmUp(), n_trials) is True
        assert stages.is_spent(arm(latencies), WarmUp(), None) is False


@pytest.mark.parametrize(
    ("latencies", "gain_ms", "share", "postponed"),
    [
        ([5.0] + [6.0] * 64, 0.0009, 1e-4, True),
        ([5.0] + [6.0] * 64, 0.0011, 1e-4, False),
        ([5.0] + [6.0] * 64, 0.0, 0.0, False),
        # It has improved only just now.
        ([5.0] + [6.0] * 63, 0.0, 1e-4, False),
        # All of it is less than what could be seen.
        ([0.0009], 0.0008, 1e-9, True),
        ([0.0009], 0.0, 0.0, False),
        ([0.0011], 0.0, 1e-4, False),
    ],
)
def test_who_has_nothing_left_to_gain_is_postponed(latencies, gain_ms, share, postponed):
    assert stages.is_postponed(arm(latencies), gain_ms, 10.0, share) is postponed


def test_waiting_is_counted_in_slots_of_the_others():
    waiting = stages.Starvation()
    waiting.observe([arm(n_slots=1), arm(n_slots=1), arm(n_slots=1)])
    waiting.observe([arm(n_slots=1), arm(n_slots=3), arm(n_slots=1)])
    waiting.observe([arm(n_slots=1), arm(n_slots=3), arm(n_slots=2)])
    assert waiting.longest([0, 1, 2]) == (0, 3)
    assert waiting.longest([1, 2]) == (1, 1)


def test_a_new_run_starts_counting_anew():
    waiting = stages.Starvation()
    waiting.observe([arm(n_slots=9), arm(n_slots=1)])
    waiting.observe([arm(n_slots=0), arm(n_slots=0)])
    assert waiting.longest([0, 1])[1] == 0
    waiting.observe([arm(), arm(), arm()])
    assert waiting.longest([0, 1, 2])[1] == 0
