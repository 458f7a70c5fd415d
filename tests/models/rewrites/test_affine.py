from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from tests.models import networks
from tvm_adaptive import _tvm
from tvm_adaptive._tvm import IRModule, relax
from tvm_adaptive.models import call_counts, compile_network, prepare, run_network
from tvm_adaptive.models.network import network_of_relax
from tvm_adaptive.models.rewrites.affine import fold_affine, with_numbers_as_data
from tvm_adaptive.tuning.target import resolve_target

RNG = np.random.default_rng(0)
SHAPE = (2, 4, 7, 6)


def constant(*shape: int, positive: bool = False) -> Any:
    values = RNG.standard_normal(shape).astype("float32")
    return relax.const(np.abs(values) + 0.5 if positive else values)


def module_of(build: Callable[[Any, Any], Any]) -> IRModule:
    return networks.module_of({"x": SHAPE}, build)


def norm(emit: Any, x: Any, n_channels: int, **options: Any) -> Any:
    statistics = [constant(n_channels) for _ in range(3)]
    variance = constant(n_channels, positive=True)
    found = relax.op.nn.batch_norm(x, *statistics, variance, axis=1, **options)
    return emit(relax.TupleGetItem(emit(found), 0))


def conv(emit: Any, x: Any, **options: Any) -> Any:
    kernel = constant(6, 4 // options.get("groups", 1), 3, 3)
    return emit(relax.op.nn.conv2d(x, kernel, **options))


def transposed(emit: Any, x: Any, **options: Any) -> Any:
    kernel = constant(4, 6 // options.get("groups", 1), 2, 2)
    return emit(relax.op.nn.conv2d_transpose(x, kernel, strides=2, **options))


def product(emit: Any, x: Any, other: Any) -> Any:
    return emit(relax.op.multiply(x, other))


def total(emit: Any, x: Any, other: Any) -> Any:
    return emit(relax.op.add(x, other))


def operators(mod: IRModule) -> list[str]:
    names = [str(each.value.op.name) for each in _tvm.bindings_of(mod["main"])]
    return [name.removeprefix("relax.").removeprefix("nn.") for name in names]


BIAS = (1, 6, 1, 1)
CASES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "a normalisation after a convolution": (
        lambda emit, x: norm(emit, conv(emit, x), 6),
        ["conv2d", "add"],
    ),
    "one without scale and centre": (
        lambda emit, x: norm(emit, conv(emit, x), 6, scale=False, center=False),
        ["conv2d", "add"],
    ),
    "after a bias": (
        lambda emit, x: norm(emit, total(emit, conv(emit, x), constant(*BIAS)), 6),
        ["conv2d", "add"],
    ),
    "after groups": (lambda emit, x: norm(emit, conv(emit, x, groups=2), 6), ["conv2d", "add"]),
    "after a transposed convolution": (
        lambda emit, x: norm(emit, total(emit, transposed(emit, x), constant(*BIAS)), 6),
        ["conv2d_transpose", "add"],
    ),
    "after a transposed convolution of groups": (
        lambda emit, x: norm(emit, transposed(emit, x, groups=2), 6),
        ["conv2d_transpose", "add"],
    ),
    "alone": (lambda emit, x: norm(emit, x, 4), ["multiply", "add"]),
    "products and sums with numbers": (
        lambda emit, x: total(
            emit,
            product(emit, total(emit, conv(emit, x), constant(*BIAS)), relax.const(0.7, "float32")),
            relax.const(0.3, "float32"),
        ),
        ["conv2d", "add"],
    ),
    "a number first": (
        lambda emit, x: emit(relax.op.multiply(relax.const(3.0, "float32"), conv(emit, x))),
        ["conv2d"],
    ),
    "differences and quotients": (
        lambda emit, x: emit(
            relax.op.divide(
                emit(relax.op.subtract(conv(emit, x), constant(*BIAS))),
                relax.const(7.0, "float32"),
            )
        ),
        ["conv2d", "add"],
    ),
    "a hard swish, written out": (
        lambda emit, x: product(
            emit,
            emit(
                relax.op.divide(
                    product(emit, x, emit(relax.op.clip(total(emit, x, constant()), 0, 6))),
                    relax.const(6.0, "float32"),
                )
            ),
            relax.const(1.5, "float32"),
        ),
        ["add", "clip", "multiply", "multiply"],
    ),
    "a factor that differs within a channel": (
        lambda emit, x: product(emit, conv(emit, x), constant(1, 1, 5, 4)),
        ["conv2d", "multiply"],
    ),
    "factors along different axes": (
        lambda emit, x: product(emit, product(emit, x, constant(4, 1, 1)), constant(7, 6)),
        ["multiply", "multiply"],
    ),
    "sums along different axes": (
        lambda emit, x: total(emit, total(emit, conv(emit, x), constant(*BIAS)), constant(5, 4)),
        ["conv2d", "add", "add"],
    ),
    "a factor that widens": (
        lambda emit, x: product(emit, x, constant(3, 2, 4, 7, 6)),
        ["multiply"],
    ),
    "a factor for the last axis": (
        lambda emit, x: product(emit, conv(emit, x), constant(4)),
        ["conv2d", "multiply"],
    ),
    "division of a constant": (
        lambda emit, x: emit(relax.op.divide(constant(positive=True), emit(relax.op.exp(x)))),
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
    def build(emit: Any, x: Any) -> Any:
        y = conv(emit, x)
        return total(emit, norm(emit, y, 6), y)

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "multiply", "add", "add"]
    compare(mod)


def test_a_sum_with_another_use_stays(compare: Callable[[IRModule], None]) -> None:
    def build(emit: Any, x: Any) -> Any:
        y = total(emit, conv(emit, x), constant(*BIAS))
        return total(emit, product(emit, y, relax.const(2.0, "float32")), y)

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "add", "multiply", "add"]
    compare(mod)


@pytest.mark.parametrize("divisor", [0.0, np.inf, np.nan, 1e-39])
def test_a_quotient_without_a_reciprocal_stays(divisor: float) -> None:
    mod = module_of(lambda emit, x: emit(relax.op.divide(x, relax.const(divisor, "float32"))))
    kept = "divide" if divisor != np.inf else "multiply"
    assert operators(fold_affine(mod)) == [kept]


def test_factors_of_rows_and_of_channels_are_both_applied(
    compare: Callable[[IRModule], None],
) -> None:
    def build(emit: Any, x: Any) -> Any:
        y = conv(emit, x)
        rows = constant(1, 1, int(y.ty.shape[2]), 1)
        return product(emit, product(emit, y, rows), constant(*BIAS))

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "multiply", "multiply"]
    compare(mod)


