"""Attention of ONNX Runtime's own operators, written in products and a softmax."""

from __future__ import annotations

import math

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters import values
from tvm_adaptive.models.frontend.converters.values import Expr, constant, dtype_of, shape_of

# Added to the scores of keys that a mask hides, where the node names no other number.
_HIDDEN = -10000.0


def convert_attention(node: OnnxNode) -> Expr:
    """Convert Attention: queries, keys and values are parts of one product."""
    op, emit = relax.op, node.builder.emit
    x, weight, bias, mask, past, added = node.inputs[0:6]
    if past is not None:
        raise ValueError("keys and values of earlier steps are not supported")
    for name in ("do_rotary", "past_present_share_buffer", "unidirectional"):
        if node.number(name):
            raise ValueError(f"{name} is not supported")
    n_heads, width = node.number("num_heads"), shape_of(weight)[1]
    sizes = [int(size) for size in node.attributes.get("qkv_hidden_sizes", ())] or 3 * [width // 3]
    product = emit(op.matmul(x, weight))
    product = product if bias is None else emit(op.add(product, bias))
    parts = emit(op.split(product, [sizes[0], sizes[0] + sizes[1]], axis=2))
    queries, keys, these = (
        _heads(node, emit(relax.TupleGetItem(parts, place)), n_heads) for place in range(3)
    )
    scale = float(node.attributes.get("scale", 0.0)) or 1.0 / math.sqrt(sizes[0] // n_heads)
    scores = emit(op.matmul(queries, emit(op.permute_dims(keys, [0, 1, 3, 2]))))
    scores = emit(op.multiply(scores, constant(scale, dtype_of(x))))
    for bias_of_scores in (_mask_bias(node, mask, x), added):
        if bias_of_scores is not None:
            scores = emit(op.add(scores, bias_of_scores))
    found = emit(op.matmul(emit(op.nn.softmax(scores)), these))
    n_images, n_tokens, _ = shape_of(x)
    return op.reshape(emit(op.permute_dims(found, [0, 2, 1, 3])), [n_images, n_tokens, sizes[2]])


def _heads(node: OnnxNode, x: Expr, n_heads: int) -> Expr:
    n_images, n_tokens, width = shape_of(x)
    shape = [n_images, n_tokens, n_heads, width // n_heads]
    split = node.builder.emit(relax.op.reshape(x, shape))
    return node.builder.emit(relax.op.permute_dims(split, [0, 2, 1, 3]))


def _mask_bias(node: OnnxNode, mask: Expr | None, x: Expr) -> Expr | None:
    """Return what a mask, with 0 for keys that it hides, adds to scores; None without one."""
    if mask is None:
        return None
    op, emit, dtype = relax.op, node.builder.emit, dtype_of(x)
    n_images, n_tokens, _ = shape_of(x)
    if shape_of(mask) == [n_images]:  # how many keys of each image count
        rows = constant(np.arange(n_tokens)[None], dtype_of(mask))
        mask = emit(op.less(rows, emit(op.reshape(mask, [n_images, 1]))))
    places = {2: [n_images, 1, 1, n_tokens], 3: [n_images, 1, n_tokens, n_tokens]}
    shape = shape_of(mask)
    if len(shape) not in places or math.prod(shape) != math.prod(places[len(shape)]):
        raise ValueError(f"a mask of the shape {shape} is not supported")
    hidden = emit(op.subtract(constant(1, dtype), values.cast(node.builder, mask, dtype)))
    number = constant(node.attributes.get("mask_filter_value", _HIDDEN), dtype)
    return emit(op.reshape(emit(op.multiply(hidden, number)), places[len(shape)]))
