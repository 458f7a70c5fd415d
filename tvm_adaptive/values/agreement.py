"""Compare what two kernels or two networks compute; draw the inputs for that.

A kernel does not say which buffers it writes: all start with random values and are compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# A sum of K terms in another order differs by about eps * sqrt(K) of the result's size;
# 8 of these leave room for what is computed after the sum.
_ROUNDINGS = 8.0
# A looser tolerance would let random numbers pass.
_LOOSEST = 0.25
# Share of integers, made from floating-point numbers, that may round to another one. Of
# half-precision sums that are rounded to integers it is some thousandths.
ROUNDED_SHARE = 0.01
# Size of a perturbation in tolerances. Another order of additions changes less than an
# eighth of one; where that can cross a rounding's edge, one of two opposite perturbations
# of this size crosses it in 97 of 100 cases.
_PERTURBATION = 4.0


class Difference(NamedTuple):
    """The largest differences from a reference; infinite if only one side is finite."""

    max_abs: float
    max_rel: float  # relative to the reference, without its zeros


def random_array(
    rng: np.random.Generator, shape: Sequence[int], dtype: str, *, positive: bool = False
) -> Array:
    """Draw the start values of a buffer; ``positive`` ones suit roots and logarithms."""
    kind = numpy_dtype(dtype)
    if is_float(kind):
        return rng.uniform(0.1 if positive else -1.0, 1.0, size=shape).astype(kind)
    if kind == np.bool_ or kind.itemsize >= 4:  # long integers may be indices
        return rng.integers(0, 2, size=shape).astype(kind)
    low = 0 if positive or kind.kind == "u" else -4
    return rng.integers(low, 5, size=shape).astype(kind)


def tolerance(dtypes: Sequence[str], reduction_length: int) -> float:
    """Return the relative error that another order of additions may cause."""
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

    Integers must be equal, unless they are made from floating-point numbers: then rounding
    may change a few. ``neighbours``, the integers by buffer number that the reference gives
    for perturbed inputs, say which; without them, ``rounded_share`` may be off by one.
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


def outputs_agree(
    outputs: Sequence[Array],
    reference: Sequence[Array],
    rtol: float = 1e-3,
    atol: float | None = None,
) -> bool:
    """Say whether two networks computed the same, except for rounding.

    Floating-point numbers agree when ``|output - reference| <= atol + rtol * |reference|``
    and both are finite. Integers must be equal; one in a hundred may be off by one.
    """
    if not _have_same_shapes(outputs, reference):
        return False
    if not all(np.isfinite(each.astype(np.float64)).all() for each in [*outputs, *reference]):
        return False
    problem = disagreement(reference, outputs, rtol=rtol, atol=atol, rounded_share=ROUNDED_SHARE)
    return problem is None


def largest_difference(outputs: Sequence[Array], reference: Sequence[Array]) -> Difference:
    """Compare outputs element by element."""
    if not _have_same_shapes(outputs, reference):
        return Difference(math.inf, math.inf)
    max_abs = max_rel = 0.0
    for output, expected in zip(outputs, reference, strict=True):
        got, want = output.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
        with np.errstate(invalid="ignore"):
            distance = np.abs(got - want)
        distance[(got == want) | (np.isnan(got) & np.isnan(want))] = 0.0
        distance[np.isnan(distance)] = np.inf
        scale = np.where(np.isfinite(want), np.abs(want), 1.0)
        relative = distance[scale > 0] / scale[scale > 0]
        max_abs = max(max_abs, float(distance.max(initial=0.0)))
        max_rel = max(max_rel, float(relative.max(initial=0.0)))
    return Difference(max_abs, max_rel)


def perturbed(
    values: Sequence[Array], rtol: float, rng: np.random.Generator
) -> tuple[list[Array], list[Array]]:
    """Return start values whose floats grow or shrink at random, and the opposite ones."""
    share = min(_LOOSEST, _PERTURBATION * rtol)
    up, down = list(values), list(values)
    for i, each in enumerate(values):
        if is_float(each.dtype):
            steps = rng.choice([-share, share], size=each.shape)
            exact = each.astype(np.float64)
            up[i] = (exact * (1.0 + steps)).astype(each.dtype)
            down[i] = (exact * (1.0 - steps)).astype(each.dtype)
    return up, down


def is_mostly_not_finite(start: Sequence[Array], end: Sequence[Array]) -> bool:
    """Say whether more than half of the numbers that a kernel wrote are NaN or infinite."""
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
    is_boolean = expected.dtype == np.bool_
    expected, found, *neighbours = (
        each if each.dtype == np.uint64 else each.astype(np.int64)
        for each in (expected, found, *neighbours)
    )
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
        excused = (distance <= 1) & (not is_boolean)
        n_most = rounded_share * wrong.size
    return wrong if wrong.sum() > n_most else wrong & ~excused


def _have_same_shapes(outputs: Sequence[Array], reference: Sequence[Array]) -> bool:
    return [output.shape for output in outputs] == [expected.shape for expected in reference]


def _wrong_floats(expected: Array, found: Array, rtol: float, atol: float | None) -> Array:
    finite = expected[np.isfinite(expected)]
    if atol is None:
        atol = rtol * (float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0)
    return ~np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def item_bytes(dtype: str) -> int:
    """Return the bytes of one number; for a type unknown to numpy, those of the largest."""
    try:
        return numpy_dtype(dtype).itemsize
    except TypeError:
        return np.dtype(np.float64).itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's type of a name, also of those in ``ml_dtypes``."""
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401 - registers bfloat16 and the like with numpy
    return np.dtype(name)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Say whether numbers of a type are rounded."""
    return _epsilon(dtype) > 0.0


def _epsilon(dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps)
    if dtype.kind == "V":
        import ml_dtypes

        with contextlib.suppress(ValueError):  # its integers have none
            return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    return 0.0
