"""Products and sums with constants become part of the convolution before them.

So do batch normalisations, which are such a product and sum in inference. Elsewhere, quotients
become products, which are ten times cheaper, and neighbouring constants become one. That changes
last digits. So it is not done where a last digit decides: before a rounding to whole numbers, or a
comparison.

Numbers that training has found are different in each layer. As a number in its code, each would
make a task of its own of a layer that is otherwise like others.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, handle, relax
from tvm_adaptive.models.network import (
    known_extents,
    operator_of,
    uses_of,
    with_rewritten_calls,
    with_rewritten_main,
    without_dead_bindings,
)

FloatArray = npt.NDArray[np.float64]

_CONVOLUTION = "relax.nn.conv2d"
_TRANSPOSED = "relax.nn.conv2d_transpose"
_PRODUCTS = ("relax.multiply", "relax.divide")
_SUMS = ("relax.add", "relax.subtract")
# Who adds such a number to another one wants it rounded: to eighths, at least.
_ROUNDING = 2.0**20
# Where a last digit of an operand decides, the results jump.
_JUMPS = frozenset(
    f"relax.{name}"
    for name in (
        *("floor", "ceil", "round", "trunc", "sign", "floor_divide", "floor_mod", "mod"),
        *("greater", "greater_equal", "less", "less_equal", "equal", "not_equal"),
        *("bucketize", "searchsorted", "image.grid_sample", "quantize"),
    )
)
# These add in an order of their own, so that last digits are not those of the model anyway.
_ROUNDED_SUMS = (
    *("relax.matmul", "relax.sum", "relax.mean", "relax.variance", "relax.std", "relax.einsum"),
    *("relax.nn.conv", "relax.nn.avg_pool", "relax.nn.adaptive_avg_pool", "relax.nn.attention"),
    *("relax.nn.layer_norm", "relax.nn.group_norm", "relax.nn.instance_norm", "relax.nn.rms_norm"),
    *("relax.nn.softmax", "relax.nn.log_softmax", "relax.cumsum", "relax.cumprod"),
)


def fold_affine(mod: IRModule) -> IRModule:
    """Fold products and sums with constants, and batch normalisations with constant statistics.

    Constants are computed in double precision. TVM folds only normalisations that directly
    follow a convolution, and makes a difference, a quotient, a product and a sum of others.
    """
    return without_dead_bindings(with_rewritten_main(mod, _Rewriter(mod)))


def with_numbers_as_data(mod: IRModule) -> IRModule:
    """Pass numbers that only one product or sum has as tensors, so that layers are alike.

    Numbers with a meaning, such as the 3 and 6 of a hard swish, are in many layers: they stay in
    the code. PP-OCR's detector has 63 different functions this way instead of 73.
    """
    counts = Counter(
        float(_numbers(argument))
        for binding in _tvm.bindings_of(mod["main"])
        for argument in _operands(binding.value)
        if isinstance(argument, Constant) and _rank(argument) == 0
    )

    def as_data(argument: Any, rank: int) -> Any:
        is_number = isinstance(argument, Constant) and _rank(argument) == 0
        if not is_number or counts[float(_numbers(argument))] != 1:
            return argument
        return _constant(_numbers(argument).reshape([1] * rank), argument)

    def rewrite(_builder: Any, call: Any) -> Any:
        rank = max((_rank(each) for each in _operands(call)), default=0)
        if rank < 1:
            return call
        arguments = [as_data(each, rank) for each in call.args]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    return with_rewritten_calls(mod, rewrite)


def _operands(value: Any) -> list[Any]:
    """Return the arguments of a product or sum of floating-point numbers; none of others."""
    name = operator_of(value)
    return list(value.args) if name in _PRODUCTS + _SUMS and _is_float(value) else []


@_tvm.mutator
class _Rewriter(_tvm.PyExprMutator):  # type: ignore[misc]
    """Rewrites ``main``, binding by binding."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self._uses = uses_of(mod)
        self._shared: set[int] = set()  # handles of new variables with several uses
        self._exact = _exact_values(mod)
        self._is_exact = False  # what is visited

    def visit_var_binding_(self, binding: Any) -> None:
        """Visit a binding, and note whether its new variable has several uses."""
        self._is_exact = handle(binding.var) in self._exact
        super().visit_var_binding_(binding)
        if self._uses[handle(binding.var)] > 1:
            self._shared.add(handle(self.visit_expr(binding.var)))

    def visit_call_(self, call: Any) -> Any:
        """Rewrite a product or sum with a constant."""
        call = super().visit_call_(call)
        name = operator_of(call)
        if name not in _PRODUCTS + _SUMS or not _is_float(call) or self._is_exact:
            return call
        value, constant = call.args
        if isinstance(value, Constant) and name in ("relax.multiply", "relax.add"):
            value, constant = constant, value
        # A constant that is larger than the value widens it.
        extents = known_extents(call)
        if not (isinstance(constant, Constant) and extents == known_extents(value) != []):
            return call
        number = _numbers(constant)
        if name in _SUMS and _rounds(number):
            return call
        if name == "relax.divide":
            with np.errstate(divide="ignore"):
                number = 1.0 / number
            if not _is_held(number, value):
                return call
        if name in _PRODUCTS:
            return self._product(value, number)
        return self._sum(value, -number if name == "relax.subtract" else number)

    def visit_tuple_getitem_(self, item: Any) -> Any:
        """Write the first result of a batch normalisation as a product and a sum."""
        item = super().visit_tuple_getitem_(item)
        norm = self._bound(item.tuple_value)
        if item.index != 0 or operator_of(norm) != "relax.nn.batch_norm":
            return item
        attrs, (data, *statistics) = norm.attrs, norm.args
        if not all(isinstance(each, Constant) for each in statistics) or not _is_float(data):
            return item
        if self._is_exact and self._own(data, _CONVOLUTION, _TRANSPOSED) is None:
            return item
        gamma, beta, mean, variance = map(_numbers, statistics)
        scale = (gamma if attrs.scale else 1.0) / np.sqrt(variance + float(attrs.epsilon))
        shift = (beta if attrs.center else 0.0) - mean * scale
        shape = [1] * _rank(data)
        shape[int(attrs.axis)] = -1
        product = self.builder_.emit(self._product(data, scale.reshape(shape)))
        return self._sum(product, shift.reshape(shape))

    def _bound(self, value: Any) -> Any:
        """Return the call that a variable stands for; the value itself without one."""
        found = self.lookup_binding(value) if isinstance(value, relax.Var) else value
        return found if isinstance(found, relax.Call) else value

    def _own(self, value: Any, *names: str) -> Any | None:
        """Return the call behind a variable that has no other use; None if it is another one."""
        call = self._bound(value)
        is_shared = isinstance(value, relax.Var) and handle(value) in self._shared
        is_named = isinstance(call, relax.Call) and operator_of(call) in names
        return call if is_named and not is_shared else None

    def _product(self, value: Any, factor: FloatArray) -> Any:
        """Return an expression of a value times a constant."""
        convolution = self._own(value, _CONVOLUTION, _TRANSPOSED)
        scaled = None if convolution is None else _scaled(convolution, factor)
        if scaled is not None:
            return scaled
        before = self._own(value, "relax.multiply", "relax.add")
        if before is not None and _is_of_same_shape(before):
            inner, number = before.args[0], _numbers(before.args[1])
            if operator_of(before) == "relax.multiply":
                joined = number * factor if _fit(number, factor) else None
                if joined is not None and _is_held(joined, value, number, factor):
                    return self._product(inner, joined)
                return relax.op.multiply(value, _constant(factor, value))
            # Elsewhere, that would be no operation less.
            convolution = self._own(inner, _CONVOLUTION, _TRANSPOSED)
            scaled = None if convolution is None else _scaled(convolution, factor)
            if scaled is not None:
                return self._sum(self.builder_.emit(scaled), number * factor)
        return relax.op.multiply(value, _constant(factor, value))

    def _sum(self, value: Any, addend: FloatArray) -> Any:
        """Return an expression of a value plus a constant."""
        before = self._own(value, "relax.add")
        if before is not None and _is_of_same_shape(before):
            number = _numbers(before.args[1])
            if _fit(number, addend) and not _rounds(number):
                return self._sum(before.args[0], number + addend)
        return relax.op.add(value, _constant(addend, value))


