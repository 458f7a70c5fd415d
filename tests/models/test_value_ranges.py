"""What integer inputs may be, for the ways in which models use them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tvm_adaptive.models.network import Network, main_of, network_of_relax
from tvm_adaptive.models.value_ranges import input_ranges, output_scales

op = relax.op
LOWEST = float(np.finfo("float32").min)


def network_of(inputs: dict[str, tuple[tuple[int, ...], str]], make: Callable[..., Any]) -> Network:
    """Return a network of what a function makes of the inputs; it may emit operators."""
    builder = relax.BlockBuilder()
    variables = [
        relax.Var(name, relax.TensorType(shape, dtype)) for name, (shape, dtype) in inputs.items()
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(make(builder.emit, *variables))
        builder.emit_func_output(result)
    return network_of_relax("net", builder.get(), {})


def ranges_of(inputs: dict[str, Any], make: Callable[..., Any]) -> dict[str, tuple[float, float]]:
    network = network_of(inputs, make)
    found = input_ranges(main_of(network.mod), network.input_dtypes)
    drawn = dict(zip(network.input_shapes, network.random_inputs(3), strict=True))
    for name, (low, high) in found.items():
        assert low <= drawn[name].min() <= drawn[name].max() <= high
        assert drawn[name].dtype == network.input_dtypes[name]
    return {name: tuple(each) for name, each in found.items()}


def table(rows: int, dtype: str = "float32") -> Any:
    return relax.const(np.ones((rows, 4), dtype))


def number(value: float, dtype: str = "int64") -> Any:
    return relax.const(value, dtype)


def places(n: int, dtype: str = "int64") -> Any:
    return relax.const(np.arange(n, dtype=dtype))


IDS = {"x": ((2, 8), "int64")}
WITH_DATA = {**IDS, "data": ((2, 8), "float32")}
# Of each way: what the only integer input may be.
TABLES: dict[str, tuple[Callable[..., Any], tuple[float, float]]] = {
    "rows": (lambda emit, x: op.take(table(50), x, 0), (0, 49)),
    "columns": (lambda emit, x: op.take(table(50), x, 1), (0, 3)),
    "numbers": (lambda emit, x: op.take(places(20), x), (0, 19)),
    "cast and reshaped": (
        lambda emit, x: op.take(table(50), emit(op.reshape(emit(op.astype(x, "int32")), [16])), 0),
        (0, 49),
    ),
    "places behind the padding": (
        lambda emit, x: op.take(table(50), emit(op.add(x, number(2))), 0),
        (0, 47),
    ),
    "one less": (lambda emit, x: op.take(table(50), emit(op.subtract(x, number(1))), 0), (1, 50)),
    "the smallest table": (
        lambda emit, x: op.add(emit(op.take(table(50), x, 0)), emit(op.take(table(30), x, 0))),
        (0, 29),
    ),
    "a table of one row": (lambda emit, x: op.take(table(1), x, 0), (0, 0)),
    "from the end": (
        lambda emit, x: op.take(
            table(50),
            emit(op.where(emit(op.less(x, number(0))), emit(op.add(x, number(50))), x)),
            0,
        ),
        (0, 49),
    ),
    "a part": (
        lambda emit, x: op.take(table(50), emit(op.split(emit(op.concat([x, x], 1)), 2, 1))[1], 0),
        (0, 49),
    ),
    "one hot": (
        lambda emit, x: op.one_hot(x, relax.prim_value(1.0), relax.prim_value(0.0), 7),
        (0, 6),
    ),
    "elements": (lambda emit, x: op.gather_elements(table(50), x, 0), (0, 49)),
    # Counted places, as RoBERTa has them, do not limit the words.
    "counted": (
        lambda emit, x: op.add(
            emit(op.take(table(50), x, 0)),
            emit(
                op.take(
                    table(12),
                    emit(op.cumsum(emit(op.astype(emit(op.not_equal(x, number(1))), "int64")), 1)),
                    0,
                )
            ),
        ),
        (0, 49),
    ),
    "nothing": (lambda emit, x: op.add(x, number(3)), (0, 1)),
}


@pytest.mark.parametrize("way", TABLES)
def test_indices_are_within_their_tables(way: str) -> None:
    make, expected = TABLES[way]
    assert ranges_of(IDS, make) == {"x": expected}


def test_rows_of_a_weight_that_is_a_parameter() -> None:
    network = network_of(
        {"x": ((3,), "int32"), "words": ((40, 4), "float32")},
        lambda emit, x, words: op.take(words, x, 0),
    )
    assert input_ranges(main_of(network.mod), {"x": "int32"}) == {"x": (0, 39)}


def compared(function: Callable[..., Any], n: int = 8) -> Callable[..., Any]:
    def make(emit: Any, x: Any, data: Any) -> Any:
        length = emit(op.reshape(x, [2, 8]))
        return op.where(emit(function(length, places(n))), data, number(0.0, "float32"))

    return make


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, p: op.less(p, x), (1, 8)),
        (op.greater, (1, 8)),
        (lambda x, p: op.greater_equal(p, x), (1, 8)),
        (lambda x, p: op.less_equal(p, x), (0, 7)),
        (lambda x, p: op.greater(p, x), (0, 7)),
    ],
)
def test_lengths_and_places_are_within_what_they_are_compared_with(function, expected) -> None:
    assert ranges_of(WITH_DATA, compared(function))["x"] == expected


def test_lengths_that_each_step_of_a_loop_tests() -> None:
    def make(emit: Any, x: Any, data: Any) -> Any:
        for step in range(5):
            data = emit(op.where(emit(op.greater(x, number(step))), data, emit(op.negative(data))))
        return data

    assert ranges_of(WITH_DATA, make)["x"] == (1, 5)


def test_a_test_for_padding_is_no_limit() -> None:
    def make(emit: Any, x: Any, data: Any) -> Any:
        seen = emit(op.astype(emit(op.greater(x, number(0))), "float32"))
        words = emit(op.sum(emit(op.take(table(50), x, 0)), -1))
        return op.multiply(emit(op.multiply(data, seen)), words)

    assert ranges_of(WITH_DATA, make)["x"] == (0, 49)


def added(emit: Any, x: Any, data: Any) -> Any:
    """Add a large negative number where the mask is 0, as BERT does."""
    closed = emit(op.subtract(number(1.0, "float32"), emit(op.astype(x, "float32"))))
    return op.add(data, emit(op.multiply(closed, number(-10000.0, "float32"))))


def chosen(emit: Any, x: Any, data: Any) -> Any:
    """Choose the lowest number where the mask is 0, or where a later word would be seen."""
    causal = relax.const(np.tri(2, 8, dtype=bool))
    seen = emit(op.logical_and(emit(op.astype(x, "bool")), causal))
    return op.where(seen, data, number(LOWEST, "float32"))


def filled(emit: Any, x: Any, data: Any) -> Any:
    """Fill with the lowest number where the mask is 1, as PyTorch's padding masks do."""
    return op.where(emit(op.astype(x, "bool")), number(-np.inf, "float32"), data)


