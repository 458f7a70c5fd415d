"""Operators on single elements, and those of which TVM's converter knows a part."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxConverter, OnnxNode, as_text
from tvm_adaptive.models.frontend.converters import values
from tvm_adaptive.models.frontend.converters.values import Expr, cast, constant, dtype_of, shape_of


def convert_constant(node: OnnxNode) -> Expr:
    """Convert a Constant, with its value in any attribute."""
    for kind, dtype in (("float", "float32"), ("int", "int64")):
        for name in (f"value_{kind}", f"value_{kind}s"):
            if name in node.attributes:
                return constant(node.attributes[name], dtype)
    return node.by_tvm()


def convert_cast(node: OnnxNode) -> Expr:
    """Convert Cast between types that have numbers in numpy."""
    if hasattr(node.inputs[0].ty, "dtype"):  # not a shape that depends on values
        values.check_type(dtype_of(node.inputs[0]))
    values.check_type(values.numpy_type_of(node.attributes["to"]))
    return node.by_tvm()


def refused(attribute: str, value: Any) -> OnnxConverter:
    """Return TVM's converter without a value of an attribute that it takes for another one."""

    def convert(node: OnnxNode) -> Expr:
        if node.attributes.get(attribute) == value:
            raise ValueError(f"{attribute} {as_text(value)} is not supported")
        return node.by_tvm()

    return convert


def convert_place_of_extreme(node: OnnxNode) -> Expr:
    """Convert ArgMax or ArgMin, whose axis old versions may count from the end, too."""
    rank = values.rank_of(node.inputs[0])
    axis = node.number("axis")
    attributes = {**node.attributes, "axis": axis + rank if axis < 0 else axis}
    return node.by_tvm(attributes=attributes)


def convert_arithmetic(node: OnnxNode) -> Expr:
    """Convert Add, Sub, Mul or Div, for which a single number has no axes.

    A constant of the shape 1 beside an image would end the conversion of its layout.
    """
    pair = list(node.inputs)
    for place, other in ((0, 1), (1, 0)):
        value = values.array_of(pair[place])
        is_single = value is not None and value.size == 1
        if value is not None and is_single and 0 < value.ndim <= values.rank_of(pair[other]):
            pair[place] = constant(value.reshape(()), dtype_of(pair[place]))
    return node.by_tvm(inputs=pair)


def convert_equal(node: OnnxNode) -> Expr:
    """Convert Equal: to TVM each number equals itself, and LLVM compares no truth values."""
    first, second = node.inputs
    are_tensors = all(hasattr(each.ty, "dtype") for each in node.inputs)
    are_known = all(values.array_of(each) is not None for each in node.inputs)
    if are_known or not are_tensors:  # numbers that numpy compares, or shapes
        return node.by_tvm()
    dtype = dtype_of(first)
    if first.same_as(second) and "float" in dtype:
        return relax.op.logical_not(relax.op.isnan(first))
    if dtype == "bool":
        pair = [cast(node.builder, each, "int32") for each in node.inputs]
        return node.by_tvm(inputs=pair)
    return node.by_tvm()


def convert_of_many(node: OnnxNode) -> Expr:
    """Convert Sum, Mean, Max or Min, going from one input to the next.

    TVM's own joins the inputs to one tensor, which costs a copy and the layout of images.
    """
    op = relax.op
    function = {"Max": op.maximum, "Min": op.minimum}.get(node.operator, op.add)
    total, *rest = list(node.inputs)
    for each in rest:
        total = node.builder.emit(function(total, each))
    if node.operator != "Mean":
        return total
    return op.divide(total, constant(len(rest) + 1, dtype_of(total)))


def convert_clip(node: OnnxNode) -> Expr:
    """Convert Clip to operators through which the layout of images passes."""
    op, emit = relax.op, node.builder.emit
    x, *given = node.inputs[0:3]
    dtype = dtype_of(x)
    if node.opset < 11:
        found = [node.attributes.get(name) for name in ("min", "max")]
        given = [None if value is None else constant(value, dtype) for value in found]
    functions = ((op.maximum, -np.inf), (op.minimum, np.inf))
    for bound, (function, nothing) in zip(given, functions, strict=True):
        if bound is None:
            continue
        value = values.array_of(bound)
        if value is None:
            if "float" in dtype:  # not a number is no bound
                bound = op.where(op.isnan(bound), constant(nothing, dtype), bound)  # noqa: PLW2901
            # What is no number stays so: of two that do not compare, TVM takes the second.
            x = emit(function(bound, x))
        elif not (value.dtype.kind == "f" and (np.isnan(value).any() or value == nothing)):
            x = emit(function(constant(value.reshape(()), dtype), x))
    return x


