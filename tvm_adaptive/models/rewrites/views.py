"""Copies that vanish: moves of moves, transposes of nothing, and moves behind other operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, relax
from tvm_adaptive.models.network import (
    known_extents,
    operator_of,
    with_rewritten_main,
    without_dead_bindings,
)
from tvm_adaptive.models.rewrites.moves import (
    CONCATENATION,
    RESHAPE,
    RESHAPES,
    TRANSPOSE,
    axes_of_transpose,
    axis_of_concatenation,
    reshaped_constant,
    squeeze_from_first,
)

# From channels last to channels first: how PyTorch's blocks of channels last return.
_TO_CHANNELS_FIRST = (0, 3, 1, 2)
_PRODUCT = "relax.matmul"
# Clips are minima and maxima by the time that they matter.
_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "divide", "maximum", "minimum", "multiply", "subtract"),
        *("abs", "clip", "erf", "exp", "log", "negative", "rsqrt", "sigmoid", "sqrt", "tanh"),
        *("nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.silu"),
    )
)


def without_repeated_moves(mod: IRModule, *, channels_last: bool) -> IRModule:
    """Return a module in which one reshape or transpose does what several did, or none.

    With ``channels_last``, a transpose to channels first moves behind the elementwise operations
    on its result, where the other operands follow at no cost: numbers, constants, and results of
    such transposes. There it meets the transposes of the next block, and both vanish.

    What is computed element by element from a product in another shape is computed from the product
    itself, with which it is fused. A concatenation of concatenations takes their parts.
    """
    rewriter = _Rewriter(mod, channels_last=channels_last)
    return without_dead_bindings(with_rewritten_main(mod, rewriter))


@_tvm.mutator
class _Rewriter(_tvm.PyExprMutator):  # type: ignore[misc]
    """Rewrites ``main``, binding by binding."""

    def __init__(self, mod: IRModule, *, channels_last: bool) -> None:
        super().__init__(mod)
        self._channels_last = channels_last

    def visit_call_(self, call: Any) -> Any:
        """Rewrite a reshape, a transpose, or an operation on the result of one."""
        call = super().visit_call_(call)
        name = operator_of(call)
        if name in RESHAPES:
            extents = known_extents(call)
            # The conversion of layouts follows a squeeze, but no other reshape.
            is_one_of_several = self._behind(call.args[0], *RESHAPES) is not None
            is_left = not extents or (name != RESHAPE and not is_one_of_several)
            return squeeze_from_first(call) if is_left else self._reshaped(call.args[0], extents)
        if name == TRANSPOSE:
            return self._transposed(call.args[0], axes_of_transpose(call))
        if name == CONCATENATION:
            return self._concatenated(call)
        if name in _ELEMENTWISE and known_extents(call):
            found = self._before_transposes(call) if self._channels_last else None
            found = self._before_reshapes(call) if found is None else found
            return call if found is None else found
        return call

    def _behind(self, value: Any, *names: str) -> Any | None:
        """Return the call of an operator whose result a variable is; None if it is another's."""
        found = self.lookup_binding(value) if isinstance(value, relax.Var) else None
        is_it = isinstance(found, relax.Call) and operator_of(found) in names
        return found if is_it else None

    def _reshaped(self, source: Any, extents: Sequence[int]) -> Any:
        before = self._behind(source, *RESHAPES)
        while before is not None:
            source = before.args[0]
            before = self._behind(source, *RESHAPES)
        if known_extents(source) == list(extents):
            return source
        if isinstance(source, Constant):
            return reshaped_constant(source, extents)
        return relax.op.reshape(source, tuple(extents))

    def _transposed(self, source: Any, axes: Sequence[int]) -> Any:
        before = self._behind(source, TRANSPOSE)
        if before is not None:
            first = axes_of_transpose(before)
            source, axes = before.args[0], [first[axis] for axis in axes]
        extents = known_extents(source)
        moved = [axis for axis in axes if not extents or extents[axis] != 1]
        if moved == sorted(moved) and extents:
            return self._reshaped(source, [extents[axis] for axis in axes])
        return source if list(axes) == sorted(axes) else relax.op.permute_dims(source, list(axes))

    def _concatenated(self, call: Any) -> Any:
        """Concatenate the parts of parts, along the same axis, at once."""
        parts, axis = getattr(call.args[0], "fields", ()), axis_of_concatenation(call)
        found: list[Any] = []
        for part in parts:
            before = self._behind(part, CONCATENATION)
            own = () if before is None else getattr(before.args[0], "fields", ())
            is_same = own and axis is not None and axis_of_concatenation(before) == axis
            found += own if is_same else [part]
        return call if len(found) == len(parts) else relax.op.concat(relax.Tuple(found), axis)

    def _before_reshapes(self, call: Any) -> Any | None:
        """Compute an operation on a product, and reshape the result; None without a product."""
        extents = known_extents(call)
        full = (each for each in call.args if known_extents(each) == extents)  # not broadcast
        products = (self._product_behind(each) for each in full)
        product = next((each for each in products if each is not None), None)
        if product is None:
            return None
        shape = known_extents(product)
        operands = [self._like(each, shape, extents) for each in call.args]
        if any(each is None for each in operands):
            return None
        result = relax.Call(call.op, operands, call.attrs, call.ty_args)
        return self._reshaped(self.builder_.emit(result), extents)

    def _product_behind(self, value: Any) -> Any | None:
        """Return the product, or what is computed from one, that a value is a reshape of."""
        found = self._behind(value, *RESHAPES)
        source = None if found is None else found.args[0]
        before = self._behind(source, _PRODUCT, *_ELEMENTWISE)
        while before is not None and operator_of(before) != _PRODUCT:
            extents = known_extents(before)
            same = (each for each in before.args if known_extents(each) == extents)
            calls = (self._behind(each, _PRODUCT, *_ELEMENTWISE) for each in same)
            before = next((each for each in calls if each is not None), None)
        return None if before is None else source

    def _like(self, value: Any, shape: Sequence[int], extents: Sequence[int]) -> Any | None:
        """Return an operand of the shape of a product, or a row or number for it."""
        own = known_extents(value)
        if own == list(extents):
            wanted = list(shape)
        elif not own:
            return value if not getattr(value.ty, "ndim", 0) else None
        elif math.prod(own) == 1 or (math.prod(own) == own[-1] == extents[-1] == shape[-1]):
            wanted = [*[1] * (len(shape) - 1), own[-1]]
        else:
            return None
        found = self._reshaped(value, wanted)
        return self.builder_.emit(found) if isinstance(found, relax.Call) else found

    def _before_transposes(self, call: Any) -> Any | None:
        """Compute an operation on what was transposed, and transpose the result."""
        extents = known_extents(call)
        if len(extents) != 4 or not any(self._origin(each) is not None for each in call.args):
            return None
        operands = [self._operand(each, extents) for each in call.args]
        if any(each is None for each in operands):
            return None
        result = relax.Call(call.op, operands, call.attrs, call.ty_args)
        return relax.op.permute_dims(self.builder_.emit(result), list(_TO_CHANNELS_FIRST))

    def _origin(self, value: Any) -> Any | None:
        """Return what a value is the transpose to channels first of."""
        found = self._behind(value, TRANSPOSE)
        if found is None or tuple(axes_of_transpose(found)) != _TO_CHANNELS_FIRST:
            return None
        return found.args[0]

    def _operand(self, value: Any, extents: Sequence[int]) -> Any | None:
        """Return an operand with channels last; None if that would be a copy."""
        origin = self._origin(value)
        if origin is not None:
            return origin if known_extents(value) == list(extents) else None
        if not isinstance(value, Constant):
            return None if getattr(value.ty, "ndim", 0) else value
        numbers = _tvm.data_of_constant(value).numpy()
        if not numbers.ndim:
            return value
        numbers = numbers.reshape([1] * (4 - numbers.ndim) + list(numbers.shape))
        return relax.const(_tvm.tensor(numbers.transpose(0, 2, 3, 1).copy()))
