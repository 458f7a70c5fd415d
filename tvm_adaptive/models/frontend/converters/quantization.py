"""Quantised operators, computed in float: integers up to 2^24 are exact there."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters import values
from tvm_adaptive.models.frontend.converters.places import convert_windows
from tvm_adaptive.models.frontend.converters.values import (
    Array,
    Expr,
    constant,
    dtype_of,
    known,
    shape_of,
)

# Whole numbers, their scale and their zero point.
Quantised: TypeAlias = tuple[Expr, Expr, Expr | None]


def convert_quantize(node: OnnxNode) -> Expr:
    """Convert QuantizeLinear."""
    x, scale, zero = _spread_inputs(node)
    dtype = _output_type(node, "uint8" if zero is None else dtype_of(zero))
    scaled = relax.op.divide(_float(node, x), _float(node, scale))
    return _quantized(node, scaled, zero, dtype)


def convert_dequantize(node: OnnxNode) -> Expr:
    """Convert DequantizeLinear."""
    x, scale, zero = _spread_inputs(node)
    values.check_type(dtype_of(x))
    product = _dequantized(node, x, scale, zero)
    return values.cast(node.builder, product, _output_type(node, dtype_of(scale)))


def convert_dynamic_quantize(node: OnnxNode) -> Expr:
    """Convert DynamicQuantizeLinear; numbers that are all zero have a scale, too."""
    return relax.Tuple(list(_quantized_by_range(node, node.inputs[0])))


def _quantized_by_range(node: OnnxNode, x: Expr) -> tuple[Expr, Expr, Expr]:
    """Return numbers of 8 bits for the range of a tensor, with their scale and zero point."""
    op, emit = relax.op, node.builder.emit
    zero, n_steps, one = (constant(value, "float32") for value in (0, 255, 1))
    high, low = emit(op.maximum(op.max(x), zero)), emit(op.minimum(op.min(x), zero))
    span = op.where(op.equal(high, low), one, op.subtract(high, low))
    scale = emit(op.divide(span, n_steps))
    point = emit(_quantized(node, op.divide(op.negative(low), scale), None, "uint8"))
    return emit(_quantized(node, op.divide(x, scale), point, "uint8")), scale, point


def convert_qlinear_matmul(node: OnnxNode) -> Expr:
    """Convert QLinearMatMul."""
    op, emit = relax.op, node.builder.emit
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.inputs[0:8]
    # Values of rows of the first matrix, and of columns of the second.
    product = _multiplied(node, a, _column(node, a_zero), b, b_zero)
    scale = emit(op.multiply(_float(node, _column(node, a_scale)), _float(node, b_scale)))
    scaled = op.divide(op.multiply(product, scale), _float(node, _column(node, y_scale)))
    return _quantized(node, scaled, _column(node, y_zero), dtype_of(y_zero))


def convert_qgemm(node: OnnxNode) -> Expr:
    """Convert QGemm of ONNX Runtime; without a scale of its own, the result is a float."""
    op, emit = relax.op, node.builder.emit
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = node.inputs[0:9]
    a = emit(op.permute_dims(a)) if node.number("transA") else a
    # Zero points are those of its columns, also where these are rows of what is given.
    b = emit(op.permute_dims(b)) if node.number("transB") else b
    product = _multiplied(node, a, a_zero, b, b_zero)
    if bias is not None:
        product = emit(op.add(product, _float(node, bias)))
    alpha = constant(float(node.attributes.get("alpha", 1.0)), "float32")
    scale = emit(op.multiply(op.multiply(_float(node, a_scale), _float(node, b_scale)), alpha))
    result = op.multiply(product, scale)
    return result if y_scale is None else _requantized(node, result, y_scale, y_zero, y_zero)


def convert_matmul_to_float(node: OnnxNode) -> Expr:
    """Convert MatMulIntegerToFloat or DynamicQuantizeMatMul of ONNX Runtime."""
    if node.operator == "DynamicQuantizeMatMul":
        b, b_scale, b_zero, bias = node.inputs[1:5]
        a, a_scale, a_zero = _quantized_by_range(node, node.inputs[0])
    else:
        a, b, a_scale, b_scale, a_zero, b_zero, bias = node.inputs[0:7]
    return scaled_product(node, (a, a_scale, a_zero), (b, b_scale, b_zero), bias)


def scaled_product(node: OnnxNode, a: Quantised, b: Quantised, bias: Expr | None) -> Expr:
    """Return the product of quantised matrices in float, plus a bias."""
    op, (x, x_scale, x_zero), (w, w_scale, w_zero) = relax.op, a, b
    product = _multiplied(node, x, x_zero, w, w_zero)
    result = op.multiply(product, op.multiply(_float(node, x_scale), _float(node, w_scale)))
    return result if bias is None else op.add(node.builder.emit(result), bias)


def convert_qembed_layer_normalization(node: OnnxNode) -> Expr:
    """Convert QEmbedLayerNormalization of ONNX Runtime, whose tables and factors are quantised."""
    ids, segments, *tables, mask = node.inputs[0:8]
    scales, zeros = node.inputs[8:13], node.inputs[13:18]
    floats = [
        None if table is None else node.builder.emit(_dequantized(node, table, scale, zero))
        for table, scale, zero in zip(tables, scales, zeros, strict=True)
    ]
    inputs = [ids, segments, *floats, mask]
    return node.by_tvm(operator="EmbedLayerNormalization", inputs=inputs)


def convert_qlinear_where(node: OnnxNode) -> Expr:
    """Convert QLinearWhere of ONNX Runtime."""
    x, y = (_dequantized(node, *node.inputs[place : place + 3]) for place in (1, 4))
    chosen = relax.op.where(node.inputs[0], node.builder.emit(x), node.builder.emit(y))
    scale, zero = node.inputs[7:9]
    return _requantized(node, chosen, scale, zero, node.inputs[1])


def convert_qlinear_conv(node: OnnxNode) -> Expr:
    """Convert QLinearConv."""
    op, emit = relax.op, node.builder.emit
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = node.inputs[0:9]
    product = _convolved(node, x, x_zero, w, w_zero)
    channels = [1, -1] + [1] * (len(shape_of(x)) - 2)
    if bias is not None:
        product = op.add(product, op.reshape(_float(node, bias), channels))
    scale = op.multiply(_float(node, x_scale), _float(node, w_scale))
    scale = emit(op.divide(scale, _float(node, y_scale)))
    if shape_of(scale):
        scale = emit(op.reshape(scale, channels))
    return _quantized(node, op.multiply(product, scale), y_zero, dtype_of(y_zero))


def convert_conv_integer(node: OnnxNode) -> Expr:
    """Convert ConvInteger."""
    x, w, x_zero, w_zero = node.inputs[0:4]
    return values.cast(node.builder, _convolved(node, x, x_zero, w, w_zero), "int32")


def convert_qlinear_pair(node: OnnxNode) -> Expr:
    """Convert QLinearAdd or QLinearMul of ONNX Runtime."""
    function = relax.op.add if node.operator == "QLinearAdd" else relax.op.multiply
    first, second = (_dequantized(node, *node.inputs[place : place + 3]) for place in (0, 3))
    scale, zero = node.inputs[6:8]
    result = function(first, second)
    # As ONNX Runtime, which alone defines both: if the zero point is odd, ties go the other way.
    return _requantized(node, result, scale, zero, node.inputs[0], is_sum_rounded=True)


def convert_qlinear_single(node: OnnxNode) -> Expr:
    """Convert an operator of ONNX Runtime on one quantised tensor, such as QLinearSigmoid."""
    if node.number("channels_last"):
        raise ValueError("channels_last is not supported")
    x = node.builder.emit(_dequantized(node, *node.inputs[0:3]))
    name = node.operator.removeprefix("QLinear")
    attributes = dict(node.attributes)
    opset = int(attributes.pop("opset", node.opset))  # that of a QLinearSoftmax
    found = node.by_tvm(operator=name, inputs=[x], attributes=attributes, opset=opset)
    scale, zero = node.inputs[3:5]
    return _requantized(node, found, scale, zero, node.inputs[0])


def convert_qlinear_concat(node: OnnxNode) -> Expr:
    """Convert QLinearConcat of ONNX Runtime."""
    scale, zero, *given = list(node.inputs)
    parts = [_dequantized(node, *given[place : place + 3]) for place in range(0, len(given), 3)]
    emitted = [node.builder.emit(part) for part in parts]
    found = values.concatenated(node.builder, emitted, node.number("axis"))
    return _requantized(node, found, scale, zero, given[0])


def _dequantized(node: OnnxNode, x: Expr, scale: Expr, zero: Expr | None) -> Expr:
    return relax.op.multiply(_centred(node, x, zero), _float(node, scale))


def _requantized(
    node: OnnxNode,
    x: Expr,
    scale: Expr,
    zero: Expr | None,
    like: Expr,
    *,
    is_sum_rounded: bool = False,
) -> Expr:
    """Return a quantised result of the type of an input."""
    scaled = relax.op.divide(node.builder.emit(x), _float(node, scale))
    return _quantized(node, scaled, zero, dtype_of(like), is_sum_rounded=is_sum_rounded)


def _multiplied(node: OnnxNode, a: Expr, a_zero: Any, b: Expr, b_zero: Any) -> Expr:
    emit = node.builder.emit
    return emit(relax.op.matmul(*(emit(_centred(node, *x)) for x in ((a, a_zero), (b, b_zero)))))


def _convolved(node: OnnxNode, x: Expr, x_zero: Any, w: Expr, w_zero: Any) -> Expr:
    emit = node.builder.emit
    if w_zero is not None and shape_of(w_zero):
        w_zero = emit(relax.op.reshape(w_zero, [-1] + [1] * (len(shape_of(w)) - 1)))
    inputs = [emit(_centred(node, x, x_zero)), emit(_centred(node, w, w_zero))]
    attributes = dict(node.attributes)
    convolution = dataclasses.replace(node, operator="Conv", inputs=inputs, attributes=attributes)
    return emit(convert_windows(convolution))


def _output_type(node: OnnxNode, default: str) -> str:
    kind = node.number("output_dtype")
    return values.numpy_type_of(kind) if kind else default


def _quantized(
    node: OnnxNode, scaled: Expr, zero: Expr | None, dtype: str, *, is_sum_rounded: bool = False
) -> Expr:
    """Round to the nearest even integer, add the zero point, or do so before, and saturate."""
    op = relax.op
    if not np.issubdtype(np.dtype(dtype), np.integer):
        raise ValueError(f"quantisation to {dtype} is not supported")
    limits = np.iinfo(dtype)
    if zero is None:
        rounded = op.round(scaled)
    elif is_sum_rounded:
        rounded = op.round(op.add(scaled, _float(node, zero)))
    else:
        rounded = op.add(op.round(scaled), _float(node, zero))
    limited = op.maximum(rounded, constant(limits.min, "float32"))
    limited = op.minimum(limited, constant(limits.max, "float32"))
    return values.cast(node.builder, limited, dtype)


def _centred(node: OnnxNode, x: Expr, zero: Expr | None) -> Expr:
    return (
        _float(node, x) if zero is None else relax.op.subtract(_float(node, x), _float(node, zero))
    )


def _float(node: OnnxNode, x: Expr) -> Expr:
    return values.cast(node.builder, x, "float32")


def _column(node: OnnxNode, value: Expr) -> Expr:
    """Return values of rows as a column."""
    n = shape_of(value)
    if len(n) != 1 or n[0] == 1:
        return value
    return node.builder.emit(relax.op.reshape(value, [*n, 1]))


def _spread_inputs(node: OnnxNode) -> tuple[Expr, Expr, Expr | None]:
    """Return data, and its scale and zero point in shapes that fit it."""
    x, scale, zero = node.inputs[0:3]
    return x, _spread(node, scale, x), None if zero is None else _spread(node, zero, x)


def _spread(node: OnnxNode, value: Expr, x: Expr) -> Expr:
    op, emit = relax.op, node.builder.emit
    shape, extents = shape_of(value), shape_of(x)
    rank, block = len(extents), node.number("block_size")
    axis = node.number("axis", 1) % rank if rank else 0
    if len(shape) == rank and block:
        wide = emit(op.repeat(value, block, axis))
        return emit(op.strided_slice(wide, [axis], [0], [extents[axis]]))
    if len(shape) != 1 or rank < 2:
        return value
    if shape[0] == 1:
        return emit(op.reshape(value, []))
    return emit(op.reshape(value, [-1 if place == axis else 1 for place in range(rank)]))


def convert_packed_product(node: OnnxNode) -> Expr:
    """Convert MatMulNBits of ONNX Runtime: weights of 4 or 8 bits, with a scale for each block."""
    x, packed, scales, zeros, order, bias = node.inputs[0:6]
    n_bits, block = node.number("bits", 4), node.number("block_size")
    n_inputs, n_outputs = node.number("K"), node.number("N")
    if order is not None or n_bits not in (4, 8):
        reason = "g_idx" if order is not None else f"bits {n_bits}"
        raise ValueError(f"{reason} is not supported")
    n_blocks = -(-n_inputs // block)
    rows = _unpacked(known(packed, "weights"), n_bits).reshape(n_outputs, -1)
    blocks = rows[:, : n_blocks * block].reshape(n_outputs, n_blocks, block).astype("float32")
    zero = np.full((n_outputs, n_blocks), 2.0 ** (n_bits - 1), "float32")
    if zeros is not None:
        zero = known(zeros, "zero_points")
        zero = _unpacked(zero, n_bits) if zero.dtype == np.uint8 else zero
        zero = zero.reshape(n_outputs, -1)[:, :n_blocks].astype("float32")
    scale = known(scales, "scales").reshape(n_outputs, n_blocks).astype("float32")
    weights = (blocks - zero[..., None]) * scale[..., None]
    weights = weights.reshape(n_outputs, -1)[:, :n_inputs].T
    product = relax.op.matmul(x, constant(np.ascontiguousarray(weights), dtype_of(x)))
    return product if bias is None else relax.op.add(node.builder.emit(product), bias)


def _unpacked(numbers: Array, n_bits: int) -> Array:
    """Return the last axis with a number in each place, the lower half of a byte first."""
    if n_bits == 8:
        return numbers
    halves = np.stack([numbers & 15, numbers >> 4], -1)
    return halves.reshape(*numbers.shape[:-1], -1)
