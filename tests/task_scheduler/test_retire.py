import math

import numpy as np
import pytest

from tvm_adaptive.task_scheduler import retire
from tvm_adaptive.task_scheduler.arms import Arm

NAN = math.nan


def arm(latencies=(), *, weight=1.0, n_slots=0):
    return Arm("arm", weight, 1e9, np.array(latencies, dtype=float), n_slots, 1.0)


def test_end_to_end_is_the_weighted_sum_of_those_that_have_a_result():
    arms = [arm([3.0, 2.0], weight=2.0), arm([NAN]), arm([5.0]), arm()]
    assert retire.end_to_end_ms(arms) == pytest.approx(9.0)
    assert retire.end_to_end_ms([]) == 0.0


@pytest.mark.parametrize(
    ("latencies", "n_trials"),
    [([], 0), ([NAN, NAN], 2), ([2.0], 0), ([2.0, 3.0, NAN], 2), ([NAN, 3.0, 2.0, 2.0], 1)],
)
def test_patience_counts_from_the_incumbent(latencies, n_trials):
    assert retire.trials_since_improvement(arm(latencies)) == n_trials
    assert retire.out_of_patience(arm(latencies), n_trials + 1) is False
    assert retire.out_of_patience(arm(latencies), n_trials) is True
    assert retire.out_of_patience(arm(latencies), None) is False


@pytest.mark.parametrize(
    ("latencies", "gain_ms", "share", "retired"),
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
def test_who_has_nothing_left_to_gain_is_retired(latencies, gain_ms, share, retired):
    assert retire.not_worth_a_slot(arm(latencies), gain_ms, 10.0, share) is retired


def test_waiting_is_counted_in_slots_of_the_others():
    waiting = retire.Waiting()
    waiting.observe([arm(n_slots=1), arm(n_slots=1), arm(n_slots=1)])
    waiting.observe([arm(n_slots=1), arm(n_slots=3), arm(n_slots=1)])
    waiting.observe([arm(n_slots=1), arm(n_slots=3), arm(n_slots=2)])
    assert waiting.longest([0, 1, 2]) == (0, 3)
    assert waiting.longest([1, 2]) == (1, 1)


def test_a_new_run_starts_counting_anew():
    waiting = retire.Waiting()
    waiting.observe([arm(n_slots=9), arm(n_slots=1)])
    waiting.observe([arm(n_slots=0), arm(n_slots=0)])
    assert waiting.longest([0, 1])[1] == 0
    waiting.observe([arm(), arm(), arm()])
    assert waiting.longest([0, 1, 2])[1] == 0
