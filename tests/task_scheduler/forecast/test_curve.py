import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER

X = np.array([1.0, 2.0, 10.0, 77.0, 1000.0])


def test_the_published_formula():
    # As in Domhan et al., in the published parameters.
    published = 0.8 / (1 + (X / math.exp(3.0)) ** -0.6)
    np.testing.assert_allclose(LOG_POWER.evaluate(X, (0.8, 3.0, 0.6)), published, rtol=1e-12)


def test_log_power_is_a_hill_curve():
    # Half of the limit at exp(b), all of it far away.
    values = LOG_POWER.evaluate([math.exp(2.0), 1e12], [3.0, 2.0, 1.0])
    np.testing.assert_allclose(values, [1.5, 3.0], rtol=1e-9)


@given(n_trials=st.integers(1, 5000))
def test_every_shape_of_a_grid_is_an_increasing_curve(family, n_trials):
    grid = family.grid(n_trials)
    lower, upper = family.bounds(n_trials)
    assert (grid.shapes >= lower - 1e-9).all()
    assert (grid.shapes <= upper + 1e-9).all()
    g = family.basis([1.0, 2.0, max(n_trials, 3), 1e5], grid.shapes)
    assert np.isfinite(g).all()
    assert (g > 0).all()
    assert (np.diff(g, axis=1) >= 0).all()
    if family.saturates:
        assert (g <= 1.0).all()


def test_one_shape_and_many_agree(family):
    shapes = family.grid(50).shapes[[0, 7, -1]]
    many = family.basis(X, shapes)
    assert many.shape == (3, len(X))
    for shape, row in zip(shapes, many, strict=True):
        np.testing.assert_array_equal(family.basis(X, shape), row)


def test_a_uniform_prior_weighs_shapes_by_their_volume(family):
    # The mean of a uniform distribution lies in the middle of its range.
    grid = family.grid(100)
    lower, upper = family.bounds(100)
    weights = np.exp(grid.log_volume - grid.log_volume.max())
    mean = weights @ grid.shapes / weights.sum()
    # Coarse grids, fine enough for evidence that varies slowly: within a fifth.
    assert (np.abs(mean - (lower + upper) / 2) < 0.2 * (upper - lower)).all()


def test_the_limit_of_a_saturating_curve_is_bounded():
    low, high = LOG_POWER.amplitude_bounds(1.0, 2.0, [0.25, 0.5, 0.8])
    np.testing.assert_allclose(low, [4.0, 2.0, 1.25])
    np.testing.assert_allclose(high, 2.0)


def test_without_a_limit_the_last_value_is_bounded(unlimited):
    low, high = unlimited.amplitude_bounds(1.0, 2.0, [0.5])
    assert (low[0], high[0]) == (2.0, 4.0)
