from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.values.ranges import ANY, ONE, OPERATORS, ZERO, ZERO_OR_ONE, Range, hull, multiply

BOUNDS = st.integers(-6, 6).map(float) | st.sampled_from([-math.inf, math.inf])
TRUTHS = st.sampled_from([ZERO, ONE, ZERO_OR_ONE])
BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
LOGICAL = {"logical_and": np.logical_and, "logical_or": np.logical_or}


@st.composite
def ranges_and_values(draw: st.DrawFn) -> tuple[Range, float]:
    low, high = sorted(draw(st.tuples(BOUNDS, BOUNDS)))
    inside = st.integers(
        int(max(low, -9)) if low < 9 else 9, int(min(high, 9)) if high > -9 else -9
    )
    value = float(draw(inside))
    return Range(min(low, value), max(high, value)), value


def is_inside(value: float, inside: Range) -> bool:
    return inside.low <= value <= inside.high


@given(st.sampled_from(sorted(BINARY)), ranges_and_values(), ranges_and_values())
def test_results_are_within_their_range(name, a, b):
    assert is_inside(float(BINARY[name](a[1], b[1])), OPERATORS[name](a[0], b[0]))


@given(ranges_and_values(), ranges_and_values())
def test_quotients_are_within_their_range(a, b):
    if b[1] != 0:
        found = OPERATORS["divide"](a[0], b[0])
        assert found.low - 1e-9 <= a[1] / b[1] <= found.high + 1e-9


@given(ranges_and_values(), ranges_and_values(), TRUTHS)
def test_a_choice_is_within_its_range(a, b, condition):
    found = OPERATORS["where"](condition, a[0], b[0])
    if condition != ZERO:
        assert is_inside(a[1], found)
    if condition != ONE:
        assert is_inside(b[1], found)
    assert OPERATORS["masked_fill"](b[0], condition, a[0]) == found


@given(st.sampled_from(sorted(LOGICAL)), TRUTHS, TRUTHS)
def test_truths_are_within_their_range(name, a, b):
    for one in a:
        for other in b:
            assert is_inside(float(LOGICAL[name](one, other)), OPERATORS[name](a, b))
    assert OPERATORS["logical_not"](OPERATORS["logical_not"](a)) == a


@given(ranges_and_values(), ranges_and_values(), ranges_and_values())
def test_a_wider_range_gives_a_wider_result(a, b, c):
    wide = hull(a[0], c[0])
    for name in BINARY:
        narrow, found = OPERATORS[name](a[0], b[0]), OPERATORS[name](wide, b[0])
        assert found.low <= narrow.low
        assert found.high >= narrow.high


def test_what_is_not_known_is_a_number():
    assert multiply(ANY, ZERO) == ZERO
    assert multiply(ANY, ONE) == ANY
    assert OPERATORS["clip"](ANY, ZERO, ONE) == ZERO_OR_ONE
    assert OPERATORS["sigmoid"](ANY) == ZERO_OR_ONE
    assert OPERATORS["negative"](Range(-1.0, 2.0)) == (-2.0, 1.0)


@pytest.mark.parametrize("name", ["reshape", "take", "max"])
def test_moved_elements_stay_what_they_are(name):
    assert OPERATORS[name](Range(2.0, 5.0), ANY) == (2.0, 5.0)
