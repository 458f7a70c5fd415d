import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.policy import (
    DEFAULT,
    INDICES,
    PAPER,
    DynaTunePolicy,
    PolicyOptions,
)
from tvm_adaptive.task_scheduler.stages import WarmUp

NAN = math.nan


class Belief(NamedTuple):
    mean: float
    samples: np.ndarray

    @property
    def expected_drop(self):
        return float((1.0 - 1.0 / self.samples).mean())


class Script:
    """Forecasts a fixed speed-up for each length of history, and keeps what it was asked."""

    def __init__(self, ratios):
        self.ratios = ratios
        self.asked = []

    def __call__(self, history, horizon, rng):
        self.asked.append((history, horizon))
        samples = np.atleast_1d(self.ratios[len(history)]).astype(float)
        return Belief(float(samples.mean()), samples)


def arm(latencies=(), *, weight=1.0, flop=1e9, n_slots=1, sec=1.0, finished=False):
    return Arm("arm", weight, flop, np.array(latencies, dtype=float), n_slots, sec, finished)


def policy(ratios, **options):
    return DynaTunePolicy(PolicyOptions(**options), Script(ratios))


def test_milliseconds_per_second_decide(rng):
    # Both would halve 8 ms in a slot of 16 trials: 2 s a trial against 1 s a trial.
    arms = [arm([8.0], sec=2.0), arm([9.0, 8.0], sec=2.0)]
    decision = policy({1: 2.0, 2: 2.0}).choose(arms, rng)
    assert (decision.arm, decision.reason, decision.unit) == (1, "index", "ms/s")
    assert decision.scores == pytest.approx([4.0 / 32.0, 4.0 / 16.0])
    assert decision.n_trials is None


@pytest.mark.parametrize(
    ("index", "first", "second"),
    [
        ("epsilon-greedy", 2.5, 2.0),
        ("softmax", 2.5, 2.0),
        # The latency at the mean of the throughput, and a bonus with T = 3.
        ("ucb", 10 / 3 + math.sqrt(2 * math.log(3)), 2.0 + math.sqrt(math.log(3))),
    ],
)
def test_other_indices_by_hand(index, first, second, rng):
    # Ten ms, halved or not, against ten that surely become eight.
    arms = [arm([10.0], n_slots=1), arm([11.0, 10.0], n_slots=2, sec=2.0)]
    decision = policy({1: [1.0, 2.0], 2: 1.25}, index=index).choose(arms, rng)
    assert decision.scores == pytest.approx([first, second], rel=1e-6)


def test_the_papers_constant_is_that_of_the_first_slots_also_in_a_resumed_run(rng):
    # 1.5 ms after the first slots of one trial, 0.75 ms today.
    today = [arm([1.0, 0.25], n_slots=2), arm([0.5, 0.5, 0.5], n_slots=1)]
    resumed = policy({2: 1.0, 3: 1.0}, index="ucb", slot_trials=1).choose(today, rng)
    assert resumed.scores[1] == pytest.approx(math.sqrt(2 * math.log(3)))
    fast = policy({2: 1.0, 3: 1.0}, index="ucb", slot_trials=2).choose(today, rng)
    assert fast.scores[1] == pytest.approx(math.sqrt(0.2 * math.log(3)))


def test_weights_count_also_of_tasks_without_flop(rng):
    arms = [arm([1.0], flop=1.0, weight=5.0), arm([1.0, 1.0], flop=1e12)]
    decision = policy({1: 2.0, 2: 2.0}, index="epsilon-greedy", epsilon=0.0).choose(arms, rng)
    assert decision.scores == pytest.approx([2.5, 0.5])
    assert decision.arm == 0


def test_only_the_arm_that_ran_is_forecast_again(rng):
    script = Script({1: 2.0, 2: 1.5, 3: 1.1})
    tuner = DynaTunePolicy("default", script)
    tuner.choose([arm([4.0]), arm([5.0, 4.0])], rng)
    tuner.choose([arm([4.0]), arm([5.0, 4.0, 4.0], n_slots=2)], rng)
    assert [len(history) for history, *_ in script.asked] == [1, 2, 3]
    assert script.asked[1][0].best == pytest.approx([0.8, 1.0])


def test_the_history_is_the_best_so_far_on_the_arms_own_scale(rng):
    script = Script({4: 2.0})
    DynaTunePolicy("default", script).choose([arm([NAN, 4.0, 8.0, 2.0])], rng)
    assert script.asked[0][0].best == pytest.approx([0.0, 0.5, 0.5, 1.0])


