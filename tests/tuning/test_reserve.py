import math

import pytest

from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import FinishConfig
from tvm_adaptive.tuning.reserve import Reserve, has_gaps, reserve_of, tuned_share


def budget_with(seconds, left_sec):
    now = [0.0]
    budget = Budget(seconds, lambda: now[0])
    now[0] = 600.0 if seconds is None else seconds - left_sec
    return budget


@pytest.mark.parametrize(
    ("seconds", "left_sec", "playoff_sec", "check_sec"),
    [
        (600.0, 580.0, 20 + 30 + 19.2, 12.0),  # checks, timings, qualifying
        (80.0, 50.0, 15.0, 12.0),
        (80.0, 30.0, 5.0, 5.0),
        (80.0, 15.0, 0.0, 0.0),
        (None, math.inf, 20 + 160 + 19.2, 12.0),
    ],
)
def test_playoffs_leave_a_short_run_time_to_search(seconds, left_sec, playoff_sec, check_sec):
    budget = budget_with(seconds, left_sec)
    found = reserve_of(budget, FinishConfig(), 20, later_sec=30.0, least_later_sec=20.0)
    assert (found.later_sec, found.least_later_sec) == (30.0, 20.0)
    assert found.playoff_sec == pytest.approx(playoff_sec)
    assert found.check_sec == pytest.approx(check_sec)


def test_while_a_task_has_nothing_only_checks_are_kept_back():
    reserve = Reserve(later_sec=10.0, least_later_sec=10.0, playoff_sec=30.0, check_sec=5.0)
    assert reserve.kept_sec(has_gaps=True) == 15.0
    assert reserve.kept_sec(has_gaps=False) == 40.0


def test_what_is_not_tuned_need_not_be_checked_and_compiles_faster():
    reserve = Reserve(later_sec=50.0, least_later_sec=20.0, playoff_sec=30.0, check_sec=10.0)
    assert reserve.kept_sec(has_gaps=True, share=0.0) == 20.0
    assert reserve.kept_sec(has_gaps=True, share=0.5) == 40.0
    assert reserve.kept_sec(has_gaps=True, share=1.0) == 60.0
    assert reserve.after_sec(0.5) == 35.0


def test_a_task_with_a_result_counts_as_tuned():
    tasks = [TaskProgress("a", 1.0, best_sec=1e-3), TaskProgress("b", 1.0)]
    assert tuned_share(RunProgress(tasks)) == 0.5
    assert tuned_share(RunProgress([])) == 0.0


@pytest.mark.parametrize(
    ("best_sec", "n_trials", "proven", "expected"),
    [
        (math.inf, 0, (), True),
        (math.inf, 4, (), True),
        (math.inf, 16, (), False),  # a whole batch has failed
        (math.inf, 0, ("b",), False),
        (1e-3, 4, (), False),
    ],
)
def test_a_gap_is_a_task_that_has_nothing_and_was_hardly_tried(
    best_sec, n_trials, proven, expected
):
    tasks = [
        TaskProgress("a", 1.0, 4, best_sec=1e-3),
        TaskProgress("b", 1.0, n_trials, best_sec=best_sec),
    ]
    assert has_gaps(RunProgress(tasks), proven, 16) == expected
