from __future__ import annotations

import math

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import compile_network, outputs_agree, prepare, run_network
from tvm_adaptive.models.builtin.vgg import vgg16
from tvm_adaptive.tuning.target import resolve_target

N_PARAMETERS = 138_357_544  # table 2 rounds it to 138 million
POOLED = (1, 3, 6, 9, 12)


@pytest.mark.slow
def test_size_is_that_of_the_paper():
    params = vgg16().params
    assert sum(math.prod(value.shape) for value in params.values()) == N_PARAMETERS
    assert sum(name.endswith("weight") for name in params) == 16


# 64 pixels leave 2 x 2 features for each channel, whose order matters to the dense layer.
@pytest.mark.slow
@pytest.mark.parametrize("image_size", [32, 64])
def test_torch_computes_the_same(image_size, small, torch_params):
    torch = pytest.importorskip("torch")
    from torch.nn import functional as f

    network, target = small("vgg16", image_size=image_size), resolve_target("cpu")
    p, inputs = torch_params(network), network.random_inputs(seed=3)
    x = torch.from_numpy(inputs[0])
    for index in range(13):
        name = f"convolutions.{index}"
        x = f.relu(f.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], padding=1))
        x = f.max_pool2d(x, 2) if index in POOLED else x
    x = x.flatten(1)
    for name in ("hidden1", "hidden2"):
        x = f.relu(f.linear(x, p[f"{name}.weight"], p[f"{name}.bias"]))
    expected = f.linear(x, p["classifier.weight"], p["classifier.bias"]).numpy()
    compiled = compile_network(prepare(network, target), None, target)
    assert outputs_agree(run_network(compiled, inputs), [expected])


@pytest.mark.parametrize("image_size", [16, 48, 225])
def test_the_image_must_be_halved_five_times(image_size):
    with pytest.raises(InvalidOptionError, match=f"a multiple of 32 but got {image_size}"):
        vgg16(image_size=image_size)
