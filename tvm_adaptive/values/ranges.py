"""Arithmetic with ranges: what operators make of the lowest and the highest value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Range(NamedTuple):
    """The lowest and the highest value of a tensor, infinite where nothing is known."""

    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether both ends are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)


ANY = Range(-math.inf, math.inf)
ZERO = Range(0.0, 0.0)
ONE = Range(1.0, 1.0)
ZERO_OR_ONE = Range(0.0, 1.0)


def range_of(low: float, high: float) -> Range:
    """Return a range; an end that is no number is not known."""
    return Range(-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)


def hull(*ranges: Range) -> Range:
    """Return the range of what is in any of several ones."""
    return Range(min(each.low for each in ranges), max(each.high for each in ranges))


def multiply(a: Range, b: Range) -> Range:
    """Return the range of products; an unknown number times zero is zero."""
    products = [x * y if x and y else 0.0 for x in a for y in b]
    return Range(min(products), max(products))


def not_equal(a: Range, b: Range) -> Range:
    """Return whether numbers differ: never, always or sometimes."""
    if a.high < b.low or b.high < a.low:
        return ONE
    return ZERO if a == b and a.low == a.high else ZERO_OR_ONE


def _add(a: Range, b: Range) -> Range:
    return range_of(a.low + b.low, a.high + b.high)


def _negative(a: Range) -> Range:
    return Range(-a.high, -a.low)


def _divide(a: Range, b: Range) -> Range:
    if b.low <= 0 <= b.high:
        return ANY
    return multiply(a, Range(1 / b.high, 1 / b.low))


def _maximum(a: Range, b: Range) -> Range:
    return Range(max(a.low, b.low), max(a.high, b.high))


def _minimum(a: Range, b: Range) -> Range:
    return Range(min(a.low, b.low), min(a.high, b.high))


def _not(a: Range) -> Range:
    return Range(1.0 - a.high, 1.0 - a.low)


def _less(a: Range, b: Range) -> Range:
    if a.high < b.low:
        return ONE
    return ZERO if a.low >= b.high else ZERO_OR_ONE


def _where(condition: Range, a: Range, b: Range) -> Range:
    if condition == ZERO:
        return b
    return a if condition == ONE else hull(a, b)


# By the names of Relax's operators, without their ``relax.``.
COMPARISONS: dict[str, Callable[[Range, Range], Range]] = {
    "less": _less,
    "greater": lambda a, b: _less(b, a),
    "less_equal": lambda a, b: _not(_less(b, a)),
    "greater_equal": lambda a, b: _not(_less(a, b)),
}
# Of integers they compute something else.
OF_TRUTHS: dict[str, Callable[..., Range]] = {
    "logical_not": _not,
    "bitwise_not": _not,
    "logical_and": _minimum,
    "bitwise_and": _minimum,
    "logical_or": _maximum,
    "bitwise_or": _maximum,
}
# Results have no elements but those of the first argument, or what lies between them.
_MOVES = (
    *("reshape", "expand_dims", "squeeze", "flatten", "permute_dims", "broadcast_to", "flip"),
    *("repeat", "tile", "strided_slice", "dynamic_strided_slice", "reverse_sequence", "sort"),
    *("take", "gather_elements", "gather_nd", "index_tensor"),
    *("max", "min", "mean", "median", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"),
)
OPERATORS: dict[str, Callable[..., Range]] = {
    **dict.fromkeys(_MOVES, lambda first, *_others: first),
    **COMPARISONS,
    **OF_TRUTHS,
    "add": _add,
    "subtract": lambda a, b: _add(a, _negative(b)),
    "negative": _negative,
    "multiply": multiply,
    "divide": _divide,
    "maximum": _maximum,
    "minimum": _minimum,
    "clip": lambda a, low, high: _minimum(_maximum(a, low), high),
    "equal": lambda a, b: _not(not_equal(a, b)),
    "not_equal": not_equal,
    "where": _where,
    "masked_fill": lambda a, mask, value: _where(mask, value, a),
    "full": lambda _shape, value: value,
    "full_like": lambda _like, value: value,
    "sigmoid": lambda _: ZERO_OR_ONE,
}
