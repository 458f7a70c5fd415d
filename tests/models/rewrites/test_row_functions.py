"""Softmax and normalisations as functions of whole rows."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tvm import relax

from tests.models import networks
from tests.models.networks import drawn
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.models import Network, call_counts, compile_network, prepare, run_network
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
WIDTH = 2 * vector_unit_of(CPU).lanes
SHAPES = [
    (3, 5, WIDTH),
    (2, 3, 5, 3 * WIDTH),
    (591, 197),  # the last vector overlaps the one before
    (5, WIDTH - 1),
    (7, 4),
    (1, 1, 6625),
]


def network_of(shape, layer, dtype="float32"):
    """Return a network of a layer and a product with 2."""
    return networks.network_of(
        {"x": shape},
        lambda emit, x: relax.op.multiply(emit(layer(x)), relax.const(2, dtype)),
        dtype,
    )


def compiled(shape, layer, dtype="float32", *, vector_math=None):
    """Return what computes half of a network's output, and the text of its function."""
    prepared = prepare(network_of(shape, layer, dtype), CPU, vector_math=vector_math)
    (name,) = call_counts(prepared.mod)
    executable = compile_network(prepared, None, CPU)
    return lambda x: run_network(executable, [x])[0] / 2, prepared.mod[name].script()


def computed(shape, layer, x, **options):
    """Return half of what a network computes, and the text of its function."""
    run, text = compiled(shape, layer, str(x.dtype), **options)
    return run(x), text


def softmax(x, axis=-1):
    x = x.astype("float64")
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def normalized(x, axes, scale, shift, epsilon=1e-5):
    x = x.astype("float64")
    deviation = np.sqrt(x.var(axes, keepdims=True) + epsilon)
    return (x - x.mean(axes, keepdims=True)) / deviation * scale + shift


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape):
    run, text = compiled(shape, lambda x: relax.op.nn.softmax(x, -1))
    for spread in (0.1, 30.0):
        x = np.float32(spread) * drawn(shape)
        np.testing.assert_allclose(run(x), softmax(x), rtol=1e-5, atol=1e-30)
    assert 'T.sblock("softmax")' in text


def test_probabilities_add_up_to_one_whatever_the_offset():
    x = drawn((4, 1000)) + np.array([[-1e4], [0], [80], [1e4]], "float32")
    found, _ = computed((4, 1000), lambda x: relax.op.nn.softmax(x, -1), x)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found, softmax(x), rtol=1e-5)


def test_masked_numbers_get_nothing():
    x = drawn((5, 40))
    x[:, 11:] = -np.inf
    found, _ = computed((5, 40), lambda x: relax.op.nn.softmax(x, -1), x)
    np.testing.assert_allclose(found, softmax(x), rtol=1e-5, atol=0)


def test_a_row_with_nan_is_nan():
    x = drawn((3, 40))
    x[1, 7] = np.nan
    found, _ = computed((3, 40), lambda x: relax.op.nn.softmax(x, -1), x)
    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], softmax(x[[0, 2]]), rtol=1e-5)


@pytest.mark.parametrize(("shape", "axis", "dtype"), [((4, 6, 32), 1, "f4"), ((4, 32), 1, "f8")])
def test_other_softmaxes_are_lowered_as_they_were(shape, axis, dtype):
    x = drawn(shape).astype(dtype)
    found, text = computed(shape, lambda x: relax.op.nn.softmax(x, axis), x)
    np.testing.assert_allclose(found, softmax(x, axis), rtol=1e-5)
    assert 'T.sblock("softmax")' not in text


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_normalization(shape):
    scale, shift = drawn(shape[-1:], 1), drawn(shape[-1:], 2)
    x = 3 * drawn(shape) + 5
    found, text = computed(
        shape,
        lambda x: relax.op.nn.layer_norm(x, relax.const(scale), relax.const(shift), axes=[-1]),
        x,
    )
    np.testing.assert_allclose(found, normalized(x, -1, scale, shift), rtol=1e-4, atol=1e-5)
    assert 'T.sblock("normalization")' in text


def test_a_row_of_equal_numbers_is_its_shift():
    scale, shift = drawn((100,), 1), drawn((100,), 2)
    x = np.full((3, 100), 1000, "float32")
    layer = lambda x: relax.op.nn.layer_norm(x, relax.const(scale), relax.const(shift), axes=[-1])  # noqa: E731
    found, _ = computed((3, 100), layer, x)
    # A mean of squares less the square of the mean would leave nothing but rounding errors.
    np.testing.assert_allclose(found, np.broadcast_to(shift, (3, 100)), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "channels", "is_ours"),
    [
        ((2, 50, 3 * WIDTH), 2, True),
        ((1, 5, 7, WIDTH), 3, True),
        ((2, 3 * WIDTH, 50), 1, True),
        ((2, 5, 197), 1, True),
        ((2, 50, 3), 2, False),  # no vector of channels
    ],
)
def test_normalization_of_each_channel(shape, channels, is_ours):
    n = shape[channels]
    scale, shift = drawn((n,), 1), drawn((n,), 2)
    axes = [axis for axis in range(1, len(shape)) if axis != channels]
    x = 3 * drawn(shape) + 5
    found, text = computed(
        shape,
        lambda x: relax.op.nn.group_norm(
            x, relax.const(scale), relax.const(shift), n, channels, axes
        ),
        x,
    )
    wide = [n if axis == channels else 1 for axis in range(len(shape))]
    expected = normalized(x, tuple(axes), scale.reshape(wide), shift.reshape(wide))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert ('T.sblock("normalization")' in text) is is_ours