def _fit(a: FloatArray, b: FloatArray) -> bool:
    """Say whether two constants become one that is no larger than both."""
    return np.broadcast(a, b).size == max(a.size, b.size)


def _is_held(numbers: FloatArray, like: Any, *factors: FloatArray) -> bool:
    """Say whether a value's type holds products: none is infinite, or next to zero but not 0."""
    dtype = np.dtype(str(like.ty.dtype))
    is_zero = functools.reduce(np.logical_or, (each == 0 for each in factors or (numbers,)))
    with np.errstate(over="ignore", under="ignore"):
        sizes = np.abs(numbers.astype(dtype))
    is_normal = np.isfinite(sizes) & (sizes >= np.finfo(dtype).tiny)
    return bool((is_normal | (is_zero & (numbers == 0))).all())


def _is_float(value: Any) -> bool:
    return str(getattr(value.ty, "dtype", "")) in ("float32", "float64")


def _rank(value: Any) -> int:
    """Return the number of axes of a tensor; -1 where it is not known."""
    return int(getattr(value.ty, "ndim", -1))


def _is_of_same_shape(call: Any) -> bool:
    """Say whether the second operand is a constant that does not widen the first."""
    value, constant = call.args
    return isinstance(constant, Constant) and known_extents(value) == known_extents(call)


