import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.measure_callback.progress import GIVE_UP_TRIALS, RunProgress, TaskProgress
from tvm_adaptive.tuning.budget import Budget, EndCosts, timed_share, tuned_compile_sec
from tvm_adaptive.tuning.config import DEFAULT, FinishConfig
from tvm_adaptive.values.forms import FormKey


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


NO_PLAYOFFS = FinishConfig(n_qualifiers=0)


def reserve(budget, seconds):
    """Reserve seconds for what follows the play-offs, of which there are none."""
    budget.plan_reserve(NO_PLAYOFFS, 0, EndCosts(seconds, seconds))
    budget.update_reserve(RunProgress([]), (), 1)


def test_without_a_limit_only_an_interrupt_stops():
    clock = Clock()
    budget = Budget(None, clock)
    clock.now += 1e9
    assert budget.left_sec == math.inf
    assert not budget.should_stop()
    budget.interrupt()
    assert budget.should_stop()


def test_without_a_limit_an_endless_playoff_takes_nothing_from_the_search():
    budget = Budget(None, Clock())
    budget.plan_reserve(FinishConfig(max_task_sec=math.inf), 1, EndCosts(1.0, 1.0))
    task = TaskProgress("task", 1.0, n_trials=4, best_sec=1e-3)
    budget.update_reserve(RunProgress([task]), (), 16)
    assert budget.search_left_sec == math.inf


def test_the_reserve_and_one_more_round_are_kept_back():
    clock = Clock()
    budget = Budget(100.0, clock)
    reserve(budget, 20.0)
    budget.round_started()
    clock.now += 10.0
    budget.round_started()
    assert budget.next_round_sec == 10.0
    clock.now += 60.0  # 30 left: exactly the reserve and a round
    assert not budget.should_stop()
    clock.now += 0.1
    assert budget.should_stop()


def test_a_search_begins_only_if_it_reaches_its_first_round():
    clock = Clock()
    budget = Budget(100.0, clock)
    reserve(budget, 90.0)
    assert budget.can_search(62)
    clock.now += 9.0
    assert budget.can_search(20)
    assert not budget.can_search(62)
    assert Budget(None, clock).can_search(10**6)
    budget.interrupt()
    assert not budget.can_search(0)


def test_what_earlier_attempts_took_counts():
    clock = Clock()
    budget = Budget(100.0, clock)
    budget.spent_sec += 70.0
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


def test_one_slow_round_does_not_set_the_next_ones_seconds():
    clock = Clock()
    budget = Budget(1000.0, clock)
    for seconds in [1.0] * 7 + [9.0]:
        budget.round_started()
        clock.now += seconds
    budget.round_started()
    assert budget.next_round_sec == 2.0


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
    assert budget.stopped == ""
    budget.stop_reason = "the goal is reached"
    assert budget.should_stop()
    assert not budget.interrupted


def test_a_search_that_ended_early_says_when_and_why():
    clock = Clock()
    budget = Budget(600.0, clock)
    budget.stop_reason = "nothing left"
    clock.now += 212.0
    assert budget.stopped == "stopped after 212 of 600 s: nothing left"
    assert Budget(None, clock).stopped == ""


@pytest.mark.parametrize(
    ("seconds", "use_all", "n_rounds"), [(1e3, False, 14), (1e3, True, 30), (None, False, 30)]
)
def test_a_search_within_a_budget_ends_on_a_plateau(make_session, seconds, use_all, n_rounds):
    clock = Clock()
    budget = Budget(seconds, clock)
    session = make_session(DEFAULT.replace(use_all=use_all), budget=budget)
    progress = RunProgress([TaskProgress("a", 1.0, best_sec=1e-3)])
    made = 0
    while made < 30 and not budget.should_stop():
        clock.now += 1.0
        session.round_done(progress)
        made += 1
    assert made == n_rounds
    assert ("saved less than 0.5 %" in budget.stop_reason) == (n_rounds == 14)