def multiplied(emit: Any, x: Any, data: Any) -> Any:
    return op.multiply(data, emit(op.astype(x, "float32")))


def mixed(emit: Any, x: Any, data: Any) -> Any:
    share = emit(op.astype(x, "float32"))
    rest = emit(op.subtract(number(1.0, "float32"), share))
    return op.add(emit(op.multiply(data, share)), emit(op.multiply(emit(op.negative(data)), rest)))


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8"])
@pytest.mark.parametrize(("make", "value"), [(added, 1), (chosen, 1), (filled, 0), (multiplied, 1)])
def test_a_mask_lets_everything_pass(make, value: int, dtype: str) -> None:
    inputs = {"x": ((2, 8), dtype), "data": ((2, 8), "float32")}
    assert ranges_of(inputs, make)["x"] == (value, value)
    # A name is worth less than the use, more than nothing.
    inputs = {"padding_mask": ((2, 8), dtype), "data": ((2, 8), "float32")}
    assert ranges_of(inputs, make)["padding_mask"] == (value, value)
    # Of a mask that lets everything pass, a kernel that ignores it would seem right.
    network = network_of(inputs, make)
    one_sided = tuple(network.random_inputs())
    for known in (network, dataclasses.replace(network, sample=one_sided)):
        mask, data = known.telling_inputs()
        assert (mask.dtype, set(mask.ravel().tolist())) == (dtype, {0, 1})
        assert (mask[:, 0] == value).all()
        np.testing.assert_array_equal(data, one_sided[1])
    assert ranges_of(inputs, mixed)["padding_mask"] == (1, 1)