@pytest.mark.parametrize(
    ("options", "horizon"),
    [({}, 16), ({"slot_trials": 7}, 7), ({"slot_sec": 9.0}, 4), ({"slot_sec": 0.1}, 1)],
)
def test_the_horizon_is_the_slot(options, horizon, rng):
    script = Script({2: 2.0})
    arms = [arm([11.0, 10.0], sec=4.0)]
    DynaTunePolicy(PolicyOptions(**options), script).choose(arms, rng)
    assert script.asked[0][1] == horizon


@pytest.mark.parametrize("flop", [1e9, 1e15])
def test_what_two_others_reached_is_expected_whatever_one_count_of_operations_is(flop, rng):
    # 100, 200 (or a million times as much), 50 and 25 GFLOPS.
    arms = [arm([10.0]), arm([5.0], flop=flop), arm([20.0]), arm([40.0])]
    script = Script({1: 1.5})
    DynaTunePolicy(PolicyOptions(peer_margin=0.1), script).choose(arms, rng)
    assert [history.expected_peak for history, _ in script.asked] == [
        pytest.approx(peak) for peak in (1.1, 1.1, 2.2, 4.4)
    ]
    unasked = Script({1: 1.5})
    DynaTunePolicy(PolicyOptions(peer_margin=None), unasked).choose(arms, rng)
    assert {history.expected_peak for history, _ in unasked.asked} == {None}


def test_a_copy_is_not_expected_to_compute_as_much_as_others(rng):
    script = Script({1: 1.5})
    copy = dataclasses.replace(arm([10.0], flop=1.0), n_bytes=2.5e8)  # as 1e9 operations
    DynaTunePolicy("default", script).choose([arm([10.0]), arm([10.0]), copy], rng)
    assert [history.expected_peak for history, _ in script.asked] == pytest.approx([1.05] * 3)


def test_equals_are_expected_to_stay_so(rng):
    script = Script({1: 1.5})
    DynaTunePolicy("default", script).choose([arm([10.0])] * 3, rng)
    assert [history.expected_peak for history, _ in script.asked] == pytest.approx([1.05] * 3)


@pytest.mark.parametrize(
    ("now_ms", "peer_margin", "n_forecasts"), [(4.9, 0.05, 3), (4.0, 0.05, 4), (4.0, None, 3)]
)
def test_forecasts_are_made_anew_when_the_peers_have_become_much_better(
    now_ms, peer_margin, n_forecasts, rng
):
    script = Script({1: 1.5, 2: 1.5, 3: 1.5})
    tuner = DynaTunePolicy(PolicyOptions(peer_margin=peer_margin), script)
    arms = [arm([10.0], finished=True), arm([1.0], finished=True)]
    tuner.choose([*arms, arm([10.0]), arm([6.0, 5.0])], rng)
    tuner.choose([*arms, arm([10.0]), arm([6.0, 5.0, now_ms], n_slots=2)], rng)
    assert len(script.asked) == n_forecasts


def test_warm_up_comes_first_and_reports_who_was_given_up(rng):
    hopeless = arm([NAN] * 64, flop=1e12, n_slots=5)
    decision = policy({}).choose([hopeless, arm(n_slots=0), arm([1.0])], rng)
    assert (decision.arm, decision.reason, decision.n_trials) == (1, "warm-up", 4)
    assert decision.retired == (0,)


def test_one_given_up_is_not_asked_again(rng):
    tuner = policy({1: 2.0})
    hopeless = arm([NAN] * 64, n_slots=5)
    assert tuner.choose([hopeless, arm([1.0])], rng).retired == (0,)
    # Who carries out decisions finishes what they retire.
    again = tuner.choose([dataclasses.replace(hopeless, finished=True), arm([1.0])], rng)
    assert (again.arm, again.retired) == (1, ())
    assert np.isnan(again.scores[0])


def test_nothing_worth_a_slot_ends_the_run(rng):
    stuck, longer = [10.0] * 65, [10.0] * 66
    arms = [arm(stuck), arm(longer), arm([1.0], finished=True)]
    decision = policy({65: 1.00001, 66: 1.0}).choose(arms, rng)
    assert (decision.arm, decision.reason, decision.retired) == (None, "nothing-left", ())


def test_a_task_is_postponed_until_its_share_of_the_network_shows(rng):
    tuner = policy({1: 2.0, 2: 1.5, 3: 1.001})
    decision = tuner.choose([arm([1e-3]), arm([1000.0, 100.0])], rng)
    assert (decision.arm, decision.retired) == (1, ())
    assert np.isnan(decision.scores[0])
    # The first candidates of the other one were slow.
    decision = tuner.choose([arm([1e-3]), arm([1000.0, 100.0, 0.01], n_slots=2)], rng)
    assert (decision.arm, decision.retired) == (0, ())


