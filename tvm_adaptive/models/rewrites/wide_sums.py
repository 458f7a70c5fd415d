"""Sums of numbers of half precision, added in single precision, as frameworks add them.

TVM adds in the type of its operands: the sum of 4,096 ones of float16 is 2,048, where one more is
rounded away, and the mean of 256 x 256 numbers is 0, as their number is infinite.
"""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import (
    Constant,
    IRModule,
    bindings_of,
    data_of_constant,
    handle,
    relax,
    tensor,
)
from tvm_adaptive.models.network import operator_of, with_rewritten_calls

_HALVES = ("float16", "bfloat16")
_REDUCTIONS = (
    *("relax.einsum", "relax.mean", "relax.sum", "relax.prod", "relax.variance", "relax.std"),
    *("relax.cumsum", "relax.cumprod"),
    *("relax.nn.avg_pool", "relax.nn.adaptive_avg_pool"),
    *("relax.nn.softmax", "relax.nn.log_softmax"),
    # TVM does not lower these in bfloat16.
    *("relax.nn.layer_norm", "relax.nn.group_norm", "relax.nn.instance_norm"),
)
# They add in the type that they state.
_SCANS = {"relax.cumsum": relax.op.cumsum, "relax.cumprod": relax.op.cumprod}
_PRODUCTS = ("relax.matmul", "relax.nn.conv", "relax.nn.attention")
# Of GPUs, whose units multiply halves and add in single precision.
_PRODUCTS_OF_HALVES = {
    "relax.matmul": relax.op.matmul,
    "relax.nn.conv1d": relax.op.nn.conv1d,
    "relax.nn.conv2d": relax.op.nn.conv2d,
    "relax.nn.conv3d": relax.op.nn.conv3d,
}


def with_wide_sums(mod: IRModule, *, keeps_operands: bool) -> IRModule:
    """Return a network that adds halves in float32.

    Products are of halves that become float32 before or, with ``keeps_operands``, as they are
    multiplied. A product that states that its result is of half precision stays as it is.
    """
    names = _REDUCTIONS + _PRODUCTS
    calls = [binding.value for binding in bindings_of(mod["main"])]
    wanted = [call for call in calls if operator_of(call).startswith(names)]
    if not any(_has_halves(each) for call in wanted for each in call.args):
        return mod
    # What several calls read, as all steps of a recurrent layer do, is converted once.
    known: dict[int, Any] = {}

    def widened(builder: Any, value: Any) -> Any:
        if isinstance(value, relax.Tuple):
            return relax.Tuple([widened(builder, each) for each in value.fields])
        if not _is_half(value):
            return value
        if (key := handle(value)) in known:
            return known[key]
        if isinstance(value, Constant):
            numbers = data_of_constant(value).numpy().astype("float32")
            known[key] = relax.const(tensor(numbers))
            return known[key]
        found = builder.emit(relax.op.astype(value, "float32"))
        if isinstance(value, relax.DataflowVar):  # others may be read outside of this block
            known[key] = found
        return found

    def rewrite(builder: Any, call: Any) -> Any:
        is_wanted = operator_of(call).startswith(names) and any(map(_has_halves, call.args))
        if not is_wanted or str(getattr(call.attrs, "out_dtype", "")) in _HALVES:
            return call
        if keeps_operands and operator_of(call) in _PRODUCTS_OF_HALVES:
            found = builder.emit(_product_of_halves(call))
        else:
            wide = [widened(builder, each) for each in call.args]
            found = builder.emit(_of_wide(call, wide))
        return relax.op.astype(found, _dtype_of(call)) if _is_half(call) else found

    return with_rewritten_calls(mod, rewrite)


def _of_wide(call: Any, wide: list[Any]) -> Any:
    """Return a call with operands of float32."""
    scan = _SCANS.get(operator_of(call))
    if scan is None or str(call.attrs.dtype) not in _HALVES:
        return relax.Call(call.op, wide, call.attrs, call.ty_args)
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return scan(*wide, axis, dtype="float32", exclusive=bool(call.attrs.exclusive))


def _product_of_halves(call: Any) -> Any:
    """Return a product, or a convolution, that multiplies halves and adds in float32."""
    function, attrs = _PRODUCTS_OF_HALVES[operator_of(call)], call.attrs
    if operator_of(call) == "relax.matmul":
        return function(*call.args, out_dtype="float32")
    numbers = {name: [*getattr(attrs, name)] for name in ("strides", "padding", "dilation")}
    layouts = {name: getattr(attrs, f"{name}_layout") for name in ("data", "kernel", "out")}
    layouts = {f"{name}_layout": layout for name, layout in layouts.items()}
    return function(*call.args, **numbers, **layouts, groups=attrs.groups, out_dtype="float32")


def _has_halves(value: Any) -> bool:
    """Say whether an operand is of half precision, or a tuple with one that is."""
    return any(map(_is_half, value.fields if isinstance(value, relax.Tuple) else [value]))


def _is_half(value: Any) -> bool:
    return _dtype_of(value) in _HALVES


def _dtype_of(value: Any) -> str:
    return str(getattr(getattr(value, "ty", None), "dtype", ""))
