"""Products and convolutions of a few more rows or columns than are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tvm_adaptive._tvm.vector_unit import VectorUnit, vector_unit_of
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.rewrites.whole_tiles import whole_rows
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
UNIT = vector_unit_of(CPU)
N_LANES = UNIT.lanes
WHOLE = 12 * N_LANES


def drawn(shape, dtype="float32", seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def network_of(shape, layers, dtype="float32"):
    """Return a network of layers, each of which makes a value of the one before."""
    builder = relax.BlockBuilder()
    x = y = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            for layer in layers[:-1]:
                y = builder.emit(layer(y))
            y = builder.emit_output(layers[-1](y))
        builder.emit_func_output(y)
    return Network("net", builder.get(), {}, {"x": shape}, {"x": dtype})


def product(shape, other, dtype="float32"):
    """Return a network of a product of matrices and what follows, and its weight."""
    weight = drawn(other, dtype)
    multiply = lambda y: relax.op.matmul(y, relax.const(weight, dtype))  # noqa: E731
    return network_of(shape, [multiply, relax.op.nn.relu], dtype), weight


def convolution(n_filters, n_channels=8, size=1, groups=1, **how):
    weight, bias = drawn((n_filters, n_channels // groups, size, size)), drawn((1, n_filters, 1, 1))
    layers = [
        lambda y: relax.op.nn.conv2d(
            y, relax.const(weight), padding=size // 2, groups=groups, **how
        ),
        lambda y: relax.op.add(y, relax.const(bias)),
        relax.op.nn.relu,
    ]
    return network_of((1, n_channels, 7, 9), layers)


def extents_of_product(prepared):
    """Return the extents of what a network's heaviest function multiplies."""
    found = []
    for name in call_counts(prepared.mod):
        allocated = prepared.mod[name].body.block.alloc_buffers
        found += [tuple(map(int, each.shape)) for each in allocated if "pad" not in str(each.name)]
    return max(found, key=np.prod)


def outputs(network, **how):
    (shape,) = network.input_shapes.values()
    prepared = prepare(network, CPU, **how)
    return run_network(compile_network(prepared, None, CPU), [drawn(shape, seed=3)])[0], prepared


@pytest.mark.parametrize(
    ("shape", "other", "expected"),
    [
        ((1, 197, 24), (24, 48), (1, 198, 48)),  # a vision transformer's places
        ((2, 3, 257, 8), (2, 3, 8, 16), (2, 3, 258, 16)),
        ((149, 8), (8, 16), (150, 16)),
        ((1, 3, 37, 8), (1, 3, 8, 16), (1, 3, 40, 16)),
        ((1, 196, 24), (24, 48), (1, 196, 48)),
        ((1, 31, 24), (24, 48), (1, 31, 48)),  # one tile
        ((2, 37, 8), (1, 8, 16), (2, 37, 16)),  # broadcast
        ((1, 40, 24), (24, WHOLE - 1), (1, 40, WHOLE)),
        ((1, 24), (24, WHOLE - 1), (1, WHOLE)),
        ((2, 37, 8), (2, 8, WHOLE - 1), (2, 40, WHOLE)),
        ((1, 40, 24), (24, N_LANES + 1), (1, 40, N_LANES + 1)),  # twice as many
    ],
)
def test_products_have_rows_and_columns_that_tiles_divide(shape, other, expected):
    network, weight = product(shape, other)
    found, prepared = outputs(network)
    np.testing.assert_allclose(
        found, np.maximum(drawn(shape, seed=3) @ weight, 0), rtol=1e-5, atol=1e-5
    )
    assert extents_of_product(prepared) == expected
    assert len(call_counts(prepared.mod)) == 1, "what follows is fused"


@pytest.mark.parametrize("out_dtype", ["float64", "float16"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda y, how: relax.op.matmul(y, relax.const(drawn((8, 16))), **how),
        lambda y, how: relax.op.matmul(y, relax.op.permute_dims(y, (0, 2, 1)), **how),
        lambda y, how: relax.op.nn.conv1d(
            y,
            relax.const(drawn((1, 8, WHOLE - 1))),
            data_layout="NWC",
            kernel_layout="WIO",
            **how,
        ),
    ],
    ids=["constant", "computed", "convolution"],
)
def test_a_product_of_another_type_has_that_type(layer, out_dtype):
    shape = (2, 37, 8)
    (plain,), (found,) = (
        outputs(network_of(shape, [lambda y, how=how: layer(y, how)]))[:1]
        for how in ({}, {"out_dtype": out_dtype})
    )
    assert found.dtype == out_dtype
    np.testing.assert_allclose(found, plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("n", "expected"), [(31, (1, 31, 31)), (WHOLE - 1, (1, WHOLE, WHOLE))])
