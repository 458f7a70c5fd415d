"""Winograd's matrices: exact, and few operations to multiply with them."""

from __future__ import annotations

import operator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tvm_adaptive.models.forms.minimal_filtering import (
    combinations,
    minimal_filtering,
    transformed_taps,
)

OPERATIONS: dict[str, Any] = {
    "scaled": lambda x, factor: x * Fraction(factor),
    "plus": operator.add,
    "minus": operator.sub,
}


@pytest.mark.parametrize(("n_results", "n_taps"), [(2, 3), (4, 3), (3, 2), (2, 5), (3, 4), (1, 3)])
def test_the_bilinear_algorithm_is_a_correlation(n_results: int, n_taps: int) -> None:
    found = minimal_filtering(n_results, n_taps)
    data = [Fraction(each) for each in (3, -1, 4, 1, -5, 9)][: found.n_inputs]
    taps = [Fraction(each) for each in (2, 7, -1, 8, 2)][:n_taps]

    def times(matrix: Any, vector: Any) -> list[Fraction]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    products = map(operator.mul, times(found.data, data), times(found.taps, taps))
    expected = [sum(data[i + k] * taps[k] for k in range(n_taps)) for i in range(n_results)]
    assert times(found.results, list(products)) == expected


def test_more_points_than_are_accurate_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 7 points"):
        minimal_filtering(6, 3)


@pytest.mark.parametrize("n_results", [2, 4])
def test_combinations_are_a_product_in_fewer_operations(n_results: int) -> None:
    found, counts = minimal_filtering(n_results, 3), {"plus": 0, "minus": 0, "scaled": 0}

    def counting(name: str) -> Any:
        def apply(*values: Any) -> Any:
            counts[name] += 1
            return OPERATIONS[name](*values)

        return apply

    operations = {name: counting(name) for name in counts}
    for matrix in (found.data, found.results):
        values = [Fraction(each) for each in (3, -1, 4, 1, -5, 9)][: found.n_inputs]
        expected = [sum(a * b for a, b in zip(row, values, strict=True)) for row in matrix]
        assert combinations(matrix, values, **operations) == expected
    n_terms = sum(
        bool(each) for matrix in (found.data, found.results) for r in matrix for each in r
    )
    n_rows = found.n_inputs + found.n_results
    assert counts["plus"] + counts["minus"] <= n_terms - n_rows


def test_a_row_of_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match="zeros"):
        combinations([[Fraction(0)] * 2], [1, 2], **OPERATIONS)


def test_filters_are_transformed_one_by_one(rng: np.random.Generator) -> None:
    filtering, weights = minimal_filtering(4, 3), rng.standard_normal((3, 3, 2, 5)).astype("f4")
    found = transformed_taps(weights, filtering)
    g = np.array(filtering.taps, dtype=float)
    assert (found.shape, found.dtype) == ((36, 2, 5), weights.dtype)
    for c, k in np.ndindex(2, 5):
        expected = g @ weights[:, :, c, k].astype(float) @ g.T
        np.testing.assert_allclose(found[:, c, k].reshape(6, 6), expected, rtol=1e-6, atol=1e-7)
