"""Quantised operators, computed in float: integers up to 2^24 are exact there."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import onnx_converters
from tvm_adaptive.models.frontend.converters.values import (
    check_type,
    constant,
    dtype_of,
    numpy_type_of,
    shape_of,
)

Expr = Any


def convert_quantize(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert QuantizeLinear."""
    x, scale, zero = inputs[0], inputs[1], inputs[2]
    dtype = "uint8" if zero is None else dtype_of(zero)
    if attributes.get("output_dtype"):
        dtype = numpy_type_of(attributes["output_dtype"])
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    scale = _spread(builder, scale, x, axis, block)
    zero = None if zero is None else _spread(builder, zero, x, axis, block)
    return _quantized(builder, relax.op.divide(_float(x), _float(scale)), zero, dtype)


def convert_dequantize(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert DequantizeLinear."""
    x, scale, zero = inputs[0], inputs[1], inputs[2]
    check_type(dtype_of(x))
    dtype = dtype_of(scale)
    if attributes.get("output_dtype"):
        dtype = numpy_type_of(attributes["output_dtype"])
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    scale = _spread(builder, scale, x, axis, block)
    zero = None if zero is None else _spread(builder, zero, x, axis, block)
    product = relax.op.multiply(_centred(x, zero), _float(scale))
    return _cast(builder, product, dtype)


def convert_qlinear_matmul(
    builder: Any, inputs: Any, _attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert QLinearMatMul."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (inputs[n] for n in range(8))
    # Values of rows of the first matrix, and of columns of the second.
    a = _centred(a, _column(builder, a_zero))
    b = _centred(b, b_zero)
    product = builder.emit(relax.op.matmul(a, b))
    scale = relax.op.multiply(_float(_column(builder, a_scale)), _float(b_scale))
    scaled = relax.op.divide(
        relax.op.multiply(product, builder.emit(scale)), _float(_column(builder, y_scale))
    )
    return _quantized(builder, scaled, _column(builder, y_zero), dtype_of(y_zero))


def convert_qlinear_conv(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert QLinearConv."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (inputs[n] for n in range(9))
    product = _convolved(builder, x, x_zero, w, w_zero, attributes, scope, opset)
    channels = [1, -1] + [1] * (len(shape_of(x)) - 2)
    if bias is not None:
        product = relax.op.add(product, relax.op.reshape(builder.emit(_float(bias)), channels))
    scale = relax.op.divide(relax.op.multiply(_float(x_scale), _float(w_scale)), _float(y_scale))
    scale = builder.emit(scale)
    if shape_of(scale):
        scale = builder.emit(relax.op.reshape(scale, channels))
    return _quantized(builder, relax.op.multiply(product, scale), y_zero, dtype_of(y_zero))


def convert_conv_integer(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert ConvInteger."""
    x, w, x_zero, w_zero = (inputs[n] for n in range(4))
    product = _convolved(builder, x, x_zero, w, w_zero, attributes, scope, opset)
    return _cast(builder, product, "int32")


def _convolved(  # noqa: PLR0917
    builder: Any,
    x: Expr,
    x_zero: Expr | None,
    w: Expr,
    w_zero: Expr | None,
    attributes: dict[str, Any],
    scope: Any,
    opset: int,
) -> Expr:
    x = builder.emit(_centred(x, x_zero))
    if w_zero is not None and shape_of(w_zero):
        shape = [-1] + [1] * (len(shape_of(w)) - 1)
        w_zero = builder.emit(relax.op.reshape(w_zero, shape))
    w = builder.emit(_centred(w, w_zero))
    convert = onnx_converters()["Conv"]
    return builder.emit(convert(builder, [x, w, None], dict(attributes), scope, opset))


def _quantized(builder: Any, scaled: Expr, zero: Expr | None, dtype: str) -> Expr:
    """Round to the nearest even integer, add the zero point, and saturate."""
    op = relax.op
    if not np.issubdtype(np.dtype(dtype), np.integer):
        raise ValueError(f"quantisation to {dtype} is not supported")
    limits = np.iinfo(dtype)
    rounded = op.round(scaled)
    if zero is not None:
        rounded = op.add(rounded, _float(zero))
    limited = op.maximum(rounded, constant(limits.min, "float32"))
    limited = op.minimum(limited, constant(limits.max, "float32"))
    return _cast(builder, limited, dtype)


def _centred(x: Expr, zero: Expr | None) -> Expr:
    return _float(x) if zero is None else relax.op.subtract(_float(x), _float(zero))


def _float(x: Expr) -> Expr:
    return x if x.ty is not None and dtype_of(x) == "float32" else relax.op.astype(x, "float32")


def _cast(builder: Any, x: Expr, dtype: str) -> Expr:
    found = builder.emit(x)
    return found if dtype_of(found) == dtype else relax.op.astype(found, dtype)


def _column(builder: Any, value: Expr) -> Expr:
    """Return values of rows as a column."""
    n = shape_of(value)
    return builder.emit(relax.op.reshape(value, [*n, 1])) if len(n) == 1 and n[0] > 1 else value


def _spread(builder: Any, value: Expr, x: Expr, axis: int, block: int) -> Expr:
    """Return scales or zero points in a shape that fits the data."""
    shape, rank = shape_of(value), len(shape_of(x))
    if len(shape) == rank and block:
        wide = builder.emit(relax.op.repeat(value, block, axis % rank))
        n = shape_of(x)[axis % rank]
        return builder.emit(relax.op.strided_slice(wide, [axis % rank], [0], [n]))
    if len(shape) != 1 or rank < 2:
        return value
    if shape[0] == 1:
        return builder.emit(relax.op.reshape(value, []))
    return builder.emit(
        relax.op.reshape(value, [-1 if place == axis % rank else 1 for place in range(rank)])
    )
