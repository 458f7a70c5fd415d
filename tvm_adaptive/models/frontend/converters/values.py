"""What converters of ONNX operators share: constants, shapes, parts of tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import Constant, data_of_constant, relax, tensor
from tvm_adaptive._tvm.onnx_frontend import OnnxNode

Array = npt.NDArray[Any]
Expr = Any

HALVES = ("float16", "bfloat16")
# A function that joins or splits more would have a branch or a buffer for each.
_MAX_PARTS = 32


def aligned(node: OnnxNode) -> OnnxNode:
    """Return a node whose second operand broadcasts as in numpy; before version 7, from an axis."""
    is_old = node.opset < 7 and node.number("broadcast") and "axis" in node.attributes
    if not is_old or len(node.inputs) != 2:
        return node
    x, y = node.inputs
    n_more = (rank_of(x) - node.number("axis") - rank_of(y)) if node.number("axis") >= 0 else 0
    if n_more > 0:
        y = node.builder.emit(relax.op.reshape(y, [*shape_of(y), *[1] * n_more]))
    return dataclasses.replace(node, inputs=[x, y])


def array_of(value: Expr) -> Array | None:
    """Return the values of a constant; None for anything else."""
    return np.asarray(data_of_constant(value).numpy()) if isinstance(value, Constant) else None


def known(value: Expr, what: str) -> Array:
    """Return the values of a constant; raise ValueError for anything else."""
    found = array_of(value)
    if found is None:
        raise ValueError(f"{what} must be constant, but depends on the model's inputs")
    return found


def known_number(value: Expr, what: str) -> int:
    """Return the only integer of a constant; raise ValueError for anything else."""
    return int(known(value, what).reshape(-1)[0])


def constant(value: Any, dtype: str) -> Expr:
    """Return a constant."""
    # A single value keeps its rank of zero: layouts of images are kept only past those.
    return relax.const(tensor(np.asarray(value).astype(dtype, order="C")))


def shape_of(value: Expr) -> list[int]:
    """Return the extents of an expression; raise ValueError unless they are numbers."""
    shape = value.ty.shape
    if shape is None:
        raise ValueError("the shape of an input is unknown")
    try:
        return [int(extent) for extent in shape]
    except TypeError as error:
        raise ValueError("the shape of an input depends on values") from error


def rank_of(value: Expr) -> int:
    """Return the number of axes of a tensor, whose extents may depend on values; else -1."""
    return int(getattr(value.ty, "ndim", -1))


def dtype_of(value: Expr) -> str:
    """Return the type of an expression's elements."""
    return str(value.ty.dtype)


def cast(builder: Any, value: Expr, dtype: str) -> Expr:
    """Return an expression in a type."""
    value = value if hasattr(value.ty, "dtype") else builder.emit(value)
    return value if dtype_of(value) == dtype else builder.emit(relax.op.astype(value, dtype))


def check_type(dtype: str) -> None:
    """Raise ValueError for types of a byte or less in which TVM rounds in another way."""
    if dtype.startswith(("float8", "float4", "int4", "uint4", "int2", "uint2")):
        raise ValueError(f"the type {dtype} is not supported")


def transposed(builder: Any, value: Expr) -> Expr:
    """Return the transpose of a matrix, which is computed here if it is constant."""
    found = array_of(value)
    if found is not None:
        return constant(found.T, dtype_of(value))
    return builder.emit(relax.op.permute_dims(value, [1, 0]))


def from_start(builder: Any, indices: Expr, extent: int) -> Expr:
    """Return indices of int64 that count from the start, of some that count from the end."""
    op = relax.op
    indices = cast(builder, indices, "int64")
    zero, n = constant(0, "int64"), constant(extent, "int64")
    return builder.emit(op.where(op.less(indices, zero), op.add(indices, n), indices))


def split_evenly(builder: Any, value: Expr, n: int, axis: int) -> list[Expr]:
    """Return the equal parts of an expression along an axis."""
    if n == 1:
        return [value]
    found = array_of(value)
    if found is not None:
        return [constant(each, dtype_of(value)) for each in np.split(found, n, axis)]
    if n > _MAX_PARTS:
        # In two steps, of which the second uses one function for all but the last.
        size = math.ceil(n / math.ceil(n / _MAX_PARTS))
        unit = shape_of(value)[axis] // n
        starts = [start * unit for start in range(size, n, size)]
        pieces = builder.emit(relax.op.split(value, starts, axis))
        parts: list[Expr] = []
        for place, start in enumerate(range(0, n, size)):
            piece = builder.emit(relax.TupleGetItem(pieces, place))
            parts += split_evenly(builder, piece, min(size, n - start), axis)
        return parts
    pieces = builder.emit(relax.op.split(value, n, axis))
    return [builder.emit(relax.TupleGetItem(pieces, place)) for place in range(n)]


def concatenated(builder: Any, values: Sequence[Expr], axis: int) -> Expr:
    """Return expressions behind one another along an axis."""
    if len(values) == 1:
        return values[0]
    if len(values) > _MAX_PARTS:
        starts = range(0, len(values), _MAX_PARTS)
        parts = [concatenated(builder, values[n : n + _MAX_PARTS], axis) for n in starts]
        return concatenated(builder, parts, axis)
    return builder.emit(relax.op.concat(list(values), axis))


def numpy_type_of(kind: Any) -> str:
    """Return the name of a type by its number in ONNX."""
    import onnx

    return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(kind))))
