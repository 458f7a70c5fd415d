"""What follows a convolution in its function, as an expression of one element."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import IRModule, Schedule, handle, tirx
from tvm_adaptive._tvm.expressions import is_load, parts_of
from tvm_adaptive._tvm.tensor_functions import buffer_shape, call_with
from tvm_adaptive.models.forms.convolution import Convolution, are

# A longer expression, written once for each element of a tile, takes longer to compile than
# a second pass over the results takes to run: an exponential is some hundred operations.
_MOST_OPERATIONS = 24


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """One element of a function's result, given that of its convolution."""

    result: Any  # buffer of the shape of the convolution's
    operands: tuple[Any, ...]  # other buffers that it reads
    _convolved: Any  # buffer
    _value: Any  # expression
    _iterators: tuple[Any, ...]

    def applied(self, value: Any, index: Sequence[Any]) -> Any:
        """Return the element at an index, if the convolution's is ``value``."""
        places = {handle(each): place for each, place in zip(self._iterators, index, strict=True)}
        return _rewritten(self._value, places, self._convolved, value)


def epilogue_of(convolution: Convolution) -> Epilogue | None:
    """Return a short epilogue that keeps each element in its place; None for another one."""
    if not convolution.rest:
        return None
    schedule = Schedule(IRModule({"main": convolution.function}))
    blocks = list(schedule.get_child_blocks(schedule.get_sblock("root")))
    following = blocks[-len(convolution.rest) :]
    try:
        for block in following[:-1]:
            schedule.compute_inline(block)
    except _tvm.ScheduleError:  # two results, or a reduction
        return None
    # Inlining keeps the convolution and its padding as they are.
    block = schedule.get(following[-1])
    iterators = tuple(each.var for each in block.iter_vars)
    loads = list(_loads(block.body.value))
    convolved = handle(_convolved_in(convolution, schedule, blocks))
    is_elementwise = (
        block.init is None
        and len(block.iter_vars) == len(buffer_shape(convolution.result))
        and are(block.body.indices, iterators)
        and buffer_shape(_tvm.buffer_of(block.body)) == buffer_shape(convolution.result)
        and all(
            are(load.indices, iterators)
            for load in loads
            if handle(_tvm.buffer_of(load)) == convolved
        )
    )
    if not is_elementwise or _size(block.body.value) > _MOST_OPERATIONS:
        return None
    operands = {handle(_tvm.buffer_of(load)): _tvm.buffer_of(load) for load in loads}
    buffer = operands.pop(convolved, None)
    if buffer is None:
        return None
    return Epilogue(
        _tvm.buffer_of(block.body), tuple(operands.values()), buffer, block.body.value, iterators
    )


def _convolved_in(convolution: Convolution, schedule: Schedule, blocks: Sequence[Any]) -> Any:
    """Return the buffer that the convolution writes in a schedule of its function."""
    return _tvm.buffer_of(schedule.get(blocks[-len(convolution.rest) - 1]).writes[0])


def _loads(expression: Any) -> Iterator[Any]:
    if is_load(expression):
        yield expression
    for part in parts_of(expression):
        yield from _loads(part)


def _size(expression: Any) -> int:
    return 1 + sum(map(_size, parts_of(expression)))


def _rewritten(expression: Any, places: Mapping[int, Any], buffer: Any, value: Any) -> Any:
    """Return an expression with other iterators, and a value in place of a buffer's loads."""
    if isinstance(expression, tirx.Var):
        return places[handle(expression)]
    if is_load(expression) and handle(_tvm.buffer_of(expression)) == handle(buffer):
        return value
    parts = [_rewritten(part, places, buffer, value) for part in parts_of(expression)]
    return _with_parts(expression, parts) if parts else expression


def _with_parts(expression: Any, parts: Sequence[Any]) -> Any:
    """Return an expression with other operands."""
    if is_load(expression):
        return _tvm.buffer_of(expression)[tuple(parts)]
    if hasattr(expression, "op"):
        return call_with(expression, parts)
    if isinstance(expression, tirx.Cast):
        return tirx.Cast(expression.ty.dtype, *parts)
    return type(expression)(*parts)
