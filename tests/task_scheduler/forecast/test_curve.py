import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.forecast.curve import (
    FAMILIES,
    LOG_LINEAR,
    LOG_POWER,
    LOGLOG_LINEAR,
    POW2,
    POW4,
    CurveFamily,
    curve_family,
)

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
X = np.array([1.0, 2.0, 10.0, 77.0, 1000.0])


@pytest.mark.parametrize(
    ("family", "theta", "published"),
    [
        # As in Domhan et al., in the published parameters: (a, b, c) and so on.
        (LOG_POWER, (0.8, 3.0, 0.6), lambda x: 0.8 / (1 + (x / math.exp(3.0)) ** -0.6)),
        (POW2, (0.2, 0.3), lambda x: 0.2 * x**0.3),
        (
            POW4,
            (0.9, 0.3, 1.2, 0.5),
            lambda x: 0.9 - (0.3 * 0.9**-2 * x + 1.2 * 0.9**-2) ** -0.5,
        ),
        (LOG_LINEAR, (0.2, 0.5), lambda x: 0.1 * np.log(x) + 0.2),
        (LOGLOG_LINEAR, (1.0, 0.4, 1.5), lambda x: np.log(0.4 * np.log(x) + 1.5)),
    ],
    ids=lambda value: value.name if isinstance(value, CurveFamily) else None,
)
def test_the_published_formulas(family, theta, published):
    np.testing.assert_allclose(family.evaluate(X, theta), published(X), rtol=1e-12)


def test_log_power_is_a_hill_curve():
    # Half of the limit at exp(b), all of it far away.
    values = LOG_POWER.evaluate([math.exp(2.0), 1e12], [3.0, 2.0, 1.0])
    np.testing.assert_allclose(values, [1.5, 3.0], rtol=1e-9)


@each_family
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


@each_family
def test_one_shape_and_many_agree(family):
    shapes = family.grid(50).shapes[[0, 7, -1]]
    many = family.basis(X, shapes)
    assert many.shape == (3, len(X))
    for shape, row in zip(shapes, many, strict=True):
        np.testing.assert_array_equal(family.basis(X, shape), row)


@each_family
def test_a_uniform_prior_weighs_shapes_by_their_volume(family):
    # The mean of a uniform distribution lies in the middle of its range.
    grid = family.grid(100)
    lower, upper = family.bounds(100)
    weights = np.exp(grid.log_volume - grid.log_volume.max())
    mean = weights @ grid.shapes / weights.sum()
    # Coarse grids, fine enough for evidence that varies slowly: within a fifth.
    assert (np.abs(mean - (lower + upper) / 2) < 0.2 * (upper - lower)).all()


@pytest.mark.parametrize("family", [LOG_POWER, POW4])
def test_the_limit_of_a_saturating_curve_is_bounded(family):
    low, high = family.amplitude_bounds(1.0, 2.0, [0.25, 0.5, 0.8])
    np.testing.assert_allclose(low, [4.0, 2.0, 1.25])
    np.testing.assert_allclose(high, 2.0)


def test_without_a_limit_the_last_value_is_bounded():
    low, high = POW2.amplitude_bounds(1.0, 2.0, [0.5])
    assert (low[0], high[0]) == (2.0, 4.0)


def test_without_an_amplitude_a_shape_is_possible_or_not():
    low, high = LOGLOG_LINEAR.amplitude_bounds(1.0, 2.0, [0.9, 1.5, 2.1])
    np.testing.assert_array_equal(low < high, [False, True, False])


def test_families_are_found_by_name():
    assert curve_family("log-power") is LOG_POWER
    with pytest.raises(InvalidOptionError, match='named "exp3"; choose among "log-power"'):
        curve_family("exp3")
