from __future__ import annotations

import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import outputs_agree
from tvm_adaptive.models.builtin.squeezenet import squeezenet1_1
from tvm_adaptive.models.network import operator_of

N_PARAMETERS = 1_235_496  # as torchvision counts them


def test_size_is_that_of_the_revision():
    params = squeezenet1_1().params
    assert sum(math.prod(value.shape) for value in params.values()) == N_PARAMETERS
    assert sum(name.endswith("weight") for name in params) == 2 + 3 * 8


@pytest.mark.slow
def test_torch_computes_the_same(cases, torch_params):
    torch = pytest.importorskip("torch")
    from torch.nn import functional as f

    case = cases["squeezenet1_1"]
    p = torch_params(case.network)

    def conv(name, x, **how):
        return f.relu(f.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], **how))

    x = conv("stem", torch.from_numpy(case.inputs[0]), stride=2)
    for index in range(8):
        if index in (0, 2, 4):
            x = f.max_pool2d(x, 3, 2)
        squeezed = conv(f"fires.{index}.squeeze", x)
        x = torch.cat(
            [
                conv(f"fires.{index}.expand1", squeezed),
                conv(f"fires.{index}.expand3", squeezed, padding=1),
            ],
            dim=1,
        )
    expected = conv("classifier", x).mean(dim=(2, 3)).numpy()
    assert outputs_agree(case.reference, [expected])


def test_no_window_is_dropped_at_the_usual_size():
    pools = [
        binding.value
        for block in squeezenet1_1().mod["main"].body.blocks
        for binding in block.bindings
        if operator_of(binding.value) == "relax.nn.max_pool2d"
    ]
    assert len(pools) == 3
    for pool in pools:
        assert (list(pool.attrs.pool_size), list(pool.attrs.strides)) == ([3, 3], [2, 2])
        assert all((int(extent) - 3) % 2 == 0 for extent in list(pool.args[0].ty.shape)[2:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"image_size": 30}, "image_size must be at least 31 but got 30"),
        ({"width": 6}, "width must be a multiple of 4 but got 6"),
    ],
)
def test_sizes_must_fit(options, text):
    with pytest.raises(InvalidOptionError, match=text):
        squeezenet1_1(**options)


def test_the_smallest_image_is_still_an_image(small):
    network = small("squeezenet1_1", image_size=31)
    assert np.shape(network.random_inputs()[0]) == (1, 3, 31, 31)
