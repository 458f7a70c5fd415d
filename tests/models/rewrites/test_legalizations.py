from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.models.forms.test_alternatives import with_rows
from tvm_adaptive._tvm import IRModule, estimate_tir_flops
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.tuning.target import resolve_target


def transposed(shape, kernel, **attributes):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
            y = relax.op.nn.conv2d_transpose(x, relax.const(kernel), **layouts, **attributes)
            y = builder.emit_output(relax.op.nn.relu(builder.emit(y)))
        builder.emit_func_output(y)
    network = Network("net", builder.get(), {}, {"x": shape}, {"x": "float32"})
    return prepare(network, resolve_target("cpu"))


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_an_index_beside_the_table_reads_the_nearest_row(axis, kind):
    table = np.arange(12, dtype="float32").reshape(4, 3) if axis is not None else np.arange(4.0)
    table = table.astype("float32")
    builder = relax.BlockBuilder()
    places = relax.Var("places", relax.TensorType((5,), kind))
    with builder.function("main", [places]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.take(relax.const(table), places, axis))
        builder.emit_func_output(y)
    network = Network("net", builder.get(), {}, {"places": (5,)}, {"places": kind})
    prepared = prepare(network, resolve_target("cpu"))
    x = np.array([0, 2, -1, 10**8, -(10**9)], kind)
    (found,) = run_network(compile_network(prepared, None, resolve_target("cpu")), [x])
    np.testing.assert_array_equal(found, np.take(table, x, axis, mode="clip"))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("axis", [1, None])
@pytest.mark.parametrize("vector_math", [True, False])
@pytest.mark.parametrize(
    "x",
    [
        np.array([[-np.inf] * 5, [-np.inf, 1, 3, 3, 2], [np.inf] * 5], "float32"),
        np.full((2, 4), -np.inf, "float32"),
        np.full((2, 4), np.inf, "float32"),
        np.zeros((2, 4), "uint8"),
        np.array([[-128] * 3, [127] * 3, [1, 0, 2]], "int8"),
    ],
)
def test_the_place_of_an_extreme_is_within_the_tensor(name, axis, x, vector_math):
    builder = relax.BlockBuilder()
    variable = relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
    with builder.function("main", [variable]):
        with builder.dataflow():
            y = builder.emit_output(getattr(relax.op, name)(variable, axis, keepdims=False))
        builder.emit_func_output(y)
    network = Network("net", builder.get(), {}, {"x": x.shape}, {"x": str(x.dtype)})
    prepared = prepare(network, resolve_target("cpu"), vector_math=vector_math)
    (found,) = run_network(compile_network(prepared, None, resolve_target("cpu")), [x])
    assert found.dtype == "int64"
    np.testing.assert_array_equal(found, getattr(np, name)(x, axis))


def expected_transposed(x, kernel, *, strides, padding, dilation, output_padding):
    """Add what each value of the data contributes, for one group."""
    n, *extents, _ = x.shape
    *sizes, _, n_filters = kernel.shape
    full = [
        (extents[i] - 1) * strides[i] + (sizes[i] - 1) * dilation[i] + 1 + output_padding[i]
        for i in (0, 1)
    ]
    found = np.zeros((n, *full, n_filters), "float32")
    for row, column in np.ndindex(*sizes):
        part = x @ kernel[row, column]
        first = (row * dilation[0], column * dilation[1])
        for i, j in np.ndindex(*extents):
            found[:, first[0] + i * strides[0], first[1] + j * strides[1]] += part[:, i, j]
    top, left, bottom, right = padding
    return np.maximum(found[:, top : full[0] - bottom, left : full[1] - right], 0)


@pytest.mark.parametrize(
    ("size", "strides", "padding", "dilation", "output_padding"),
    [
        ((2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (0, 0)),
        ((4, 4), (2, 2), (1, 1, 1, 1), (1, 1), (0, 0)),
        ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 1)),
        ((3, 5), (1, 3), (0, 2, 1, 0), (1, 1), (0, 2)),
        ((2, 3), (3, 2), (1, 0, 0, 1), (2, 3), (2, 1)),
        ((1, 1), (2, 2), (0, 0, 0, 0), (1, 1), (1, 0)),
        ((3, 3), (2, 2), (3, 3, 2, 2), (1, 1), (1, 1)),  # cuts data off
    ],
)
def test_transposed_convolutions_of_all_kinds(size, strides, padding, dilation, output_padding):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 5, 3)).astype("float32")
    kernel = rng.standard_normal((*size, 3, 4)).astype("float32")
    how = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "output_padding": output_padding,
    }
    prepared = transposed(x.shape, kernel, **how)
    assert len(call_counts(prepared.mod)) == 1, "what follows is fused"
    found = run_network(compile_network(prepared, None, resolve_target("cpu")), [x])
    expected = expected_transposed(x, kernel, **how)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_a_transposed_convolution_of_an_open_batch():
    """As the masks of objects, of which there are as many as were found."""
    kernel = np.random.default_rng(1).standard_normal((16, 8, 2, 2)).astype("float32")
    inputs = [
        np.random.default_rng(2).standard_normal((6, 16, 8, 8)).astype("float32"),
        np.array([0, 1, 1, 0, 0, 1]),
    ]

    def channels_first(_emit, y):
        return relax.op.nn.conv2d_transpose(y, relax.const(kernel), strides=[2, 2])

    def channels_last(emit, y):
        y = emit(relax.op.permute_dims(y, [0, 2, 3, 1]))
        weights = relax.const(np.ascontiguousarray(kernel.transpose(2, 3, 1, 0)))
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWOI"}
        y = emit(relax.op.nn.conv2d_transpose(y, weights, strides=[2, 2], **layouts))
        return relax.op.permute_dims(y, [0, 3, 1, 2])

    cpu = resolve_target("cpu")
    expected, found = (
        run_network(compile_network(prepare(with_rows(build), cpu, "keep"), None, cpu), inputs)[0]
        for build in (channels_first, channels_last)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_transposed_convolution_multiplies_no_zeros():
    kernel = np.ones((2, 2, 8, 16), "float32")
    prepared = transposed((1, 10, 10, 8), kernel, strides=(2, 2))
    (name,) = call_counts(prepared.mod)
    flop = estimate_tir_flops(IRModule({"main": prepared.mod[name]}))
    products = 20 * 20 * 16 * 8
    assert 2 * products <= flop < 2.2 * products
