import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import integrate, stats

from tvm_adaptive.cost_model.acquisition import log_expected_improvement, selection_score
from tvm_adaptive.values.improvement import expected_improvement

values = st.floats(-10, 10)
spreads = st.floats(1e-3, 10)


def ei(mean, std, best=0.0):
    return float(expected_improvement([mean], [std], best)[0])


def log_ei(mean, std, best=0.0):
    return float(log_expected_improvement([mean], [std], best)[0])


@pytest.mark.parametrize(
    ("mean", "std", "best", "expected"),
    [
        (0.0, 1.0, 0.0, 1 / math.sqrt(2 * math.pi)),
        (1.0, 1.0, 0.0, 1.0833154705876864),
        (3.0, 2.0, 3.0, 2 / math.sqrt(2 * math.pi)),
        (5.0, 0.0, 2.0, 3.0),
        (1.0, 0.0, 2.0, 0.0),
        (2.0, 0.0, 2.0, 0.0),
    ],
)
def test_known_values(mean, std, best, expected):
    assert ei(mean, std, best) == pytest.approx(expected, rel=1e-12)


def test_it_is_the_expectation_that_its_name_says():
    def integrand(value):
        return max(0.0, value - 0.7) * stats.norm.pdf(value, 0.2, 0.5)

    expected, _ = integrate.quad(integrand, 0.7, 5)
    assert ei(0.2, 0.5, 0.7) == pytest.approx(expected, rel=1e-7)


@given(mean=values, std=st.floats(0, 10), best=values)
def test_never_below_what_is_certain(mean, std, best):
    value = ei(mean, std, best)
    assert value >= 0
    assert value >= mean - best


@given(mean=values, std=st.floats(0, 10), best=values, more=st.floats(0, 5))
def test_grows_with_mean_and_with_std(mean, std, best, more):
    tolerance = 1e-12
    assert ei(mean + more, std, best) >= ei(mean, std, best) - tolerance
    assert ei(mean, std + more, best) >= ei(mean, std, best) - tolerance


@given(mean=values, std=spreads, best=values, unit=st.sampled_from([1e-6, 0.5, 1e9]))
def test_a_change_of_units_changes_only_the_units(mean, std, best, unit):
    assume(ei(mean, std, best) > 1e-200)
    assert ei(mean * unit, std * unit, best * unit) == pytest.approx(
        ei(mean, std, best) * unit, rel=1e-6
    )


@given(mean=values, best=values)
def test_the_limit_without_spread(mean, best):
    assert ei(mean, 1e-12, best) == pytest.approx(max(0.0, mean - best), abs=1e-11)


@given(mean=values, std=spreads, best=values)
def test_log_ei_is_the_logarithm(mean, std, best):
    assume((mean - best) / std > -20)
    # EI itself loses (z^2 * 1e-16) to cancellation.
    assert log_ei(mean, std, best) == pytest.approx(math.log(ei(mean, std, best)), abs=1e-6)


@pytest.mark.parametrize("z", [-0.5, -1.0, -1.5, -6.0, -30.0, -49.9, -50.1, -200.0, -1e3])
def test_log_ei_against_high_precision(z):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        exact = mpmath.log(mpmath.npdf(z) + mpmath.mpf(z) * mpmath.ncdf(z))
    assert log_ei(z, 1.0) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("z", [-1.0, -50.0, 50.0])
def test_log_ei_is_continuous_where_its_formula_changes(z):
    below, above = log_ei(z * (1 + 1e-9), 1.0), log_ei(z * (1 - 1e-9), 1.0)
    assert below == pytest.approx(above, rel=1e-6)


@pytest.mark.parametrize("mean", [-1e300, -1e6, -1e3, 0.0, 1e3, 1e300])
@pytest.mark.parametrize("std", [1e-300, 1e-3, 1.0, 1e300])
def test_extremes_are_finite(mean, std):
    assert math.isfinite(log_ei(mean, std))
    assert math.isfinite(ei(mean, std))


@given(z=st.lists(st.floats(-1e4, 100), min_size=2, max_size=20, unique=True))
def test_log_ei_ranks_where_ei_is_zero(z):
    z = np.sort(z)
    z = z[np.append(True, np.diff(z) > 1e-6)]
    ranked = log_expected_improvement(z, np.ones(len(z)), 0.0)
    assert (np.diff(ranked) > 0).all()


def test_log_ei_without_spread():
    np.testing.assert_array_equal(
        log_expected_improvement([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 2.0), [-np.inf, -np.inf, 0.0]
    )


def test_shapes_and_arguments_are_kept():
    mean, std = np.array([0.1, 0.2, 0.3]), np.array([1.0, 0.0, 2.0])
    copies = mean.copy(), std.copy()
    for function in (expected_improvement, log_expected_improvement):
        assert function(mean, std, 0.2).shape == (3,)
        assert function(np.zeros(0), np.zeros(0), 0.0).shape == (0,)
    np.testing.assert_array_equal(mean, copies[0])
    np.testing.assert_array_equal(std, copies[1])


@given(log_eis=st.lists(st.floats(-1e12, 1e3), min_size=2, max_size=30))
def test_the_score_is_strictly_increasing_and_positive(log_eis):
    log_eis = np.sort(log_eis)
    # Floating point tells neighbours apart down to a relative distance.
    far = np.diff(log_eis) > 1e-9 * (1 + np.abs(log_eis[1:]))
    scores = selection_score(log_eis)
    assert (scores > 0).all()
    assert np.isfinite(scores).all()
    assert (np.diff(scores) >= 0).all()
    assert (np.diff(scores)[far] > 0).all()


def test_the_score_at_the_edges():
    scores = selection_score([-np.inf, -1e300, np.nan, 0.0, np.inf])
    assert (scores > 0).all()
    assert np.isfinite(scores).all()
    assert scores[3] == 1.0


@given(log_ei=st.floats(-1e6, 100), others=st.lists(st.floats(-1e6, 100), max_size=5))
def test_the_score_does_not_depend_on_the_batch(log_ei, others):
    assert selection_score([log_ei, *others])[0] == selection_score([log_ei])[0]