def group_norm(n_groups):
    return functools.partial(
        relax.op.nn.group_norm, num_groups=n_groups, channel_axis=1, axes=[2, 3]
    )


def instance_norm(x, scale, shift):
    return relax.op.nn.instance_norm(x, scale, shift, 1, [2, 3])


def test_channels_beside_the_groups_are_not_the_last_axis():
    x, (scale, shift) = 3 * drawn((3, 5, 32)) + 5, drawn((2, 3), 1)
    found, text = computed(
        x.shape,
        lambda x: relax.op.nn.group_norm(x, relax.const(scale), relax.const(shift), 3, 0, [1]),
        x,
    )
    wide = scale.reshape(3, 1, 1), shift.reshape(3, 1, 1)
    np.testing.assert_allclose(found, normalized(x, (1,), *wide), rtol=1e-4, atol=1e-5)
    assert 'T.sblock("normalization")' not in text


@pytest.mark.parametrize("vector_math", [True, False])
@pytest.mark.parametrize(
    ("norm", "n_groups"), [(group_norm(8), 8), (group_norm(32), 32), (instance_norm, 32)]
)
@pytest.mark.parametrize("level", [1000.0, 255.0])
def test_the_variance_beside_a_large_mean(norm, n_groups, level, vector_math):
    """TVM subtracts the squared mean from the mean of squares, which is nothing or negative."""
    scale, shift = drawn((32,), 1), drawn((32,), 2)
    x = np.full((2, 32, 40, 30), level, "float32")
    if level == 1000.0:
        x += drawn(x.shape)
    constants = relax.const(scale), relax.const(shift)
    found, _ = computed(x.shape, lambda x: norm(x, *constants), x, vector_math=vector_math)
    groups = x.reshape(2, n_groups, -1)
    expected = normalized(groups, (2,), 1.0, 0.0).reshape(x.shape)
    expected = expected * scale[:, None, None] + shift[:, None, None]
    np.testing.assert_allclose(found, expected, atol=1e-2)


@pytest.mark.parametrize("vector_math", [True, False])
@pytest.mark.parametrize("norm", [group_norm(2), instance_norm])
def test_a_plain_image_is_the_shift(norm, vector_math):
    """Added one by one, 90,000 numbers of 255 have a mean of 255.27, and some deviation."""
    scale, shift = drawn((4,), 1), drawn((4,), 2)
    x = np.full((1, 4, 300, 300), 255.0, "float32")
    constants = relax.const(scale), relax.const(shift)
    found, _ = computed(x.shape, lambda x: norm(x, *constants), x, vector_math=vector_math)
    np.testing.assert_allclose(found, np.broadcast_to(shift[:, None, None], x.shape), atol=1e-2)


def test_rounding_of_many_equal_numbers_does_not_add_up():
    shape, ones = (1, 1000, 1000, WIDTH), np.ones(WIDTH, "float32")
    constants = relax.const(ones), relax.const(ones)
    x = np.full(shape, 0.1, "float32")
    found, text = computed(
        shape, lambda x: relax.op.nn.group_norm(x, *constants, WIDTH, 3, [1, 2]), x
    )
    assert 'T.sblock("normalization")' in text
    np.testing.assert_allclose(found, 1.0, atol=1e-2)


def test_without_vector_mathematics_exponentials_are_those_of_the_c_library():
    network = network_of((4, 100), lambda x: relax.op.nn.softmax(x, -1))
    prepared = prepare(network, CPU, vector_math=False)
    (name,) = call_counts(prepared.mod)
    assert "T.exp" in prepared.mod[name].script()


def safe_softmax(x, least=-np.inf, fill=0.0, axis=-1):
    """Write a softmax as PyTorch's attention does: zeros in rows that are masked."""
    op = relax.op
    is_number = op.astype(op.logical_not(op.equal(x, relax.const(least, "float32"))), "int8")
    is_masked = op.logical_not(op.astype(op.max(is_number, axis, keepdims=True), "bool"))
    found = op.nn.softmax(x, axis)
    return op.where(is_masked, op.full_like(found, relax.const(fill, "float32")), found)


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        ({"fill": 2.0}, False),
        ({"least": -1e30}, False),
        ({"axis": 1}, False),
    ],
)
def test_rows_that_are_masked_are_zeros_without_a_search_for_them(options, is_plain):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 40, 40), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.normalize(safe_softmax(x, **options)))
    mod = relax.transform.Normalize()(builder.get())
    mod = relax.transform.ConvertToDataflow(1)(mod)
    network = Network("net", mod, {}, {"x": (2, 40, 40)}, {"x": "float32"})
    prepared = prepare(network, CPU)
    assert ("where" not in prepared.mod.script()) is is_plain
    values = drawn((2, 40, 40))
    values[0, 3] = values[1, 5] = -np.inf
    (found,) = run_network(compile_network(prepared, None, CPU), [values])
    if is_plain:
        expected = np.where(np.isinf(values), 0, softmax(np.where(np.isinf(values), 0, values)))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
