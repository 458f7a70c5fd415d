"""Winograd's minimal filtering: a convolution of one tile by fewer multiplications.

Pure mathematics. F(m, r) computes m results of a filter of r elements from m + r - 1 inputs
and as many multiplications, where the direct way takes m r. In two dimensions [1]_::

    Y = A^T [(G g G^T) * (B^T d B)] A

References
----------
.. [1] Lavin, Gray: Fast algorithms for convolutional neural networks, CVPR 2016, section 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")

# Where the polynomials are evaluated, in the order in which they are used; infinity comes
# last. Small integers keep the coefficients, and so the rounding errors, small, and pairs of
# opposite numbers share half of the operations.
_POINTS = (0, 1, -1, 2, -2)


@dataclasses.dataclass(frozen=True)
class Filtering:
    """F(m, r) of one dimension."""

    n_results: int  # m
    n_taps: int  # r
    data: tuple[tuple[Fraction, ...], ...]  # B^T, (m + r - 1, m + r - 1)
    taps: tuple[tuple[Fraction, ...], ...]  # G, (m + r - 1, r)
    results: tuple[tuple[Fraction, ...], ...]  # A^T, (m, m + r - 1)

    @property
    def n_inputs(self) -> int:
        """Elements of a tile, and multiplications for it."""
        return self.n_results + self.n_taps - 1


def minimal_filtering(n_results: int, n_taps: int) -> Filtering:
    """Return F(m, r), by Toom and Cook's evaluation and interpolation of polynomials.

    Raises ValueError if it has more points than are known to keep rounding errors small.
    """
    n_points = n_results + n_taps - 2
    if n_points > len(_POINTS):
        raise ValueError(f"F({n_results}, {n_taps}) needs {n_points} points but has {_POINTS}.")
    points = [Fraction(point) for point in _POINTS[:n_points]]
    others = [[q for q in points if q != p] for p in points]
    scales = [math.prod(p - q for q in rest) for p, rest in zip(points, others, strict=True)]
    at_infinity = [Fraction(0)] * n_points + [Fraction(1)]

    def powers(point: Fraction, n: int) -> tuple[Fraction, ...]:
        return tuple(point**k for k in range(n))

    taps = [tuple(x / s for x in powers(p, n_taps)) for p, s in zip(points, scales, strict=True)]
    columns = [*(powers(p, n_results) for p in points), tuple(at_infinity[-n_results:])]
    return Filtering(
        n_results,
        n_taps,
        data=(*((*_coefficients(rest), Fraction(0)) for rest in others), _coefficients(points)),
        taps=(*taps, tuple(at_infinity[-n_taps:])),
        results=tuple(zip(*columns, strict=True)),
    )


def transformed_taps(weights: npt.NDArray[Any], filtering: Filtering) -> npt.NDArray[Any]:
    """Return G g G^T of each filter of (r, r, c, k), as (n * n, c, k) of the same type."""
    taps = np.array(filtering.taps, dtype=np.float64)
    flat = weights.reshape(filtering.n_taps**2, -1).astype(np.float64)
    # One product: its matrix has G's elements in pairs.
    found = (np.kron(taps, taps) @ flat).astype(weights.dtype)
    return found.reshape(-1, *weights.shape[2:])


def combinations(
    rows: Sequence[Sequence[Fraction]],
    values: Sequence[_T],
    *,
    scaled: Callable[[_T, float], _T],
    plus: Callable[[_T, _T], _T],
    minus: Callable[[_T, _T], _T],
) -> list[_T]:
    """Return the product of a matrix with a vector of anything, in few operations.

    Two rows in sequence that differ in signs alone, which opposite points make, share their
    sums: ``even + odd`` and ``even - odd``.
    """

    def total(row: Sequence[Fraction]) -> _T | None:
        # Positive terms first, which saves a negation.
        terms = sorted((float(c), k) for k, c in enumerate(row) if c)[::-1]
        result: _T | None = None
        for coefficient, k in terms:
            size = abs(coefficient)
            term = values[k] if size == 1.0 else scaled(values[k], size)
            if result is None:
                result = term if coefficient > 0 else scaled(values[k], coefficient)
            else:
                result = (plus if coefficient > 0 else minus)(result, term)
        return result

    found: list[_T] = []
    for place, row in enumerate(rows):
        if len(found) > place:  # found with the row before
            continue
        after = rows[place + 1] if place + 1 < len(rows) else ()
        is_pair = list(map(abs, row)) == list(map(abs, after)) and row != after
        if is_pair:
            same = [a if a == b else Fraction(0) for a, b in zip(row, after, strict=True)]
            opposite = [a if a != b else Fraction(0) for a, b in zip(row, after, strict=True)]
            even, odd = total(same), total(opposite)
            if even is not None and odd is not None:
                found += [plus(even, odd), minus(even, odd)]
                continue
        single = total(row)
        if single is None:
            raise ValueError("A row of zeros has no sum.")
        found.append(single)
    return found


def _coefficients(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Return the coefficients of the monic polynomial with these roots, lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        for power, coefficient in enumerate(found):
            shifted[power] -= root * coefficient
        found = shifted
    return tuple(found)