def test_matrices_that_are_no_constants_are_copied_if_that_pays(n, expected):
    layers = [lambda y: relax.op.matmul(y, relax.op.permute_dims(y, (0, 2, 1))), relax.op.nn.relu]
    found, prepared = outputs(network_of((1, n, 8), layers))
    x = drawn((1, n, 8), seed=3)
    np.testing.assert_allclose(found, np.maximum(x @ x.swapaxes(1, 2), 0), rtol=1e-5, atol=1e-5)
    batch, _, n_wide = expected
    assert extents_of_product(prepared) == (batch, whole_rows(n, UNIT), n_wide)


@pytest.mark.parametrize(
    ("n_registers", "rows"), [(16, {49: 50, 169: 170, 196: 196}), (32, {49: 49, 169: 170})]
)
def test_few_registers_want_two_vectors_in_a_row(n_registers, rows):
    unit = VectorUnit(8, n_registers)
    assert {n: whole_rows(n, unit) for n in rows} == rows


@pytest.mark.parametrize(("mcpu", "n_wide"), [("znver3", 6640), ("skylake-avx512", 6656)])
def test_letters_of_an_alphabet_have_columns_that_tiles_divide(mcpu, n_wide):
    network, _ = product((40, 8), (8, 6625))
    target = resolve_target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    assert extents_of_product(prepare(network, target)) == (40, n_wide)


@pytest.mark.parametrize(
    ("mcpu", "n", "n_wide"), [("znver3", 1000, 1008), ("skylake-avx512", 1008, 1008)]
)
@pytest.mark.parametrize("n_images", [1, 40])
def test_few_registers_want_an_even_number_of_vectors(mcpu, n, n_wide, n_images):
    network, _ = product((n_images, 8), (8, n))
    target = resolve_target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    assert extents_of_product(prepare(network, target)) == (n_images, n_wide)
    narrow, _ = product((n_images, 8), (8, 48 + n % 16))  # one more vector would be a seventh
    assert extents_of_product(prepare(narrow, target)) == (n_images, 48 + n % 16)


@pytest.mark.parametrize(
    ("n_filters", "n_wide", "how"),
    [
        (WHOLE - 1, WHOLE, {}),
        (WHOLE - N_LANES + 1, WHOLE, {"size": 3, "strides": 2}),
        (WHOLE - 1, WHOLE, {"size": 3, "dilation": 2}),
        (WHOLE, WHOLE, {"size": 3}),
        (N_LANES + 1, N_LANES + 1, {}),  # would be twice as many
    ],
)
def test_convolutions_have_channels_that_vectors_divide(n_filters, n_wide, how):
    network = convolution(n_filters, **how)
    found, prepared = outputs(network)
    expected, first = outputs(network, layout="keep")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert first.layout == "keep"
    assert extents_of_product(prepared)[-1] == n_wide


def test_other_types_are_lowered_as_they_were():
    network, _ = product((197, 8), (8, WHOLE - 1), "float64")
    text = prepare(network, CPU).mod.script()
    assert "198" not in text
    assert f"{WHOLE}" not in text


@pytest.mark.parametrize(
    ("n", "size", "how", "n_rows"),
    [
        (197, 1, {}, 198),
        (399, 3, {"strides": 2}, 200),  # 199 places, as of wav2vec2
        (197, 3, {"padding": 1}, 198),
        (201, 3, {"dilation": 2}, 198),
        (400, 3, {"strides": 2, "padding": 1}, 200),  # tiles divide it
        (21, 3, {}, 19),  # one tile
    ],
)
def test_convolutions_along_one_axis_have_rows_that_tiles_divide(n, size, how, n_rows):
    weight, bias = drawn((16, 8, size)), drawn((1, 16, 1), seed=2)
    layers = [
        lambda y: relax.op.nn.conv1d(y, relax.const(weight), **how),
        lambda y: relax.op.add(y, relax.const(bias)),
        relax.op.nn.relu,
    ]
    network = network_of((2, 8, n), layers)
    found, prepared = outputs(network)
    expected, _ = outputs(network, layout="keep")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert extents_of_product(prepared) == (2, n_rows, 16)
