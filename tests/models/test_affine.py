from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import IRModule, relax
from tvm_adaptive.models import call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.affine import fold_affine, with_numbers_as_data
from tvm_adaptive.models.network import network_of_relax
from tvm_adaptive.tuning.target import resolve_target

RNG = np.random.default_rng(0)
SHAPE = (2, 4, 7, 6)


def constant(*shape: int, positive: bool = False) -> Any:
    values = RNG.standard_normal(shape).astype("float32")
    return relax.const(np.abs(values) + 0.5 if positive else values)


def module_of(build: Callable[[Any, Any], Any], shape: tuple[int, ...] = SHAPE) -> IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def norm(builder: Any, x: Any, n_channels: int, **options: Any) -> Any:
    statistics = [constant(n_channels) for _ in range(3)]
    variance = constant(n_channels, positive=True)
    found = relax.op.nn.batch_norm(x, *statistics, variance, axis=1, **options)
    return builder.emit(relax.TupleGetItem(builder.emit(found), 0))


def conv(builder: Any, x: Any, **options: Any) -> Any:
    kernel = constant(6, 4 // options.get("groups", 1), 3, 3)
    return builder.emit(relax.op.nn.conv2d(x, kernel, **options))


def transposed(builder: Any, x: Any, **options: Any) -> Any:
    kernel = constant(4, 6 // options.get("groups", 1), 2, 2)
    return builder.emit(relax.op.nn.conv2d_transpose(x, kernel, strides=2, **options))


def product(builder: Any, x: Any, other: Any) -> Any:
    return builder.emit(relax.op.multiply(x, other))


def total(builder: Any, x: Any, other: Any) -> Any:
    return builder.emit(relax.op.add(x, other))


def operators(mod: IRModule) -> list[str]:
    names = [str(each.value.op.name) for each in _tvm.bindings_of(mod["main"])]
    return [name.removeprefix("relax.").removeprefix("nn.") for name in names]


BIAS = (1, 6, 1, 1)
CASES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "a normalisation after a convolution": (
        lambda b, x: norm(b, conv(b, x), 6),
        ["conv2d", "add"],
    ),
    "one without scale and centre": (
        lambda b, x: norm(b, conv(b, x), 6, scale=False, center=False),
        ["conv2d", "add"],
    ),
    "after a bias": (
        lambda b, x: norm(b, total(b, conv(b, x), constant(*BIAS)), 6),
        ["conv2d", "add"],
    ),
    "after groups": (lambda b, x: norm(b, conv(b, x, groups=2), 6), ["conv2d", "add"]),
    "after a transposed convolution": (
        lambda b, x: norm(b, total(b, transposed(b, x), constant(*BIAS)), 6),
        ["conv2d_transpose", "add"],
    ),
    "after a transposed convolution of groups": (
        lambda b, x: norm(b, transposed(b, x, groups=2), 6),
        ["conv2d_transpose", "add"],
    ),
    "alone": (lambda b, x: norm(b, x, 4), ["multiply", "add"]),
    "products and sums with numbers": (
        lambda b, x: total(
            b,
            product(b, total(b, conv(b, x), constant(*BIAS)), relax.const(0.7, "float32")),
            relax.const(0.3, "float32"),
        ),
        ["conv2d", "add"],
    ),
    "a number first": (
        lambda b, x: b.emit(relax.op.multiply(relax.const(3.0, "float32"), conv(b, x))),
        ["conv2d"],
    ),
    "differences and quotients": (
        lambda b, x: b.emit(
            relax.op.divide(
                b.emit(relax.op.subtract(conv(b, x), constant(*BIAS))),
                relax.const(7.0, "float32"),
            )
        ),
        ["conv2d", "add"],
    ),
    "a hard swish, written out": (
        lambda b, x: product(
            b,
            b.emit(
                relax.op.divide(
                    product(b, x, b.emit(relax.op.clip(total(b, x, constant()), 0, 6))),
                    relax.const(6.0, "float32"),
                )
            ),
            relax.const(1.5, "float32"),
        ),
        ["add", "clip", "multiply", "multiply"],
    ),
    "a factor that differs within a channel": (
        lambda b, x: product(b, conv(b, x), constant(1, 1, 5, 4)),
        ["conv2d", "multiply"],
    ),
    "factors along different axes": (
        lambda b, x: product(b, product(b, x, constant(4, 1, 1)), constant(7, 6)),
        ["multiply", "multiply"],
    ),
    "sums along different axes": (
        lambda b, x: total(b, total(b, conv(b, x), constant(*BIAS)), constant(5, 4)),
        ["conv2d", "add", "add"],
    ),
    "a factor that widens": (lambda b, x: product(b, x, constant(3, 2, 4, 7, 6)), ["multiply"]),
    "a factor for the last axis": (
        lambda b, x: product(b, conv(b, x), constant(4)),
        ["conv2d", "multiply"],
    ),
    "division of a constant": (
        lambda b, x: b.emit(relax.op.divide(constant(positive=True), b.emit(relax.op.exp(x)))),
        ["exp", "divide"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_folded_computes_the_same(case: str, compare: Callable[[IRModule], None]) -> None:
    build, expected = CASES[case]
    mod = module_of(build)
    assert operators(fold_affine(mod)) == expected
    compare(mod)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[[IRModule], None]:
    """Return a check that folding changes no results, with a preparation that does not fold."""
    preparation = sys.modules["tvm_adaptive.models.prepare"]
    monkeypatch.setattr(preparation, "fold_affine", lambda mod: mod)
    target = resolve_target("cpu")
    x = RNG.standard_normal(SHAPE).astype("float32")

    def run(mod: IRModule) -> Any:
        prepared = prepare(network_of_relax("net", mod, {}), target)
        return np.array(run_network(compile_network(prepared, None, target), [x])[0])

    def check(mod: IRModule) -> None:
        np.testing.assert_allclose(run(fold_affine(mod)), run(mod), rtol=1e-4, atol=1e-5)

    return check


def test_a_convolution_with_another_use_keeps_its_weights(
    compare: Callable[[IRModule], None],
) -> None:
    def build(b: Any, x: Any) -> Any:
        y = conv(b, x)
        return total(b, norm(b, y, 6), y)

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "multiply", "add", "add"]
    compare(mod)


def test_a_sum_with_another_use_stays(compare: Callable[[IRModule], None]) -> None:
    def build(b: Any, x: Any) -> Any:
        y = total(b, conv(b, x), constant(*BIAS))
        return total(b, product(b, y, relax.const(2.0, "float32")), y)

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "add", "multiply", "add"]
    compare(mod)


@pytest.mark.parametrize("divisor", [0.0, np.inf, np.nan, 1e-39])
def test_a_quotient_without_a_reciprocal_stays(divisor: float) -> None:
    mod = module_of(lambda b, x: b.emit(relax.op.divide(x, relax.const(divisor, "float32"))))
    kept = "divide" if divisor != np.inf else "multiply"
    assert operators(fold_affine(mod)) == [kept]


def test_factors_of_rows_and_of_channels_are_both_applied(
    compare: Callable[[IRModule], None],
) -> None:
    def build(b: Any, x: Any) -> Any:
        y = conv(b, x)
        rows = constant(1, 1, int(y.ty.shape[2]), 1)
        return product(b, product(b, y, rows), constant(*BIAS))

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "multiply", "multiply"]
    compare(mod)


def test_two_factors_whose_product_is_too_large_stay() -> None:
    large = relax.const(1e25, "float32")
    mod = module_of(lambda b, x: product(b, product(b, x, large), large))
    assert operators(fold_affine(mod)) == ["multiply", "multiply"]


def rows_of(b: Any, x: Any) -> Any:
    y = b.emit(relax.op.divide(x, relax.const(41.0, "float32")))
    return b.emit(relax.op.floor(b.emit(relax.op.reshape(y, (-1,)))))


def rounded(b: Any, x: Any) -> Any:
    """Return a quotient rounded by the sum with a number that leaves no digits behind the point."""
    magic = relax.const(12582912.0, "float32")
    return b.emit(relax.op.subtract(total(b, x, magic), magic))


def rectified_rows(b: Any, x: Any) -> Any:
    y = b.emit(relax.op.nn.relu(b.emit(relax.op.divide(x, relax.const(41.0, "float32")))))
    return b.emit(relax.op.floor(y))


def cut_off(b: Any, x: Any) -> Any:
    """Return the floor by the same sum, a half below; and of a quotient."""
    half = relax.const(0.5, "float32")
    return rounded(b, b.emit(relax.op.subtract(b.emit(relax.op.divide(x, half)), half)))


@pytest.mark.parametrize(
    ("build", "values", "expected"),
    [
        (rectified_rows, [41.0, 82.0, -3.0], [1.0, 2.0, 0.0]),
        (cut_off, [0.4, 0.6, 1.1], [0.0, 1.0, 2.0]),
        (rows_of, [41.0, 82.0, 81.9, 0.0], [1.0, 2.0, 1.0, 0.0]),
        (lambda b, x: b.emit(relax.op.astype(rows_of(b, x), "int32")), [41.0], [1]),
        (rounded, [0.3, 0.7, -1.6], [0.0, 1.0, -2.0]),
    ],
)
def test_what_a_last_digit_decides_is_computed_as_it_stands(
    build: Any, values: list[float], expected: list[float]
) -> None:
    x = np.array(values, "float32")
    target = resolve_target("cpu")
    network = network_of_relax("net", module_of(build, x.shape), {})
    (found,) = run_network(compile_network(prepare(network, target), None, target), [x])
    np.testing.assert_array_equal(found, expected)


def test_a_product_behind_one_that_widens_stays(compare: Callable[[IRModule], None]) -> None:
    """One channel becomes six."""

    def build(b: Any, x: Any) -> Any:
        kernel = constant(1, 4, 3, 3)
        y = product(b, b.emit(relax.op.nn.conv2d(x, kernel)), constant(*BIAS))
        y = product(b, y, relax.const(0.5, "float32"))
        return product(b, total(b, y, constant(2, 6, 1, 1)), constant(*BIAS))

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "multiply", "multiply", "add", "multiply"]
    compare(mod)


