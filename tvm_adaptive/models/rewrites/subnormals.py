"""Weights so small that processors compute slowly with them.

Training with weight decay leaves numbers below 1.2e-38, which float32 holds with fewer digits: a
tenth of the weights of PP-OCRv6's detector, one in eighty of PP-OCRv5's. Intel's processors take
some hundred cycles more for each instruction that meets one, or that makes one. Zeros in their
place change no digit of a sum that has other terms: PP-OCRv5's detector for 640 x 640 places took
80 ms, and takes 26 (two cores of an Emerald Rapids). Single numbers stay: one may be added before
a logarithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_adaptive import _tvm
from tvm_adaptive._tvm import Constant, IRModule, handle, relax
from tvm_adaptive.models.network import operator_of, with_rewritten_calls

# Of the largest number of a constant, and of 1: float32 has seven digits. A filter whose weights
# are all this small makes subnormal sums, which took 11 of 39 ms.
_LEAST_SHARE = 2.0**-100

# Operators that add products with weights, and those with a factor or a bias for each channel.
_SUMS_OF_PRODUCTS = ("relax.matmul", "relax.nn.conv")
_OF_CHANNELS = ("relax.multiply", "relax.add", "relax.subtract", "relax.nn.")


def without_subnormals(mod: IRModule) -> IRModule:
    """Return a network whose weights of float32 have zeros instead of numbers next to zero."""
    # What all steps of a recurrent layer share stays one.
    known: dict[tuple[int, float], Any] = {}

    def weights(argument: Any, least_share: float) -> Any:
        if not isinstance(argument, Constant) or str(argument.ty.dtype) != "float32":
            return argument
        key = handle(argument), least_share
        if key not in known:
            known[key] = _rounded(argument, least_share)
        return known[key]

    def rewrite(_builder: Any, call: Any) -> Any:
        name = operator_of(call)
        if not name.startswith(_SUMS_OF_PRODUCTS + _OF_CHANNELS):
            return call
        least_share = _LEAST_SHARE if name.startswith(_SUMS_OF_PRODUCTS) else 0.0
        arguments = [weights(each, least_share) for each in call.args]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    return with_rewritten_calls(mod, rewrite)


def _rounded(weights: Any, least_share: float) -> Any:
    """Return constant weights without numbers next to zero."""
    numbers = _tvm.data_of_constant(weights).numpy()
    sizes = np.abs(numbers)
    largest = min(float(sizes.max(initial=0.0, where=np.isfinite(sizes))), 1.0)
    least = max(float(np.finfo(np.float32).tiny), least_share * largest)
    is_tiny = (sizes < least) & (sizes != 0)
    if numbers.size == 1 or not is_tiny.any():
        return weights
    return relax.const(_tvm.tensor(np.where(is_tiny, np.float32(0), numbers)))