def test_a_stuck_task_is_postponed_until_its_gain_shows(rng):
    tuner, stuck = policy({65: 1.001, 2: 1.5, 3: 1.0}), arm([5.0] * 65)
    decision = tuner.choose([stuck, arm([2e4, 1e4])], rng)
    assert (decision.arm, decision.retired) == (1, ())
    assert np.isnan(decision.scores[0])
    decision = tuner.choose([stuck, arm([2e4, 1e4, 1.0], n_slots=2)], rng)
    assert (decision.arm, decision.retired) == (0, ())


def test_patience_is_the_papers(rng):
    tuner = policy({201: 2.0, 1: 2.0}, patience_trials=200)
    decision = tuner.choose([arm([1.0] + [2.0] * 200), arm([1.0])], rng)
    assert decision.retired == (0,)


def test_who_waits_too_long_gets_a_small_slot(rng):
    tuner = policy({n: 2.0 if n > 1 else 1.001 for n in range(1, 100)}, starve_after=5.0)
    played = [1.0, 1.0]
    reasons = []
    for slot in range(1, 13):
        arms = [arm([1.0]), arm(played, n_slots=slot, sec=float(len(played)))]
        decision = tuner.choose(arms, rng)
        reasons.append(decision.reason)
        played = [*played, 1.0]
    assert reasons == ["index"] * 11 + ["starved"]
    assert (decision.arm, decision.n_trials) == (0, 4)


def test_ties_follow_the_generator():
    arms = [arm([1.0], n_slots=1) for _ in range(4)]
    picks = [policy({1: 2.0}).choose(arms, np.random.default_rng(seed)).arm for seed in range(40)]
    again = [policy({1: 2.0}).choose(arms, np.random.default_rng(seed)).arm for seed in range(40)]
    assert picks == again
    assert set(picks) == {0, 1, 2, 3}


def test_chance_is_named_as_the_reason():
    arms = [arm([1.0]), arm([1.0])]
    decision = policy({1: 2.0}, index="epsilon-greedy", epsilon=1.0).choose(
        arms, np.random.default_rng(0)
    )
    assert decision.reason == "explore"


def test_seconds_that_nobody_charged_count_alike(rng):
    decision = policy({1: 2.0, 2: 2.0}).choose([arm([1.0], sec=0.0), arm([1.0, 1.0], sec=0.0)], rng)
    assert decision.scores == pytest.approx([0.5 / 16, 0.5 / 16])


@pytest.mark.parametrize("method", ["quadrature", "records"])
def test_the_packages_own_forecast_is_used(method, rng):
    falling = 10.0 * np.exp(-np.arange(40) / 30.0) + 5.0
    stuck = np.append(falling, np.full(400, 20.0))
    tuner = DynaTunePolicy(PolicyOptions(method=method, postpone_share=0.0))
    decision = tuner.choose([arm(stuck, sec=440.0), arm(falling, sec=40.0)], rng)
    assert decision.arm == 1
    assert (decision.scores >= 0).all()


def test_the_presets():
    assert DynaTunePolicy().options is DEFAULT
    assert DynaTunePolicy("paper").options is PAPER
    assert (PAPER.index, PAPER.method, PAPER.patience_trials) == ("ucb", "emcee", 200)
    assert PAPER.warm_up.n_trials is None
    assert (DEFAULT.index, DEFAULT.warm_up) == ("gain-per-sec", WarmUp())
    assert {DEFAULT.index, PAPER.index} <= set(INDICES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.index = "ucb"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"index": "best"}, "index must be one of gain-per-sec.*'best'"),
        ({"method": "guess"}, "method must be one of .*'guess'"),
        ({"epsilon": 1.1}, r"epsilon must be in \[0, 1\] but got 1.1"),
        ({"postpone_share": 1.0}, r"postpone_share must be in \[0, 1\) but got 1.0"),
        ({"slot_trials": 0}, "slot_trials must be at least 1 but got 0"),
        ({"patience_trials": 0}, "patience_trials must be at least 1"),
        ({"slot_sec": 0.0}, "slot_sec must be above 0"),
        ({"starve_after": NAN}, "starve_after must be above 0"),
        ({"peer_margin": 0.0}, "peer_margin must be above 0"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(InvalidOptionError, match=match):
        PolicyOptions(**options)


def test_an_unknown_preset_is_refused():
    with pytest.raises(InvalidOptionError, match="one of default, paper but got 'best'"):
        DynaTunePolicy("best")
