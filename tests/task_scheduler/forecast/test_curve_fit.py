import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER
from tvm_adaptive.task_scheduler.forecast.emcee_chains import fit_least_squares, last_segment
from tvm_adaptive.task_scheduler.forecast.result import NoFitError

X = np.arange(1.0, 81.0)


def test_a_noiseless_curve_is_found_again(family, theta):
    fit = fit_least_squares(family, X, family.evaluate(X, theta), ceiling=10.0)
    assert fit.rms < 1e-4
    ahead = np.array([100.0, 200.0])
    expected = family.evaluate(ahead, theta)
    np.testing.assert_allclose(family.evaluate(ahead, fit.theta), expected, rtol=5e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(8, 60))
def test_a_fit_has_reached_the_last_value(family, theta, seed, n):
    rng = np.random.default_rng(seed)
    y = np.maximum.accumulate(rng.gamma(2.0, size=n))
    y /= y[-1]
    x = np.arange(1.0, n + 1)
    fit = fit_least_squares(family, x, y, ceiling=3.0)
    assert np.isfinite(fit.theta).all()
    assert family.evaluate(x[-1:], fit.theta)[0] >= 1.0 - 1e-9
    if family.saturates:
        assert fit.theta[0] <= 3.0 * (1 + 1e-9)


def test_no_room_below_the_ceiling_is_no_fit():
    with pytest.raises(NoFitError, match="stays below the ceiling"):
        fit_least_squares(LOG_POWER, X, np.linspace(0.5, 1.0, 80), ceiling=0.9)


STEPS = np.concatenate([np.full(10, 1.0), np.full(12, 1.19), np.full(20, 1.5)])


@pytest.mark.parametrize(
    ("best", "start"),
    [
        ([1.0] * 30, 0),
        # 19 % is no jump, 26 % is one.
        (STEPS, 22),
        # Seven trials after the jump are too few, eight are not.
        (STEPS[:29], 0),
        (STEPS[:30], 22),
        # Short again: pooled with the segment before, not with everything.
        ([1.0] * 10 + [2.0] * 10 + [3.0] * 3, 10),
        # The first success is no jump.
        ([0.0] * 5 + [1.0] * 10, 0),
        ([0.0] * 12, 0),
        ([1.0], 0),
        ([], 0),
    ],
)
def test_segments_by_hand(best, start):
    assert last_segment(np.asarray(best, dtype=float)) == start
