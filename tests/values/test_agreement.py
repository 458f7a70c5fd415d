from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays, from_dtype

from tvm_adaptive.values.agreement import (
    differs_rarely,
    disagreement,
    is_mostly_not_finite,
    largest_size,
    numpy_dtype,
    outputs_problem,
    perturbed,
    random_array,
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
    assert (
        0
        < tolerance([dtype, "float64"], {dtype: length})
        <= tolerance([dtype], {dtype: 4 * length})
    )
    assert tolerance([dtype], {dtype: length}) <= 0.25


def test_tolerance_follows_the_coarsest_type_and_is_zero_for_integers() -> None:
    assert tolerance(["float32", "float16"], {"float16": 64}) == tolerance([], {"float16": 64})
    assert tolerance(["float16"], {"float32": 4096}) == tolerance(["float16"], {})
    assert tolerance(["int8"], {"int32": 64}) == 0.0
    assert tolerance([], {}) == 0.0


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
    rtol = tolerance([dtype], {dtype: length})
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


INTEGERS = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "bool"]


@given(data=st.data(), dtype=st.sampled_from(INTEGERS), length=st.integers(1, 500))
def test_integers_are_exact_where_nothing_excuses_them(
    data: st.DataObject, dtype: str, length: int
) -> None:
    """Also beside floating-point numbers, and one of them is enough."""
    expected = data.draw(arrays(dtype, length))
    found = expected.copy()
    place = data.draw(st.integers(0, length - 1))
    found[place] = data.draw(from_dtype(np.dtype(dtype)))
    pair = ([np.ones(2), expected], [np.ones(2), found])
    text = disagreement(*pair, rtol=0.1)
    if found[place] == expected[place]:
        assert text is None
    else:
        assert f"buffer 1: 1 of {length} values are wrong, first at [{place}]" in str(text)


@given(data=st.data(), dtype=st.sampled_from(INTEGERS), length=st.integers(1, 500))
def test_an_integer_may_be_what_the_reference_gives_for_its_neighbours(
    data: st.DataObject, dtype: str, length: int
) -> None:
    expected, other = (data.draw(arrays(dtype, length)) for _ in range(2))
    n_most = max(1, length // 100)
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=n_most, unique=True))
    neighbour, found = expected.copy(), expected.copy()
    neighbour[places] = found[places] = other[places]
    neighbours = [{0: expected}, {0: neighbour}]
    assert disagreement([expected], [found], rtol=0.1, neighbours=neighbours) is None
    # Where the neighbours agree with the reference, nothing is excused.
    untouched = sorted(set(range(length)) - set(places))
    if untouched:
        place = data.draw(st.sampled_from(untouched))
        found[place] = not found[place] if dtype == "bool" else found[place] ^ 1
        assert disagreement([expected], [found], rtol=0.1, neighbours=neighbours) is not None


def test_more_than_a_hundredth_is_no_rounding() -> None:
    expected, neighbour = np.zeros(1000, np.int32), np.ones(1000, np.int32)
    found = expected.copy()
    found[:10] = 1
    assert disagreement([expected], [found], rtol=0.1, neighbours=[{0: neighbour}]) is None
    found[:11] = 1
    text = disagreement([expected], [found], rtol=0.1, neighbours=[{0: neighbour}])
    assert "11 of 1000" in str(text)


def test_between_two_neighbours_lies_one_that_is_off_by_one() -> None:
    expected = np.array([5, 5])
    neighbours = [{0: np.array([3, 5])}, {0: np.array([7, 5])}]

    def agrees(*found: int) -> bool:
        return disagreement([expected], [np.array(found)], rtol=0.1, neighbours=neighbours) is None

    assert agrees(4, 5)
    assert agrees(7, 5)
    assert not agrees(8, 5)
    assert not agrees(5, 4)
    # Two away, and nobody's: not a number that was rounded the other way, but an index.
    neighbours[0][0][0] = 1
    assert agrees(4, 5)
    assert not agrees(3, 5)


