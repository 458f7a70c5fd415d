import dataclasses
import math

import numpy as np
import pytest

from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.baselines import at_random, linear, round_robin

MAKERS = [round_robin, at_random, linear]


class Slots:
    """Arms that get a valid trial per slot, so many seconds each, and may end after some."""

    def __init__(self, *, flops=(1e9, 1e9, 1e9), sec=1.0, ends=None):
        self.flops, self.sec, self.ends = flops, sec, ends or {}
        self.counts = [0] * len(flops)

    def arms(self):
        ends = [self.ends.get(k, 10**9) for k in range(len(self.flops))]
        return [
            Arm(f"arm{k}", 1.0, flop, np.full(n, 5.0), n, n * self.sec, n >= end)
            for k, (flop, n, end) in enumerate(zip(self.flops, self.counts, ends, strict=True))
        ]

    def play(self, policy, n_slots, seed=0):
        rng, picks = np.random.default_rng(seed), []
        for _ in range(n_slots):
            arm = policy.choose(self.arms(), rng).arm
            if arm is None:
                break
            picks.append(arm)
            self.counts[arm] += 1
        return picks


def test_round_robin_goes_round_and_skips_the_finished():
    assert Slots().play(round_robin(), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert Slots(ends={1: 1}).play(round_robin(), 6) == [0, 1, 2, 0, 2, 0]


def test_random_plays_all_alike():
    slots = Slots()
    picks = slots.play(at_random(), 3000)
    # Three standard deviations of a third of 3000.
    assert np.bincount(picks) == pytest.approx([1000] * 3, abs=80)
    assert picks == Slots().play(at_random(), 3000)
    assert picks != Slots().play(at_random(), 3000, seed=1)


@pytest.mark.parametrize("sec", [1.0, 0.0])
def test_linear_gives_time_by_flop(sec):
    slots = Slots(flops=(1e9, 2e9, 5e9), sec=sec)
    slots.play(linear(), 800)
    assert slots.counts == pytest.approx([100, 200, 500], abs=2)


def test_linear_gives_nothing_to_a_task_of_weight_0(rng):
    idle, used = (Arm(f"arm{w}", w, 1e9, np.full(3, 5.0), 3, 3.0) for w in (0.0, 1.0))
    assert {linear().choose([idle, used], rng).arm for _ in range(20)} == {1}
    decision = linear().choose([idle, dataclasses.replace(used, finished=True)], rng)
    assert (decision.arm, decision.reason) == (0, "rule")


@pytest.mark.parametrize("make", MAKERS)
def test_what_a_finished_arm_leaves_goes_to_the_others(make):
    assert len(Slots(ends={0: 2}).play(make(), 100)) == 100


@pytest.mark.parametrize("make", MAKERS)
def test_patience_retires(make, rng):
    stuck = Arm("stuck", 1.0, 1e9, np.array([1.0] + [2.0] * 200), 13, 13.0)
    fresh = Arm("fresh", 1.0, 1e9, np.array([1.0]), 1, 1.0)
    policy = make(patience_trials=200)
    decision = policy.choose([stuck, fresh], rng)
    assert (decision.arm, decision.retired) == (1, (0,))
    finished = dataclasses.replace(stuck, finished=True)
    assert policy.choose([finished, fresh], rng).retired == ()


@pytest.mark.parametrize("make", MAKERS)
def test_a_broken_arm_is_given_up(make, rng):
    broken = Arm("broken", 1.0, 1e12, np.full(64, math.nan), 4, 4.0)
    fresh = Arm("fresh", 1.0, 1e9, np.empty(0), 0, 0.0)
    decision = make().choose([broken, fresh], rng)
    assert (decision.arm, decision.reason, decision.retired) == (1, "warm-up", (0,))
