"""Compute what depends on constants alone, before a network is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, handle, relax, relax_transform
from tvm_adaptive.models.network import operator_of, without_dead_bindings

Array = npt.NDArray[Any]


def fold(mod: IRModule) -> IRModule:
    """Replace operations of ``main`` on constants by their results.

    TVM's ``FoldConstant`` does so, too. But it lowers all operations of a network to find
    those on constants, which takes as long as lowering it, and compiles a function for each
    that it finds, in some fifty milliseconds; a network of a hundred layers has hundreds. So
    it gets no more than the operations on constants that numpy does not compute to the last
    bit as TVM.
    """
    has_tuples = True
    while has_tuples:
        found = _Constants(mod)
        compiled = _compiled(mod, found) if found.has_calls else {}
        mod = without_dead_bindings(with_values(mod, found.values | compiled))
        # Operations on a field are computed once the field is known, in another turn.
        has_tuples = any(isinstance(value, relax.Tuple) for value in compiled.values())
    return mod


class _Constants:
    """The variables of ``main`` that depend on constants alone."""

    def __init__(self, mod: IRModule) -> None:
        self.values: dict[int, Any] = {}  # constants by the handles of variables
        self.left: list[Any] = []  # bindings that are not computed yet, in their order
        self._left: set[int] = set()  # handles of their variables
        self.has_calls = False  # whether operations are among them
        for binding in _tvm.bindings_of(mod["main"]):
            if isinstance(binding, relax.VarBinding):
                self._visit(binding)

    def _visit(self, binding: Any) -> None:
        key, value = handle(binding.var), binding.value
        if not isinstance(value, Constant):
            if not all(self._is_constant(each) for each in _leaves(value)):
                return
            value = self._computed(value)
        if value is None:
            self._left.add(key)
            self.left.append(binding)
            self.has_calls |= isinstance(binding.value, relax.Call)
        else:
            self.values[key] = value

    def _is_constant(self, leaf: Any) -> bool:
        if isinstance(leaf, relax.Var):
            return handle(leaf) in self.values or handle(leaf) in self._left
        if isinstance(leaf, relax.ShapeExpr):
            return all(hasattr(extent, "value") for extent in leaf.values)
        # Tensors, numbers and texts; functions.
        return hasattr(leaf, "value") or isinstance(leaf, (Constant, relax.GlobalVar))

    def _computed(self, value: Any) -> Any | None:
        """Return the value of a binding as a constant; None where that is left to TVM."""
        if isinstance(value, relax.Var):
            return self.values.get(handle(value))
        name = operator_of(value)
        if name not in _MOVES and name not in _ARITHMETIC:
            return None
        arguments = self._arguments(value)
        found = None if arguments is None else _folded(value, name, arguments)
        return None if found is None else relax.const(_tvm.tensor(found))

    def _arguments(self, call: Any) -> list[Array] | None:
        """Return the tensors and floats among a call's arguments; None where one is unknown."""
        arguments = []
        for argument in call.args:
            is_tuple = isinstance(argument, relax.Tuple)
            for field in argument.fields if is_tuple else [argument]:
                known = self.values.get(handle(field), field)
                number = getattr(known, "value", None)
                if isinstance(known, Constant):
                    arguments.append(_tvm.data_of_constant(known).numpy())
                elif isinstance(number, float):
                    arguments.append(np.asarray(number, str(known.ty.dtype)))
                # Whole numbers are places, which an operator reads from its call.
                elif not isinstance(known, relax.ShapeExpr) and not (
                    is_tuple and isinstance(number, int)
                ):
                    return None
        return arguments


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what an expression is computed from; itself where that is not known."""
    if isinstance(value, relax.Call) and hasattr(value.op, "name"):  # an operator
        for argument in value.args:
            yield from _leaves(argument)
    elif isinstance(value, relax.Tuple):
        for field in value.fields:
            yield from _leaves(field)
    elif isinstance(value, relax.TupleGetItem):
        yield from _leaves(value.tuple_value)
    else:
        yield value


def _compiled(mod: IRModule, constants: _Constants) -> dict[int, Any]:
    """Let TVM compute the bindings that are left; return what it did compute."""
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            for binding in _with_arguments(mod, constants):
                builder.emit_normalized(binding)
            variables = [binding.var for binding in constants.left]
            outputs = builder.emit_output(relax.Tuple(variables))
        builder.emit_func_output(outputs)
    folded = relax_transform.FoldConstant()(_tvm.with_main(mod, builder.get()["main"]))["main"]
    bound = {handle(binding.var): binding.value for binding in _tvm.bindings_of(folded)}
    results = {}
    fields = bound[handle(folded.body.body)].fields
    for binding, field in zip(constants.left, fields, strict=True):
        value = bound.get(handle(field), field)
        parts: Sequence[Any] = value.fields if isinstance(value, relax.Tuple) else [value]
        is_new = isinstance(binding.value, relax.Call)
        if is_new and all(isinstance(part, Constant) for part in parts):
            results[handle(binding.var)] = value
    return results


def _with_arguments(mod: IRModule, constants: _Constants) -> Iterator[Any]:
    """Yield the bindings that are left, and those of the constants that they use."""
    used = {handle(leaf) for binding in constants.left for leaf in _leaves(binding.value)}
    left = {handle(binding.var) for binding in constants.left}
    for binding in _tvm.bindings_of(mod["main"]):
        key = handle(binding.var)
        if key in left:
            yield binding
        elif key in used:
            yield relax.VarBinding(binding.var, constants.values[key])


def with_values(mod: IRModule, values: dict[int, Any]) -> IRModule:
    """Return a module whose ``main`` binds variables, by their handles, to values."""
    if not values:
        return mod

    def bound(binding: Any) -> Any:
        value = values.get(handle(binding.var))
        return binding if value is None else relax.VarBinding(binding.var, value)

    main = mod["main"]
    blocks = [type(block)(list(map(bound, block.bindings))) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, main.body.body)
    return relax_transform.Normalize()(_tvm.with_main(mod, _tvm.with_body(main, body)))


def _ints(values: Any) -> Any:
    return None if values is None else tuple(int(value) for value in values)


def _sliced(call: Any, x: Array) -> Array | None:
    axes, begins, ends, *strides = (
        [field.value for field in argument.fields] for argument in call.args[1:]
    )
    steps = strides[0] if strides else [1] * len(axes)
    if min(steps, default=1) < 1:
        return None  # numpy's last element of a reversed axis has another name
    slices = [slice(None)] * x.ndim
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        slices[axis] = slice(begin, end, step)
    return x[tuple(slices)]


def _taken(call: Any, x: Array, indices: Array) -> Array | None:
    axis = call.attrs.axis
    axis = 0 if axis is None else int(axis)
    # What is out of bounds depends on the operator's mode.
    is_inside = bool(np.all((indices >= 0) & (indices < x.shape[axis])))
    return np.take(x, indices, axis) if is_inside else None


def _concatenated(call: Any, *parts: Array) -> Array:
    axis = call.attrs.axis
    return np.concatenate(parts, 0 if axis is None else int(axis))


# Each gives TVM's result to the last bit: single operations of IEEE arithmetic, and moves of
# elements. Other operations, and arithmetic on integers, are left to TVM.
_MOVES: dict[str, Callable[..., Array | None]] = {
    "relax.permute_dims": lambda call, x: np.transpose(x, _ints(call.attrs.axes)),
    # The inferred shape: the requested one may hold a -1.
    "relax.reshape": lambda call, x: x.reshape(_ints(call.ty.shape)),
    "relax.expand_dims": lambda call, x: np.expand_dims(x, _ints(call.attrs.axis)),
    "relax.squeeze": lambda call, x: np.squeeze(x, _ints(call.attrs.axis)),
    "relax.strided_slice": _sliced,
    "relax.take": _taken,
    "relax.concat": _concatenated,
}
_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.sqrt": np.sqrt,
    "relax.negative": np.negative,
}
_FLOATS = {"float32", "float64"}


def _folded(call: Any, name: str, arguments: list[Array]) -> Array | None:
    """Return what a call computes; None where that is left to TVM."""
    if name in _MOVES:
        moved = _MOVES[name](call, *arguments)
        return None if moved is None else np.asarray(moved, order="C")
    types = {str(argument.dtype) for argument in arguments}
    if name in _ARITHMETIC and len(types) == 1 and types <= _FLOATS:
        with np.errstate(all="ignore"):  # TVM reports no overflows either
            return np.asarray(_ARITHMETIC[name](*arguments), arguments[0].dtype)
    return None
