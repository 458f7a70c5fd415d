import numpy as np
import pytest

from tvm_adaptive.task_scheduler.forecast.record_breaks import forecast_records
from tvm_adaptive.task_scheduler.forecast.result import History


def records(values, m, seed=0, peak=None, n_samples=512):
    history = History(np.asarray(values, dtype=float), peak)
    return forecast_records(history, m, np.random.default_rng(seed), n_samples=n_samples)


@pytest.mark.parametrize(("n", "m"), [(10, 10), (48, 16), (900, 100)])
def test_the_chance_is_that_of_record_theory(n, m):
    forecast = records(np.linspace(1, 2, n), m, n_samples=10_000)
    assert forecast.improvement_chance == pytest.approx(m / (n + m), abs=2e-4)


def test_one_point_gains_what_the_prior_says():
    # m / (n + m) = 3 / 4 of a 5 % jump.
    assert records([7.0], 3).mean == pytest.approx(7.0 * (1 + 0.75 * 0.05))


def test_large_past_jumps_promise_large_ones():
    small = records([1.0] * 10 + [1.01] * 10 + [1.02] * 10, 16)
    large = records([1.0] * 10 + [1.5] * 10 + [2.2] * 10, 16)
    assert large.mean / large.incumbent > small.mean / small.incumbent


@pytest.mark.parametrize("values", [[], [0.0] * 20])
def test_without_a_success_it_says_so(values):
    forecast = records(values, 16)
    assert forecast.mean == forecast.std == 0.0
    assert (forecast.samples == 0).all()
    assert forecast.warning == "no success yet"


def test_mean_and_std_are_those_of_the_samples():
    forecast = records(np.linspace(1, 1.3, 12), 12, n_samples=400_000)
    assert forecast.samples.mean() == pytest.approx(forecast.mean, rel=1e-3)
    assert forecast.samples.std() == pytest.approx(forecast.std, rel=0.03)


def test_nothing_exceeds_the_peak():
    forecast = records([1.0, 5.0, 9.0, 9.9], 1000, peak=10.0)
    assert forecast.samples.max() <= 10.0
    assert forecast.mean <= 10.0
