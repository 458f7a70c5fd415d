"""How a block of a scheduled function reads a weight: which loops, in which order."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tvm_adaptive._tvm import For, IndexMap, IntImm, PrimFunc, SBlockRealize, SeqStmt

_Bound = tuple[tuple[Any, Any], ...]  # axes of blocks and what they are bound to


@dataclasses.dataclass(frozen=True)
class Site:
    """A block and the loops around it."""

    loops: tuple[Any, ...]  # the outermost first
    realized: tuple[Any, ...]  # the blocks around it, the outermost first, and itself

    @property
    def block(self) -> Any:
        """The block itself."""
        return self.realized[-1].block

    @functools.cached_property
    def bound(self) -> _Bound:
        """The axes of all these blocks by the loops' variables."""
        bound: _Bound = ()
        for each in self.realized:
            values = substitute(list(each.iter_values), bound)
            axes = [axis.var for axis in each.block.iter_vars]
            bound = (*bound, *zip(axes, values, strict=True))
        return bound

    def summed(self) -> list[Any]:
        """Return what the axes that are summed over are bound to."""
        axes = [axis for axis in self.block.iter_vars if axis.iter_type == axis.CommReduce]
        return substitute([axis.var for axis in axes], self.bound)

    def index_of(self, buffer: Any) -> list[Any] | None:
        """Return which single element of a buffer is read, None if it is none or several."""
        for region in self.block.reads:
            if _source(region).same_as(buffer):
                if any(int(each.extent) != 1 for each in region.region):
                    return None
                return substitute([each.min for each in region.region], self.bound)
        return None


def sites_of(function: PrimFunc) -> Iterator[Site]:
    """Yield the innermost blocks of a function."""
    yield from _sites(function.body, (), ())


def _sites(statement: Any, loops: tuple[Any, ...], realized: tuple[Any, ...]) -> Iterator[Site]:
    if isinstance(statement, For):
        yield from _sites(statement.body, (*loops, statement), realized)
    elif isinstance(statement, SeqStmt):
        for each in statement.seq:
            yield from _sites(each, loops, realized)
    elif isinstance(statement, SBlockRealize):
        mine = (*realized, statement)
        inside = list(_sites(statement.block.body, loops, mine))
        yield from inside or [Site(loops, mine)]


def substitute(expressions: Sequence[Any], bound: _Bound) -> list[Any]:
    """Return expressions with variables replaced, simplified."""
    if not expressions or not bound:
        return list(expressions)
    variables, values = zip(*bound, strict=True)
    return list(IndexMap(list(variables), list(expressions), None).map_indices(list(values)))


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a block reads a weight, in numbers."""

    loops: tuple[Any, ...]  # those of more than one round, the outermost first
    index: tuple[Any, ...]  # of the element, by the loops' variables
    shape: tuple[int, ...]  # the weight's
    outer: range  # the loops around all of the sum's: a step of theirs reads one panel
    summing: range  # the outermost of the sum's loops, up to the next one that is not
    n_elements: int  # of a panel; they lie side by side

    @functools.cached_property
    def extents(self) -> list[int]:
        """Rounds of each loop."""
        return [int(loop.extent) for loop in self.loops]

    @property
    def n_steps(self) -> int:
        """Panels that are read, repeated ones included."""
        return math.prod(self.extents[i] for i in self.outer)

    def offset_at(self, step: int) -> int:
        """Return where the panel of a step begins, in elements."""
        values = dict.fromkeys(range(len(self.loops)), 0)
        for i in reversed(self.outer):
            step, values[i] = divmod(step, self.extents[i])
        return _offset(self.index, self.loops, values, self.shape)


def reading_of(site: Site, buffer: Any) -> Reading | None:
    """Return how a block reads a weight, None where it is no regular reading of panels."""
    index, summed = site.index_of(buffer), site.summed()
    if index is None or not summed or any(int(loop.min) for loop in site.loops):
        return None
    once = [loop for loop in site.loops if int(loop.extent) == 1]
    loops = tuple(loop for loop in site.loops if int(loop.extent) > 1)
    zeros = tuple((loop.loop_var, integer(loop.loop_var, 0)) for loop in once)
    index, summed = substitute(index, zeros), substitute(summed, zeros)
    shape = shape_of(buffer)
    rounds = [int(loop.extent) for loop in loops]
    origin = _offset(index, loops, {}, shape)
    strides = [_offset(index, loops, {i: 1}, shape) - origin for i in range(len(loops))]
    is_summing = [
        _values(summed, loops, {i: 1}) != _values(summed, loops, {}) for i in range(len(loops))
    ]
    if True not in is_summing:
        return None
    first = is_summing.index(True)
    end = next((i for i in range(first, len(loops)) if not is_summing[i]), len(loops))
    inside = [i for i in range(first, len(loops)) if strides[i]]
    n_elements = math.prod(rounds[i] for i in inside)
    last = _offset(index, loops, {i: rounds[i] - 1 for i in inside}, shape)
    by_strides = sum((rounds[i] - 1) * strides[i] for i in inside)
    if not last - origin == by_strides == n_elements - 1:
        return None  # not side by side
    return Reading(loops, tuple(index), shape, range(first), range(first, end), n_elements)


def integer(variable: Any, value: int) -> Any:
    """Return a constant of a variable's type."""
    return IntImm(dtype_of(variable), value)


def dtype_of(value: Any) -> str:
    """Return the type of a variable, or of a buffer's elements."""
    return str(value.ty.dtype)


def item_bytes(buffer: Any) -> int:
    """Return the bytes of an element, at least 1."""
    bits = re.search(r"\d+$", dtype_of(buffer))
    return max(1, int(bits.group()) // 8) if bits else 1


def parameter_buffers(function: PrimFunc) -> list[Any]:
    """Return the buffers that a function takes; None where a parameter is none."""
    return [each if hasattr(each.ty, "shape") else None for each in function.params]


def shape_of(buffer: Any) -> tuple[int, ...]:
    """Return the extents of a buffer."""
    return tuple(int(extent) for extent in buffer.ty.shape)


def _source(region: Any) -> Any:
    return region.source if hasattr(region, "source") else region.buffer  # TVM 0.26


def _offset(
    index: Sequence[Any], loops: Sequence[Any], values: dict[int, int], shape: Sequence[int]
) -> int:
    """Return where an element lies, given the loops' rounds; those not given are at 0."""
    offset = 0
    for place, extent in zip(_values(index, loops, values), shape, strict=True):
        offset = offset * extent + place
    return offset


def _values(expressions: Sequence[Any], loops: Sequence[Any], values: dict[int, int]) -> list[int]:
    bound = tuple(
        (loop.loop_var, integer(loop.loop_var, values.get(i, 0))) for i, loop in enumerate(loops)
    )
    return [int(each) for each in substitute(expressions, bound)]
