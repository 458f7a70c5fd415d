from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_adaptive.models import (
    compile_network,
    prepare,
    resnet18,
    run_network,
)
from tvm_adaptive.models.builtin.resnet import draw_parameter, resnet34, resnet50


# torchvision's parameters, less those of its batch normalisations, which carry two values
# for each channel where the folded network has one bias; layers that have weights.
@pytest.mark.parametrize(
    ("make", "n_parameters", "n_layers"),
    [
        (resnet18, 11_689_512 - 4_800, 1 + 16 + 3 + 1),
        # Their weights take seconds to draw.
        pytest.param(resnet34, 21_797_672 - 8_512, 1 + 32 + 3 + 1, marks=pytest.mark.slow),
        pytest.param(resnet50, 25_557_032 - 26_560, 1 + 48 + 4 + 1, marks=pytest.mark.slow),
    ],
)
def test_size_is_that_of_the_paper(make, n_parameters, n_layers):
    params = make().params
    assert sum(math.prod(value.shape) for value in params.values()) == n_parameters
    assert sum(name.endswith("weight") for name in params) == n_layers


@pytest.mark.slow
def test_batches_are_independent(case):
    network = resnet18(batch=2, image_size=32, width=8, classes=10)
    compiled = compile_network(prepare(network, case.target), None, case.target)
    pair = np.concatenate([case.network.random_inputs(seed)[0] for seed in (3, 4)])
    (scores,) = run_network(compiled, [pair])
    np.testing.assert_allclose(scores[:1], case.reference[0], rtol=1e-3, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    outputs=st.integers(1, 8),
    inputs=st.integers(2, 16),
    size=st.sampled_from([1, 3, 7]),
    seed=st.integers(0, 100),
)
def test_weights_have_mean_zero_for_each_output(outputs, inputs, size, seed):
    shape = (outputs, inputs, size, size)
    weight = draw_parameter(np.random.default_rng(seed), "stem.weight", shape)
    assert weight.shape == shape
    assert weight.dtype == np.float32
    np.testing.assert_allclose(weight.mean(axis=(1, 2, 3)), 0.0, atol=1e-6)
