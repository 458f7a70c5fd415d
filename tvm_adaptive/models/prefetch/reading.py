"""How a block of a scheduled function reads a weight: which loops, in which order.

A panel is what a kernel reads of a weight in one step of the loops around its reduction
loops; a line is a cache line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    DataType,
    For,
    IndexMap,
    IntImm,
    PrimFunc,
    SBlockRealize,
    SeqStmt,
    buffer_of,
)
from tvm_adaptive._tvm.tensor_functions import buffer_shape

_Bindings = tuple[tuple[Any, Any], ...]  # variables and their values


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
    def bindings(self) -> _Bindings:
        """The axes of all these blocks as expressions of loop variables."""
        bindings: _Bindings = ()
        for each in self.realized:
            values = substitute(list(each.iter_values), bindings)
            axes = [axis.var for axis in each.block.iter_vars]
            bindings = (*bindings, *zip(axes, values, strict=True))
        return bindings

    def reduction_axes(self) -> list[Any]:
        """Return the reduction axes as expressions of loop variables."""
        axes = [axis for axis in self.block.iter_vars if axis.iter_type == axis.CommReduce]
        return substitute([axis.var for axis in axes], self.bindings)

    def index_of(self, buffer: Any) -> list[Any] | None:
        """Return which single element of a buffer is read, None if it is none or several."""
        for region in self.block.reads:
            if buffer_of(region).same_as(buffer):
                if any(int(each.extent) != 1 for each in region.region):
                    return None
                return substitute([each.min for each in region.region], self.bindings)
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
        outer = (*realized, statement)
        inside = list(_sites(statement.block.body, loops, outer))
        yield from inside or [Site(loops, outer)]


def substitute(expressions: Sequence[Any], bindings: _Bindings) -> list[Any]:
    """Return expressions with variables replaced, simplified."""
    if not expressions or not bindings:
        return list(expressions)
    variables, values = zip(*bindings, strict=True)
    return list(IndexMap(list(variables), list(expressions), None).map_indices(list(values)))


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a block reads a weight, in numbers."""

    loops: tuple[Any, ...]  # those of more than one iteration, the outermost first
    index: tuple[Any, ...]  # of the element, by the loop variables
    shape: tuple[int, ...]  # of the weight
    outer: range  # loops around the reduction loops: each of their steps reads one panel
    reduction: range  # the outermost reduction loops, up to the first other loop inside
    n_elements: int  # of a panel; they are contiguous

    @functools.cached_property
    def extents(self) -> list[int]:
        """Iterations of each loop."""
        return [int(loop.extent) for loop in self.loops]

    @property
    def n_steps(self) -> int:
        """Number of panels that are read, repeated ones included."""
        return math.prod(self.extents[i] for i in self.outer)

    def offset_at(self, step: int) -> int:
        """Return where the panel of a step begins, in elements."""
        values = dict.fromkeys(range(len(self.loops)), 0)
        for i in reversed(self.outer):
            step, values[i] = divmod(step, self.extents[i])
        return _offset(self.index, self.loops, values, self.shape)


def reading_of(site: Site, buffer: Any) -> Reading | None:
    """Return how a block reads a weight, None if it does not read regular panels."""
    index, reduced = site.index_of(buffer), site.reduction_axes()
    if index is None or not reduced or any(int(loop.min) for loop in site.loops):
        return None
    once = [loop for loop in site.loops if int(loop.extent) == 1]
    loops = tuple(loop for loop in site.loops if int(loop.extent) > 1)
    zeros = tuple((loop.loop_var, integer(loop.loop_var, 0)) for loop in once)
    index, reduced = substitute(index, zeros), substitute(reduced, zeros)
    shape = buffer_shape(buffer)
    rounds = [int(loop.extent) for loop in loops]
    origin = _offset(index, loops, {}, shape)
    strides = [_offset(index, loops, {i: 1}, shape) - origin for i in range(len(loops))]
    start = _values(reduced, loops, {})
    is_reduction = [_values(reduced, loops, {i: 1}) != start for i in range(len(loops))]
    if True not in is_reduction:
        return None
    first = is_reduction.index(True)
    end = next((i for i in range(first, len(loops)) if not is_reduction[i]), len(loops))
    inside = [i for i in range(first, len(loops)) if strides[i]]
    n_elements = math.prod(rounds[i] for i in inside)
    last = _offset(index, loops, {i: rounds[i] - 1 for i in inside}, shape)
    by_strides = sum((rounds[i] - 1) * strides[i] for i in inside)
    if not last - origin == by_strides == n_elements - 1:
        return None  # not contiguous
    return Reading(loops, tuple(index), shape, range(first), range(first, end), n_elements)


