"""Copies that vanish: reshapes of reshapes, transposes of transposes, and transposes moved down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, relax
from tvm_adaptive.models.network import known_extents, with_rewritten_main, without_dead_bindings

_RESHAPE, _TRANSPOSE = "relax.reshape", "relax.permute_dims"
# From channels last to channels first: how PyTorch's blocks of channels last return.
_TO_CHANNELS_FIRST = (0, 3, 1, 2)
_ELEMENTWISE = {
    f"relax.{name}"
    for name in (
        *("abs", "clip", "exp", "negative", "nn.gelu", "nn.relu", "nn.silu", "sigmoid", "tanh"),
        *("add", "divide", "maximum", "minimum", "multiply", "subtract"),
    )
}


def without_repeated_moves(mod: IRModule, *, channels_last: bool) -> IRModule:
    """Return a module in which one reshape or transpose does what several did, or none.

    With ``channels_last``, a transpose to channels first moves behind the elementwise operations
    on its result, where the other operands follow at no cost: numbers, constants, and results of
    such transposes. There it meets the transposes of the next block, and both vanish.
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
        name = str(getattr(call.op, "name", ""))
        if name == _RESHAPE:
            return self._reshaped(call)
        if name == _TRANSPOSE:
            return self._transposed(call.args[0], _axes_of(call), call)
        if self._channels_last and name in _ELEMENTWISE:
            return self._before_transposes(call)
        return call

    def _behind(self, value: Any, name: str) -> Any | None:
        """Return the call of an operator whose result a variable is; None if it is another's."""
        found = self.lookup_binding(value) if isinstance(value, relax.Var) else None
        is_it = isinstance(found, relax.Call) and str(getattr(found.op, "name", "")) == name
        return found if is_it else None

    def _reshaped(self, call: Any) -> Any:
        extents, source = known_extents(call), call.args[0]
        if not extents:
            return call
        before = self._behind(source, _RESHAPE)
        while before is not None:
            source = before.args[0]
            before = self._behind(source, _RESHAPE)
        if known_extents(source) == extents:
            return source
        return call if source is call.args[0] else relax.op.reshape(source, tuple(extents))

    def _transposed(self, source: Any, axes: Sequence[int], call: Any) -> Any:
        before = self._behind(source, _TRANSPOSE)
        if before is not None:
            first = _axes_of(before)
            source, axes, call = before.args[0], [first[axis] for axis in axes], None
        if list(axes) == sorted(axes):
            return source
        return relax.op.permute_dims(source, list(axes)) if call is None else call

    def _before_transposes(self, call: Any) -> Any:
        """Compute an operation on what was transposed, and transpose the result."""
        extents = known_extents(call)
        if len(extents) != 4 or not any(self._origin(each) is not None for each in call.args):
            return call
        operands = [self._operand(each, extents) for each in call.args]
        if any(each is None for each in operands):
            return call
        result = relax.Call(call.op, operands, call.attrs, call.ty_args)
        return relax.op.permute_dims(self.builder_.emit(result), list(_TO_CHANNELS_FIRST))

    def _origin(self, value: Any) -> Any | None:
        """Return what a value is the transpose to channels first of."""
        found = self._behind(value, _TRANSPOSE)
        if found is None or tuple(_axes_of(found)) != _TO_CHANNELS_FIRST:
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


def _axes_of(call: Any) -> list[int]:
    axes, rank = call.attrs.axes, int(call.args[0].ty.ndim)
    return [int(axis) for axis in axes] if axes is not None else list(range(rank))[::-1]
