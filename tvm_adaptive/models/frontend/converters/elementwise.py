"""Operators on single elements, and those of which TVM's converter knows a part."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxConverter, onnx_converters
from tvm_adaptive.models.frontend.converters.values import (
    array_of,
    check_type,
    constant,
    dtype_of,
    known,
    numpy_type_of,
    shape_of,
)

Expr = Any


def convert_constant(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert a Constant, with its value in any attribute."""
    for name, dtype in (
        ("value_float", "float32"),
        ("value_floats", "float32"),
        ("value_int", "int64"),
        ("value_ints", "int64"),
    ):
        if name in attributes:
            return constant(attributes[name], dtype)
    return onnx_converters()["Constant"](builder, inputs, attributes, scope, opset)


def convert_cast(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert Cast between types that have numbers in numpy."""
    check_type(dtype_of(inputs[0]))
    check_type(numpy_type_of(attributes["to"]))
    return onnx_converters()["Cast"](builder, inputs, attributes, scope, opset)


def refused(operator: str, attribute: str, value: Any) -> OnnxConverter:
    """Return TVM's converter without a value of an attribute that it takes for another one."""

    def convert(
        builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
    ) -> Expr:
        if attributes.get(attribute) == value:
            shown = value.decode() if isinstance(value, bytes) else value
            raise ValueError(f"{attribute} {shown} is not supported")
        return onnx_converters()[operator](builder, inputs, attributes, scope, opset)

    return convert


def of_two(name: str) -> OnnxConverter:
    """Return TVM's converter of Add, Sub, Mul or Div, for which a single number has no axes.

    A constant of the shape 1 beside an image would end the conversion of its layout.
    """

    def convert(
        builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
    ) -> Expr:
        pair = list(inputs)
        for place, other in ((0, 1), (1, 0)):
            value = array_of(pair[place])
            if value is None or value.size != 1:
                continue
            if 0 < value.ndim <= len(shape_of(pair[other])):
                pair[place] = constant(value.reshape(()), dtype_of(pair[place]))
        return onnx_converters()[name](builder, pair, attributes, scope, opset)

    return convert


def of_many(name: str) -> OnnxConverter:
    """Return a converter of Sum, Mean, Max or Min that goes from one input to the next.

    TVM's own joins the inputs to one tensor, which costs a copy and the layout of images.
    """

    def convert(
        builder: Any, inputs: Any, _attributes: dict[str, Any], _scope: Any, _opset: int
    ) -> Expr:
        op = relax.op
        functions = {"Sum": op.add, "Mean": op.add, "Max": op.maximum, "Min": op.minimum}
        total, *rest = list(inputs)
        for each in rest:
            total = builder.emit(functions[name](total, each))
        if name != "Mean":
            return total
        return op.divide(total, constant(len(rest) + 1, dtype_of(total)))

    return convert


def convert_clip(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, opset: int
) -> Expr:
    """Convert Clip to operators through which the layout of images passes."""
    op = relax.op
    x = inputs[0]
    dtype = dtype_of(x)
    given = list(inputs)[1:3]
    if opset < 11:
        given = [
            constant(attributes[name], dtype) if name in attributes else None
            for name in ("min", "max")
        ]
    functions = ((op.maximum, -np.inf), (op.minimum, np.inf))
    for bound, (function, nothing) in zip(given, functions, strict=False):
        if bound is None:
            continue
        value = array_of(bound)
        if value is None:
            if "float" in dtype:  # not a number is no bound
                bound = op.where(op.isnan(bound), constant(nothing, dtype), bound)  # noqa: PLW2901
            x = builder.emit(function(x, bound))
        elif not (value.dtype.kind == "f" and (np.isnan(value).any() or value == nothing)):
            x = builder.emit(function(x, constant(value.reshape(()), dtype)))
    return x


def convert_dropout(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert a Dropout outside of training."""
    if inputs[2] is not None and known(inputs[2], "training_mode").any():
        raise ValueError("training_mode is not supported; export the model for inference")
    if attributes["tvm_custom"]["num_outputs"] == 1:
        return inputs[0]
    ones = constant(np.ones(shape_of(inputs[0])), "bool")
    return relax.Tuple([inputs[0], builder.emit(ones)])


def convert_is_inf(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert IsInf, of one sign or both."""
    (x,) = inputs
    dtype = dtype_of(x)
    signs = [
        sign
        for sign, name in ((1, "detect_positive"), (-1, "detect_negative"))
        if attributes.get(name, 1)
    ]
    if not signs:
        return constant(np.zeros(shape_of(x)), "bool")
    if len(signs) == 2:
        return relax.op.isinf(x)
    return builder.emit(relax.op.equal(x, constant(signs[0] * np.inf, dtype)))


def convert_pow(
    builder: Any, inputs: Any, _attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert Pow of any types: the result is of the first one's."""
    x, y = inputs
    dtype = dtype_of(x)
    # TVM's power is of floats; integers of 32 bits need the wider ones.
    computed = dtype
    if "float" not in dtype:
        computed = "float64"
    x, y = (
        each if dtype_of(each) == computed else builder.emit(relax.op.astype(each, computed))
        for each in (x, y)
    )
    result = builder.emit(relax.op.power(x, y))
    return result if computed == dtype else relax.op.astype(relax.op.round(result), dtype)


def convert_swish(
    _builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert Swish."""
    (x,) = inputs
    alpha = constant(attributes.get("alpha", 1.0), dtype_of(x))
    return relax.op.multiply(x, relax.op.sigmoid(relax.op.multiply(x, alpha)))


def convert_one_hot(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert OneHot; an index out of range makes no element hot."""
    op = relax.op
    indices, values = inputs[0], inputs[2]
    depth = int(known(inputs[1], "depth").reshape(-1)[0])
    rank = len(shape_of(indices)) + 1
    axis = int(attributes.get("axis", -1)) % rank
    if dtype_of(indices) != "int64":
        indices = builder.emit(op.astype(indices, "int64"))
    zero, extent = constant(0, "int64"), constant(depth, "int64")
    indices = op.where(op.less(indices, zero), op.add(indices, extent), indices)
    indices = builder.emit(op.expand_dims(builder.emit(indices), [axis]))
    shape = [depth if place == axis else 1 for place in range(rank)]
    places = constant(np.arange(depth).reshape(shape), "int64")
    off, on = (builder.emit(op.strided_slice(values, [0], [n], [n + 1])) for n in (0, 1))
    return op.where(op.equal(indices, places), on, off)


def convert_lp_normalization(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert LpNormalization; what is zero stays zero."""
    op = relax.op
    (x,) = inputs
    axis = int(attributes.get("axis", -1))
    if int(attributes.get("p", 2)) == 1:
        norm = op.sum(op.abs(x), axis, keepdims=True)
    else:
        norm = op.sqrt(op.sum(op.multiply(x, x), axis, keepdims=True))
    norm = builder.emit(norm)
    zero, one = (constant(value, dtype_of(x)) for value in (0, 1))
    return op.divide(x, op.where(op.equal(norm, zero), one, norm))


def convert_eye_like(
    _builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert EyeLike: a constant of the input's shape."""
    dtype = dtype_of(inputs[0])
    if attributes.get("dtype"):
        dtype = numpy_type_of(attributes["dtype"])
    rows, columns = shape_of(inputs[0])
    return constant(np.eye(rows, columns, int(attributes.get("k", 0))), dtype)


def convert_layer_normalization(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert LayerNormalization, with its mean and deviation where they are used."""
    n_outputs = attributes["tvm_custom"]["num_outputs"]
    x, scale, bias = inputs[0], inputs[1], inputs[2]
    if n_outputs == 1 and dtype_of(x) == "float32" and bias is not None:
        return onnx_converters()["LayerNormalization"](builder, inputs, attributes, scope, opset)
    op = relax.op
    rank = len(shape_of(x))
    axes = list(range(int(attributes.get("axis", -1)) % rank, rank))
    wide = x if dtype_of(x) == "float32" else builder.emit(op.astype(x, "float32"))
    mean = builder.emit(op.mean(wide, axes, keepdims=True))
    centred = builder.emit(op.subtract(wide, mean))
    variance = op.mean(op.multiply(centred, centred), axes, keepdims=True)
    epsilon = constant(attributes.get("epsilon", 1e-5), "float32")
    deviation = builder.emit(op.rsqrt(op.add(variance, epsilon)))
    normal = builder.emit(op.multiply(centred, deviation))
    if dtype_of(x) != "float32":
        normal = builder.emit(op.astype(normal, dtype_of(x)))
    result = op.multiply(normal, scale)
    result = builder.emit(result if bias is None else op.add(result, bias))
    return relax.Tuple([result, mean, deviation][:n_outputs]) if n_outputs > 1 else result


def convert_rms_normalization(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert RMSNormalization over any number of axes."""
    op = relax.op
    x, scale = inputs[0], inputs[1]
    rank = len(shape_of(x))
    axes = list(range(int(attributes.get("axis", -1)) % rank, rank))
    wide = x if dtype_of(x) == "float32" else builder.emit(op.astype(x, "float32"))
    square = op.mean(op.multiply(wide, wide), axes, keepdims=True)
    epsilon = constant(attributes.get("epsilon", 1e-5), "float32")
    normal = builder.emit(op.multiply(wide, op.rsqrt(op.add(square, epsilon))))
    if dtype_of(x) != "float32":
        normal = builder.emit(op.astype(normal, dtype_of(x)))
    return op.multiply(normal, scale)


def convert_group_normalization(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, opset: int
) -> Expr:
    """Convert GroupNormalization of any type, with weights for groups or for channels."""
    op = relax.op
    x, scale, bias = inputs[0], inputs[1], inputs[2]
    shape, groups = shape_of(x), int(attributes["num_groups"])
    if shape_of(scale)[0] == groups != shape[1] or opset < 21:
        # Before version 21, the weights are those of groups.
        scale, bias = (
            builder.emit(op.repeat(each, shape[1] // shape_of(each)[0], 0))
            for each in (scale, bias)
        )
    grouped = [shape[0], groups, -1]
    wide = builder.emit(op.reshape(x, grouped))
    if dtype_of(x) != "float32":
        wide = builder.emit(op.astype(wide, "float32"))
    mean = builder.emit(op.mean(wide, [2], keepdims=True))
    centred = builder.emit(op.subtract(wide, mean))
    variance = op.mean(op.multiply(centred, centred), [2], keepdims=True)
    epsilon = constant(attributes.get("epsilon", 1e-5), "float32")
    normal = builder.emit(op.multiply(centred, op.rsqrt(op.add(variance, epsilon))))
    if dtype_of(x) != "float32":
        normal = builder.emit(op.astype(normal, dtype_of(x)))
    normal = builder.emit(op.reshape(normal, shape))
    channels = [1, shape[1]] + [1] * (len(shape) - 2)
    scale, bias = (builder.emit(op.reshape(each, channels)) for each in (scale, bias))
    return op.add(op.multiply(normal, scale), bias)