@pytest.mark.parametrize(
    ("reason", "is_interrupted", "expected"),
    [
        ("nothing-left", False, "stopped after 0 s: no task promises a gain"),
        ("of a policy", False, "stopped after 0 s: of a policy"),
        ("all-finished", True, ""),  # as the search returned nothing more
        ("", False, ""),
    ],
)
def test_why_the_task_scheduler_ended_a_search_is_said(
    make_session, reason, is_interrupted, expected
):
    budget = Budget(None, Clock())
    budget.interrupted = is_interrupted
    make_session(budget=budget).scheduler_ended(reason)
    assert budget.stopped == expected


@pytest.mark.parametrize(("n_trials", "is_reached"), [(GIVE_UP_TRIALS, False), (0, True)])
def test_a_goal_is_that_of_all_tasks(make_session, n_trials, is_reached):
    budget = Budget(None, Clock())
    failed = [TaskProgress("b", 1.0, n_trials)] if n_trials else []
    session = make_session(budget=budget)
    options = dataclasses.replace(session.options, until_ms=2.0)
    session = dataclasses.replace(session, options=options)
    session.check_goal(RunProgress([TaskProgress("a", 1.0, 8, best_sec=1e-3), *failed]))
    assert bool(budget.stop_reason) == is_reached


def test_what_has_ended_does_not_begin_again():
    clock = Clock()
    budget = Budget(100.0, clock)
    reserve(budget, 60.0)
    clock.now += 50.0
    assert budget.should_stop()
    reserve(budget, 0.0)
    assert budget.should_stop()


def test_what_the_search_has_left_is_without_what_is_kept_back():
    clock = Clock()
    budget = Budget(100.0, clock, spent_sec=10.0)
    reserve(budget, 20.0)
    clock.now += 30.0
    assert (budget.left_sec, budget.search_left_sec) == (60.0, 40.0)
    clock.now += 50.0
    assert (budget.left_sec, budget.search_left_sec) == (10.0, 0.0)
    assert Budget(None, clock).search_left_sec == math.inf


def budget_with(seconds, left_sec):
    clock = Clock()
    budget = Budget(seconds, clock)
    clock.now += 600.0 if seconds is None else seconds - left_sec
    return budget


def progress_of(best_secs, n_trials=4):
    tasks = [TaskProgress(str(i), 1.0, n_trials, best_sec=sec) for i, sec in enumerate(best_secs)]
    return RunProgress(tasks)


def reserves_of(budget, finish, n_tasks, later_sec, least_later_sec):
    """Return the reserve of a search without gaps, with gaps only, and after it."""
    budget.plan_reserve(finish, n_tasks, EndCosts(later_sec, least_later_sec))
    found = []
    for best_sec in (1e-3, math.inf):
        budget.update_reserve(progress_of([best_sec]), (), 16)
        found.append(budget.reserve_sec)
    return found


@pytest.mark.parametrize(
    ("seconds", "left_sec", "playoff_sec"),
    [
        (600.0, 580.0, 30 + 30 + 19.2),  # checks, timings, qualifying
        (80.0, 50.0, 15.0),
        (80.0, 30.0, 5.0),
        (80.0, 15.0, 0.0),
        (None, math.inf, 30 + 160 + 19.2),
    ],
)
def test_playoffs_leave_a_short_run_time_to_search(seconds, left_sec, playoff_sec):
    tuned, untuned = reserves_of(budget_with(seconds, left_sec), FinishConfig(), 20, 30.0, 20.0)
    assert tuned == pytest.approx(30.0 + playoff_sec)
    assert untuned == 20.0


def test_while_a_task_has_nothing_only_checks_of_the_others_are_reserved():
    budget = budget_with(600.0, 580.0)
    budget.plan_reserve(FinishConfig(), 20, EndCosts(50.0, 20.0))
    expected = {(math.inf, math.inf): 20.0, (1e-3, math.inf): 35.0 + 10.0, (1e-3,): 50.0 + 79.2}
    for best_secs, reserve_sec in expected.items():
        budget.update_reserve(progress_of(best_secs), (), 16)
        assert budget.reserve_sec == pytest.approx(reserve_sec)
    # Compiling what is not tuned takes less; play-offs spend their own reserve.
    budget.release_playoffs(timed_share(progress_of((1e-3, math.inf))))
    assert budget.reserve_sec == 35.0
    assert budget.spare_sec == 580.0 - 35.0