def test_extents_that_are_not_known_stay() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.multiply(x, relax.const(2.0, "float32")))
            y = builder.emit_output(relax.op.multiply(y, constant(4)))
        builder.emit_func_output(y)
    mod = with_numbers_as_data(fold_affine(builder.get()))
    assert operators(mod) == ["multiply", "multiply"]


def test_integers_stay() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "int32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.floor_divide(x, relax.const(2, "int32")))
        builder.emit_func_output(y)
    assert operators(fold_affine(builder.get())) == ["floor_divide"]


def two_layers(b: Any, x: Any) -> Any:
    """Return layers that differ in their weights, and in a factor and a number behind a clip."""
    for factor, number in ((0.7, 0.2), (0.9, 0.4)):
        y = b.emit(relax.op.nn.conv2d(x, constant(4, 4, 3, 3), padding=1))
        y = b.emit(relax.op.clip(total(b, y, relax.const(3.0, "float32")), 0, 6))
        y = product(b, y, relax.const(factor, "float32"))
        x = total(b, y, relax.const(number, "float32"))
    return x


def test_layers_that_differ_in_numbers_are_one_function(
    compare: Callable[[IRModule], None],
) -> None:
    mod = module_of(two_layers)
    found = with_numbers_as_data(fold_affine(mod))
    shapes = [
        tuple(map(int, argument.ty.shape))
        for each in _tvm.bindings_of(found["main"])
        if str(each.value.op.name) in ("relax.multiply", "relax.add")
        for argument in each.value.args[1:]
    ]
    # The 3 is in both layers.
    assert shapes == [(), (1, 1, 1, 1), (1, 1, 1, 1)] * 2
    prepared = prepare(network_of_relax("net", mod, {}), resolve_target("cpu"))
    counts = call_counts(prepared.mod)
    assert sorted(n for name, n in counts.items() if "conv2d" in name) == [2]
    compare(mod)


def test_numbers_keep_their_type() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float64"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.multiply(x, relax.const(3.0, "float64")))
            y = builder.emit_output(relax.op.divide(y, relax.const(6.0, "float64")))
        builder.emit_func_output(y)
    (binding,) = _tvm.bindings_of(fold_affine(builder.get())["main"])
    number = binding.value.args[1]
    assert (str(number.ty.dtype), float(_tvm.data_of_constant(number).numpy())) == ("float64", 0.5)
