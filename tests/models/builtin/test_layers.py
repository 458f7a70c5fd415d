from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_adaptive.models.builtin.layers import (
    GAIN_AFTER_RELU,
    draw_bias,
    draw_for_relu,
    draw_weight,
)

SHAPES = st.tuples(st.integers(1, 8), st.integers(2, 16), st.sampled_from([1, 3, 7]))


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, gain=st.floats(0.1, 10.0), seed=st.integers(0, 100))
def test_centred_weights_have_mean_zero_for_each_output(shape, gain, seed):
    weight = draw_weight(np.random.default_rng(seed), shape, gain)
    assert weight.shape == shape
    assert weight.dtype == np.float32
    np.testing.assert_allclose(weight.mean(axis=(1, 2)), 0.0, atol=1e-5)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gain", [0.25, 2.0])
def test_the_gain_is_that_of_the_variance(gain, centred):
    rng = np.random.default_rng(0)
    weight = draw_weight(rng, (2000, 300), gain, centred=centred)
    outputs = weight @ rng.standard_normal((300, 50))
    assert outputs.var() == pytest.approx(gain, rel=0.1)


def test_layers_between_two_relus_keep_the_variance():
    rng = np.random.default_rng(0)
    before = rng.standard_normal((1000, 50))
    after = draw_for_relu(rng, "conv.weight", (4000, 1000)) @ np.maximum(before, 0)
    assert after.var() == pytest.approx(1.0, rel=0.1)
    assert math.isclose(GAIN_AFTER_RELU, 2 * math.pi / (math.pi - 1))


def test_biases_are_small_and_there():
    rng = np.random.default_rng(0)
    for bias in (draw_bias(rng, (5000,)), draw_for_relu(rng, "conv.bias", (5000,))):
        assert bias.dtype == np.float32
        assert bias.std() == pytest.approx(0.1, rel=0.1)
