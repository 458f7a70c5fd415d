"""What is rewritten in a network before its layout is converted."""

from __future__ import annotations

import math
from typing import Any

from tvm_adaptive._tvm import IRModule, relax, relax_patterns

_CLIP = "relax.clip"


def split_clips(mod: IRModule) -> IRModule:
    """Write each clip of floats as a minimum of a maximum.

    TVM's layout conversion does not know ``clip``, which ReLU6 is: it would transpose to
    NCHW before each and back after it. It knows the other two.
    """
    functions: dict[Any, Any] = {}
    for variable, function in mod.functions.items():
        is_relax = isinstance(function, relax.Function)
        functions[variable] = _without_clips(function) if is_relax else function
    return IRModule(functions, attrs=mod.attrs)


def _without_clips(function: Any) -> Any:
    pattern = relax_patterns.is_op(_CLIP)(*(relax_patterns.wildcard() for _ in range(3)))
    return relax_patterns.rewrite_call(pattern, _split_clip, function)


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
