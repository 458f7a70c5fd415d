"""Vectors of several registers as loops over vectors of one register each.

MetaSchedule makes vectors of any length. LLVM widens those of 24 or 40 numbers to 32 or 64, and
takes them apart at each step, and sums that are collected as such a vector stay in memory between
the steps of a reduction. On two cores of a Zen 3, a product of 120 x 512 x 1920 in tiles of 4 x 24
numbers took 9.9 ms, in tiles of 4 rows of three registers 1.57, in 6 x 16 1.54.
"""

from __future__ import annotations

from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import (
    For,
    ForKind,
    IRModule,
    PrimFunc,
    SBlockRealize,
    SeqStmt,
    Target,
    Var,
    buffer_of,
    is_gpu,
)
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.models.prefetch.reading import dtype_of, integer, item_bytes, substitute

_ITEM_BYTES = 4


def with_register_vectors(mod: IRModule, target: Target) -> IRModule:
    """Return a module of scheduled functions whose uneven vectors are loops over registers.

    Vectors of 32-bit numbers that fill several registers, and whose number is no power of two,
    become loops that are written out. The same instructions run on the same numbers in the same
    order. Call it before a module is built, after weights have got their layouts.
    """
    if is_gpu(target):
        return mod
    lanes = vector_unit_of(target).lanes
    functions = {
        variable: function.with_body(_rewritten(function.body, lanes))
        if isinstance(function, PrimFunc)
        else function
        for variable, function in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)


def _rewritten(statement: Any, lanes: int) -> Any:
    if isinstance(statement, For):
        if _is_uneven(statement, lanes):
            return _split(statement, lanes)
        return For(
            *(statement.loop_var, statement.min, statement.extent, statement.kind),
            _rewritten(statement.body, lanes),
            statement.thread_binding,
            statement.annotations,
        )
    if isinstance(statement, SeqStmt):
        return SeqStmt([_rewritten(each, lanes) for each in statement.seq])
    if isinstance(statement, SBlockRealize):
        block = statement.block
        rewritten = _tvm.SBlock(
            *(block.iter_vars, block.reads, block.writes, block.name_hint),
            _rewritten(block.body, lanes),
            *(block.init, block.alloc_buffers, block.match_buffers, block.annotations),
        )
        return SBlockRealize(statement.iter_values, statement.predicate, rewritten)
    return statement


def _is_uneven(loop: Any, lanes: int) -> bool:
    if int(loop.kind) != int(ForKind.VECTORIZED) or not isinstance(loop.body, SBlockRealize):
        return False
    n_registers, rest = divmod(int(loop.extent), lanes)
    if rest or n_registers & (n_registers - 1) == 0:
        return False
    return all(item_bytes(buffer_of(each)) == _ITEM_BYTES for each in loop.body.block.writes)


def _split(loop: Any, lanes: int) -> Any:
    """Return a loop over registers, which is written out, around one over their numbers."""
    dtype, realized = dtype_of(loop.loop_var), loop.body
    register, number = Var("register", dtype), Var("number", dtype)
    place = ((loop.loop_var, register * lanes + number),)
    values = substitute([*realized.iter_values, realized.predicate], place)
    *iter_values, predicate = values
    inner = For(
        *(number, integer(number, 0), integer(number, lanes), ForKind.VECTORIZED),
        SBlockRealize(iter_values, predicate, realized.block),
    )
    n_registers = integer(register, int(loop.extent) // lanes)
    return For(register, integer(register, 0), n_registers, ForKind.UNROLLED, inner)
