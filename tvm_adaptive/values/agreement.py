"""Do two kernels compute the same? Inputs that tell, and tolerances that are fair.

A buffer of a kernel does not say whether it is read or written, so all of them start
with the same random values and all are compared afterwards: an output that was not
written, or only in part, still holds what it started with and gives itself away.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Rounding errors of a sum of K terms in another order are about eps * sqrt(K) of the
# result's size; 8 of these leave room for what is computed after the sum.
_ROUNDINGS = 8.0
# A looser tolerance would let random numbers pass.
_LOOSEST = 0.25
# Share of integers, made from floating-point numbers, that may round to another one. Of
# half-precision sums that are rounded to integers it is some thousandths.
ROUNDED_SHARE = 0.01
# Inputs are disturbed by so many tolerances. What another order of additions changes stays
# below an eighth of one; a place that it can move across a rounding's edge is moved across
# it by one of two opposite disturbances of this size in 97 of 100 cases.
_DISTURBANCE = 4.0


def random_array(
    rng: np.random.Generator, shape: Sequence[int], dtype: str, *, positive: bool = False
) -> Array:
    """Draw the start values of one buffer.

    Floating-point numbers are uniform in [-1, 1], or in [0.1, 1] if ``positive`` (for
    kernels with roots and logarithms). Integers are small; 32 and 64-bit ones are 0 or 1,
    because they may be indices.
    """
    kind = numpy_dtype(dtype)
    if kind == np.bool_:
        return rng.integers(0, 2, size=shape).astype(kind)
    if is_float(kind):
        return rng.uniform(0.1 if positive else -1.0, 1.0, size=shape).astype(kind)
    if kind.itemsize >= 4:
        return rng.integers(0, 2, size=shape).astype(kind)
    low = 0 if positive or kind.kind == "u" else -4
    return rng.integers(low, 5, size=shape).astype(kind)


def tolerance(dtypes: Sequence[str], reduction_length: int) -> float:
    """Return the relative error that another order of additions may make."""
    epsilons = [_epsilon(numpy_dtype(name)) for name in dtypes]
    return min(_LOOSEST, _ROUNDINGS * max(epsilons, default=0.0) * math.sqrt(reduction_length))


def disagreement(
    expected: Sequence[Array],
    found: Sequence[Array],
    *,
    rtol: float,
    atol: float | None = None,
    neighbours: Sequence[Mapping[int, Array]] = (),
    rounded_share: float = 0.0,
) -> str | None:
    """Say where two kernels disagree, or None if they agree.

    Integers have to be equal. One that is made from floating-point numbers may also be what
    rounding makes of it: a number that is rounded may get to the next one, the largest of
    numbers that are nearly equal may be another one, a comparison may go the other way. A
    kernel does not say which of its integers that can happen to; ``neighbours`` do.
    """
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            return f"buffer {number} has shape {other.shape}, expected {one.shape}"
        if is_float(one.dtype):
            wrong = _wrong_floats(one.astype(np.float64), other.astype(np.float64), rtol, atol)
        else:
            others = [each[number] for each in neighbours if number in each]
            wrong = _wrong_integers(one, other, others, rounded_share)
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            where = [int(axis) for axis in place]
            return (
                f"buffer {number}: {int(wrong.sum())} of {wrong.size} values are wrong, first at "
                f"{where}: {other[place]} instead of {one[place]}"
            )
    return None


def disturbed(
    values: Sequence[Array], rtol: float, rng: np.random.Generator
) -> tuple[list[Array], list[Array]]:
    """Return start values that differ by some roundings, and those that differ the other way.

    Floating-point numbers are a little larger or smaller, each at random; integers stay.
    """
    share = min(_LOOSEST, _DISTURBANCE * rtol)
    up: list[Array] = []
    down: list[Array] = []
    for each in values:
        signs = rng.choice([-share, share], size=each.shape) if is_float(each.dtype) else None
        for found, way in ((up, 1.0), (down, -1.0)):
            moved = each if signs is None else each.astype(np.float64) * (1.0 + way * signs)
            found.append(moved.astype(each.dtype))
    return up, down


def tells_nothing(start: Sequence[Array], end: Sequence[Array]) -> bool:
    """Say whether more than half of what a kernel wrote is NaN or infinite."""
    written = finite = 0
    for before, after in zip(start, end, strict=True):
        if not is_float(after.dtype):
            continue
        changed = after[~(before == after)].astype(np.float64)
        written += changed.size
        finite += int(np.isfinite(changed).sum())
    return 2 * finite < written


def _wrong_integers(
    expected: Array, found: Array, neighbours: Sequence[Array], rounded_share: float
) -> Array:
    wrong: Array = expected != found
    if not wrong.any():
        return wrong
    is_truth = expected.dtype == np.bool_
    expected, found, *neighbours = (_widened(each) for each in (expected, found, *neighbours))
    # Modulo 2^64, so that the largest distances do not overflow.
    distance = np.maximum(expected, found).astype(np.uint64)
    distance -= np.minimum(expected, found).astype(np.uint64)
    if neighbours:
        low = np.minimum.reduce([expected, *neighbours])
        high = np.maximum.reduce([expected, *neighbours])
        excused = (distance <= 1) & (low <= found) & (found <= high)
        for each in neighbours:
            excused |= found == each
        n_most = max(1.0, ROUNDED_SHARE * wrong.size)
    else:
        excused = (distance <= 1) & (not is_truth)
        n_most = rounded_share * wrong.size
    return wrong if wrong.sum() > n_most else wrong & ~excused


def _widened(values: Array) -> Array:
    return values if values.dtype == np.uint64 else values.astype(np.int64)


def _wrong_floats(expected: Array, found: Array, rtol: float, atol: float | None) -> Array:
    finite = expected[np.isfinite(expected)]
    if atol is None:
        atol = rtol * (float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0)
    return ~np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one number, those of the largest for a type numpy has not."""
    try:
        return numpy_dtype(dtype).itemsize
    except TypeError:
        return np.dtype(np.float64).itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's type of a name, which may be one of ``ml_dtypes``."""
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401 - teaches numpy bfloat16 and its kin
    return np.dtype(name)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Say whether numbers of a type are rounded."""
    return _epsilon(dtype) > 0.0


def _epsilon(dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps)
    if dtype.kind == "V":
        import ml_dtypes

        with contextlib.suppress(ValueError):  # its integers have no such thing
            return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    return 0.0
