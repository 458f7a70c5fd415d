"""How the results of a tensor function use its operands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tvm_adaptive._tvm import IRModule, Schedule, buffer_of, handle, s_tir, tirx

# In the text of a value: the condition of a choice has a remainder.
_BY_REMAINDER = re.compile(r"(?:if_then_else|Select)\([^,]*%")
# Steps of the last two lead to the same element again at the border alone.
_STEPWISE = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max)


def shares_operands(mod: IRModule) -> bool:
    """Say whether several results share each element of an operand, as in products of matrices.

    In depthwise convolutions, pooling and products with a vector, some operand of the heaviest
    block has elements of its own for each result, windows that overlap aside.
    """
    block = s_tir.analysis.find_anchor_sblock(mod)
    if block is None:
        return True
    spatial = [each for each in block.iter_vars if each.iter_type == each.DataPar]
    axes = [each.var for each in spatial if getattr(each.dom.extent, "value", 0) != 1]
    return not any(_has_own_elements(each, axes) for each in operands_of(block))


def reads_windows(mod: IRModule) -> bool:
    """Say whether results read windows of an operand, as in convolutions and pooling.

    Then an index of it depends on an axis of the results and on one of their sums. In a product
    with a vector none does.
    """
    block = s_tir.analysis.find_anchor_sblock(mod)
    if block is None:
        return False
    long = [each for each in block.iter_vars if getattr(each.dom.extent, "value", 0) != 1]
    spatial = [each.var for each in long if each.iter_type == each.DataPar]
    reduced = [each.var for each in long if each.iter_type == each.CommReduce]
    indices = [index for operand in operands_of(block) for index in operand.region]
    found = [stepped_in(index.min) for index in indices]
    return any(_has_any(each, spatial) and _has_any(each, reduced) for each in found)


def batch_axes(mod: IRModule) -> list[bool]:
    """Say of each spatial axis of the heaviest block whether all of its operands depend on it.

    So it is with the first axis of a batched product: matrices of different places share nothing.
    """
    block = s_tir.analysis.find_anchor_sblock(mod)
    if block is None:
        return []
    used = [variables_of(region) for region in operands_of(block)]
    spatial = [each.var for each in block.iter_vars if each.iter_type == each.DataPar]
    return [bool(used) and all(has_all(found, [axis]) for found in used) for axis in spatial]


def reads_with_gaps(mod: IRModule) -> bool:
    """Say whether remainders decide which elements are read and which are zero.

    So it is in a transposed convolution that is written as one of a dilated image.
    """
    schedule = Schedule(mod)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    values = [getattr(schedule.get(each).body, "value", None) for each in blocks]
    return any(_BY_REMAINDER.search(str(value)) for value in values)


def operands_of(block: Any) -> list[Any]:
    """Return the regions that a block reads, but for those of its results."""
    written = {handle(buffer_of(each)) for each in block.writes}
    return [each for each in block.reads if handle(buffer_of(each)) not in written]


def variables_of(region: Any) -> list[Any]:
    """Return the variables that the place of a region depends on."""
    return [var for each in region.region for var in tirx.analysis.undefined_vars(each.min)]


def has_all(variables: Sequence[Any], axes: Sequence[Any]) -> bool:
    """Say whether all axes are among some variables."""
    return all(any(axis.same_as(variable) for variable in variables) for axis in axes)


def _has_any(variables: Sequence[Any], axes: Sequence[Any]) -> bool:
    """Say whether some axis is among some variables."""
    return any(has_all(variables, [axis]) for axis in axes)


def _has_own_elements(region: Any, axes: Sequence[Any]) -> bool:
    """Say whether the place of an element depends on all axes."""
    return has_all([each for index in region.region for each in stepped_in(index.min)], axes)


def stepped_in(index: Any) -> list[Any]:
    """Return the variables of which each step leads to another element: not channels of groups."""
    if isinstance(index, tirx.Var):
        return [index]
    if isinstance(index, _STEPWISE):
        return [*stepped_in(index.a), *stepped_in(index.b)]
    return []