def test_what_is_no_mask_stays_where_functions_are_checked() -> None:
    index = network_of({"x": ((1, 16), "int64")}, lambda emit, x: op.take(table(1), x, 0))
    assert index.telling_inputs()[0].max() == 0
    lengths = network_of(
        {"seq_len": ((4,), "int32")}, lambda emit, x: op.negative(emit(op.astype(x, "float32")))
    )
    np.testing.assert_array_equal(lengths.telling_inputs()[0], np.ones(4, "int32"))


def test_without_a_hint() -> None:
    inputs = {"flag": ((4,), "bool"), "pixels": ((4,), "uint8"), "seq_len": ((4,), "int32"),
              "code": ((4,), "int8"), "step": ((4,), "int64"), "x": ((4,), "float32")}  # fmt: skip

    def make(emit: Any, *variables: Any) -> Any:
        return op.concat([emit(op.astype(each, "float32")) for each in variables], 0)

    assert ranges_of(inputs, make) == {
        "flag": (0, 1),
        "pixels": (0, 255),
        "seq_len": (1, 1),
        "code": (-128, 127),
        "step": (0, 1),
    }


def test_bytes_that_are_indices_are_not_negative() -> None:
    for rows, high in ((200, 127), (128, 127), (100, 99)):
        found = ranges_of(
            {"x": ((2, 8), "int8")},
            lambda emit, x, rows=rows: op.take(table(rows), emit(op.astype(x, "int32")), 0),
        )
        assert found == {"x": (0, high)}


def test_a_seed_gives_the_same_inputs_again_and_another_one_others() -> None:
    network = network_of(WITH_DATA, lambda emit, x, data: op.add(data, emit(op.sum(
        emit(op.take(table(50), x, 0)), -1))))  # fmt: skip
    one, two, other = (network.random_inputs(seed) for seed in (1, 1, 2))
    for a, b, c in zip(one, two, other, strict=True):
        assert np.array_equal(a, b)
        assert not np.array_equal(a, c)


def test_the_scale_of_an_output_is_that_of_what_bounds_it() -> None:
    def make(emit: Any, x: Any, data: Any) -> Any:
        share = emit(op.sigmoid(data))
        moved = emit(op.reshape(share, [16]))
        product = emit(op.multiply(share, number(0.01, "float32")))
        limited = emit(op.clip(data, -3.0, 2.0))
        return relax.Tuple([moved, product, limited, data, emit(op.nn.softmax(data))])

    network = network_of(WITH_DATA, make)
    found = output_scales(main_of(network.mod))
    assert found == pytest.approx([1.0, 0.01, 3.0, 0.0, 0.0])


@pytest.mark.parametrize(("bound", "size"), [(-LOWEST, 16), (-LOWEST, 2), (1e9, 16), (6.0, 16)])
def test_a_bound_far_from_all_values_excuses_no_error(bound: float, size: int) -> None:
    """As of a clip to what the type holds, and of the number of a mask."""

    def make(emit: Any, x: Any, data: Any) -> Any:
        clipped = emit(op.clip(data, 0.0, bound))
        hidden = emit(op.where(emit(op.astype(x, "bool")), emit(op.sigmoid(data)), number(
            -bound, "float32")))  # fmt: skip
        return relax.Tuple([clipped, hidden])

    network = network_of({name: ((2, size), kind) for name, kind in (
        ("x", "int64"), ("data", "float32"))}, make)  # fmt: skip
    positive = np.linspace(0.5, 2.0, 2 * size, dtype="float32").reshape(2, size)
    hidden = np.where([[True], [size < 16]], positive, np.float32(-bound))
    expected = [positive, hidden]
    assert network.problem_beside_framework(expected, expected, 1e-3) is None
    for place in (0, 1):
        wrong = [each.copy() for each in expected]
        wrong[place][0, 0] = 0.55
        problem = network.problem_beside_framework(wrong, expected, 1e-3)
        assert f"output {place}: 1 of" in str(problem)


def test_a_sigmoid_next_to_zero_may_be_off_by_a_millionth() -> None:
    network = network_of(WITH_DATA, lambda emit, x, data: op.sigmoid(data))
    expected = np.full((2, 8), 1e-9, "float32")
    found = expected + np.float32(1e-7)
    assert network.problem_beside_framework([found], [expected], 1e-3) is None
    assert network.problem_beside_framework([found * 100], [expected], 1e-3) is not None
