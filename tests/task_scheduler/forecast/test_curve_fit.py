import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_adaptive.task_scheduler.forecast.curve import FAMILIES, LOG_POWER, LOGLOG_LINEAR, POW4
from tvm_adaptive.task_scheduler.forecast.curve_fit import (
    NoFitError,
    fit_least_squares,
    last_segment,
)

X = np.arange(1.0, 81.0)
THETA = {
    "log-power": (1.3, 2.0, 0.8),
    "pow2": (0.3, 0.25),
    "pow4": (1.2, 0.4, 1.3, 0.7),
    "log-linear": (0.3, 0.5),
    "loglog-linear": (1.0, 0.4, 1.2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_noiseless_curve_is_found_again(name):
    family = FAMILIES[name]
    y = family.evaluate(X, THETA[name])
    fit = fit_least_squares(family, X, y, ceiling=10.0)
    assert fit.rms < 1e-4
    ahead = np.array([100.0, 200.0])
    expected = family.evaluate(ahead, THETA[name])
    np.testing.assert_allclose(family.evaluate(ahead, fit.theta), expected, rtol=5e-3)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(8, 60))
def test_a_fit_has_reached_the_last_value(name, seed, n):
    rng = np.random.default_rng(seed)
    y = np.maximum.accumulate(rng.gamma(2.0, size=n))
    y /= y[-1]
    x = np.arange(1.0, n + 1)
    fit = fit_least_squares(FAMILIES[name], x, y, ceiling=3.0)
    assert np.isfinite(fit.theta).all()
    assert FAMILIES[name].evaluate(x[-1:], fit.theta)[0] >= 1.0 - 1e-9
    if FAMILIES[name].saturates:
        assert fit.theta[0] <= 3.0 * (1 + 1e-9)


@pytest.mark.parametrize("family", [LOG_POWER, POW4, LOGLOG_LINEAR], ids=lambda f: f.name)
def test_no_room_below_the_ceiling_is_no_fit(family):
    with pytest.raises(NoFitError, match="stays below the ceiling"):
        fit_least_squares(family, X, np.linspace(0.5, 1.0, 80), ceiling=0.9)


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


def test_the_size_of_a_jump_and_of_a_segment_can_be_set():
    assert last_segment(STEPS, jump=0.1) == 22
    assert last_segment(STEPS[:22], jump=0.1) == 10
    assert last_segment(STEPS[:24], min_points=2) == 22
