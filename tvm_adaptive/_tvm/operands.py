"""How the results of a tensor function use its operands."""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import IRModule, buffer_of, handle, s_tir, tirx

_LINEAR = (tirx.Add, tirx.Sub, tirx.Mul)


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
    written = {handle(buffer_of(each)) for each in block.writes}
    reads = [each for each in block.reads if handle(buffer_of(each)) not in written]
    return not any(_has_own_elements(each, axes) for each in reads)


def _has_own_elements(region: Any, axes: list[Any]) -> bool:
    """Say whether the place of an element depends on all axes."""
    used = [variable for each in region.region for variable in _linear_in(each.min)]
    return all(any(axis.same_as(variable) for variable in used) for axis in axes)


def _linear_in(index: Any) -> list[Any]:
    """Return the variables of which each step leads to another element: not channels of groups."""
    if isinstance(index, tirx.Var):
        return [index]
    if isinstance(index, _LINEAR):
        return [*_linear_in(index.a), *_linear_in(index.b)]
    return []
