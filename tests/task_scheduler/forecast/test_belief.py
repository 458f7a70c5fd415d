import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.forecast.belief import METHODS, Forecast, forecast
from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER

FAST = [method for method in METHODS if method != "emcee"]


def believe(best, m=16, seed=0, **options):
    return forecast(best, m, rng=np.random.default_rng(seed), **options)


@st.composite
def histories(draw, min_size=1):
    """Staircases of any shape, with or without failures in front."""
    gains = st.one_of(st.just(0.0), st.floats(1e-4, 3.0))
    steps = draw(st.lists(gains, min_size=min_size, max_size=80))
    zeros = draw(st.integers(0, 10))
    first = draw(st.floats(1e-3, 1e3))
    return np.concatenate([np.zeros(zeros), first * np.cumprod(1.0 + np.array(steps) ** 2)])


@pytest.mark.parametrize("method", FAST)
@settings(max_examples=30, deadline=None)
@given(best=histories(), m=st.integers(0, 500), headroom=st.none() | st.floats(0.5, 20.0))
def test_never_below_the_incumbent_whatever_is_expected(method, family, best, m, headroom):
    peak = headroom and headroom * best[-1]
    belief = believe(best, m, method=method, family=family, expected_peak=peak)
    assert (belief.samples >= best[-1]).all()
    assert belief.mean >= best[-1]
    assert np.isfinite(belief.samples).all()


@pytest.mark.parametrize("method", FAST)
@settings(max_examples=50, deadline=None)
@given(best=histories(), m=st.integers(0, 300), more=st.integers(0, 300))
def test_a_longer_slot_promises_no_less(method, best, m, more):
    short, long = believe(best, m, method=method), believe(best, m + more, method=method)
    assert long.mean >= short.mean * (1 - 1e-12)


@pytest.mark.parametrize("method", FAST)
@settings(max_examples=50, deadline=None)
@given(best=histories(), unit=st.sampled_from([1e-9, 1e-3, 7.0, 1e12]))
def test_a_change_of_units_changes_only_the_units(method, best, unit):
    before = believe(best, method=method, expected_peak=3 * best[-1])
    after = believe(unit * best, method=method, expected_peak=unit * 3 * best[-1])
    assert after.mean == pytest.approx(unit * before.mean, rel=1e-6)
    np.testing.assert_allclose(after.samples, unit * before.samples, rtol=1e-6)


def test_the_published_belief_does_not_depend_on_the_unit_either(family):
    # A power of two changes no digit, so that not even the chain's path may differ.
    best = np.maximum.accumulate(np.random.default_rng(4).gamma(3.0, size=40))
    before = believe(best, method="emcee", family=family)
    after = believe(1024.0 * best, method="emcee", family=family)
    np.testing.assert_allclose(after.samples, 1024.0 * before.samples, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("best", [[], [0.0], [0.0] * 50])
def test_without_a_success_nothing_is_known(method, best):
    belief = believe(best, method=method)
    assert (belief.mean, list(belief.samples)) == (0.0, [0.0])


@pytest.mark.parametrize(
    ("method", "best"),
    [("quadrature", [3.0]), ("emcee", [3.0]), ("emcee", [0.0] * 3 + [1.0, 1.5])],
)
def test_few_trials_are_left_to_the_records(method, best):
    belief = believe(best, method=method)
    np.testing.assert_array_equal(belief.samples, believe(best, method="records").samples)
    assert belief.mean > best[-1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("best", [[1.0] * 8, [0.0] * 30 + [1.0], [1.0] * 7 + [2.0]])
def test_awkward_histories_get_a_forecast(method, best):
    belief = believe(best, 32, method=method)
    assert isinstance(belief, Forecast)
    assert belief.mean >= best[-1]
    assert (belief.samples >= best[-1]).all()


@pytest.mark.parametrize("best", [[1.0, 1.0], [0.0, 2.0], [1.0, 1.5, 1.5, 3.0]])
def test_the_grid_needs_two_trials_only(best):
    belief = believe(best, 16)
    assert belief.mean != believe(best, 16, method="records").mean
    assert 0.0 < belief.expected_drop < 0.5


def test_what_is_expected_at_most_lowers_the_forecast_and_caps_no_draw():
    best = np.where(np.arange(20) < 3, 1.9, 2.0)
    free = believe(best)
    close = believe(best, expected_peak=2.1)
    assert 0.0 < close.expected_drop < 0.5 * free.expected_drop
    assert close.mean < 2.1 < close.samples.max()
    # Once it was reached, it was wrong.
    assert believe(best, expected_peak=1.9).mean == free.mean


def test_data_overrule_what_was_expected():
    steep = np.linspace(1.0, 2.0, 20)
    free = believe(steep)
    close = believe(steep, expected_peak=2.1)
    assert 0.8 * free.expected_drop < close.expected_drop < free.expected_drop


@pytest.mark.parametrize("method", METHODS)
def test_no_trials_no_change(method):
    belief = believe(np.linspace(1, 2, 20), 0, method=method)
    assert (belief.mean, set(belief.samples)) == (2.0, {2.0})


def test_a_failed_fit_is_left_to_the_records(caplog):
    # At 0.4 of its limit at the most, a curve that has reached 2 tends to 5.
    slow = dataclasses.replace(
        LOG_POWER, name="slow", basis_function=lambda *args: 0.4 * LOG_POWER.basis_function(*args)
    )
    best = np.linspace(1, 2, 20)
    with caplog.at_level("INFO"):
        belief = believe(best, family=slow)
    assert belief.mean == believe(best, method="records").mean
    assert "family slow stays below the ceiling" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_forecast(method):
    best = np.maximum.accumulate(np.random.default_rng(0).gamma(2.0, size=30))
    first, again = believe(best, method=method), believe(best, method=method)
    np.testing.assert_array_equal(first.samples, again.samples)
    assert not np.array_equal(believe(best, method=method, seed=1).samples, first.samples)


def test_the_history_is_not_written_to():
    best = np.linspace(1, 2, 30)
    copy = best.copy()
    for method in METHODS:
        believe(best, method=method)
    np.testing.assert_array_equal(best, copy)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "mcmc"}, InvalidOptionError, "method must be one of quadrature, .* got .mcmc."),
        (
            {"expected_peak": 0.0},
            InvalidOptionError,
            "expected_peak must be positive and finite but got 0.0",
        ),
        ({"m": -1}, ValueError, "horizon_trials must not be negative but got -1"),
    ],
)
def test_options_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        believe(np.ones(20), **options)
