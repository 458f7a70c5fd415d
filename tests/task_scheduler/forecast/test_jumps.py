import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.task_scheduler.forecast.jumps import (
    exchangeable_chance,
    jump_samples,
    learned_chance,
    strata,
)
from tvm_adaptive.task_scheduler.forecast.result import History


def staircase(n, records_at):
    best = np.zeros(n)
    for trial in records_at:
        best[trial - 1 :] += 1.0
    return History(best)


@pytest.mark.parametrize(
    ("n", "m", "chance"), [(30, 30, 0.5), (90, 10, 0.1), (5, 0, 0.0), (0, 0, 0.0), (0, 4, 1.0)]
)
def test_exchangeable_trials(n, m, chance):
    assert exchangeable_chance(n, m) == chance


def test_the_learned_chance_is_about_that_of_exchangeable_trials_when_records_are():
    # Records at 1, e, e^2, ... are what one per unit of log trials means.
    history = staircase(148, [1, 3, 7, 20, 55])
    for m in (1, 16, 64):
        assert learned_chance(history, m) == pytest.approx(m / (148 + m), rel=0.15)


def test_a_search_that_learns_is_trusted_and_a_stuck_one_is_not():
    exchangeable = 16 / (64 + 16)
    learning = staircase(64, range(1, 65, 4))
    assert learned_chance(learning, 16) > 1.5 * exchangeable
    assert learned_chance(staircase(64, [1]), 16) < 0.6 * exchangeable


@given(n=st.integers(1, 500), m=st.integers(0, 500), more=st.integers(0, 500))
def test_a_longer_slot_has_a_better_chance(n, m, more):
    history = staircase(n, [1])
    assert 0 <= learned_chance(history, m) <= learned_chance(history, m + more) < 1


@pytest.mark.parametrize("tail", [np.inf, 8.0, 4.0])
@pytest.mark.parametrize("chance", [0.02, 0.4, 1.0])
def test_jumps_have_the_mean_and_the_chance_asked_for(chance, tail):
    rng = np.random.default_rng(3)
    gains = jump_samples(chance, np.full(200_000, 0.3), rng, tail=tail)
    assert (gains > 0).sum() == pytest.approx(chance * len(gains), abs=1)
    # Strata leave the last stratum's tail to chance; sd / sqrt(n) would be 0.01 at most.
    assert gains.mean() == pytest.approx(0.3, rel=0.02)


def test_no_chance_no_gain():
    gains = jump_samples(0.0, np.full(10, 0.3), np.random.default_rng(0))
    np.testing.assert_array_equal(gains, np.zeros(10))


@given(size=st.integers(1, 200), seed=st.integers(0, 100))
def test_each_stratum_has_one(size, seed):
    u = strata(size, np.random.default_rng(seed))
    np.testing.assert_array_equal(np.sort(np.floor(u * size)), np.arange(size))
