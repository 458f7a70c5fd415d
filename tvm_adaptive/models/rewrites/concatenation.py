"""Concatenations whose vectors lie within one part each.

As TVM lowers a concatenation, each number compares its place with the begin of each part, one
after the other. Nothing is loaded in vectors then: 512 channels of 13 parts at 28 x 28 places took
1.9 ms (two cores of a Zen 3), 0.06 ms in this form.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from tvm_adaptive._tvm import (
    IRModule,
    PrimFunc,
    SBlockRealize,
    Schedule,
    ScheduleError,
    te,
    tirx,
)
from tvm_adaptive._tvm.tensor_functions import realizes, with_rewritten_functions
from tvm_adaptive.models.network import known_extents

# Annotation of a block: how many numbers in a row always belong to the same part.
_RUN = "tvm_adaptive.run"
# MetaSchedule's largest vector.
_MOST_NUMBERS = 64
# Fewer are not worth a branch for each vector.
_LEAST_NUMBERS = 4


def concatenation(builder: Any, call: Any) -> Any | None:
    """Lower a concatenation of known extents; None for another one."""
    parts = list(getattr(call.args[0], "fields", ()))
    extents, axis = [*map(known_extents, parts)], call.attrs.axis
    if axis is None or len(parts) < 2 or not all(extents):
        return None
    axis = int(axis) % len(extents[0])
    ends = list(itertools.accumulate(each[axis] for each in extents))
    compute = functools.partial(_concatenated, axis, ends)
    return builder.call_te(compute, *parts, primfunc_name_hint="concatenate")


def _concatenated(axis: int, ends: Sequence[int], *parts: Any) -> Any:
    begins = [0, *ends]

    def element(*places: Any) -> Any:
        before, place, after = places[:axis], places[axis], places[axis + 1 :]

        def of(first: int, last: int) -> Any:
            """Return the number of one of some parts, found by halving."""
            if first == last:
                index = (*before, place - begins[first], *after)
                return parts[first][index]
            middle = (first + last + 1) // 2
            # TVM knows what "<" means for a whole vector, but not what "<=" does.
            is_before = place < begins[middle]
            return tirx.if_then_else(is_before, of(first, middle - 1), of(middle, last))

        return of(0, len(parts) - 1)

    shape = [*parts[0].shape]
    shape[axis] = ends[-1]
    is_last = axis == len(shape) - 1
    attributes = {_RUN: math.gcd(*ends)} if is_last else {}
    return te.compute(shape, element, name="T_concat", attrs=attributes)


def with_runs(mod: IRModule) -> IRModule:
    """Return a module whose concatenations have an axis of their own for the numbers in a row."""
    return with_rewritten_functions(mod, _with_run)


def _with_run(function: PrimFunc) -> PrimFunc:
    root = function.body.block if isinstance(function.body, SBlockRealize) else None
    blocks = [] if root is None else [each.block for each in realizes(root.body)]
    runs = [int(each.annotations[_RUN]) for each in blocks if _RUN in each.annotations]
    if not runs:
        return function
    schedule = Schedule(IRModule({"main": function}))
    references = schedule.get_child_blocks(schedule.get_sblock("root"))
    for block in references:
        if _RUN in schedule.get(block).annotations:
            schedule.unannotate(block, _RUN)
    unchanged, n = schedule.mod["main"], _in_vector(math.gcd(*runs))
    if n < _LEAST_NUMBERS:
        return unchanged
    # What is no chain of elements stays as it is.
    with contextlib.suppress(ScheduleError):
        for block in references[:-1]:
            schedule.compute_inline(block)
        extents = [int(schedule.get(loop).extent) for loop in schedule.get_loops(references[-1])]
        if extents[-1] % n == 0 and extents[-1] > n:
            split = _split_of(n, extents[-1], len(extents))
            schedule.transform_block_layout(references[-1], split)
            return schedule.mod["main"]
    return unchanged


def _in_vector(run: int) -> int:
    return max(n for n in range(1, _MOST_NUMBERS + 1) if run % n == 0)


def _split_of(n: int, n_channels: int, n_axes: int) -> Any:
    """Return the map of a block's iterators that splits the last one."""

    def split(*places: Any) -> list[Any]:
        *outer, channel = places
        run, number = tirx.floordiv(channel, n), tirx.floormod(channel, n)
        # MetaSchedule would take few runs together as one vector.
        return [run, *outer, number] if n_channels <= _MOST_NUMBERS else [*outer, run, number]

    return tirx.IndexMap.from_func(split, ndim=n_axes)
