"""Compute what depends on constants alone, without a compiler.

TVM's ``FoldConstant`` compiles a function for each of them, some fifty milliseconds each;
a network of a hundred layers has hundreds: folded batch normalisations, transposed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import IRModule, fold_calls

Array = npt.NDArray[Any]


def _permuted(call: Any, x: Array) -> Array:
    axes = call.attrs.axes
    return np.transpose(x, None if axes is None else [int(axis) for axis in axes])


def _reshaped(call: Any, x: Array) -> Array:
    # As it was found out already: what was asked for may have a -1.
    return x.reshape([int(extent) for extent in call.ty.shape])


def _expanded(call: Any, x: Array) -> Array:
    return np.expand_dims(x, tuple(int(axis) for axis in call.attrs.axis))


def _squeezed(call: Any, x: Array) -> Array:
    axes = call.attrs.axis
    return np.squeeze(x, None if axes is None else tuple(int(axis) for axis in axes))


# Each gives what TVM's gives, to the last bit: single operations of IEEE arithmetic, and
# moves of elements. Others, and arithmetic on integers, are left to TVM.
_MOVES: dict[str, Callable[[Any, Array], Array]] = {
    "relax.permute_dims": _permuted,
    "relax.reshape": _reshaped,
    "relax.expand_dims": _expanded,
    "relax.squeeze": _squeezed,
}
_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.sqrt": np.sqrt,
    "relax.negative": np.negative,
}
_FLOATS = ("float32", "float64")


def fold(mod: IRModule) -> IRModule:
    """Replace cheap operations on constants by their results."""
    return fold_calls(mod, _value)


def _value(call: Any, name: str, arguments: list[Array]) -> Array | None:
    """Return what a call computes; None where that is left to TVM."""
    if name in _MOVES and len(arguments) == 1:
        return np.ascontiguousarray(_MOVES[name](call, arguments[0]))
    types = {str(argument.dtype) for argument in arguments}
    if name in _ARITHMETIC and len(types) == 1 and types <= set(_FLOATS):
        with np.errstate(all="ignore"):  # as TVM's own
            return np.asarray(_ARITHMETIC[name](*arguments), arguments[0].dtype)
    return None
