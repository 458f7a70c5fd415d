"""Compute the layouts of weights that schedules have chosen, before a network is compiled.

TVM's ``FoldConstant`` does so, too. But it compiles a function for each tensor function with
weights, one after the other: seven seconds for a detector of 75 functions. These functions
only move elements, which numpy does in milliseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import (
    BufferStore,
    Constant,
    For,
    IntImm,
    IRModule,
    PrimFunc,
    SBlockRealize,
    SeqStmt,
    Sequential,
    Var,
    handle,
    relax,
    relax_transform,
    tirx,
)
from tvm_adaptive.errors import AdaptiveError
from tvm_adaptive.models.network import without_dead_bindings
from tvm_adaptive.models.rewrites.folding import with_values

Array = npt.NDArray[Any]

# What TVM adds to the name of a function whose schedule packs a weight.
_PACKED = "_prepacked"
_INDEX_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
}


class OtherCodeError(AdaptiveError):
    """A function does more than move elements."""


def name_before_packing(name: str) -> str:
    """Return the name that a function had before :func:`pack`."""
    return name.removesuffix(_PACKED)


def pack(mod: IRModule) -> IRModule:
    """Split what schedules do to constant weights from their functions, and compute it."""
    t = relax_transform
    mod = t.SplitLayoutRewritePreproc()(mod)
    values, packed, has_others = {}, {}, False
    for binding in _tvm.bindings_of(mod["main"]):
        call = _tvm.tensor_call_of(binding)
        if call is None or not _is_on_constants(call):
            continue
        # What all steps of a recurrent layer share stays one.
        key = (str(call.args[0].name_hint), *map(handle, call.args[1]))
        if key not in packed:
            try:
                packed[key] = _packed(mod[call.args[0]], call)
            except OtherCodeError:
                has_others = True
                continue
        values[handle(binding.var)] = packed[key]
    mod = with_values(mod, values)
    rest = [t.FoldConstant()] if has_others else []
    # A function that packs two arguments returns a tuple.
    return without_dead_bindings(Sequential(rest)(mod))


def _packed(function: PrimFunc, call: Any) -> Any:
    """Return the result of a call of a function that only moves elements of constants."""
    arrays = [_tvm.data_of_constant(each).numpy() for each in call.args[1]]
    constants = [relax.const(_tvm.tensor(each)) for each in moved_arrays(function, arrays)]
    return relax.Tuple(constants) if hasattr(call.ty, "fields") else constants[0]


def moved_arrays(function: PrimFunc, arguments: list[Array]) -> list[Array]:
    """Return the results of a function that only moves elements, 0 where it writes none.

    The function is not lowered; its last parameters are the results. Raises OtherCodeError for one
    that does anything else.
    """
    inputs, outputs = function.params[: len(arguments)], function.params[len(arguments) :]
    if not all(hasattr(each.ty, "shape") for each in outputs):
        raise OtherCodeError
    results = [np.zeros(_extents(each.ty.shape), str(each.ty.dtype)) for each in outputs]
    arrays = dict(zip(map(handle, (*inputs, *outputs)), (*arguments, *results), strict=True))
    for realize, loops in _blocks(function.body, ()):
        _move(realize, loops, arrays)
    return results


def _is_on_constants(call: Any) -> bool:
    """Say whether a tensor function is called with constants alone."""
    arguments = call.args[1]
    if len(call.args) > 2 or not isinstance(arguments, relax.Tuple) or not arguments.fields:
        return False
    return all(isinstance(each, Constant) for each in arguments)


def _blocks(statement: Any, loops: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the innermost blocks of a function in their order, with the loops around each."""
    if isinstance(statement, For):
        yield from _blocks(statement.body, (*loops, statement))
    elif isinstance(statement, SeqStmt):
        for each in statement:
            yield from _blocks(each, loops)
    elif isinstance(statement, SBlockRealize):
        block = statement.block
        if isinstance(block.body, BufferStore):
            yield statement, loops
        elif block.iter_vars or block.alloc_buffers or block.match_buffers:
            raise OtherCodeError
        else:
            yield from _blocks(block.body, loops)
    else:
        raise OtherCodeError


def _move(realize: Any, loops: tuple[Any, ...], arrays: dict[int, Array]) -> None:
    """Carry out one block within its loops, all iterations at once."""
    block, store = realize.block, realize.block.body
    is_always = getattr(realize.predicate, "value", None)
    if block.init is not None or not is_always or not hasattr(store.value, "indices"):
        raise OtherCodeError
    if any(_extent(loop.min) for loop in loops):
        raise OtherCodeError
    grid = np.ogrid[tuple(map(slice, _extents(loop.extent for loop in loops)))] if loops else []
    known: dict[int, Any] = {
        handle(loop.loop_var): axis for loop, axis in zip(loops, grid, strict=True)
    }
    for variable, value in zip(block.iter_vars, realize.iter_values, strict=True):
        known[handle(variable.var)] = _index(value, known)
    source, result = (_array(_tvm.buffer_of(each), arrays) for each in (store.value, store))
    taken = source[tuple(_index(each, known) for each in store.value.indices)]
    result[tuple(_index(each, known) for each in store.indices)] = taken


def _array(buffer: Any, arrays: dict[int, Array]) -> Array:
    """Return what a buffer holds, in the buffer's own shape."""
    array = arrays.get(handle(buffer))
    if array is None or array.shape != _extents(buffer.ty.shape):
        raise OtherCodeError
    return array


def _index(expression: Any, known: dict[int, Any]) -> Any:
    """Return the values of an index for all iterations, an array for each or a number."""
    if isinstance(expression, IntImm):
        return int(expression.value)
    if isinstance(expression, Var) and handle(expression) in known:
        return known[handle(expression)]
    apply = _INDEX_OPERATORS.get(type(expression))
    if apply is None:
        raise OtherCodeError
    return apply(_index(expression.a, known), _index(expression.b, known))


def _extents(expressions: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_extent, expressions))


def _extent(expression: Any) -> int:
    if not isinstance(expression, IntImm):
        raise OtherCodeError
    return int(expression.value)
