"""Maxima of windows that reach beyond the border."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.models import networks
from tvm_adaptive.models import call_counts, compile_network, prepare, run_network
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")


def network_of(shape, **how):
    """Return maxima of what a convolution, which gives pooling its layout, leaves as it is."""
    unit = np.eye(shape[1], dtype="float32").reshape((shape[1], shape[1], 1, 1))

    def build(emit, x):
        return relax.op.nn.max_pool2d(emit(relax.op.nn.conv2d(x, relax.const(unit))), **how)

    return networks.network_of({"x": shape}, build)


def branches_in(prepared):
    (name,) = [each for each in call_counts(prepared.mod) if "pool" in each]
    return str(prepared.mod[name]).count("if_then_else")


def pooled(images, window, strides, padding, places):
    """Return maxima by numpy, of images with channels first."""
    top, left, bottom, right = padding
    wide = ((0, 0), (0, 0), (top, bottom + window[0]), (left, right + window[1]))
    padded = np.pad(images, wide, constant_values=-np.inf)
    found = np.empty((*images.shape[:2], *places), images.dtype)
    for i, j in np.ndindex(*places):
        rows = slice(i * strides[0], i * strides[0] + window[0])
        columns = slice(j * strides[1], j * strides[1] + window[1])
        found[:, :, i, j] = padded[:, :, rows, columns].max(axis=(2, 3))
    return found


@pytest.mark.parametrize(
    ("shape", "window", "strides", "padding", "ceil"),
    [
        ((1, 16, 14, 14), (3, 3), (2, 2), (1, 1, 1, 1), False),
        ((2, 5, 9, 12), (3, 3), (1, 1), (1, 1, 1, 1), False),
        ((1, 8, 7, 9), (5, 2), (2, 1), (2, 0, 2, 1), False),
        ((1, 8, 8, 11), (3, 3), (2, 2), (0, 0, 0, 0), True),
        ((1, 8, 10, 7), (2, 3), (3, 2), (1, 1, 0, 0), True),
        ((1, 3, 2, 2), (3, 3), (1, 1), (2, 2, 2, 2), False),
    ],
)
def test_maxima_at_the_border_need_no_branch(shape, window, strides, padding, ceil):
    network = network_of(shape, pool_size=window, strides=strides, padding=padding, ceil_mode=ceil)
    (images,) = network.random_inputs()
    images -= 10.0  # a zero beyond the border would be the largest
    prepared = prepare(network, CPU)
    assert branches_in(prepared) == 0
    (found,) = run_network(compile_network(prepared, None, CPU), [images])
    assert found.shape[2:] != shape[2:] or strides == (1, 1)
    expected = pooled(images, window, strides, padding, found.shape[2:])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "how",
    [
        {"pool_size": (3, 3), "padding": (2, 2), "dilation": (2, 2)},  # skips the nearest place
        {"pool_size": (2, 2), "padding": (2, 2)},  # windows without a place of the image
        {"pool_size": (2, 2), "strides": (2, 2)},  # nothing beyond the border
    ],
)
def test_other_windows_stay_as_they_are(how):
    network = network_of((1, 4, 8, 8), **how)
    (images,) = network.random_inputs()
    images -= 10.0
    prepared = prepare(network, CPU)
    assert (branches_in(prepared) > 0) == ("padding" in how)
    channels_first = prepare(network, CPU, layout="keep")
    expected = run_network(compile_network(channels_first, None, CPU), [images])
    found = run_network(compile_network(prepared, None, CPU), [images])
    np.testing.assert_array_equal(found[0], expected[0])