def test_two_factors_whose_product_is_too_large_stay() -> None:
    large = relax.const(1e25, "float32")
    mod = module_of(lambda emit, x: product(emit, product(emit, x, large), large))
    assert operators(fold_affine(mod)) == ["multiply", "multiply"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_factors_whose_product_is_next_to_zero_stay(dtype: str) -> None:
    tiny, large = (1e-25, 1e30) if dtype == "float32" else (1e-200, 1e300)

    def scaled(emit: Any, x: Any) -> Any:
        for factor in (tiny, tiny, large):
            x = product(emit, x, relax.const(factor, dtype))
        return x

    def factors(mod: IRModule) -> list[float]:
        calls = [each.value for each in _tvm.bindings_of(mod["main"])]
        arguments = [each for call in calls for each in call.args]
        found = [_tvm.data_of_constant(x) for x in arguments if isinstance(x, _tvm.Constant)]
        return [float(np.abs(each.numpy()).max()) for each in found]

    kept = factors(fold_affine(networks.module_of({"x": SHAPE}, scaled, dtype)))
    assert kept == pytest.approx([tiny * large * tiny], rel=1e-6, abs=0.0)
    # Also where the first one is that of a convolution's weights; zeros are held.
    if dtype == "float32":
        found = factors(fold_affine(module_of(lambda emit, x: scaled(emit, conv(emit, x)))))
        assert all(each > np.finfo(dtype).tiny for each in found)
        zero = relax.const(0.0, dtype)
        mod = module_of(lambda emit, x: product(emit, product(emit, x, zero), zero))
        assert operators(fold_affine(mod)) == ["multiply"]


def rows_of(emit: Any, x: Any) -> Any:
    y = emit(relax.op.divide(x, relax.const(41.0, "float32")))
    return emit(relax.op.floor(emit(relax.op.reshape(y, (-1,)))))


def rounded(emit: Any, x: Any) -> Any:
    """Return a quotient rounded by the sum with a number that leaves no digits behind the point."""
    magic = relax.const(12582912.0, "float32")
    return emit(relax.op.subtract(total(emit, x, magic), magic))


def rectified_rows(emit: Any, x: Any) -> Any:
    y = emit(relax.op.nn.relu(emit(relax.op.divide(x, relax.const(41.0, "float32")))))
    return emit(relax.op.floor(y))


def quantised_quotients(emit: Any, x: Any) -> Any:
    y = emit(relax.op.divide(x, relax.const(61.0, "float32")))
    scale, zero_point = relax.const(1.0, "float32"), relax.const(0, "int8")
    return emit(relax.op.quantize(y, scale, zero_point, axis=0, out_dtype="int8"))


def cut_off(emit: Any, x: Any) -> Any:
    """Return the floor by the same sum, a half below; and of a quotient."""
    half = relax.const(0.5, "float32")
    return rounded(emit, emit(relax.op.subtract(emit(relax.op.divide(x, half)), half)))


@pytest.mark.parametrize(
    ("build", "values", "expected"),
    [
        (rectified_rows, [41.0, 82.0, -3.0], [1.0, 2.0, 0.0]),
        (cut_off, [0.4, 0.6, 1.1], [0.0, 1.0, 2.0]),
        (rows_of, [41.0, 82.0, 81.9, 0.0], [1.0, 2.0, 1.0, 0.0]),
        (lambda emit, x: emit(relax.op.astype(rows_of(emit, x), "int32")), [41.0], [1]),
        (rounded, [0.3, 0.7, -1.6], [0.0, 1.0, -2.0]),
        (quantised_quotients, [91.5], [2]),
    ],
)
def test_what_a_last_digit_decides_is_computed_as_it_stands(
    build: Any, values: list[float], expected: list[float]
) -> None:
    x = np.array(values, "float32")
    target = resolve_target("cpu")
    network = networks.network_of({"x": x.shape}, build)
    (found,) = run_network(compile_network(prepare(network, target), None, target), [x])
    np.testing.assert_array_equal(found, expected)


def test_a_factor_of_a_wider_type_stays_behind_half_precision() -> None:
    def build(emit: Any, x: Any) -> Any:
        kernel = relax.const(np.ones((1, 1, 1, 1), "float16"))
        y = emit(relax.op.nn.conv2d(x, kernel, out_dtype="float32"))
        return emit(relax.op.multiply(y, relax.const(1e-8, "float32")))

    mod = networks.module_of({"x": (1, 1, 4, 4)}, build, "float16")
    assert operators(fold_affine(mod)) == ["conv2d", "multiply"]


def test_a_product_behind_one_that_widens_stays(compare: Callable[[IRModule], None]) -> None:
    """One channel becomes six."""

    def build(emit: Any, x: Any) -> Any:
        kernel = constant(1, 4, 3, 3)
        y = product(emit, emit(relax.op.nn.conv2d(x, kernel)), constant(*BIAS))
        y = product(emit, y, relax.const(0.5, "float32"))
        return product(emit, total(emit, y, constant(2, 6, 1, 1)), constant(*BIAS))

    mod = module_of(build)
    assert operators(fold_affine(mod)) == ["conv2d", "multiply", "multiply", "add", "multiply"]
    compare(mod)


def test_extents_that_are_not_known_stay() -> None:
    def build(emit: Any, x: Any) -> Any:
        return product(emit, product(emit, x, relax.const(2.0, "float32")), constant(4))

    mod = networks.module_of({"x": (tirx.Var("n", "int64"), 4)}, build)
    assert operators(with_numbers_as_data(fold_affine(mod))) == ["multiply", "multiply"]


def test_integers_stay() -> None:
    two = relax.const(2, "int32")
    halved = networks.module_of({"x": (4,)}, lambda _, x: relax.op.floor_divide(x, two), "int32")
    assert operators(fold_affine(halved)) == ["floor_divide"]


def two_layers(emit: Any, x: Any) -> Any:
    """Return layers that differ in their weights, and in a factor and a number behind a clip."""
    for factor, number in ((0.7, 0.2), (0.9, 0.4)):
        y = emit(relax.op.nn.conv2d(x, constant(4, 4, 3, 3), padding=1))
        y = emit(relax.op.clip(total(emit, y, relax.const(3.0, "float32")), 0, 6))
        y = product(emit, y, relax.const(factor, "float32"))
        x = total(emit, y, relax.const(number, "float32"))
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
    def build(emit: Any, x: Any) -> Any:
        y = product(emit, x, relax.const(3.0, "float64"))
        return relax.op.divide(y, relax.const(6.0, "float64"))

    mod = networks.module_of({"x": (2, 3)}, build, "float64")
    (binding,) = _tvm.bindings_of(fold_affine(mod)["main"])
    number = binding.value.args[1]
    assert (str(number.ty.dtype), float(_tvm.data_of_constant(number).numpy())) == ("float64", 0.5)
