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
# A network of a few layers in half precision differs from its framework by one to three.
_LAST_PLACES = 4.0
# Of what hides scores of attention: exporters write -10,000, -1e9, or the lowest number.
_LEAST_MASK = 5e3
# How many numbers of an array tell enough of all.
_SAMPLE_SIZE = 4096
# Numbers that a kernel wrote tell nothing of errors if more than this share is one of them;
# fewer may be so by chance.
_MOST_EQUAL = 0.99
_LEAST_VARIED = 16
# Size of a perturbation in tolerances. Another order of additions changes less than an
# eighth of one; where that can cross a rounding's edge, one of two opposite perturbations
# of this size crosses it in 97 of 100 cases.
_PERTURBATION = 4.0
# Opposite pairs of perturbations. Of a thousand integers that another order of additions
# changes, three usually miss none.
N_PERTURBED_PAIRS = 3


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


def hides_errors(start: Sequence[Array], end: Sequence[Array]) -> bool:
    """Say whether a kernel wrote numbers that are nearly all one, as rounded ones may be."""
    pairs = zip(start, end, strict=True)
    return any(is_nearly_one(new) and not np.array_equal(old, new) for old, new in pairs)


def is_nearly_one(values: Array) -> bool:
    """Say whether nearly all numbers of an array are the same; no in a small one."""
    if values.size < _LEAST_VARIED:
        return False
    some = values.reshape(-1)[:: values.size // _SAMPLE_SIZE | 1]
    _, counts = np.unique(some.astype(np.float64), return_counts=True)
    return bool(counts.max() > _MOST_EQUAL * some.size)


def tolerance(dtypes: Sequence[str], sums: Mapping[str, int]) -> float:
    """Return the relative error that another order of additions may cause.

    Of arguments of some types, and sums with a number of terms by the type that they add in.
    """
    errors = [_epsilon(numpy_dtype(name)) for name in dtypes]
    errors += [_epsilon(numpy_dtype(name)) * math.sqrt(n) for name, n in sums.items()]
    return min(_LOOSEST, _ROUNDINGS * max(errors, default=0.0))


def disagreement(
    expected: Sequence[Array],
    found: Sequence[Array],
    *,
    rtol: float,
    atol: float | None = None,
    neighbours: Sequence[Mapping[int, Array]] = (),
    rounded_share: float = 0.0,
    names: Sequence[str] = (),
) -> str | None:
    """Say where two kernels disagree, or None if they agree.

    Integers must be equal, unless they are made from floating-point numbers: then rounding
    may change a few, also if they become floating-point numbers again. ``neighbours``, what the
    reference writes for perturbed inputs, by buffer number, say which; without them,
    ``rounded_share`` of the integers may be off by one.
    """
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        name = names[number] if names else f"buffer {number}"
        if one.shape != other.shape:
            return f"{name} has shape {other.shape}, expected {one.shape}"
        if np.array_equal(one, other):  # such as operands, which may be large
            continue
        least = 0.0 if atol is None else atol
        others = [each[number] for each in neighbours if number in each]
        if is_float(one.dtype):
            if atol is None:
                least = _floor(one, rtol)
            wrong = _is_apart(one, other, rtol, least)
            if others and _is_rare(wrong):
                for each in others:
                    wrong &= _is_apart(each, other, rtol, least)
        else:
            wrong = _wrong_integers(one, other, others, rounded_share)
        if wrong.any():
            place, margin = _first_place(wrong), ""
            if is_float(one.dtype):
                margin = f", with a tolerance of {least + rtol * abs(float(one[place])):.2g}"
            return (
                f"{name}: {int(wrong.sum())} of {wrong.size} values are wrong, first at "
                f"{list(place)}: {other[place]} instead of {one[place]}{margin}"
            )
    return None


def differs_rarely(expected: Sequence[Array], found: Sequence[Array], rtol: float) -> bool:
    """Say whether there are floats, and so little differs that a rounding may explain it."""
    if not any(is_float(each.dtype) for each in expected):
        return False
    return all(_may_be_rounded(*pair, rtol) for pair in zip(expected, found, strict=True))


def outputs_agree(
    outputs: Sequence[Array],
    reference: Sequence[Array],
    rtol: float = 1e-3,
    atol: float | None = None,
) -> bool:
    """Say whether two networks computed the same, except for rounding.

    Floating-point numbers agree when ``|output - reference| <= atol + rtol * |reference|``
    and both are finite; ``rtol`` is at least four last places of float16 and bfloat16. Integers
    must be equal; one in a hundred may be off by one.
    """
    return outputs_problem(outputs, reference, rtol, atol) is None


def outputs_problem(
    outputs: Sequence[Array],
    reference: Sequence[Array],
    rtol: float = 1e-3,
    atol: float | None = None,
    *,
    floors: Sequence[float] = (),
    names: Sequence[str] = (),
) -> str | None:
    """Say which output of two networks differs, and where; None if they agree.

    As :func:`outputs_agree`; without ``atol``, it is at least the ``floors`` of the outputs.
    """
    if len(outputs) != len(reference):
        return f"there are {len(outputs)} outputs instead of {len(reference)}"
    for number, (found, expected) in enumerate(zip(outputs, reference, strict=True)):
        name = f"output {number}"
        if len(names) == len(outputs) and names[number]:
            name += f" ({names[number]})"
        for whose, each in (("", found), ("the reference of ", expected)):
            if not (finite := np.isfinite(each.astype(np.float64))).all():
                place = _first_place(~finite)
                return f"{whose}{name} is not finite, first at {list(place)}: {each[place]}"
        # Two right networks differ by some last places of a short type.
        wide = max(rtol, min(_LOOSEST, _LAST_PLACES * _epsilon(expected.dtype)))
        least = atol
        if atol is None and number < len(floors):
            least = max(_floor(expected, wide), floors[number])
        problem = disagreement(
            [expected], [found], rtol=wide, atol=least, rounded_share=ROUNDED_SHARE, names=[name]
        )
        if problem is not None:
            return problem
    return None


def largest_size(values: Array) -> float:
    """Return the largest absolute value of finite numbers, without those of a mask."""
    return float(_sizes(values).max(initial=0.0))


def largest_difference(outputs: Sequence[Array], reference: Sequence[Array]) -> Difference:
    """Compare outputs element by element."""
    if [each.shape for each in outputs] != [each.shape for each in reference]:
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
        return wrong & ~excused if _is_rare(wrong) else wrong
    excused = (distance <= 1) & (not is_boolean)
    return wrong if wrong.sum() > rounded_share * wrong.size else wrong & ~excused


def _is_apart(expected: Array, found: Array, rtol: float, least: float) -> Array:
    pair = found.astype(np.float64), expected.astype(np.float64)
    return ~np.isclose(*pair, rtol, least, equal_nan=True)


def _may_be_rounded(expected: Array, found: Array, rtol: float) -> bool:
    if np.array_equal(expected, found):
        return True
    if not is_float(expected.dtype):
        return _is_rare(np.asarray(expected != found))
    apart = _is_apart(expected, found, rtol, _floor(expected, rtol))
    # No rounding gives NaN, which is in places that were not written.
    return _is_rare(apart) and not (apart & np.isnan(found.astype(np.float64))).any()


def _is_rare(wrong: Array) -> bool:
    """Say whether so few values differ that a rounding may explain them."""
    return bool(wrong.sum() <= max(1.0, ROUNDED_SHARE * wrong.size))


def _floor(expected: Array, rtol: float) -> float:
    """Return the absolute error that is allowed even in a zero: a share of the typical size."""
    sizes = _sizes(expected)
    return rtol * (float(np.sqrt(np.mean(np.square(sizes)))) if sizes.size else 0.0)


def _sizes(values: Array) -> Array:
    """Return the absolute values of finite numbers that are none of a mask."""
    exact = values.astype(np.float64)
    return _without_mask(np.abs(exact[np.isfinite(exact)]))


def _without_mask(sizes: Array) -> Array:
    """Leave out sizes within a hundredth of the largest, if all others are 1 % of it at most."""
    largest = sizes.max(initial=0.0)
    if largest < _LEAST_MASK:
        return sizes
    is_hidden = sizes > 0.99 * largest
    others = sizes[~is_hidden]
    is_mask = is_hidden.sum() >= _LEAST_VARIED and others.max(initial=0.0) < 0.01 * largest
    return others if is_mask else sizes


def _first_place(chosen: Array) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(chosen)), chosen.shape))


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
    is_numpys = dtype.isbuiltin != 2
    if dtype.kind == "f" and is_numpys:
        return float(np.finfo(dtype).eps)
    if dtype.kind in "fV":
        import ml_dtypes

        with contextlib.suppress(ValueError):  # its integers have none
            return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    return 0.0
