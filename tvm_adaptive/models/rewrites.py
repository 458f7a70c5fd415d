"""Rewrites of a network before it is lowered: constants, clips and vector functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import IRModule, fold_calls, relax, relax_patterns, topi

Array = npt.NDArray[Any]


def fold(mod: IRModule) -> IRModule:
    """Replace cheap operations on constants by their results, without a compiler.

    TVM's ``FoldConstant`` compiles a function for each of them, in some fifty milliseconds.
    A network of a hundred layers has hundreds: folded batch normalisations, transposed weights.
    """
    return fold_calls(mod, _folded)


def _ints(values: Any) -> Any:
    return None if values is None else tuple(int(value) for value in values)


# Each gives TVM's result to the last bit: single operations of IEEE arithmetic, and moves of
# elements. Other operations, and arithmetic on integers, are left to TVM.
_MOVES: dict[str, Callable[[Any, Array], Array]] = {
    "relax.permute_dims": lambda call, x: np.transpose(x, _ints(call.attrs.axes)),
    # The inferred shape: the requested one may hold a -1.
    "relax.reshape": lambda call, x: x.reshape(_ints(call.ty.shape)),
    "relax.expand_dims": lambda call, x: np.expand_dims(x, _ints(call.attrs.axis)),
    "relax.squeeze": lambda call, x: np.squeeze(x, _ints(call.attrs.axis)),
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
    if name in _MOVES and len(arguments) == 1:
        return np.ascontiguousarray(_MOVES[name](call, arguments[0]))
    types = {str(argument.dtype) for argument in arguments}
    if name in _ARITHMETIC and len(types) == 1 and types <= _FLOATS:
        with np.errstate(all="ignore"):  # TVM reports no overflows either
            return np.asarray(_ARITHMETIC[name](*arguments), arguments[0].dtype)
    return None


def split_clips(mod: IRModule) -> IRModule:
    """Write each clip of floats as a minimum of a maximum.

    TVM's layout conversion does not support ``clip`` (ReLU6): it would transpose to NCHW
    before each and back after it. It supports the other two.
    """
    pattern = relax_patterns.is_op("relax.clip")(*(relax_patterns.wildcard() for _ in range(3)))
    functions = {
        variable: relax_patterns.rewrite_call(pattern, _split_clip, function)
        if isinstance(function, relax.Function)
        else function
        for variable, function in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)


def _split_clip(call: Any, _matches: Any) -> Any:
    x, *bounds = call.args
    dtype = str(x.ty.dtype)
    limits = [float(bound.value) for bound in bounds if hasattr(bound, "value")]
    if not dtype.startswith("float") or len(limits) < len(bounds):
        return call
    low, high = limits
    if not math.isinf(low):
        x = relax.op.maximum(x, relax.const(low, dtype))
    return x if math.isinf(high) else relax.op.minimum(x, relax.const(high, dtype))


def vector_legalizations() -> dict[str, Callable[[Any, Any], Any]]:
    """Return legalizations of transcendental functions that a CPU computes in vectors.

    For ``customize_legalize_map`` of ``relax.transform.LegalizeOps``. LLVM turns each element
    of ``exp`` or ``erf`` into a call of the C library, whatever the schedule, which makes a
    GELU ten times slower. TVM's polynomials for float32 consist of additions, multiplications
    and shifts; their relative error is below 4e-7, some three units in the last place. Other
    types stay as they are. One property is lost: ``erf`` of NaN is 1 (its GELU is still NaN).
    """
    return {
        "relax.exp": _for_float32("exp", topi.fast_exp),
        "relax.erf": _for_float32("erf", topi.fast_erf),
        "relax.tanh": _for_float32("tanh", topi.fast_tanh),
        "relax.sigmoid": _for_float32("sigmoid", _sigmoid),
        "relax.nn.silu": _for_float32("silu", lambda x: x * _sigmoid(x)),
        "relax.nn.gelu": _for_float32("gelu", _gelu),
        "relax.nn.gelu_tanh": _for_float32("gelu_tanh", _gelu_tanh),
        "relax.nn.softmax": _for_float32("softmax", topi.nn.fast_softmax, "axis"),
    }


def _for_float32(
    name: str, function: Callable[..., Any], *attributes: str
) -> Callable[[Any, Any], Any]:
    """Return a legalization that falls back to TVM's own for other types."""

    def legalize(builder: Any, call: Any) -> Any:
        (x,) = call.args
        if str(x.ty.dtype) != "float32":
            return call.op.get_attr("FLegalize")(builder, call)
        values = [getattr(call.attrs, each) for each in attributes]
        return builder.call_te(function, x, *values, primfunc_name_hint=name)

    return legalize


def _sigmoid(x: Any) -> Any:
    return topi.divide(1.0, 1.0 + topi.fast_exp(-x))


def _gelu(x: Any) -> Any:
    return x * (0.5 + 0.5 * topi.fast_erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Any) -> Any:
    # Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, section 2.
    inner = math.sqrt(2 / math.pi) * (x * (1.0 + 0.044715 * x * x))
    return x * (0.5 + 0.5 * topi.fast_tanh(inner))
