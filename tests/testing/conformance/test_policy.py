import dataclasses
import itertools

import numpy as np
import pytest

from tvm_adaptive.task_scheduler.arms import Decision
from tvm_adaptive.task_scheduler.baselines import (
    GradientPolicy,
    at_random,
    linear,
    round_robin,
)
from tvm_adaptive.task_scheduler.policy import DEFAULT, INDICES, PAPER, DynaTunePolicy
from tvm_adaptive.testing.conformance import check_policy

# The published preset's sampling takes minutes here; its own forecast has its own tests.
PAPER_WITHOUT_SAMPLING = dataclasses.replace(PAPER, method="records")


def options(**changes):
    return lambda: DynaTunePolicy(dataclasses.replace(DEFAULT, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        DynaTunePolicy,
        lambda: DynaTunePolicy(PAPER_WITHOUT_SAMPLING),
        *(options(index=index, method="records") for index in INDICES),
        options(method="records", postpone_share=0.0),
        options(method="records", slot_sec=5.0),
        GradientPolicy,
        round_robin,
        at_random,
        linear,
        lambda: at_random(patience_trials=200),
    ],
)
def test_the_packages_own_policies_conform(make):
    report = check_policy(make)
    assert report.n_decisions > 4
    assert report.max_decision_sec >= report.median_decision_sec > 0


class Always:
    """Plays each arm once and then one of them for ever, so that the others starve."""

    def choose(self, arms, rng):
        live = [k for k, arm in enumerate(arms) if not arm.finished]
        fresh = [k for k in live if arms[k].n_slots == 0]
        return Decision([*fresh, *live][0], "x", n_trials=1) if live else Decision(None, "end")


class Stubborn:
    """Does not look at who is finished."""

    def choose(self, arms, rng):
        return Decision(0, "x")


class Early:
    """Ends a run that has not begun."""

    def choose(self, arms, rng):
        return Decision(None, "bored")


class Forgetful:
    """Ends the run after the first arm."""

    def choose(self, arms, rng):
        fresh = not arms[0].finished and arms[0].n_slots == 0
        return Decision(0, "x") if fresh else Decision(None, "bored")


class OwnDice:
    """Has a source of randomness of its own."""

    dice = np.random.default_rng(0)

    def choose(self, arms, rng):
        live = [k for k, arm in enumerate(arms) if not arm.finished]
        return Decision(int(self.dice.choice(live)), "x") if live else Decision(None, "end")


class Vandal:
    """Sorts the history in place."""

    def choose(self, arms, rng):
        for arm in arms:
            arm.latencies_ms.sort()
        return round_robin().choose(arms, rng)


class OneScore:
    """Scores what it chose only."""

    def choose(self, arms, rng):
        return dataclasses.replace(round_robin().choose(arms, rng), scores=np.zeros(1))


class Unguarded:
    """Does not look whether any arm is left."""

    def choose(self, arms, rng):
        live = [k for k, arm in enumerate(arms) if not arm.finished]
        return Decision(max(live, key=lambda k: -arms[k].n_slots), "x")


class Named:
    """Gives an arm's index as a text."""

    def choose(self, arms, rng):
        return Decision("0", "x")


class NoDecision:
    """Returns a bare index."""

    def choose(self, arms, rng):
        return 0


class Hopeful:
    """Waits for the broken arm."""

    def choose(self, arms, rng):
        cold = [k for k, arm in enumerate(arms) if np.isinf(arm.best_ms) and not arm.finished]
        if cold:
            return Decision(cold[0], "warm-up")
        return Decision(None, "end")


class Burying:
    """Takes an arm whose slot is under way for one that has ended."""

    def __init__(self):
        self.ended = set()

    def choose(self, arms, rng):
        self.ended |= {k for k, arm in enumerate(arms) if arm.finished}
        live = [k for k in range(len(arms)) if k not in self.ended]
        if not live:
            return Decision(None, "end")
        return Decision(min(live, key=lambda k: arms[k].n_slots), "x")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Burying, "gave 200 slots where results came at once, but 4 where an arm was under way"),
        (Always, "waited for"),
        (Stubborn, "is finished"),
        (Early, "before arms .* were played"),
        (Forgetful, r"before arms \[1, 2, 3\] were played"),
        (OwnDice, "the same seed led to different choices"),
        (OneScore, r"one score per arm but got shape \(1,\)"),
        (NoDecision, "expected a Decision but got 0"),
        (Vandal, r"choose\(\) with \d arms left raised ValueError: .*read-only"),
        (Unguarded, r"choose\(\) with 0 arms left raised ValueError"),
        (Named, "named arm '0'; there are arms 0 to"),
        (Hopeful, "kept the policy from the other one for 30 slots"),
    ],
)
def test_what_does_not_conform_is_named(make, match):
    with pytest.raises(AssertionError, match=match):
        check_policy(make)


def test_a_seed_of_ones_own():
    seeds = itertools.count()
    for seed in itertools.islice(seeds, 3):
        assert check_policy(GradientPolicy, seed=seed).n_decisions > 0