def convert_reshape(node: OnnxNode) -> Expr:
    """Convert Reshape, whose shape was an attribute before version 5."""
    if node.opset >= 5:
        return node.by_tvm()
    shape = constant(list(node.attributes["shape"]), "int64")
    return node.by_tvm(inputs=[node.inputs[0], shape], attributes={}, opset=13)


def convert_concat(node: OnnxNode) -> Expr:
    """Convert Concat, whose axis had a default before version 4."""
    if node.opset >= 4:
        return node.by_tvm()
    attributes = {**node.attributes, "axis": node.number("axis", 1)}
    return node.by_tvm(attributes=attributes, opset=13)


def convert_dropout(node: OnnxNode) -> Expr:
    """Convert a Dropout outside of training."""
    x, _, training = node.inputs[0:3]
    if training is not None and values.known(training, "training_mode").any():
        raise ValueError("training_mode is not supported; export the model for inference")
    if node.attributes["tvm_custom"]["num_outputs"] == 1:
        return x
    return relax.Tuple([x, node.builder.emit(constant(np.ones(shape_of(x)), "bool"))])


def convert_is_inf(node: OnnxNode) -> Expr:
    """Convert IsInf, of one sign or both."""
    (x,) = node.inputs
    names = {1: "detect_positive", -1: "detect_negative"}
    signs = [sign for sign, name in names.items() if node.number(name, 1)]
    if not signs:
        return constant(np.zeros(shape_of(x)), "bool")
    if len(signs) == 2:
        return relax.op.isinf(x)
    return relax.op.equal(x, constant(signs[0] * np.inf, dtype_of(x)))


def convert_pow(node: OnnxNode) -> Expr:
    """Convert Pow of any types: the result is of the first one's."""
    dtype = dtype_of(node.inputs[0])
    # TVM's power is of floats; integers of 32 bits need the wider ones.
    computed = dtype if "float" in dtype else "float64"
    x, y = (cast(node.builder, each, computed) for each in node.inputs)
    result = relax.op.power(x, y)
    if computed == dtype:
        return result
    # Of whole exponents the exact result is whole, others are cut off.
    exponents = values.array_of(node.inputs[1])
    is_whole = "float" not in dtype_of(node.inputs[1])
    if is_whole or (exponents is not None and bool(np.all(exponents == np.rint(exponents)))):
        result = relax.op.round(result)
    return cast(node.builder, result, dtype)


def convert_swish(node: OnnxNode) -> Expr:
    """Convert Swish, or QuickGelu of ONNX Runtime, which is one."""
    (x,) = node.inputs
    default = 1.702 if node.operator == "QuickGelu" else 1.0
    alpha = constant(node.attributes.get("alpha", default), dtype_of(x))
    return relax.op.multiply(x, relax.op.sigmoid(relax.op.multiply(x, alpha)))


def convert_softplus(node: OnnxNode) -> Expr:
    """Convert Softplus: max(x, 0) and the logarithm of 1 + exp(-|x|), exact where that is small.

    TVM rounds the sum first: of x below -17 it returns 0.
    """
    op = relax.op
    (x,) = node.inputs
    power = op.exp(op.negative(op.abs(x)))
    return op.add(op.maximum(x, constant(0.0, dtype_of(x))), _logarithm_of_one_more(node, power))


def convert_area_tangent(node: OnnxNode) -> Expr:
    """Convert Atanh: half the difference of two logarithms; TVM's is 0 of all small x."""
    op = relax.op
    (x,) = node.inputs
    up, down = (_logarithm_of_one_more(node, each) for each in (x, op.negative(x)))
    return op.multiply(op.subtract(up, down), constant(0.5, dtype_of(x)))


def _logarithm_of_one_more(node: OnnxNode, x: Expr) -> Expr:
    """Return the logarithm of 1 + x, exact where x is small; not of infinity.

    Kahan's correction (Higham, Accuracy and Stability of Numerical Algorithms, 2002, problem 1.5).
    """
    op, emit = relax.op, node.builder.emit
    x = emit(x)
    zero, one = (constant(number, dtype_of(x)) for number in (0.0, 1.0))
    raised = emit(op.add(x, one))
    found = emit(op.subtract(raised, one))
    logarithm = op.multiply(op.log(raised), op.divide(x, found))
    return emit(op.where(op.equal(found, zero), x, logarithm))


