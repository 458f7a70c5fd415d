import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.search_strategy.exploration import (
    FALLBACK_EPSILON,
    n_random,
    posterior_epsilon,
)
from tvm_adaptive.search_strategy.options import SearchOptions
from tvm_adaptive.values.trial import Exploration, Prediction


def plans(std):
    std = np.asarray(std, dtype=float)
    return Prediction(np.zeros_like(std), std)


def test_epsilon_is_the_mean_uncertainty():
    exploration = posterior_epsilon(plans([0.1, 0.2, 0.3]))
    assert exploration.epsilon == pytest.approx(0.2)
    assert exploration.mean_std == pytest.approx(0.2)
    assert (exploration.reason, exploration.n_plans) == ("posterior", 3)


def test_no_finite_plan_falls_back():
    assert posterior_epsilon(plans([math.nan, math.inf])).reason == "no-success-yet"
    assert posterior_epsilon(plans([])).epsilon == FALLBACK_EPSILON


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30))
def test_epsilon_is_clipped(stds):
    epsilon = posterior_epsilon(plans(stds)).epsilon
    assert epsilon == pytest.approx(min(1.0, np.mean(stds)))


@given(st.floats(0, 1), st.integers(0, 500))
def test_n_random_is_the_nearest_whole_number(epsilon, batch):
    n = n_random(epsilon, batch)
    assert 0 <= n <= batch
    assert abs(n - epsilon * batch) <= 0.5


def test_small_batches_explore_too():
    # Rounding down would give 0 here.
    assert n_random(0.05, 16) == 1


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, math.nan])
def test_epsilon_outside_its_range_is_refused(epsilon):
    with pytest.raises(InvalidOptionError, match=r"epsilon must be in \[0, 1\] but got"):
        SearchOptions(epsilon=epsilon)


def test_an_exploration_record_checks_its_range():
    with pytest.raises(ValueError, match="epsilon must be in"):
        Exploration(1.5, "fixed")
