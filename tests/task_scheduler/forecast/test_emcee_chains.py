import numpy as np
import pytest

from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER
from tvm_adaptive.task_scheduler.forecast.emcee_chains import (
    Posterior,
    acceptance,
    fit_least_squares,
    forecast_emcee,
    last_segment,
    run_chain,
)
from tvm_adaptive.task_scheduler.forecast.result import NoFitError, ThroughputHistory


def staircase(seed, n=60):
    return np.maximum.accumulate(np.random.default_rng(seed).gamma(3.0, size=n))


def posterior_of(family, seed=0, n=60, ceiling=10.0):
    best = staircase(seed, n)
    return Posterior(family, np.arange(1.0, n + 1), best / best[-1], ceiling)


def healthy_chain(steps=500, walkers=10, d=4):
    """Half of the steps accepted, each to an independent place."""
    rng = np.random.default_rng(0)
    chain = rng.standard_normal((steps, walkers, d))
    for step in range(1, steps):
        stay = rng.random(walkers) < 0.5
        chain[step, stay] = chain[step - 1, stay]
    return chain


def test_the_density_of_the_model_by_hand():
    # One point: log N(y | f, sigma) up to its constant.
    posterior = Posterior(LOG_POWER, np.array([1.0]), np.array([1.0]), 10.0)
    # f(1) = 4 / (1 + 1) = 2
    value = posterior(np.array([[4.0, 0.0, 1.0, 0.5]]))[0]
    assert value == pytest.approx(-0.5 * (1.0 / 0.5) ** 2 - np.log(0.5))


@pytest.mark.parametrize(
    ("theta", "why"),
    [
        ([11.0, 0.0, 1.0, 0.5], "above the ceiling"),
        ([1.9, 0.0, 1.0, 0.5], "below the incumbent at the last trial"),
        ([4.0, -3.0, 1.0, 0.5], "b out of range"),
        ([4.0, 0.0, 5.0, 0.5], "h out of range"),
        ([4.0, 0.0, 1.0, 1.1], "sigma out of range"),
        ([4.0, 0.0, 1.0, 0.0], "no noise at all"),
        ([4.0, 0.0, 1.0, -0.5], "negative noise"),
    ],
)
def test_what_has_no_probability(theta, why):
    posterior = Posterior(LOG_POWER, np.array([1.0]), np.array([1.0]), 10.0)
    assert posterior(np.array([theta]))[0] == -np.inf, why


@pytest.mark.parametrize("seed", range(5))
def test_every_start_is_feasible_and_none_is_like_another(family, seed):
    posterior = posterior_of(family, seed)
    fit = fit_least_squares(family, posterior.x, posterior.y, ceiling=posterior.ceiling)
    starts = posterior.starts(fit, 10, np.random.default_rng(seed))
    assert np.isfinite(posterior(starts)).all()
    assert np.linalg.matrix_rank(starts - starts.mean(axis=0)) == starts.shape[1]


@pytest.mark.parametrize("seed", range(2))
def test_the_chain_moves_and_keeps_the_constraints(family, seed):
    posterior = posterior_of(family, seed)
    chain = run_chain(posterior, np.random.default_rng(seed))
    assert chain.shape == (500, 10, 2 + len(family.parameters))
    assert acceptance(chain).mean() > 0.1
    assert np.isfinite(posterior(chain.reshape(-1, chain.shape[2]))).all()


def test_a_frozen_chain_makes_no_forecast(monkeypatch):
    module = "tvm_adaptive.task_scheduler.forecast.emcee_chains.run_chain"
    monkeypatch.setattr(module, lambda posterior, rng: np.ones((500, 10, 4)))
    with pytest.raises(NoFitError, match="the chain is frozen"):
        forecast_emcee(ThroughputHistory(staircase(0)), 16, np.random.default_rng(0), LOG_POWER)


def test_two_hundred_samples_not_below_the_incumbent(family):
    history = ThroughputHistory(staircase(1))
    forecast = forecast_emcee(history, 32, np.random.default_rng(0), family)
    assert forecast.samples.shape == (200,)
    assert (forecast.samples >= history.incumbent).all()
    assert forecast.mean == pytest.approx(forecast.samples.mean())
    assert forecast.samples.std() > 1e-4 * history.incumbent, "start jitter is no uncertainty"


def test_the_same_seed_gives_the_same_forecast_and_another_does_not():
    np.random.seed(1)  # noqa: NPY002 - the global generator must not matter
    history = ThroughputHistory(staircase(2))
    first = forecast_emcee(history, 16, np.random.default_rng(7), LOG_POWER)
    np.random.seed(2)  # noqa: NPY002
    again = forecast_emcee(history, 16, np.random.default_rng(7), LOG_POWER)
    other = forecast_emcee(history, 16, np.random.default_rng(8), LOG_POWER)
    np.testing.assert_array_equal(first.samples, again.samples)
    assert not np.array_equal(first.samples, other.samples)


def test_the_last_segment_has_points_for_its_parameters():
    steps = [1.0] * 20 + [2.0] * 2 + [3.0] * 4
    assert last_segment(np.array(steps)) == 0
    assert last_segment(np.array([1.0] * 20 + [2.0] * 9 + [3.0] * 4)) == 20


def test_only_the_last_segment_counts():
    best = np.concatenate([np.full(20, 1.0), np.full(40, 2.0) + 0.001 * np.arange(40)])
    whole, last = (
        forecast_emcee(ThroughputHistory(best), 40, np.random.default_rng(0), LOG_POWER, start)
        for start in (0, 20)
    )
    assert last.mean < whole.mean