def convert_one_hot(node: OnnxNode) -> Expr:
    """Convert OneHot; an index out of range makes no element hot."""
    op, emit = relax.op, node.builder.emit
    indices, n, off_on = node.inputs[0:3]
    depth = values.known_number(n, "depth")
    rank = len(shape_of(indices)) + 1
    axis = node.number("axis", -1) % rank
    indices = values.from_start(node.builder, indices, depth)
    indices = emit(op.expand_dims(indices, [axis]))
    shape = [depth if place == axis else 1 for place in range(rank)]
    places = constant(np.arange(depth).reshape(shape), "int64")
    off, on = (emit(op.strided_slice(off_on, [0], [n], [n + 1])) for n in (0, 1))
    return op.where(op.equal(indices, places), on, off)


def convert_lp_normalization(node: OnnxNode) -> Expr:
    """Convert LpNormalization; what is zero stays zero."""
    op = relax.op
    (x,) = node.inputs
    dtype, axis = dtype_of(x), node.number("axis", -1)
    if dtype in values.HALVES:  # in which squares of a few hundred are infinite
        x = cast(node.builder, x, "float32")
    if node.number("p", 2) == 1:
        norm = op.sum(op.abs(x), axis, keepdims=True)
    else:
        norm = op.sqrt(op.sum(op.multiply(x, x), axis, keepdims=True))
    norm = node.builder.emit(norm)
    zero, one = (constant(value, dtype_of(x)) for value in (0, 1))
    return cast(node.builder, op.divide(x, op.where(op.equal(norm, zero), one, norm)), dtype)


def convert_eye_like(node: OnnxNode) -> Expr:
    """Convert EyeLike: a constant of the input's shape."""
    kind = node.number("dtype")
    dtype = values.numpy_type_of(kind) if kind else dtype_of(node.inputs[0])
    rows, columns = shape_of(node.inputs[0])
    return constant(np.eye(rows, columns, node.number("k")), dtype)


def convert_layer_normalization(node: OnnxNode) -> Expr:
    """Convert LayerNormalization, with its mean and deviation where they are used."""
    n_outputs = node.attributes["tvm_custom"]["num_outputs"]
    x, scale, bias = node.inputs[0:3]
    axes = _last_axes(node, x)
    # TVM takes the number of axes from the weights.
    full = [shape_of(x)[axis] for axis in axes]
    is_full = bias is not None and shape_of(scale) == shape_of(bias) == full
    if n_outputs == 1 and dtype_of(x) == "float32" and is_full:
        return node.by_tvm()
    results = _layer_normalized(node, x, axes, scale, bias)
    return relax.Tuple(results[:n_outputs]) if n_outputs > 1 else results[0]


def convert_skip_layer_normalization(node: OnnxNode) -> Expr:
    """Convert SkipLayerNormalization of ONNX Runtime, with the sum that it normalises.

    The simplified one takes no mean off, and has no shift.
    """
    op, emit = relax.op, node.builder.emit
    is_centred = node.operator == "SkipLayerNormalization"
    x, skip, scale, *rest = node.inputs[0:5]
    shift, bias = rest if is_centred else (None, rest[0])
    total = emit(op.add(x, skip))
    total = total if bias is None else emit(op.add(total, bias))
    epsilon = float(node.attributes.get("epsilon", 1e-12))
    n_outputs = node.attributes["tvm_custom"]["num_outputs"]
    if n_outputs == 1 and dtype_of(x) == "float32" and shift is not None:
        return op.nn.layer_norm(total, scale, shift, axes=-1, epsilon=epsilon)
    exact = dataclasses.replace(node, attributes={**node.attributes, "epsilon": epsilon})
    axes = [len(shape_of(total)) - 1]
    results = [*_layer_normalized(exact, total, axes, scale, shift, is_centred=is_centred), total]
    return relax.Tuple(results[:n_outputs]) if n_outputs > 1 else results[0]


def _layer_normalized(
    node: OnnxNode,
    x: Expr,
    axes: list[int],
    scale: Expr,
    bias: Expr | None,
    *,
    is_centred: bool = True,
) -> list[Expr]:
    """Return a normalised layer, its mean, and one by its deviation."""
    normal, mean, deviation = _normalized(node, x, axes, is_centred=is_centred)
    result = relax.op.multiply(normal, scale)
    result = node.builder.emit(result if bias is None else relax.op.add(result, bias))
    return [result, mean, deviation]


