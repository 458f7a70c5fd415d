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
from tvm_adaptive.models.network import operator_of, with_rewritten_main

# Of the largest number of a constant, and of 1: float32 has seven digits. A filter whose weights
# are all this small makes subnormal sums, which took 11 of 39 ms.
_LEAST_SHARE = 2.0**-100

# Operators that add products with weights, and those with a factor or a bias for each channel.
_SUMS_OF_PRODUCTS = ("relax.matmul", "relax.nn.conv")
_OF_CHANNELS = ("relax.multiply", "relax.add", "relax.subtract", "relax.nn.")


def without_subnormals(mod: IRModule) -> IRModule:
    """Return a network whose weights of float32 have zeros instead of numbers next to zero."""
    return with_rewritten_main(mod, _Rewriter(mod))


@_tvm.mutator
class _Rewriter(_tvm.PyExprMutator):  # type: ignore[misc]
    """Replaces the weights of products, convolutions and normalisations."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        # What all steps of a recurrent layer share stays one.
        self._rounded: dict[tuple[int, float], Any] = {}

    def visit_call_(self, call: Any) -> Any:
        """Return a call whose weights have no numbers next to zero."""
        call = super().visit_call_(call)
        name = operator_of(call)
        if name.startswith(_SUMS_OF_PRODUCTS):
            weights = [self._weights(each, _LEAST_SHARE) for each in call.args]
        elif name.startswith(_OF_CHANNELS):
            weights = [self._weights(each, 0.0) for each in call.args]
        else:
            return call
        return relax.Call(call.op, weights, call.attrs, call.ty_args)

    def _weights(self, argument: Any, least_share: float) -> Any:
        if not isinstance(argument, Constant) or str(argument.ty.dtype) != "float32":
            return argument
        key = handle(argument), least_share
        if key not in self._rounded:
            self._rounded[key] = _rounded(argument, least_share)
        return self._rounded[key]


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
