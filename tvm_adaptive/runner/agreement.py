"""Do two kernels compute the same? Inputs that tell, and tolerances that are fair.

A buffer of a kernel does not say whether it is read or written, so all of them start
with the same random values and all are compared afterwards: an output that was not
written, or only in part, still holds what it started with and gives itself away.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Rounding errors of a sum of K terms in another order are about eps * sqrt(K) of the
# result's size; 8 of these leave room for what is computed after the sum.
_ROUNDINGS = 8.0
# A looser tolerance would let random numbers pass.
_LOOSEST = 0.25
# Share of integers, made from floating-point numbers, that may round to a neighbour.
_ROUNDED_SHARE = 0.01


def random_array(
    rng: np.random.Generator, shape: Sequence[int], dtype: str, *, positive: bool = False
) -> Array:
    """Draw the start values of one buffer.

    Floating-point numbers are uniform in [-1, 1], or in [0.1, 1] if ``positive`` (for
    kernels with roots and logarithms). Integers are small; 32 and 64-bit ones are 0 or 1,
    because they may be indices.

    Parameters
    ----------
    rng : numpy.random.Generator
    shape : sequence of int
    dtype : str
    positive : bool

    Raises
    ------
    TypeError
        When numpy has no such type.
    """
    kind = _numpy_dtype(dtype)
    if kind == np.bool_:
        return rng.integers(0, 2, size=shape).astype(kind)
    if _is_float(kind):
        return rng.uniform(0.1 if positive else -1.0, 1.0, size=shape).astype(kind)
    if kind.itemsize >= 4:
        return rng.integers(0, 2, size=shape).astype(kind)
    low = 0 if positive or kind.kind == "u" else -4
    return rng.integers(low, 5, size=shape).astype(kind)


def tolerance(dtypes: Sequence[str], reduction_length: int) -> float:
    """Return the relative error that another order of additions may make.

    Parameters
    ----------
    dtypes : sequence of str
        Types of the kernel's buffers; the coarsest floating-point one decides.
    reduction_length : int
        Terms in its longest sum.

    Returns
    -------
    float
        0 when no buffer is floating-point.
    """
    epsilons = [_epsilon(_numpy_dtype(name)) for name in dtypes]
    return min(_LOOSEST, _ROUNDINGS * max(epsilons, default=0.0) * math.sqrt(reduction_length))


def disagreement(
    expected: Sequence[Array], found: Sequence[Array], *, rtol: float, atol: float | None = None
) -> str | None:
    """Say where two kernels disagree, or None if they agree.

    Parameters
    ----------
    expected, found : sequence of ndarray
        All buffers after the run, in the same order.
    rtol : float
        Relative to each expected value; NaN and infinities must match.
    atol : float or None
        Absolute; None for ``rtol`` times the root mean square of the buffer, as sums of
        terms of either sign lose digits.

    Returns
    -------
    str or None
    """
    from_floats = any(_is_float(array.dtype) for array in expected)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            return f"buffer {number} has shape {other.shape}, expected {one.shape}"
        if _is_float(one.dtype):
            wrong = _wrong_floats(one.astype(np.float64), other.astype(np.float64), rtol, atol)
        else:
            wrong = one != other
            if from_floats and wrong.sum() <= _ROUNDED_SHARE * wrong.size:
                continue
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            where = [int(axis) for axis in place]
            return (
                f"buffer {number}: {int(wrong.sum())} of {wrong.size} values are wrong, first at "
                f"{where}: {other[place]} instead of {one[place]}"
            )
    return None


def tells_nothing(start: Sequence[Array], end: Sequence[Array]) -> bool:
    """Say whether more than half of what a kernel wrote is NaN or infinite.

    Parameters
    ----------
    start, end : sequence of ndarray
        All buffers before and after the run.
    """
    written = finite = 0
    for before, after in zip(start, end, strict=True):
        if not _is_float(after.dtype):
            continue
        changed = after[~(before == after)].astype(np.float64)
        written += changed.size
        finite += int(np.isfinite(changed).sum())
    return 2 * finite < written


def _wrong_floats(expected: Array, found: Array, rtol: float, atol: float | None) -> Array:
    finite = expected[np.isfinite(expected)]
    if atol is None:
        atol = rtol * (float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0)
    return ~np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one number, those of the largest for a type numpy has not.

    Parameters
    ----------
    dtype : str
    """
    try:
        return _numpy_dtype(dtype).itemsize
    except TypeError:
        return np.dtype(np.float64).itemsize


def _numpy_dtype(name: str) -> np.dtype[Any]:
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401 - teaches numpy bfloat16 and its kin
    return np.dtype(name)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return _epsilon(dtype) > 0.0


def _epsilon(dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps)
    if dtype.kind == "V":
        import ml_dtypes

        with contextlib.suppress(ValueError):  # its integers have no such thing
            return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    return 0.0
