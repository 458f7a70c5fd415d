"""Races: what is saved, what a loser is recorded as, and how often the wrong one loses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.runner.evaluator import (
    HOPELESS_FACTOR,
    WARM_UP_SEC,
    Race,
    evaluate,
)
from tvm_adaptive.runner.stopping import make_rule


class Kernel:
    """A kernel on a busy host: noise upwards only, now and then a run that is interrupted.

    The first run is cold. ``stays_slow`` is how much slower everything is for the whole
    measurement, as when the host moves the processors about.
    """

    def __init__(self, run_sec, rng=None, *, stays_slow=1.0, interrupt_sec=0.0, chance=0.0):
        self.run_sec = run_sec * stays_slow
        self.rng = rng
        self.interrupt_sec, self.chance = interrupt_sec, chance
        self.now_sec = 0.0
        self.n_calls = 0

    def timer(self, number, repeat):
        means = np.full(repeat, self.run_sec)
        if self.rng is not None:
            means *= 1 + self.rng.exponential(0.03, repeat)
            hit = self.rng.random(repeat) < min(1.0, self.chance * number * self.run_sec)
            means += hit * self.interrupt_sec / number
        if self.n_calls == 0:
            means[0] += 3e-4  # wakes threads, fills caches
        self.n_calls += 1
        self.now_sec += self.run_sec + number * means.sum()
        return list(means)

    def measure(self, race=None, rule="precision"):
        return evaluate(self.timer, make_rule(rule), race=race, clock=lambda: self.now_sec)


def test_on_a_noisy_machine_one_look_decides_nothing_that_three_would_not():
    assert Race(1.0, 0.05).is_hopeless(3.5)
    assert not Race(1.0, 0.3).is_hopeless(3.5)
    assert Race(1.0, 0.3).is_hopeless(6.5)


@pytest.mark.parametrize("run_sec", [2e-5, 1e-3, 1.5 * WARM_UP_SEC, 5 * WARM_UP_SEC])
def test_a_hopeless_candidate_gets_one_look(run_sec):
    kernel = Kernel(run_sec)
    timing = kernel.measure(Race(run_sec / (1.05 * HOPELESS_FACTOR)))
    assert (timing.reason, timing.n_batches) == ("raced", 1)
    assert timing.mean_sec == pytest.approx(run_sec, rel=0.05)
    assert math.isnan(timing.stderr_sec)
    assert kernel.n_calls == (1 if run_sec >= WARM_UP_SEC else 2)
    assert timing.elapsed_sec < Kernel(run_sec).measure().elapsed_sec


@pytest.mark.parametrize("run_sec", [2e-5, 1e-3, 2e-2])
def test_one_that_is_clearly_slower_gets_the_rules_minimum(run_sec):
    rng = np.random.default_rng(0)
    timing = Kernel(run_sec, rng).measure(Race(run_sec / 1.5))
    assert (timing.reason, timing.n_batches) == ("raced", 3)
    assert timing.mean_sec == pytest.approx(run_sec, rel=0.15)
    assert timing.stderr_sec >= 0


@pytest.mark.parametrize(("noise", "loses"), [(0.01, True), (0.05, False), (0.1, False)])
def test_the_noisier_the_machine_the_further_behind_a_loser_is(noise, loses):
    kernel = Kernel(1e-3)
    timing = kernel.measure(Race(kernel.run_sec / 1.15, noise))
    assert (timing.reason == "raced") == loses
    assert Race(1.0, noise).behind_factor < HOPELESS_FACTOR


@given(
    run_sec=st.floats(1e-6, 0.05),
    ratio=st.floats(0.1, 1.0),
    seed=st.integers(0, 1000),
)
def test_one_that_may_win_is_measured_as_if_there_were_no_race(run_sec, ratio, seed):
    raced = Kernel(run_sec, np.random.default_rng(seed)).measure(Race(run_sec / ratio))
    alone = Kernel(run_sec, np.random.default_rng(seed)).measure()
    assert repr(raced) == repr(alone)  # a standard error may be NaN


@pytest.mark.parametrize("rule", ["paper", "cv"])
def test_rules_as_published_know_no_races(rule):
    assert Kernel(1e-3).measure(Race(1e-5), rule).reason != "raced"


def test_better_candidates_are_hardly_ever_dropped():
    """On a host that interrupts a run for 10 ms twice a second."""
    rng = np.random.default_rng(1)
    n, dropped = 2000, 0
    for _ in range(n):
        run_sec = 10 ** rng.uniform(-5, -1.5)
        kernel = Kernel(run_sec, rng, interrupt_sec=0.01, chance=2.0)
        # The incumbent is up to 20 % slower than this one, but was lucky by up to 15 %.
        race = Race(run_sec * rng.uniform(1.0, 1.2) * rng.uniform(0.85, 1.0))
        dropped += kernel.measure(race).reason == "raced"
    assert dropped / n < 0.005


def test_a_host_that_stays_slow_spoils_a_race_no_more_than_a_measurement():
    run_sec, slow = 1e-4, 1.5
    race = Race(run_sec)
    raced = Kernel(run_sec, np.random.default_rng(0), stays_slow=slow).measure(race)
    full = Kernel(run_sec, np.random.default_rng(0), stays_slow=slow).measure()
    assert raced.reason == "raced"
    assert full.mean_sec > race.behind_factor * race.incumbent_sec


def test_most_of_a_batch_costs_a_fraction():
    """Candidates as a search proposes them: most are up to ten times slower than the best."""
    rng = np.random.default_rng(2)
    best_sec = 1e-3
    run_secs = best_sec * np.exp(rng.uniform(0, np.log(10), 300))
    with_race, without = (
        sum(Kernel(sec, rng).measure(race).elapsed_sec for sec in run_secs)
        for race in (Race(best_sec), None)
    )
    assert with_race < 0.7 * without