def _exact_values(mod: IRModule) -> set[int]:
    """Return the variables, by handles, of which a last digit can decide: see ``_JUMPS``."""
    found: set[int] = set()
    for binding in reversed(list(_tvm.bindings_of(mod["main"]))):
        value = binding.value
        name = operator_of(value)
        dtype = str(getattr(value.ty, "dtype", ""))
        jumps = name in _JUMPS or _is_rounding(value)
        jumps |= name == "relax.astype" and not dtype.startswith(("float", "bfloat"))
        if jumps or (handle(binding.var) in found and not name.startswith(_ROUNDED_SUMS)):
            found |= {handle(each) for each in _variables(value)}
    return found


def _rounds(addend: FloatArray) -> bool:
    """Say whether adding a constant is meant to round."""
    return bool((np.abs(addend) >= _ROUNDING).any())


def _is_rounding(value: Any) -> bool:
    """Say whether a sum rounds its operand to whole numbers, or nearly so."""
    if operator_of(value) not in _SUMS or not _is_float(value):
        return False
    return any(_rounds(_numbers(each)) for each in value.args if isinstance(each, Constant))


def _variables(value: Any) -> list[Any]:
    """Return the variables that an expression is computed from."""
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, relax.TupleGetItem):
        return _variables(value.tuple_value)
    parts = value.fields if isinstance(value, relax.Tuple) else getattr(value, "args", ())
    return [each for part in parts for each in _variables(part)]


def _numbers(constant: Any) -> FloatArray:
    return np.asarray(_tvm.data_of_constant(constant).numpy(), dtype=np.float64)


def _constant(numbers: FloatArray, like: Any) -> Any:
    # A single number would become one of float32.
    dtype = str(like.ty.dtype)
    return relax.const(np.asarray(numbers, dtype=dtype), dtype)


def _scaled(call: Any, factor: FloatArray) -> Any | None:
    """Return a convolution whose results are scaled; None if the factor differs in a channel."""
    attrs, kernel = call.attrs, call.args[1]
    if kernel.ty.dtype != call.ty.dtype:  # the factor may be of the wider type
        return None
    layout, result = str(attrs.kernel_layout), str(attrs.out_layout)
    if not isinstance(kernel, Constant) or sorted(layout) != sorted("OIHW") or "C" not in result:
        return None
    shape = (1,) * (len(result) - factor.ndim) + factor.shape
    axis = result.index("C")
    if any(extent != 1 for place, extent in enumerate(shape) if place != axis):
        return None
    n_channels = getattr(call.ty.shape.values[axis], "value", None)
    if n_channels is None or factor.size not in (1, n_channels):
        return None
    per_channel = np.broadcast_to(factor.reshape(-1), n_channels)
    axes = [layout.index(each) for each in "IO"]
    last = np.moveaxis(_numbers(kernel), axes, (-2, -1))
    if str(call.op.name) == _CONVOLUTION:
        found = last * per_channel
    else:
        # Of transposed convolutions, groups lie one after the other along the inputs.
        n_groups = int(attrs.groups)
        grouped = last.reshape(*last.shape[:-2], n_groups, -1, last.shape[-1])
        found = (grouped * per_channel.reshape(n_groups, 1, -1)).reshape(last.shape)
    # Single weights next to zero do not matter.
    if not _is_held(np.abs(found).max(), call):
        return None
    weights = _constant(np.ascontiguousarray(np.moveaxis(found, (-2, -1), axes)), kernel)
    return relax.Call(call.op, [call.args[0], weights], call.attrs, call.ty_args)
