"""Exponentials, hyperbolic tangents and error functions that a CPU computes in vectors.

LLVM makes one call of the C library out of each element of ``exp`` or ``erf``, whatever
the schedule: a GELU then takes ten times as long as it must. TVM's own polynomials for
floats of 32 bits consist of additions, multiplications and shifts, and their relative
error is below 4e-7, some three units in the last place. What is not float32 stays as it
is. One thing is lost: ``erf`` of NaN is 1 (a GELU of it is still NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import topi

# (block builder, call) -> expression
Legalization = Callable[[Any, Any], Any]


def legalizations() -> dict[str, Legalization]:
    """Return what ``relax.transform.LegalizeOps`` takes as ``customize_legalize_map``."""
    return {
        "relax.exp": _of_floats("exp", topi.fast_exp),
        "relax.erf": _of_floats("erf", topi.fast_erf),
        "relax.tanh": _of_floats("tanh", topi.fast_tanh),
        "relax.sigmoid": _of_floats("sigmoid", _sigmoid),
        "relax.nn.silu": _of_floats("silu", lambda x: x * _sigmoid(x)),
        "relax.nn.gelu": _of_floats("gelu", _gelu),
        "relax.nn.gelu_tanh": _of_floats("gelu_tanh", _gelu_tanh),
        "relax.nn.softmax": _of_floats("softmax", topi.nn.fast_softmax, "axis"),
    }


def _of_floats(name: str, function: Callable[..., Any], *attributes: str) -> Legalization:
    """Return a legalization that is TVM's own for other types."""

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
