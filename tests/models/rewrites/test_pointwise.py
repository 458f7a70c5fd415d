"""Pointwise convolutions of images without tiles, as products of matrices."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.models import networks
from tests.models.networks import drawn
from tvm_adaptive import _tvm
from tvm_adaptive.models import call_counts, compile_network, prepare, run_network
from tvm_adaptive.tuning.target import resolve_target

FEW = resolve_target({"kind": "llvm", "mcpu": "znver3", "num-cores": 2})
MANY = resolve_target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2})
CPU = resolve_target("cpu")


def convolved(y, n_filters, size=1, groups=1, seed=1, **how):
    n_channels = int(y.ty.shape[1])
    kernel = drawn((n_filters, n_channels // groups, size, size), seed)
    return relax.op.nn.conv2d(y, relax.const(kernel), padding=size // 2, groups=groups, **how)


def network_of(shape, build):
    """Return a network of what is built, step by step, from an image with channels first."""
    return networks.network_of({"x": shape}, build)


def only(**how):
    return lambda emit, x: convolved(x, 24, **how)


def with_bias(emit, x):
    y = emit(convolved(x, 24))
    y = emit(relax.op.add(y, relax.const(drawn((1, 24, 1, 1), 2))))
    y = emit(relax.op.nn.relu(y))
    return relax.op.multiply(y, relax.const(np.float32(0.5)))


def bottleneck(emit, x):
    """Three convolutions, a residual connection, and a scale for each channel of the input."""
    y = emit(relax.op.nn.relu(emit(convolved(x, 40))))
    y = emit(relax.op.nn.silu(emit(convolved(y, 40, size=3, groups=40, seed=2))))
    scale = emit(relax.op.mean(y, [2, 3], keepdims=True))
    y = emit(relax.op.multiply(y, emit(relax.op.sigmoid(scale))))
    return relax.op.add(x, emit(convolved(y, 16, seed=3)))


def gated(emit, x):
    """A value for each channel that no convolution of places computes."""
    y = emit(convolved(x, 16))
    return relax.op.multiply(y, emit(relax.op.max(x, [2, 3], keepdims=True)))


def concatenated(emit, x):
    parts = [emit(convolved(x, 8)), emit(convolved(x, 8, size=3, seed=2))]
    return convolved(emit(relax.op.concat(parts, 1)), 24, seed=3)


def products_of(prepared):
    return sum(n for name, n in call_counts(prepared.mod).items() if "matmul" in name)


@pytest.mark.parametrize(
    ("build", "n_products", "n_calls"),
    [(only(), 1, 3), (with_bias, 1, 3), (bottleneck, 2, 6), (gated, 1, None), (concatenated, 2, 7)],
)
@pytest.mark.parametrize("n_images", [1, 2])
def test_a_network_computes_the_same(build, n_products, n_calls, n_images):
    network = network_of((n_images, 16, 7, 7), build)
    x = [drawn((n_images, 16, 7, 7), 9)]
    prepared = prepare(network, FEW)
    assert products_of(prepared) == n_products
    if n_calls is not None and n_images == 1:  # some of them transpose inputs and outputs
        assert sum(call_counts(prepared.mod).values()) == n_calls, "no copies"
    expected = run_network(compile_network(prepare(network, CPU, layout="keep"), None, CPU), x)
    # The code is of this machine: only the form of the network is of the other processor.
    found = run_network(compile_network(prepared, None, CPU), x)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((1, 16, 14, 14), {}),  # two by two places are a tile
        ((1, 16, 5, 13), {}),  # five in a column
        ((1, 16, 3, 3), {}),  # fewer places than two tiles have
        ((1, 16, 7, 7), {"size": 3}),
        ((1, 16, 7, 7), {"groups": 2}),
        ((1, 16, 13, 13), {"strides": 2}),
    ],
)
def test_other_convolutions_stay(shape, how):
    assert products_of(prepare(network_of(shape, only(**how)), FEW)) == 0


def test_many_registers_have_a_tile_of_seven_places():
    network = network_of((1, 16, 7, 7), only())
    assert products_of(prepare(network, MANY)) == 0
    assert products_of(prepare(network_of((1, 16, 13, 13), only()), MANY)) == 1


def test_images_of_products_are_views():
    prepared = prepare(network_of((1, 16, 7, 7), bottleneck), FEW)
    views = [
        variable.name_hint
        for variable, function in prepared.mod.functions.items()
        if isinstance(function, _tvm.PrimFunc) and _tvm.is_reshape(function)
    ]
    assert views