def test_a_short_run_reserves_less_for_checks():
    budget = budget_with(80.0, 30.0)
    budget.plan_reserve(FinishConfig(), 20, EndCosts(20.0, 20.0))
    budget.update_reserve(progress_of((1e-3, math.inf)), (), 16)
    assert budget.reserve_sec == pytest.approx(20.0 + 0.5 * 5.0)


def test_a_task_with_a_result_counts_as_tuned():
    assert timed_share(progress_of([1e-3, math.inf])) == 0.5
    assert timed_share(RunProgress([])) == 0.0


def test_what_an_earlier_run_has_proven_is_compiled_as_what_the_search_has_found():
    budget = budget_with(600.0, 580.0)
    budget.plan_reserve(FinishConfig(), 2, EndCosts(50.0, 20.0))
    for proven, later_sec in (((), 35.0), (("1",), 50.0)):
        budget.update_reserve(progress_of([1e-3, math.inf], n_trials=0), proven, 16)
        assert budget.reserve_parts["later"] == later_sec


@pytest.mark.parametrize(
    ("best_sec", "n_trials", "proven", "has_gap"),
    [
        (math.inf, 0, (), True),
        (math.inf, 4, (), True),
        (math.inf, 16, (), False),  # a whole batch has failed
        (math.inf, 0, ("1",), False),
        (1e-3, 4, (), False),
    ],
)
def test_a_gap_is_a_task_that_has_nothing_and_was_hardly_tried(best_sec, n_trials, proven, has_gap):
    budget = budget_with(600.0, 580.0)
    budget.plan_reserve(FinishConfig(), 2, EndCosts())
    budget.update_reserve(progress_of([1e-3, best_sec], n_trials), proven, 16)
    assert (budget.reserve_sec <= 1.0) == has_gap


@pytest.mark.parametrize("n_trials", [0, 4])
def test_a_task_that_has_ended_without_a_result_is_no_gap(make_session, n_trials):
    budget = budget_with(600.0, 580.0)
    budget.plan_reserve(FinishConfig(), 2, EndCosts())
    session = make_session(budget=budget)
    progress = progress_of([1e-3, math.inf], n_trials)
    session.update_reserve(progress)
    assert budget.reserve_sec <= 1.0
    session.ended.add("1")
    session.round_done(progress)
    assert budget.reserve_sec > 1.0
    # It hides no plateau either.
    assert progress.promising_sec == 1e-3


def network_of(tasks):
    """Return a progress of tasks: their best and second best times, and the build's seconds."""
    found = [
        TaskProgress(str(i), 1.0, 4, best_sec=best, second_sec=second, build_sec=build)
        for i, (best, second, build) in enumerate(tasks)
    ]
    return RunProgress(found)


def with_network_check(
    seconds=100.0, left_sec=90.0, network_check_sec=3.0, weight_secs=None, margin_sec=0.0, **finish
):
    budget = budget_with(seconds, left_sec)
    budget.plan_reserve(
        FinishConfig(**finish),
        2,
        EndCosts(50.0, 5.0, margin_sec, network_check_sec, weight_secs or {}),
        n_compilers=2,
        drafts=False,
    )
    return budget


def test_where_the_network_is_checked_only_worthy_playoffs_are_reserved():
    budget = with_network_check()
    assert budget.checks_network
    budget._clock.now += 30.0
    # A play-off of the first one may save 5 % of two thirds: 6.7 s of such a search.
    tasks = [(2e-3, 2e-3, 0.5), (1e-3, 2e-3, 0.7)]
    budget.update_reserve(network_of(tasks), (), 16)
    after_sec = 5.0 + 1.2 / 2 + 3.0
    closing_sec = 0.5 + 2 * 0.02 + 0.2 * after_sec
    assert budget.reserve_sec == pytest.approx(after_sec + closing_sec + 1 / 15 / 0.3 * 30.0)
    budget.release_playoffs(1.0)
    assert budget.reserve_sec == pytest.approx(after_sec)
    # While a task has nothing, no play-off is worth its time.
    budget.update_reserve(network_of([*tasks, (math.inf, math.inf, math.nan)]), (), 16)
    assert budget.reserve_sec == pytest.approx(after_sec + closing_sec + 0.02)


