import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

from tvm_adaptive.cost_model.acquisition import log_expected_improvement
from tvm_adaptive.testing.conformance import check_acquisition
from tvm_adaptive.values.improvement import expected_improvement


def log_probability(mean, std, incumbent):
    """NaN where std is 0 and the mean is the incumbent."""
    return log_ndtr((mean - incumbent) / std)


@pytest.mark.parametrize(
    "acquisition",
    [
        expected_improvement,
        log_expected_improvement,
        log_probability,
        lambda mean, std, incumbent: ndtr((mean - incumbent) / std),
        # Improvement that is certain, or worth nothing.
        lambda mean, std, incumbent: np.log(np.maximum(mean - 3 * std - incumbent, 0)),
        # Moves along with its unit.
        lambda mean, std, incumbent: mean + 2 * std,
        lambda mean, std, incumbent: mean,
    ],
)
def test_common_acquisitions_conform(acquisition):
    check_acquisition(acquisition)


def test_probability_at_a_std_of_zero_is_no_number():
    # The rule about std = 0 was made for this one.
    with np.errstate(all="ignore"):
        values = log_probability(np.array([0.0, 1.0, 2.0]), np.zeros(3), 1.0)
    np.testing.assert_array_equal(values, [-np.inf, np.nan, 0.0])


def column(mean, std, incumbent):
    return log_expected_improvement(mean, std, incumbent)[:, None]


def naive(mean, std, incumbent):
    return np.log(mean - incumbent)


def certain(mean, std, incumbent):
    return np.where(mean > incumbent, np.inf, log_probability(mean, std, incumbent))


def latency(mean, std, incumbent):
    """Takes the lower mean for the better one."""
    return log_expected_improvement(-mean, std, -incumbent)


def in_place(mean, std, incumbent):
    std += 1e-6
    return log_expected_improvement(mean, std, incumbent)


def signal_to_noise(mean, std, incumbent):
    return mean / std


def by_place(mean, std, incumbent):
    return mean + 1e-3 * np.arange(len(mean))


def careful(mean, std, incumbent):
    if (std <= 0).any():
        raise ValueError("std must be positive")
    return log_expected_improvement(mean, std, incumbent)


def for_many(mean, std, incumbent):
    """Squeezes the axis of a single candidate."""
    return np.squeeze(log_expected_improvement(mean, std, incumbent))


class Dice:
    """Draws from the posterior, with dice of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, mean, std, incumbent):
        return self.rng.normal(mean, std)


@pytest.mark.parametrize(
    ("acquisition", "match"),
    [
        (column, r"1 candidates need values of shape \(1,\) but got shape \(1, 1\)"),
        (for_many, r"values of shape \(1,\) but got shape \(\)"),
        (lambda mean, std, incumbent: None, r"but got shape \(\)"),
        (naive, "finite or -inf, but mean -20, std 0.01 and incumbent -0.5 led to nan"),
        (certain, "finite or -inf, .* led to inf"),
        (latency, "higher mean must not lower a value, .* as the mean grew"),
        (in_place, "wrote to its argument std"),
        (signal_to_noise, "must not depend on the origin of the unit"),
        (by_place, "values of .* of 153 candidates changed with their order"),
        (careful, "std from 0 on, raised ValueError: std must be positive"),
        (Dice(), "other values the second time"),
    ],
)
def test_what_does_not_conform_is_named(acquisition, match):
    with pytest.raises(AssertionError, match=match):
        check_acquisition(acquisition)
