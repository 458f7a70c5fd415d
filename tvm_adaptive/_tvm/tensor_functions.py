"""Make tensor functions of buffers, blocks and loops, node by node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    ArgInfo,
    For,
    IRModule,
    PrimFunc,
    Range,
    SBlock,
    SBlockRealize,
    SeqStmt,
    s_tir,
    tirx,
)
from tvm_adaptive._tvm import ForKind as Kind

# TVM 0.26 has it among the functors.
_renew_defs: Any = getattr(s_tir, "renew_defs", None) or tirx.stmt_functor.renew_defs
_FREE_LAYOUTS = "layout_free_buffers"
# As in functions of ``te``, beside which TVM fuses none with a layout; 0.26 has none.
_NO_LAYOUT: dict[str, Any] = (
    {"layout": None} if "layout" in inspect.signature(tirx.decl_buffer).parameters else {}
)

Access = tuple[Any, Sequence[Any]]  # a buffer, and the range of each index


def with_rewritten_functions(mod: IRModule, rewrite: Callable[[PrimFunc], PrimFunc]) -> IRModule:
    """Return a module with what ``rewrite`` makes of each tensor function."""
    functions = {
        variable: rewrite(function) if isinstance(function, PrimFunc) else function
        for variable, function in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)


def buffer_shape(buffer: Any) -> tuple[int, ...]:
    """Return the extents of a buffer."""
    return tuple(map(int, buffer.ty.shape))


def tensor_function(parameters: Sequence[Any], body: Any, allocated: Sequence[Any] = ()) -> Any:
    """Return a private function of buffers, whose body has blocks and buffers of its own."""
    always = tirx.const(True, "bool")
    root = SBlockRealize([], always, SBlock([], [], [], "root", body, None, list(allocated)))
    return as_private(_renew_defs(PrimFunc(list(parameters), root)), layout_free=[])


def as_private(function: PrimFunc, *, layout_free: Sequence[int]) -> PrimFunc:
    """Return a function as ``FuseTIR`` leaves those of a network.

    Schedules may choose the layout of the parameters in ``layout_free``.
    """
    function = function.without_attr("global_symbol")
    function = function.with_attr({"tirx.noalias": True, "s_tir": True})
    if layout_free:
        function = function.with_attr(_FREE_LAYOUTS, list(layout_free))
    return function


def call_with(call: Any, arguments: Sequence[Any]) -> Any:
    """Return a call of the same operator with other arguments."""
    return type(call)(call.op, list(arguments), call.attrs, call.ty_args, None, call.ty)


def block_in_loops(
    name: str,
    iterators: Sequence[Any],
    reads: Sequence[Access],
    writes: Sequence[Access],
    body: Any,
    *,
    allocated: Sequence[Any] = (),
) -> Any:
    """Return a block within a loop for each of its iterators; it may have buffers of its own."""
    regions = [[tirx.BufferRegion(*each) for each in side] for side in (reads, writes)]
    block = SBlock(list(iterators), *regions, name, body, None, list(allocated))
    loops = [tirx.Var(f"{each.var.name}_loop", "int64") for each in iterators]
    statement = SBlockRealize(loops, tirx.const(True, "bool"), block)
    for loop, each in zip(reversed(loops), reversed(iterators), strict=True):
        statement = For(loop, integer(0), each.dom.extent, Kind.SERIAL, statement)
    return statement


def realizes(statement: Any) -> Iterator[Any]:
    """Yield the outermost blocks of a statement with the values of their iterators."""
    while isinstance(statement, For):
        statement = statement.body
    if isinstance(statement, SeqStmt):
        for each in statement.seq:
            yield from realizes(each)
    elif isinstance(statement, SBlockRealize):
        yield statement


def has_fixed_arguments(function: PrimFunc) -> bool:
    """Say whether MetaSchedule knows the arguments: not if a size is known after a run only."""
    try:
        ArgInfo.from_prim_func(function)
    except (TypeError, ValueError):  # an extent, or an argument, is a variable
        return False
    return True


def has_choices(function: PrimFunc) -> bool:
    """Say whether MetaSchedule can change a function: not if its blocks contain all loops."""
    if not has_fixed_arguments(function):
        return False
    if not isinstance(function.body, SBlockRealize):
        return True
    blocks = list(realizes(function.body.block.body))
    return not blocks or any(len(each.iter_values) for each in blocks)


def float_buffer(name: str, shape: Sequence[int]) -> Any:
    """Return a buffer of float32."""
    return tirx.decl_buffer([integer(extent) for extent in shape], "float32", name, **_NO_LAYOUT)


def spatial_iterator(name: str, extent: int) -> Any:
    """Return an iterator of a block."""
    return tirx.IterVar(whole(extent), tirx.Var(name, "int64"), tirx.IterVar.DataPar)


def integer(value: int) -> Any:
    """Return an index that is a number."""
    return tirx.const(value, "int64")


def whole(extent: int) -> Any:
    """Return the range of all indices below an extent."""
    return Range.from_min_extent(integer(0), integer(extent))


def one(index: Any) -> Any:
    """Return the range of one index."""
    return Range.from_min_extent(index, integer(1))


def with_fixed_layouts(function: PrimFunc, places: Collection[int]) -> PrimFunc:
    """Return a function of whose parameters in ``places`` schedules may choose no layout."""
    free = [int(each) for each in (function.attrs or {}).get(_FREE_LAYOUTS, ())]
    left = [each for each in free if each not in places]
    return function if left == free else function.with_attr(_FREE_LAYOUTS, left)


def weights_of(mod: IRModule) -> tuple[int, ...]:
    """Return the indices of arguments that every inference shares, if weights may be packed."""
    functions = [each for each in mod.functions.values() if isinstance(each, PrimFunc)]
    if len(functions) != 1:
        return ()
    return tuple(int(index) for index in (functions[0].attrs or {}).get(_FREE_LAYOUTS, ()))
