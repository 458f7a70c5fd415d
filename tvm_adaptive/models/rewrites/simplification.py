"""Single operators, or a few, written in a simpler way: clips, broadcasts, masked softmaxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import Constant, IRModule, data_of_constant, relax, relax_patterns
from tvm_adaptive.models.network import known_extents
from tvm_adaptive.models.rewrites.row_functions import are_rows


def split_clips(mod: IRModule) -> IRModule:
    """Write each clip of floats as a minimum of a maximum.

    TVM's layout conversion does not support ``clip`` (ReLU6): it would transpose to NCHW
    before each and back after it. It supports the other two.
    """
    pattern = relax_patterns.is_op("relax.clip")(*(relax_patterns.wildcard() for _ in range(3)))
    return _rewritten(mod, pattern, _split_clip)


def _split_clip(call: Any, _matches: Any) -> Any:
    x, *bounds = call.args
    dtype = str(x.ty.dtype)
    limits = [float(bound.value) for bound in bounds if hasattr(bound, "value")]
    if not dtype.startswith("float") or len(limits) < len(bounds):
        return call
    low, high = limits
    if not math.isinf(low):
        # What is no number stays so: of two that do not compare, TVM takes the second.
        x = relax.op.maximum(relax.const(low, dtype), x)
    return x if math.isinf(high) else relax.op.minimum(relax.const(high, dtype), x)


def without_equal_broadcasts(mod: IRModule) -> IRModule:
    """Return a module without broadcasts to the shape that a value has: each is a copy."""
    wildcard = relax_patterns.wildcard
    pattern = relax_patterns.is_op("relax.broadcast_to")(wildcard(), wildcard())

    def plain(call: Any, _matches: Any) -> Any:
        (x, _), extents = call.args, known_extents(call)
        return x if extents and known_extents(x) == extents else call

    return _rewritten(mod, pattern, plain)


def without_masked_rows(mod: IRModule) -> IRModule:
    """Return a module whose softmaxes are not followed by zeros for rows that are -inf.

    PyTorch's attention looks for such rows; our own softmax makes them 0 anyway.
    """
    x, least, zero = (relax_patterns.wildcard() for _ in range(3))
    op = relax_patterns.is_op
    softmax = op("relax.nn.softmax")(x)
    is_number = op("relax.astype")(op("relax.logical_not")(op("relax.equal")(x, least)))
    reduced = op("relax.max")(is_number)
    is_masked = op("relax.logical_not")(op("relax.astype")(reduced))
    zeros = op("relax.full_like")(softmax, zero)
    found = op("relax.where")(is_masked, zeros, softmax)

    def plain(call: Any, matches: Any) -> Any:
        rows, extents = matches[softmax], known_extents(matches[x])
        axes = [int(rows.attrs.axis)], [int(each) for each in matches[reduced].attrs.axis]
        is_of_rows = all(are_rows(extents, each, matches[x]) for each in axes)
        is_of_rows &= bool(matches[reduced].attrs.keepdims)
        numbers = [_number(matches[each]) for each in (least, zero)]
        return rows if is_of_rows and numbers == [-math.inf, 0.0] else call

    return _rewritten(mod, found, plain)


def _number(x: Any) -> float | None:
    """Return the value of a constant of one number; None of anything else."""
    if not isinstance(x, Constant):
        return None
    values = data_of_constant(x).numpy()
    return float(values.item()) if values.size == 1 else None


def _rewritten(mod: IRModule, pattern: Any, rewrite: Callable[[Any, Any], Any]) -> IRModule:
    functions = {
        variable: relax_patterns.rewrite_call(pattern, rewrite, function)
        if isinstance(function, relax.Function)
        else function
        for variable, function in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)
