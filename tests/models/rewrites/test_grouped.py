"""Convolutions in groups of several channels."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.models import networks
from tests.models.networks import drawn
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.models import call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.whole_tiles import whole_rows
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
N_GROUPS = 3


def network_of(shape, window, *, n_inputs=4, n_filters=8, constant=True, dtype="float32", **how):
    """Return a convolution of an image or a signal with channels first, and what follows."""
    convolve = relax.op.nn.conv1d if len(window) == 1 else relax.op.nn.conv2d
    shape = (shape[0], N_GROUPS * n_inputs, *shape[1:])
    weight = drawn((N_GROUPS * n_filters, n_inputs, *window), 1, dtype)
    bias = drawn((1, N_GROUPS * n_filters, *(1 for _ in window)), 2, dtype)

    def build(emit, x, w=None):
        kernel = relax.const(weight, dtype) if w is None else w
        y = emit(convolve(x, kernel, groups=N_GROUPS, **how))
        y = emit(relax.op.add(y, relax.const(bias, dtype)))
        return relax.op.nn.relu(y)

    shapes = {"x": shape} if constant else {"x": shape, "w": weight.shape}
    return networks.network_of(shapes, build, dtype)


@pytest.mark.parametrize(
    ("shape", "window", "how"),
    [
        ((1, 37), (5,), {"padding": 2}),
        ((2, 40), (4,), {"strides": 2, "padding": (1, 2), "dilation": 2}),
        ((1, 9, 11), (3, 3), {"padding": 1}),
        ((2, 9, 11), (3, 1), {"strides": (2, 1), "padding": (2, 0, 1, 1), "dilation": (2, 1)}),
        ((1, 7, 7), (1, 1), {}),
    ],
)
def test_groups_compute_the_same(shape, window, how):
    network = network_of(shape, window, **how)
    inputs = network.random_inputs()
    prepared = prepare(network, CPU)
    (name,) = [each for each in call_counts(prepared.mod) if "conv" in each]
    assert name.startswith("fused_group_conv"), "what follows is fused"
    expected = run_network(compile_network(prepare(network, CPU, layout="keep"), None, CPU), inputs)
    found = run_network(compile_network(prepared, None, CPU), inputs)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)


def axes_of(prepared):
    """Return the extents of what the convolution of a network computes."""
    (name,) = [each for each in call_counts(prepared.mod) if "conv" in each]
    allocated = prepared.mod[name].body.block.alloc_buffers
    (found,) = [each for each in allocated if "group_conv" in str(each.name)]
    return tuple(map(int, found.shape))


def test_groups_have_an_axis_of_their_own_and_whole_rows():
    n_rows = whole_rows(37, vector_unit_of(CPU))
    assert axes_of(prepare(network_of((1, 37), (5,), padding=2), CPU)) == (1, n_rows, 3, 8)
    assert axes_of(prepare(network_of((1, 7, 9), (3, 3), padding=1), CPU)) == (1, 7, 9, 3, 8)


@pytest.mark.parametrize("how", [{"n_inputs": 1}, {"constant": False}, {"dtype": "float64"}])
def test_others_are_lowered_as_they_were(how):
    for shape, window in (((1, 37), (5,)), ((1, 9, 11), (3, 3))):
        prepared = prepare(network_of(shape, window, **how), CPU)
        text = prepared.mod.script()
        assert f"{N_GROUPS}), T.int64(8)" not in text


def test_groups_that_are_not_lowered_here_keep_their_channels_first_along_one_axis():
    for how in ({"constant": False}, {"dtype": "float64"}):
        assert "ncw" in prepare(network_of((1, 37), (5,), **how), CPU).mod.script()
