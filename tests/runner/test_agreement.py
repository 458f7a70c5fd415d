from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.runner.agreement import (
    disagreement,
    random_array,
    tells_nothing,
    tolerance,
)

DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positive", [False, True])
def test_random_values_are_small_and_reproducible(dtype: str, positive: bool) -> None:
    one = random_array(np.random.default_rng(3), (40, 5), dtype, positive=positive)
    two = random_array(np.random.default_rng(3), (40, 5), dtype, positive=positive)
    assert one.dtype.name == dtype
    assert one.shape == (40, 5)
    np.testing.assert_array_equal(one, two)
    values = one.astype(np.float64)
    assert np.abs(values).max() <= 4
    assert len(np.unique(values)) > 1
    if positive or dtype.startswith("uint"):
        assert values.min() >= 0


@given(
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    length=st.integers(1, 10**6),
)
def test_tolerance_grows_with_the_sum_and_stays_below_one(dtype: str, length: int) -> None:
    assert 0 < tolerance([dtype, "float64"], length) <= tolerance([dtype], 4 * length) <= 0.25


def test_tolerance_follows_the_coarsest_type_and_is_zero_for_integers() -> None:
    assert tolerance(["float32", "float16"], 64) == tolerance(["float16"], 64)
    assert tolerance(["int8", "int32"], 64) == 0.0
    assert tolerance([], 64) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("length", [16, 512])
def test_another_order_of_additions_agrees_but_a_wrong_element_does_not(
    dtype: str, length: int
) -> None:
    rng = np.random.default_rng(0)
    a = random_array(rng, (64, length), dtype)
    b = random_array(rng, (64, length), dtype)
    forward, backward = np.zeros((2, 64), a.dtype)
    for k in range(length):
        forward = (forward + a[:, k] * b[:, k]).astype(a.dtype)
        backward = (backward + a[:, -1 - k] * b[:, -1 - k]).astype(a.dtype)
    rtol = tolerance([dtype], length)
    assert disagreement([forward], [backward], rtol=rtol) is None
    wrong = backward.copy()
    wrong[7] = wrong[7].astype("float64") + 3.0 * np.sqrt(length)
    assert "1 of 64 values are wrong, first at [7]" in str(
        disagreement([forward], [wrong], rtol=rtol)
    )


def test_nan_must_match_and_nan_for_a_number_is_wrong() -> None:
    expected = np.array([1.0, np.nan, np.inf])
    assert disagreement([expected], [expected.copy()], rtol=0.0) is None
    assert disagreement([expected], [np.array([np.nan, np.nan, np.inf])], rtol=0.1)
    assert disagreement([expected], [np.array([1.0, 0.0, np.inf])], rtol=0.1)
    assert disagreement([expected], [np.array([1.0, np.nan, 5.0])], rtol=0.1)


def test_shapes_must_match() -> None:
    message = disagreement([np.zeros(3)], [np.zeros(4)], rtol=0.1)
    assert message == "buffer 0 has shape (4,), expected (3,)"


def test_integers_are_exact_unless_they_come_from_floats() -> None:
    integers = np.arange(1000)
    off = integers.copy()
    off[3] += 1
    assert "buffer 0: 1 of 1000" in str(disagreement([integers], [off], rtol=0.1))
    floats = np.ones(2)
    assert disagreement([floats, integers], [floats, off], rtol=0.1) is None
    off += 1
    assert "buffer 1" in str(disagreement([floats, integers], [floats, off], rtol=0.1))


@pytest.mark.parametrize(
    ("end", "nothing"),
    [([1.0, 2.0, 3.0], False), ([np.nan, 2.0, 3.0], False), ([np.nan, np.inf, 3.0], True)],
)
def test_mostly_nan_tells_nothing(end: Any, nothing: bool) -> None:
    start = [np.zeros(3), np.arange(2)]
    assert tells_nothing(start, [np.array(end), np.arange(2)]) is nothing
    assert tells_nothing(start, start) is False
