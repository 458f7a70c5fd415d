import dataclasses

import numpy as np
import pytest
from scipy.special import stdtr, stdtrit

from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER
from tvm_adaptive.task_scheduler.forecast.emcee_chains import Posterior, run_chain
from tvm_adaptive.task_scheduler.forecast.quadrature import (
    curve_posterior,
    forecast_quadrature,
    thinned,
)
from tvm_adaptive.task_scheduler.forecast.record_breaks import strata
from tvm_adaptive.task_scheduler.forecast.result import NoFitError, ThroughputHistory


def drawn_curves(posterior, size, rng):
    """Draw parameters (amplitude, then shape) from a posterior, shape (size, 1 + p)."""
    index = posterior.draw_shapes(size, rng)
    location, scale = posterior.location[index], posterior.scale[index]
    lower, upper = posterior.lower[index], posterior.upper[index]
    # Through the tail that is the smaller, where probabilities keep their digits.
    sign = np.where(lower > location, -1.0, 1.0)
    ends = [stdtr(posterior.dof, sign * (end - location) / scale) for end in (lower, upper)]
    t = sign * stdtrit(posterior.dof, ends[0] + strata(size, rng) * (ends[1] - ends[0]))
    return np.column_stack([np.clip(location + scale * t, lower, upper), posterior.shapes[index]])


def noisy_curve(seed, noise=0.03):
    x = np.unique(np.round(np.geomspace(1, 100, 40)))
    y = LOG_POWER.evaluate(x, [1.4, 2.0, 0.8])
    y = np.maximum.accumulate(y + noise * np.random.default_rng(seed).standard_normal(len(x)))
    return x, y / y[-1]


def test_thinning_keeps_both_ends_and_the_last_value():
    best = np.maximum.accumulate(np.random.default_rng(0).random(1000))
    x, y = thinned(best)
    assert len(x) <= 24
    assert (x[0], x[-1], y[-1]) == (1.0, 1000.0, best[-1])
    np.testing.assert_array_equal(y, best[x.astype(int) - 1])


@pytest.mark.parametrize("n", [1, 2, 8])
def test_thinning_leaves_short_histories_alone(n):
    x, _ = thinned(np.ones(n))
    np.testing.assert_array_equal(x, np.arange(1, n + 1))


def test_every_drawn_curve_keeps_the_constraints(family):
    x, y = noisy_curve(1)
    posterior = curve_posterior(family, x, y, ceiling=1.6)
    assert posterior.weights.sum() == pytest.approx(1.0)
    curves = drawn_curves(posterior, 2000, np.random.default_rng(0))
    assert (family.evaluate(x[-1:], curves) >= y[-1] * (1 - 1e-9)).all()
    if family.saturates:
        assert (curves[:, 0] <= 1.6 * (1 + 1e-9)).all()


def test_drawn_curves_follow_their_truth(family, theta):
    x = np.unique(np.round(np.geomspace(1, 100, 40)))
    y = family.evaluate(x, theta)
    posterior = curve_posterior(family, x, y, ceiling=2 * y[-1], noise_floor=0.005)
    ahead = family.evaluate([200.0], drawn_curves(posterior, 4000, np.random.default_rng(0)))
    assert ahead.mean() == pytest.approx(float(family.evaluate([200.0], theta)[0]), rel=0.03)


def test_an_impossible_ceiling_is_no_fit():
    x, y = noisy_curve(0)
    with pytest.raises(NoFitError, match="family log-power stays below the ceiling"):
        curve_posterior(LOG_POWER, x, y, ceiling=0.9)


def test_fewer_effective_points_are_less_certain():
    x, y = noisy_curve(2)
    spread = [
        drawn_curves(
            curve_posterior(LOG_POWER, x, y, ceiling=4.0, effective_points=points),
            4000,
            np.random.default_rng(0),
        )[:, 0].std()
        for points in (5.0, 10.0, 40.0)
    ]
    assert spread[0] > spread[1] > spread[2]


def test_a_mixture_follows_chance_and_evidence():
    x, y = noisy_curve(2)
    low, high = (curve_posterior(LOG_POWER, x, y, ceiling=ceiling) for ceiling in (1.1, 2.0))
    # The truth tends to 1.4 / 0.95 or so.
    assert high.log_evidence > low.log_evidence
    bayes_factor = np.exp(high.log_evidence - low.log_evidence)
    share = 0.2 * bayes_factor / (0.2 * bayes_factor + 0.8)
    mixed = low.mixed_with(high, 0.2)
    np.testing.assert_allclose(mixed.weights, (1 - share) * low.weights + share * high.weights)
    # Whatever the data say, up to the chance of it.
    assert low.mixed_with(dataclasses.replace(high, log_evidence=1e4), 0.01).weights == (
        pytest.approx(high.weights)
    )
    assert low.mixed_with(dataclasses.replace(high, log_evidence=-1e4), 0.99).weights == (
        pytest.approx(low.weights)
    )


