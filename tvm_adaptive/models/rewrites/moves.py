"""Operators that only move numbers, and the views that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import Constant, data_of_constant, relax, tensor
from tvm_adaptive.models.network import known_extents, operator_of
from tvm_adaptive.models.rewrites.strided_view import StridedView

TRANSPOSE = "relax.permute_dims"
CONCATENATION = "relax.concat"
RESHAPE = "relax.reshape"
SQUEEZE = "relax.squeeze"
RESHAPES = frozenset({RESHAPE, SQUEEZE, "relax.flatten", "relax.expand_dims"})
# What ``moved`` follows.
MOVES = RESHAPES | {TRANSPOSE, "relax.take", "relax.strided_slice"}


def axes_of_transpose(call: Any) -> list[int]:
    """Return the axes of a transpose's argument, from the first, in the order of the result."""
    axes = call.attrs.axes
    if axes is None:
        return list(range(int(call.args[0].ty.ndim)))[::-1]
    # TVM keeps the axes as they are given, also those that count from the last one.
    return [int(axis) % len(axes) for axis in axes]


def squeeze_from_first(call: Any) -> Any:
    """Return a squeeze whose axes count from the first one; another operator as it is.

    For others, TVM's conversion of layouts ends in an error (``std::bad_alloc``).
    """
    axes = call.attrs.axis if operator_of(call) == SQUEEZE else None
    rank = int(call.args[0].ty.ndim)
    if axes is None or rank < 0 or all(int(axis) >= 0 for axis in axes):
        return call
    return relax.op.squeeze(call.args[0], [int(axis) % rank for axis in axes])


def reshaped_constant(value: Constant, extents: Sequence[int]) -> Constant:
    """Return a constant of the same numbers in another shape."""
    return relax.const(tensor(data_of_constant(value).numpy().reshape(extents)))


def axis_of_concatenation(call: Any) -> int | None:
    """Return the axis of a concatenation of known rank, counted from the first; None of others."""
    axis, extents = call.attrs.axis, known_extents(call)
    return int(axis) % len(extents) if axis is not None and extents else None


def moved(call: Any, view: StridedView) -> StridedView | None:
    """Return a view as an operator moves it; None for another operator."""
    name, extents = operator_of(call), known_extents(call)
    if name in RESHAPES:
        return view.reshaped(extents)
    if name == TRANSPOSE:
        return view.transposed(axes_of_transpose(call))
    if name == "relax.take":
        place, axis = _integer(call.args[1]), call.attrs.axis
        if place is None or axis is None:
            return None
        axis = int(axis) % len(view.extents)
        place = place + view.extents[axis] if place < 0 else place
        return view.taken(axis, place) if 0 <= place < view.extents[axis] else None
    if name == "relax.strided_slice":
        return _sliced(call, view)
    return None


def _sliced(call: Any, view: StridedView) -> StridedView | None:
    given = [[_integer(each) for each in getattr(part, "fields", ())] for part in call.args[1:]]
    axes, begins, _, *strides = given
    if None in [*axes, *begins] or any(each != [1] * len(axes) for each in strides):
        return None
    extents = known_extents(call)
    for axis, begin in zip(axes, begins, strict=True):
        assert axis is not None
        assert begin is not None
        place = axis % len(extents)
        n = view.extents[place]
        first = min(max(begin + n if begin < 0 else begin, 0), n)
        view = view.sliced(place, first, extents[place])
    return view


def part_of(split: Any, index: int, view: StridedView) -> StridedView | None:
    """Return one part of a view."""
    axis = int(split.attrs.axis) % len(view.extents)
    n, sections = view.extents[axis], split.attrs.indices_or_sections
    try:
        ends = [int(each) for each in sections]
    except TypeError:
        n_parts = int(sections)
        if n % n_parts:
            return None
        ends = [n // n_parts * i for i in range(1, n_parts)]
    begins = [0, *ends]
    return view.sliced(axis, begins[index], [*ends, n][index] - begins[index])


def _integer(value: Any) -> int | None:
    """Return a constant of one integer; None of anything else."""
    if isinstance(value, Constant):
        numbers = data_of_constant(value).numpy()
        is_one = numbers.ndim == 0 and np.issubdtype(numbers.dtype, np.integer)
        return int(numbers) if is_one else None
    number = getattr(value, "value", None)
    return None if number is None else int(number)