def test_after_a_check_only_what_failed_it_is_compiled_again():
    budget = with_network_check(weight_secs={"0": 1.0})
    budget.update_reserve(network_of([(2e-3, 4e-3, 60.0), (1e-3, 2e-3, 60.0)]), (), 16)
    budget.release_playoffs(1.0)
    assert budget.reserve_sec == pytest.approx(5.0 + 120.0 / 2 + 3.0 + 1.0)
    budget.network_checked(1)
    assert budget.reserve_sec == pytest.approx(5.0 + 60.0 + 1.0)
    budget.network_checked(2)  # never more than before
    assert budget.reserve_sec == pytest.approx(5.0 + 60.0 + 1.0)
    budget.release_playoffs(1.0)
    assert budget.reserve_sec == pytest.approx(5.0 + 60.0 + 1.0)
    budget.network_checked(0)
    assert budget.reserve_sec == pytest.approx(5.0 + 1.0)
    # Builds that took less than the untuned code lets expect say little: one may be long.
    budget.update_reserve(network_of([(2e-3, 4e-3, 30.0), (1e-3, 2e-3, 30.0)]), (), 16)
    budget.network_checked(1)
    assert budget.reserve_sec == pytest.approx(5.0 + 30.0 + 1.0)


@pytest.mark.parametrize(("margin_sec", "expected_sec"), [(0.0, 1.72), (0.7, 1.02), (4.0, 0.0)])
def test_what_the_end_can_do_without_is_a_margin_already(margin_sec, expected_sec):
    budget = with_network_check(margin_sec=margin_sec)
    budget.update_reserve(network_of([(2e-3, 4e-3, 0.5), (1e-3, 2e-3, 0.7)]), (), 16)
    assert budget.reserve_parts["margin"] == pytest.approx(expected_sec)


def test_weights_are_reserved_of_the_fastest_forms():
    budget = with_network_check(weight_secs={"light": 1.0, "heavy": 3.0})
    secs = {"light": 1e-3, "heavy": 2e-3}
    tasks = [
        TaskProgress(form, 1.0, 4, best_sec=sec, build_sec=0.1, key=FormKey("conv", form))
        for form, sec in secs.items()
    ]
    budget.update_reserve(RunProgress(tasks), (), 16)
    assert budget.reserve_parts["weights"] == 1.0


def test_weights_are_reserved_of_the_heaviest_form_that_was_tried():
    budget = with_network_check(weight_secs={"light": 1.0, "heavy": 3.0, "other": 2})
    forms = {"conv": "", "light": "2x2", "heavy": "4x4", "other": ""}
    tasks = [
        TaskProgress(name, 1.0, 0, build_sec=0.1, key=FormKey("conv", form))
        for name, form in forms.items()
    ]
    tasks[3].key = FormKey("another", "2x2")

    def reserved_sec():
        budget.update_reserve(RunProgress(tasks), (), 16)
        return budget.reserve_parts["weights"]

    assert reserved_sec() == 0.0
    for index, expected_sec in ((1, 1.0), (2, 3.0), (3, 5.0)):
        tasks[index].n_trials = 4
        assert reserved_sec() == expected_sec


def test_what_the_search_did_not_reach_is_compiled_if_an_earlier_run_has_proven_it():
    budget = with_network_check()
    progress = network_of([(1e-3, 2e-3, 0.6), (math.inf, math.inf, math.nan)])
    progress.tasks[1].n_trials = 0
    budget.update_reserve(progress, ("1",), 16)
    assert budget.reserve_parts["compile"] == pytest.approx(2 * 0.6 / 2)