def test_the_evidence_is_that_of_the_curves_summed_by_hand():
    x, y = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0.5, 0.7, 0.9, 1.0])
    noise = 0.05

    def by_hand(ceiling):
        # Over the same shapes, the amplitude on a fine grid of its own, sigma integrated:
        # p(y | a, shape) ~ rss^(-(n - 1) / 2) under a uniform prior of sigma.
        grid = LOG_POWER.grid(8)
        total = 0.0
        for shape, log_prior in zip(grid.shapes, grid.log_prior, strict=True):
            g = LOG_POWER.basis(x, shape)
            low, high = 1.0 / g[-1], ceiling
            if low < high:
                a = np.linspace(low, high, 2001)
                rss = ((a[:, None] * g - y) ** 2).sum(axis=1) + len(x) * noise**2
                total += np.exp(log_prior) * (rss ** (-(len(x) - 1) / 2)).mean()
        return np.log(total)

    ours = [
        curve_posterior(LOG_POWER, x, y, ceiling=ceiling, noise_floor=noise).log_evidence
        for ceiling in (1.2, 1.6, 3.0)
    ]
    expected = [by_hand(ceiling) for ceiling in (1.2, 1.6, 3.0)]
    np.testing.assert_allclose(np.diff(ours), np.diff(expected), atol=0.02)


def test_the_mean_is_that_of_the_samples():
    best = np.maximum.accumulate(np.random.default_rng(5).gamma(2.0, size=60))
    forecast = forecast_quadrature(
        ThroughputHistory(best), 64, np.random.default_rng(0), LOG_POWER, n_samples=400_000
    )
    gain = forecast.mean - forecast.incumbent
    assert gain > 0
    assert (forecast.samples - forecast.incumbent).mean() == pytest.approx(gain, rel=0.02)


def test_the_expected_drop_is_that_of_the_samples():
    best = np.maximum.accumulate(np.random.default_rng(5).gamma(2.0, size=60))
    forecast = forecast_quadrature(
        ThroughputHistory(best), 64, np.random.default_rng(0), LOG_POWER, n_samples=400_000
    )
    drops = 1.0 - forecast.incumbent / forecast.samples
    assert forecast.expected_drop == pytest.approx(drops.mean(), rel=0.02)


def test_a_long_plateau_promises_less_than_a_climb():
    rng = np.random.default_rng(0)
    x = np.arange(1, 201)
    climbing, flat = np.minimum(x / 200, 1.0), np.minimum(x / 20, 1.0)
    gains = [
        forecast_quadrature(ThroughputHistory(best), 32, rng, LOG_POWER).mean - 1.0
        for best in (climbing, flat)
    ]
    assert gains[0] > 5 * gains[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    # Many nodes agree with the chain closely; those of the default grid where a posterior
    # is as wide as a staircase of a few records makes it.
    ("refinement", "noise", "mean_tolerance", "std_tolerance"),
    [(6, 0.03, 0.002, 0.1), (6, 0.1, 0.004, 0.1), (1, 0.1, 0.015, 0.15)],
)
@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_a_long_chain_of_the_same_model(
    seed, refinement, noise, mean_tolerance, std_tolerance
):
    x, y = noisy_curve(seed, noise)
    posterior = Posterior(LOG_POWER, x, y, ceiling=2.0)
    chain = run_chain(posterior, np.random.default_rng(seed), n_walkers=32, n_steps=6000)
    theta = chain[1000::5].reshape(-1, 4)[:, :3]
    parameters = tuple(
        dataclasses.replace(parameter, n_nodes=refinement * parameter.n_nodes)
        for parameter in LOG_POWER.parameters
    )
    family = dataclasses.replace(LOG_POWER, parameters=parameters)
    grid = curve_posterior(family, x, y, ceiling=2.0, uniform_prior=True, noise_floor=1e-4)
    curves = drawn_curves(grid, 20_000, np.random.default_rng(0))
    for ahead in (110.0, 200.0, 400.0):
        by_chain, by_grid = family.evaluate([ahead], theta), family.evaluate([ahead], curves)
        assert by_grid.mean() == pytest.approx(by_chain.mean(), abs=mean_tolerance)
        assert by_grid.std() == pytest.approx(by_chain.std(), rel=std_tolerance)