def test_without_neighbours_a_share_of_numbers_may_be_off_by_one() -> None:
    expected = np.arange(1000)
    found = expected.copy()
    found[[3, 7]] += 1
    pair = ([expected], [found])
    assert disagreement(*pair, rtol=0.1, rounded_share=0.002) is None
    assert disagreement(*pair, rtol=0.1, rounded_share=0.001) is not None
    found[7] += 1
    assert disagreement(*pair, rtol=0.1, rounded_share=0.002) is not None
    truths = np.zeros(1000, np.bool_)
    assert disagreement([truths], [~truths], rtol=0.1, rounded_share=1.0) is not None


# Of these, another order changes a few of the numbers below.
_RARELY_APART = {("float16", "compare"), ("float16", "largest")}


@pytest.mark.parametrize("rounding", ["cast", "compare", "largest"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_order_of_additions_agrees_in_what_is_rounded(rounding: str, dtype: str) -> None:
    """Sums of 256 products, and integers made of them, of 1024 rows of 8."""
    rng = np.random.default_rng(0)
    a, b = (random_array(rng, (1024, 8, 256), dtype) for _ in range(2))

    def kernel(values: list[Any], *, forward: bool) -> list[Any]:
        order = slice(None) if forward else slice(None, None, -1)
        products = (values[0] * values[1])[..., order]
        sums = np.add.accumulate(products, axis=-1, dtype=dtype)[..., -1]
        made = {
            "cast": np.rint(64 * sums.astype(np.float64)).astype(np.int32),
            "compare": sums > sums.dtype.type(0.25),
            "largest": np.argmax(sums, axis=-1),
        }
        return [*values, made[rounding]]

    rtol = tolerance([dtype], {dtype: 256})
    expected, found = (kernel([a, b], forward=forward) for forward in (True, False))
    n_apart = int((expected[2] != found[2]).sum())
    neighbours = [
        {2: kernel(values, forward=True)[2]}
        for seed in range(3)
        for values in perturbed([a, b], rtol, np.random.default_rng(seed))
    ]
    assert ((dtype, rounding) in _RARELY_APART) == (0 < n_apart <= expected[2].size // 100)
    if (dtype, rounding) in _RARELY_APART:
        assert disagreement(expected, found, rtol=rtol) is not None
        assert disagreement(expected, found, rtol=rtol, neighbours=neighbours) is None
    # A kernel that is wrong in a few places, where nothing is near an edge.
    firm = np.flatnonzero(np.all([n[2] == expected[2] for n in neighbours], axis=0))
    if (dtype, rounding) == ("float16", "cast"):
        assert firm.size == 0, "so fine a rounding of so coarse sums tells nothing"
        return
    wrong = expected[2].copy().reshape(-1)
    wrong[firm[:3]] = wrong[firm[:3]] == 0
    wrong = wrong.reshape(expected[2].shape)
    assert disagreement(expected, [a, b, wrong], rtol=rtol, neighbours=neighbours) is not None


@given(st.floats(0.0, 10.0), st.integers(0, 2**32))
def test_a_perturbation_is_small_and_leaves_integers(rtol: float, seed: int) -> None:
    floats, integers = np.linspace(0.1, 1.0, 50), np.arange(50)
    up, down = perturbed([floats, integers], rtol, np.random.default_rng(seed))
    for values, opposite in ((up, down), (down, up)):
        assert np.array_equal(values[1], integers)
        shares = values[0] / floats - 1.0
        assert np.allclose(np.abs(shares), min(0.25, 4.0 * rtol))
        assert np.allclose(shares, -(opposite[0] / floats - 1.0))


@pytest.mark.parametrize(
    ("end", "expected"),
    [([1.0, 2.0, 3.0], False), ([np.nan, 2.0, 3.0], False), ([np.nan, np.inf, 3.0], True)],
)
def test_mostly_nan_is_seen(end: Any, expected: bool) -> None:
    start = [np.zeros(3), np.arange(2)]
    assert is_mostly_not_finite(start, [np.array(end), np.arange(2)]) is expected
    assert is_mostly_not_finite(start, start) is False


def test_a_problem_names_the_output_the_place_both_values_and_the_tolerance() -> None:
    scores, expected = np.full((2, 3), 4.0), np.full((2, 3), 4.0)
    scores[1, 2] = 4.5
    rest = np.arange(3)
    assert outputs_problem([rest, expected], [rest, expected]) is None
    text = outputs_problem([rest, scores], [rest, expected], names=["", "scores"])
    assert text == (
        "output 1 (scores): 1 of 6 values are wrong, first at [1, 2]: 4.5 instead of 4.0, with "
        "a tolerance of 0.008"
    )
    text = outputs_problem([rest + 5, scores], [rest, expected], names=["n"])
    assert text == "output 0: 3 of 3 values are wrong, first at [0]: 5 instead of 0"
    assert outputs_problem([scores], []) == "there are 1 outputs instead of 0"
    scores[0, 1] = np.nan
    assert outputs_problem([scores], [expected]) == "output 0 is not finite, first at [0, 1]: nan"
    text = outputs_problem([expected], [scores])
    assert text == "the reference of output 0 is not finite, first at [0, 1]: nan"


def test_a_floor_belongs_to_its_output_and_lowers_no_tolerance() -> None:
    faint = np.full(4, 1e-8)
    pair = [faint, faint * 3], [faint, faint]
    assert outputs_problem(*pair) is not None
    assert outputs_problem(*pair, floors=[0.0, 1e-6]) is None
    assert "output 1" in str(outputs_problem(*pair, floors=[1e-6, 1e-9]))
    assert outputs_problem([np.full(4, 3.001)], [np.full(4, 3.0)], floors=[1e-9]) is None


def test_the_numbers_of_a_mask_do_not_excuse_others() -> None:
    for hidden in (-3.4e38, -1e9, -1e4):
        expected = np.array([*np.linspace(1.0, 9.0, 32), *[hidden] * 32], "float32")
        wrong = expected.copy()
        wrong[0] = 1.1
        assert "first at [0]" in str(disagreement([expected], [wrong], rtol=1e-3))
        assert disagreement([expected], [expected * np.float32(1.0005)], rtol=1e-3) is None


def test_the_largest_size_is_of_finite_numbers_and_of_no_mask() -> None:
    assert largest_size(np.array([1.0, -3.0, np.inf, np.nan])) == 3.0
    assert largest_size(np.array([[1.0, -9.0], [-1e9, 2.0]], "float32")) == 1e9  # a single one
    assert largest_size(np.array([*range(32), *[-1e9] * 32], "float32")) == 31.0
    assert largest_size(np.array([True, False])) == 1.0
    assert largest_size(np.array([np.nan])) == 0.0


def test_numbers_that_were_rounded_and_are_floats_again_may_be_the_next_ones() -> None:
    step = np.float32(0.02)
    expected = np.arange(1000, dtype="float32").reshape(10, 100) * step
    found = expected.copy()
    found[3, 7] += step
    neighbour = expected.copy()
    neighbour[3] += step
    assert disagreement([expected], [found], rtol=1e-5) is not None
    assert differs_rarely([expected], [found], 1e-5)
    assert disagreement([expected], [found], rtol=1e-5, neighbours=[{0: neighbour}]) is None
    found[4, 7] += step  # far from an edge
    problem = disagreement([expected], [found], rtol=1e-5, neighbours=[{0: neighbour}])
    assert "1 of 1000 values are wrong, first at [4, 7]" in str(problem)
    found[:2] = 0
    assert not differs_rarely([expected], [found], 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_networks_of_short_types_may_differ_by_last_places(dtype: str) -> None:
    expected = np.linspace(0.5, 1.0, 64).astype(numpy_dtype(dtype))
    error = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
    near = (expected.astype("float64") * (1 + 3 * error)).astype(expected.dtype)
    far = (expected.astype("float64") * (1 + 12 * error)).astype(expected.dtype)
    assert outputs_problem([near], [expected], 1e-3) is None
    assert outputs_problem([far], [expected], 1e-3) is not None


def test_what_no_rounding_explains_does_not_differ_rarely() -> None:
    floats, integers = np.linspace(0, 1, 200, dtype="float32"), np.arange(200)
    assert not differs_rarely([floats, integers], [floats, integers + 7], 1e-3)
    unwritten = floats.copy()
    unwritten[3] = np.nan
    assert not differs_rarely([floats], [unwritten], 1e-3)
    assert not differs_rarely([integers], [integers], 1e-3)