@dataclasses.dataclass(frozen=True)
class Visits:
    """A regular order: groups of panels, each read several times before the next one."""

    n_panels: int  # in a group, read one after the other
    n_visits: int  # how often a group is read, all of it each time

    @property
    def period(self) -> int:
        """Steps until the next group begins."""
        return self.n_panels * self.n_visits


def visits_of(offsets: Iterable[int]) -> Visits | None:
    """Recognise the order in which panels are read."""
    read: list[int] = []
    group: set[int] = set()
    n_panels = 0
    for offset in offsets:
        is_new = offset not in group
        if is_new and n_panels:
            break  # the next group
        if not is_new and not n_panels:
            n_panels = len(read)
        group.add(offset)
        read.append(offset)
    else:
        return Visits(1, 1) if len(group) == len(read) > 1 else None
    n_visits, rest = divmod(len(read), n_panels)
    if rest or read != read[:n_panels] * n_visits:
        return None
    return Visits(n_panels, n_visits)


@dataclasses.dataclass(frozen=True)
class Bursts:
    """Where, among a panel's reduction loops, lines are prefetched, and how many at a time."""

    loop: int  # which reduction loop prefetches, counted from the outermost
    n_parts: int  # each round of that loop is split into so many parts, with a burst before each
    n_bursts: int  # in all, while one panel is read
    n_lines: int  # of one burst


def bursts_of(extents: Sequence[int], n_lines: int, n_visits: int, at_once: int) -> Bursts:
    """Spread a panel's lines over the visits of the panel before it, and over each visit.

    The outermost possible loop prefetches: what compilers make of the inner loops is worth
    more than an even spread.
    """
    share = math.ceil(n_lines / n_visits)
    wanted = math.ceil(share / at_once)
    loop, before = 0, 1
    while before * extents[loop] < wanted and loop + 1 < len(extents):
        before *= extents[loop]
        loop += 1
    extent = extents[loop]
    divisors = (n for n in range(1, extent + 1) if extent % n == 0)
    n_parts = next((n for n in divisors if before * n >= wanted), extent)
    n_bursts = before * n_parts
    return Bursts(loop, n_parts, n_bursts, math.ceil(share / n_bursts))


def integer(variable: Any, value: int) -> Any:
    """Return a constant of a variable's type."""
    return IntImm(dtype_of(variable), value)


def dtype_of(value: Any) -> str:
    """Return the type of a variable, or of a buffer's elements."""
    return str(value.ty.dtype)


def item_bytes(buffer: Any) -> int:
    """Return the bytes of an element, at least 1."""
    return max(1, int(DataType(dtype_of(buffer)).itemsize))


def parameter_buffers(function: PrimFunc) -> list[Any]:
    """Return the buffers that a function takes; None for a parameter of another kind."""
    return [each if hasattr(each.ty, "shape") else None for each in function.params]


def _offset(
    index: Sequence[Any], loops: Sequence[Any], values: dict[int, int], shape: Sequence[int]
) -> int:
    """Return where an element lies for the given values of loops; other loops are at 0."""
    offset = 0
    for place, extent in zip(_values(index, loops, values), shape, strict=True):
        offset = offset * extent + place
    return offset


def _values(expressions: Sequence[Any], loops: Sequence[Any], values: dict[int, int]) -> list[int]:
    bindings = tuple(
        (loop.loop_var, integer(loop.loop_var, values.get(i, 0))) for i, loop in enumerate(loops)
    )
    return [int(each) for each in substitute(expressions, bindings)]
