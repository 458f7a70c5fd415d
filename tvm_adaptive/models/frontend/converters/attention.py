"""Attention of ONNX Runtime's own operators, written in products and a softmax."""

from __future__ import annotations

import math

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters import quantization, values
from tvm_adaptive.models.frontend.converters.values import Expr, constant, dtype_of, shape_of

# Added to the scores of keys that a mask hides, where the node names no other number.
_HIDDEN = -10000.0


def convert_attention(node: OnnxNode) -> Expr:
    """Convert Attention: queries, keys and values are parts of one product."""
    op, emit = relax.op, node.builder.emit
    x, weight, bias, mask, past, added = node.inputs[0:6]
    product = emit(op.matmul(x, weight))
    product = product if bias is None else emit(op.add(product, bias))
    return _attended_parts(node, product, mask, past, added)


def convert_qattention(node: OnnxNode) -> Expr:
    """Convert QAttention: Attention whose product is that of quantised tensors."""
    x, weight, bias, x_scale, w_scale, mask, x_zero, w_zero, past = node.inputs[0:9]
    operands = (x, x_scale, x_zero), (weight, w_scale, w_zero)
    product = node.builder.emit(quantization.scaled_product(node, *operands, bias))
    return _attended_parts(node, product, mask, past, None)


def _attended_parts(
    node: OnnxNode, product: Expr, mask: Expr | None, past: Expr | None, added: Expr | None
) -> Expr:
    """Return the attention of queries, keys and values that lie side by side."""
    if past is not None:
        raise ValueError("keys and values of earlier steps are not supported")
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.number(name):
            raise ValueError(f"{name} is not supported")
    emit, n_heads, width = node.builder.emit, node.number("num_heads"), shape_of(product)[2]
    sizes = [int(size) for size in node.attributes.get("qkv_hidden_sizes", ())] or 3 * [width // 3]
    parts = emit(relax.op.split(product, [sizes[0], sizes[0] + sizes[1]], axis=2))
    queries, keys, these = (
        _heads(node, emit(relax.TupleGetItem(parts, place)), n_heads) for place in range(3)
    )
    return _attended(node, (queries, keys, these), mask, added)


def convert_multi_head_attention(node: OnnxNode) -> Expr:
    """Convert MultiHeadAttention: queries, keys and values come apart, also from earlier steps."""
    op, emit = relax.op, node.builder.emit
    *parts, bias, mask, added, past_keys, past_values = node.inputs[0:8]
    if any(each is None for each in parts) or len(shape_of(parts[0])) != 3:
        raise ValueError("queries, keys and values in one tensor are not supported")
    if any(each is not None for each in node.inputs[8:10]):
        raise ValueError("a buffer of keys and values that is filled in part is not supported")
    # Keys and values of another sequence may come as heads, which have no bias.
    is_flat = [len(shape_of(each)) == 3 for each in parts]
    begin = 0
    for place, flat in enumerate(is_flat):
        if bias is not None and flat:
            end = begin + shape_of(parts[place])[2]
            own = emit(op.strided_slice(bias, [0], [begin], [end]))
            parts[place], begin = emit(op.add(parts[place], own)), end
    n_heads = node.number("num_heads")
    queries, keys, these = (
        _heads(node, each, n_heads) if flat else each
        for each, flat in zip(parts, is_flat, strict=True)
    )
    if node.number("unidirectional") and shape_of(keys)[2] != shape_of(queries)[2]:
        raise ValueError("unidirectional is not supported for another sequence")
    if past_keys is not None:
        keys = emit(op.concat([past_keys, keys], 2))
        these = emit(op.concat([past_values, these], 2))
    result = _attended(node, (queries, keys, these), mask, added)
    n_outputs = node.attributes["tvm_custom"]["num_outputs"]
    return relax.Tuple([emit(result), keys, these][:n_outputs]) if n_outputs > 1 else result


def _attended(
    node: OnnxNode, heads: tuple[Expr, Expr, Expr], mask: Expr | None, added: Expr | None
) -> Expr:
    """Return the attention of heads, whose results lie side by side."""
    op, emit, (queries, keys, these) = relax.op, node.builder.emit, heads
    n_images, n_heads, n_queries, width = shape_of(queries)
    scale = float(node.attributes.get("scale", 0.0)) or 1.0 / math.sqrt(width)
    scores = emit(op.matmul(queries, emit(op.permute_dims(keys, [0, 1, 3, 2]))))
    scores = emit(op.multiply(scores, constant(scale, dtype_of(queries))))
    hiding = None if mask is None else _mask_bias(node, mask, scores)
    if node.number("unidirectional"):
        later = _later_keys(scores)
        # No sum of both: a mask's number may be the lowest one, too.
        hiding = later if hiding is None else emit(op.minimum(hiding, later))
    for bias_of_scores in (hiding, added):
        if bias_of_scores is not None:
            scores = emit(op.add(scores, bias_of_scores))
    found = emit(op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores)), these)), [0, 2, 1, 3]))
    return op.reshape(found, [n_images, n_queries, n_heads * shape_of(these)[3]])


def _later_keys(scores: Expr) -> Expr:
    """Return what hides the keys behind each query if it is added to scores."""
    dtype = dtype_of(scores)
    *_, n_queries, n_keys = shape_of(scores)
    lowest = np.finfo("float16" if dtype in values.HALVES else dtype).min
    # Keys of earlier steps come first.
    triangle = np.triu(np.full((1, 1, n_queries, n_keys), lowest), n_keys - n_queries + 1)
    return constant(triangle, dtype)


def _heads(node: OnnxNode, x: Expr, n_heads: int) -> Expr:
    n_images, n_tokens, width = shape_of(x)
    shape = [n_images, n_tokens, n_heads, width // n_heads]
    split = node.builder.emit(relax.op.reshape(x, shape))
    return node.builder.emit(relax.op.permute_dims(split, [0, 2, 1, 3]))


def _mask_bias(node: OnnxNode, mask: Expr, scores: Expr) -> Expr:
    """Return what a mask, with 0 for keys that it hides, adds to scores."""
    op, emit, dtype = relax.op, node.builder.emit, dtype_of(scores)
    n_images, _, n_queries, n_keys = shape_of(scores)
    if shape_of(mask) == [n_images]:  # how many keys of each image count
        rows = constant(np.arange(n_keys)[None], dtype_of(mask))
        mask = emit(op.less(rows, emit(op.reshape(mask, [n_images, 1]))))
    places = {2: [n_images, 1, 1, n_keys], 3: [n_images, 1, n_queries, n_keys]}
    shape = shape_of(mask)
    if len(shape) not in places or math.prod(shape) != math.prod(places[len(shape)]):
        raise ValueError(f"a mask of the shape {shape} is not supported")
    hidden = emit(op.subtract(constant(1, dtype), values.cast(node.builder, mask, dtype)))
    number = constant(node.attributes.get("mask_filter_value", _HIDDEN), dtype)
    return emit(op.reshape(emit(op.multiply(hidden, number)), places[len(shape)]))