def convert_rms_normalization(node: OnnxNode) -> Expr:
    """Convert RMSNormalization over any number of axes."""
    x, scale = node.inputs[0:2]
    normal, _, _ = _normalized(node, x, _last_axes(node, x), is_centred=False)
    return relax.op.multiply(normal, scale)


def convert_bent(node: OnnxNode) -> Expr:
    """Convert Elu, Selu or ThresholdedRelu, whose constants TVM has in float32 alone."""
    op, dtype = relax.op, dtype_of(node.inputs[0])
    is_double = dtype == "float64"
    x = values.cast(node.builder, node.inputs[0], "float64" if is_double else "float32")
    is_selu = node.operator == "Selu"
    alpha = float(node.attributes.get("alpha", 1.67326319217681884765625 if is_selu else 1.0))
    bound, zero, one = (constant(value, dtype_of(x)) for value in (alpha, 0, 1))
    if node.operator == "ThresholdedRelu":
        result = op.where(op.greater(x, bound), x, zero)
    else:
        low = op.multiply(op.subtract(op.exp(op.minimum(x, zero)), one), bound)
        result = op.where(op.greater(x, zero), x, low)
    if is_selu:
        gamma = float(node.attributes.get("gamma", 1.05070102214813232421875))
        result = op.multiply(result, constant(gamma, dtype_of(x)))
    return values.cast(node.builder, node.builder.emit(result), dtype)


def convert_prelu(node: OnnxNode) -> Expr:
    """Convert PRelu; before version 7, several slopes are those of channels."""
    x, slope = node.inputs
    if node.opset < 7 and shape_of(slope) not in ([], [1]):
        n_more = values.rank_of(x) - 1 - values.rank_of(slope)
        slope = node.builder.emit(relax.op.reshape(slope, [*shape_of(slope), *[1] * n_more]))
    return node.by_tvm(inputs=[x, slope])


def convert_in_single_precision(node: OnnxNode, convert: OnnxConverter = OnnxNode.by_tvm) -> Expr:
    """Convert what loses too much in half precision, or what TVM computes in float32 alone."""
    inputs, dtype = list(node.inputs), dtype_of(node.inputs[0])
    if dtype not in values.HALVES:
        return convert(node)
    wide = [
        cast(node.builder, each, "float32")
        if each is not None and dtype_of(each) == dtype
        else each
        for each in inputs
    ]
    found = convert(dataclasses.replace(node, inputs=wide))
    return cast(node.builder, node.builder.emit(found), dtype)


def convert_group_normalization(node: OnnxNode) -> Expr:
    """Convert GroupNormalization of any type, with weights for groups or for channels."""
    op, emit = relax.op, node.builder.emit
    x, *weights = node.inputs[0:3]
    shape, groups = shape_of(x), node.number("num_groups")
    n_weights = shape_of(weights[0])[0]
    if n_weights < shape[1]:  # before version 21, the weights are those of groups
        weights = [emit(op.repeat(each, shape[1] // n_weights, 0)) for each in weights]
    normal, _, _ = _normalized(node, emit(op.reshape(x, [shape[0], groups, -1])), [2])
    channels = [1, shape[1]] + [1] * (len(shape) - 2)
    scale, bias = (emit(op.reshape(each, channels)) for each in weights)
    return op.add(op.multiply(emit(op.reshape(normal, shape)), scale), bias)


def _last_axes(node: OnnxNode, x: Expr) -> list[int]:
    rank = len(shape_of(x))
    return list(range(node.number("axis", -1) % rank, rank))


def _normalized(
    node: OnnxNode, x: Expr, axes: list[int], *, is_centred: bool = True
) -> tuple[Expr, Expr, Expr]:
    """Return what is normalised in float32, its mean, and one by its deviation."""
    op, emit = relax.op, node.builder.emit
    wide = cast(node.builder, x, "float32")
    mean = emit(op.mean(wide, axes, keepdims=True))
    if is_centred:
        wide = emit(op.subtract(wide, mean))
    variance = op.mean(op.multiply(wide, wide), axes, keepdims=True)
    epsilon = constant(node.attributes.get("epsilon", 1e-5), "float32")
    deviation = emit(op.rsqrt(op.add(variance, epsilon)))
    normal = emit(op.multiply(wide, deviation))
    return cast(node.builder, normal, dtype_of(x)), mean, deviation