@pytest.mark.parametrize(
    ("proven", "n_built", "weights_sec"),
    [((), 0, 0.0), (("input", "product"), 2, 3.0), (("product",), 0, 3.0), (("conv",), 1, 0.0)],
)
def test_a_form_that_is_proven_is_compiled_before_any_form_is_timed(proven, n_built, weights_sec):
    budget = with_network_check(weight_secs={"product": 3.0})
    forms = {"conv": "", "input": "2x2", "product": "2x2"}
    tasks = [TaskProgress(name, 1.0, key=FormKey("conv", form)) for name, form in forms.items()]
    first = TaskProgress("first", 1.0, 4, best_sec=1e-3, build_sec=0.5)
    progress = RunProgress([first, *tasks])
    budget.update_reserve(progress, proven, 16)
    assert budget.reserve_parts["compile"] == pytest.approx((1 + n_built) * 0.5 / 2)
    assert budget.reserve_parts["weights"] == weights_sec
    with_playoffs = budget_with(600.0, 580.0)
    with_playoffs.plan_reserve(FinishConfig(), 2, EndCosts())
    with_playoffs.update_reserve(progress, proven, 16)
    assert (with_playoffs.reserve_sec <= 1.0) == (n_built == 0)  # there is a gap


def test_playoffs_take_a_share_of_a_short_budget_at_the_most():
    budget = with_network_check()
    budget._clock.now += 80.0
    budget.update_reserve(network_of([(1e-3, 1e-3, 0.0)] * 6), (), 16)
    assert budget.reserve_sec <= 1.2 * (5.0 + 3.6 / 2 + 3.0) + 10.0 + 0.7


@pytest.mark.parametrize(
    "changes", [{"network_check_sec": None}, {"within_network": False}, {"seconds": None}]
)
def test_without_a_check_within_the_network_all_playoffs_are_reserved(changes):
    budget = with_network_check(**changes)
    assert not budget.checks_network
    budget.update_reserve(network_of([(1e-3, 1e-3, 0.5)] * 2), (), 16)
    assert budget.reserve_sec > 50.0


def test_compiling_a_network_takes_what_its_candidates_took():
    known, unknown = network_of([(1e-3, 2e-3, 0.4), (1e-3, 2e-3, math.nan)]).tasks
    assert tuned_compile_sec([], 9.0) == 0.0
    assert tuned_compile_sec([unknown, unknown], 9.0) == 18.0
    assert tuned_compile_sec([known, known], 9.0) == pytest.approx(0.8)
    assert tuned_compile_sec([known, unknown], 9.0) == pytest.approx(0.8)
    # One function that takes long to build says little of the others.
    assert tuned_compile_sec([known, unknown], 0.1) == pytest.approx(0.5)
    assert tuned_compile_sec([known] * 2, 0.1) == pytest.approx(0.8)


def test_tasks_without_trials_keep_the_seconds_of_their_drafts() -> None:
    clock = Clock()
    budget = Budget(100.0, clock)
    costs = EndCosts(50.0, 14.0, network_check_sec=2.0)
    budget.plan_reserve(FinishConfig(), 10, costs)
    progress = RunProgress([TaskProgress(str(i), 1.0) for i in range(10)])
    budget.update_reserve(progress, (), 16)
    # Untuned code, the check, the search's end, and drafts.
    assert budget.reserve_sec == pytest.approx(1.2 * (14.0 + 2.0) + 0.5 + 10 * (0.02 + 0.03))
    clock.now += 100.0 - 16.0 - 0.13
    assert budget.reserve_drafts(10) == 4  # of 0.03 s each
    budget.plan_reserve(FinishConfig(), 10, costs, drafts=False)
    budget.update_reserve(progress, (), 16)
    assert budget.reserve_sec == pytest.approx(1.2 * 16.0 + 0.7)
    assert budget.reserve_drafts(10) == 0


def test_drafts_come_before_the_margin_of_what_follows() -> None:
    clock = Clock()
    budget = Budget(100.0, clock)
    costs = EndCosts(50.0, 14.0, margin_sec=4.0, network_check_sec=2.0)
    budget.plan_reserve(FinishConfig(), 10, costs)
    budget.update_reserve(RunProgress([TaskProgress("a", 1.0)]), (), 16)
    clock.now += 100.0 - 12.1  # 3.9 s less than code, check and the margin need
    assert budget.reserve_drafts(10) == 3
    clock.now += 0.2
    assert budget.reserve_drafts(10) == 0
