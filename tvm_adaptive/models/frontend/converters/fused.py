"""Converters of operators that ONNX Runtime writes when it saves what it has optimised.

At its level "extended": those of "all" are for one machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode, as_text
from tvm_adaptive.models.frontend.converters.places import convert_windows
from tvm_adaptive.models.frontend.converters.values import Expr, constant, dtype_of, rank_of

_ACTIVATION = "activation"
# Of FusedConv, which numbers an activation's parameters.
_PARAMETERS = {"HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Clip": ("min", "max")}


def convert_fused_conv(node: OnnxNode) -> Expr:
    """Convert FusedConv: a convolution, the sum with a residual, and an activation."""
    *operands, residual = node.inputs[0:4]
    result = convert_windows(_plain(node, "Conv", operands))
    if residual is not None:
        result = relax.op.add(node.builder.emit(result), residual)
    name = node.text(_ACTIVATION, "")
    numbers = node.attributes.get("activation_params", ())
    given = dict(zip(_PARAMETERS.get(name, ()), numbers, strict=False))  # defaults are left out
    return _activated(node, result, name, given)


def convert_fused_gemm(node: OnnxNode) -> Expr:
    """Convert FusedGemm: a product of matrices and an activation."""
    given = {
        name.removeprefix(f"{_ACTIVATION}_"): value
        for name, value in node.attributes.items()
        if name.startswith(f"{_ACTIVATION}_")
    }
    result = _plain(node, "Gemm", node.inputs[0:3]).by_tvm()
    return _activated(node, result, node.text(_ACTIVATION, ""), given)


def convert_fused_matmul(node: OnnxNode) -> Expr:
    """Convert FusedMatMul: a product of transposed and scaled matrices."""
    x, y = (_moved(node, value, name) for value, name in zip(node.inputs[0:2], "AB", strict=True))
    product = node.builder.emit(relax.op.matmul(x, y))
    alpha = float(node.attributes.get("alpha", 1.0))
    return product if alpha == 1.0 else relax.op.multiply(product, constant(alpha, dtype_of(x)))


def _plain(node: OnnxNode, operator: str, inputs: Any) -> OnnxNode:
    """Return the node without its activation."""
    rest = {name: value for name, value in node.attributes.items() if _ACTIVATION not in name}
    return dataclasses.replace(node, operator=operator, inputs=inputs, attributes=rest)


def _activated(node: OnnxNode, value: Expr, name: str, parameters: dict[str, Any]) -> Expr:
    value = node.builder.emit(value)
    if not name:
        return value
    if name == "Clip":
        return relax.op.clip(value, parameters["min"], parameters["max"])
    return node.by_tvm(operator=as_text(name), inputs=[value], attributes=parameters)


def _moved(node: OnnxNode, value: Expr, name: str) -> Expr:
    """Return an operand with its axes in the order of a plain product."""
    axes = list(range(rank_of(value)))
    if node.number(f"transBatch{name}"):  # rows come first, before all batches
        axes = [*axes[1:-1], 0, axes[-1]]
    if node.number(f"trans{name}") and len(axes) > 1:
        axes[-2:] = axes[:-3:-1]
    if axes == sorted(axes):
        return value
    return node.builder.emit(relax.op.permute_dims(value, axes))
