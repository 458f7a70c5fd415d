from __future__ import annotations

import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import (
    call_counts,
    largest_difference,
    outputs_agree,
)
from tvm_adaptive.models.builtin.mobilenet import mobilenet_v2

# torchvision's mobilenet_v2 has 3,504,872; it carries 2 x 17,056 values of batch
# normalisation where the folded network has 17,056 biases.
N_PARAMETERS = 3_504_872 - 17_056
STRIDES = {1: 2, 3: 2, 6: 2, 13: 2}
JOINING = {2, 4, 5, 7, 8, 9, 11, 12, 14, 15}


def test_size_is_that_of_the_paper():
    params = mobilenet_v2().params
    assert sum(math.prod(value.shape) for value in params.values()) == N_PARAMETERS
    assert sum(name.endswith("depthwise.weight") for name in params) == 17


def in_torch(p, image, ceiling=6.0):
    torch = pytest.importorskip("torch")
    from torch.nn import functional as f

    def conv(name, x, **how):
        return f.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], **how)

    def clip(x):
        return x.clamp(0.0, ceiling)

    x = clip(conv("stem", torch.from_numpy(image), stride=2, padding=1))
    for index in range(17):
        name = f"blocks.{index}"
        inner = clip(conv(f"{name}.expand", x)) if index > 0 else x
        groups, stride = inner.shape[1], STRIDES.get(index, 1)
        inner = clip(conv(f"{name}.depthwise", inner, stride=stride, padding=1, groups=groups))
        if index in JOINING:
            x = x + conv(f"{name}.residual", inner)
        else:
            x = conv(f"{name}.project", inner)
    x = clip(conv("head", x)).mean(dim=(2, 3))
    return [f.linear(x, p["classifier.weight"], p["classifier.bias"]).numpy()]


@pytest.mark.slow
def test_torch_computes_the_same(cases, torch_params):
    case = cases["mobilenet_v2"]
    assert outputs_agree(case.reference, in_torch(torch_params(case.network), case.inputs[0]))


def test_a_missing_ceiling_would_be_seen(cases, torch_params):
    case = cases["mobilenet_v2"]
    unclipped = in_torch(torch_params(case.network), case.inputs[0], ceiling=np.inf)
    assert not outputs_agree(unclipped, case.reference)
    assert largest_difference(unclipped, case.reference).max_abs > 0


@pytest.mark.parametrize("way", ["NHWC", "prepack"])
def test_each_activation_is_part_of_its_convolution(way, cases):
    counts = call_counts(cases["mobilenet_v2"].prepared[way].mod)
    convolutions = {name: n for name, n in counts.items() if "conv2d" in name}
    assert sum(convolutions.values()) == 1 + 16 * 3 + 2 + 1
    assert sum(n for name, n in convolutions.items() if "minimum" in name) == 1 + 16 * 2 + 1 + 1
    # Besides: a transpose of the image, pooling and the dense layer.
    assert counts.total() == sum(convolutions.values()) + 3


def test_width_must_be_a_multiple_of_four():
    with pytest.raises(InvalidOptionError, match="width must be a multiple of 4 but got 30"):
        mobilenet_v2(width=30)
