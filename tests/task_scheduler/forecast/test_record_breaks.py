import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from tvm_adaptive.task_scheduler.forecast.record_breaks import (
    exchangeable_chance,
    expected_drop,
    forecast_records,
    jump_samples,
    learned_chance,
    strata,
)
from tvm_adaptive.task_scheduler.forecast.result import ThroughputHistory


def staircase(n, records_at):
    best = np.zeros(n)
    for trial in records_at:
        best[trial - 1 :] += 1.0
    return ThroughputHistory(best)


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


@pytest.mark.parametrize("chance", [1e-6, 0.1, 1.0])
@pytest.mark.parametrize("gain", [0.0, 1e-9, 1e-4, 0.02, 0.5, 1.0])
def test_the_expected_drop_is_the_integral_over_the_jumps(chance, gain):
    def drop(x):  # of a jump of x means, times its density
        jump = gain / chance * x
        return chance * np.exp(-x) * jump / (1.0 + jump)

    integral, _ = quad(drop, 0.0, np.inf, epsabs=0.0, epsrel=1e-9)
    assert expected_drop(chance, np.array([gain])) == pytest.approx([integral], rel=1e-6)


def test_a_rare_jump_drops_less_than_a_sure_gain():
    assert expected_drop(0.1, np.array([0.02])) == pytest.approx([0.01479], abs=1e-5)
    assert expected_drop(0.0, np.array([0.02])) == 0.0


def test_no_chance_no_gain():
    gains = jump_samples(0.0, np.full(10, 0.3), np.random.default_rng(0))
    np.testing.assert_array_equal(gains, np.zeros(10))


@given(size=st.integers(1, 200), seed=st.integers(0, 100))
def test_each_stratum_has_one(size, seed):
    u = strata(size, np.random.default_rng(seed))
    np.testing.assert_array_equal(np.sort(np.floor(u * size)), np.arange(size))


def records(values, m, seed=0, n_samples=512):
    history = ThroughputHistory(np.asarray(values, dtype=float))
    return forecast_records(history, m, np.random.default_rng(seed), n_samples=n_samples)


@pytest.mark.parametrize(("n", "m"), [(10, 10), (48, 16), (900, 100)])
def test_the_chance_is_that_of_record_theory(n, m):
    forecast = records(np.linspace(1, 2, n), m, n_samples=10_000)
    improved = forecast.samples > forecast.incumbent
    assert improved.mean() == pytest.approx(m / (n + m), abs=2e-4)


def test_one_point_gains_what_the_prior_says():
    # m / (n + m) = 3 / 4 of a 5 % jump.
    assert records([7.0], 3).mean == pytest.approx(7.0 * (1 + 0.75 * 0.05))


def test_large_past_jumps_promise_large_ones():
    small = records([1.0] * 10 + [1.01] * 10 + [1.02] * 10, 16)
    large = records([1.0] * 10 + [1.5] * 10 + [2.2] * 10, 16)
    assert large.mean / large.incumbent > small.mean / small.incumbent


@pytest.mark.parametrize("values", [[], [0.0] * 20])
def test_without_a_success_nothing_is_expected(values):
    forecast = records(values, 16)
    assert forecast.mean == 0.0
    assert (forecast.samples == 0).all()


def test_the_mean_is_that_of_the_samples():
    forecast = records(np.linspace(1, 1.3, 12), 12, n_samples=400_000)
    assert forecast.samples.mean() == pytest.approx(forecast.mean, rel=1e-3)
