"""Sums of numbers of half precision, added in single precision, as frameworks add them.

TVM adds in the type of its operands: the sum of 4,096 ones of float16 is 2,048, where one more is
rounded away, and the mean of 256 x 256 numbers is 0, as their number is infinite.
"""

from __future__ import annotations

from typing import Any

from tvm_adaptive._tvm import IRModule, relax
from tvm_adaptive.models.network import operator_of, with_rewritten_calls

_HALVES = ("float16", "bfloat16")
_REDUCTIONS = (
    *("relax.mean", "relax.sum", "relax.prod", "relax.variance", "relax.std", "relax.cumsum"),
    *("relax.nn.avg_pool", "relax.nn.adaptive_avg_pool"),
    *("relax.nn.softmax", "relax.nn.log_softmax"),
)
# GPUs have units that multiply halves and add in single precision.
_PRODUCTS = ("relax.matmul", "relax.nn.conv")


def with_wide_sums(mod: IRModule, *, products: bool) -> IRModule:
    """Return a network that adds, and with ``products`` also multiplies, halves in float32."""
    names = _REDUCTIONS + (_PRODUCTS if products else ())

    def rewrite(builder: Any, call: Any) -> Any:
        is_wanted = operator_of(call).startswith(names) and _dtype_of(call) in (*_HALVES, "float32")
        # An operator that states the type of its result would still add in it.
        if not is_wanted or str(getattr(call.attrs, "out_dtype", "")) in _HALVES:
            return call
        if not any(_dtype_of(each) in _HALVES for each in call.args):
            return call
        wide = [
            builder.emit(relax.op.astype(each, "float32")) if _dtype_of(each) in _HALVES else each
            for each in call.args
        ]
        found = builder.emit(relax.Call(call.op, wide, call.attrs, call.ty_args))
        return found if _dtype_of(call) == "float32" else relax.op.astype(found, _dtype_of(call))

    return with_rewritten_calls(mod, rewrite)


def _dtype_of(value: Any) -> str:
    return str(getattr(value.ty, "dtype", ""))
