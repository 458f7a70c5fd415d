"""What is known of the values of an ONNX graph: types, the nodes that make them, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.models.frontend.onnx_graph import nodes_of, weight_types

Array = npt.NDArray[Any]

# Nodes that a constant is computed by; those on shapes of inputs are left to folding.
MAX_SOURCES = 100


def with_types(model: Any) -> Any | None:
    """Return a model with types of its values, also those of branches; None if ONNX fails."""
    import onnx

    try:
        # What does not fit the shapes, as in a branch that is not taken, stays unknown.
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # ONNX's own: for large models
        return None


def types_of(graph: Any) -> dict[str, Any]:
    """Return the types of a graph's values, by their names."""
    known = (*graph.value_info, *graph.input, *graph.output, *weight_types(graph))
    return {each.name: each.type for each in known}


def made_by(graph: Any) -> dict[str, Any]:
    """Return the nodes of a graph by their outputs."""
    return {output: node for node in graph.node for output in node.output}


def value_of(name: str, graph: Any, model: Any) -> Any | None:
    """Compute a value that depends on few small constants alone; None for another."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    made = made_by(graph)
    weights = {each.name: each for each in graph.initializer}
    seen: set[str] = set()
    used: dict[str, Any] = {}
    wanted = [name]
    while wanted:
        value = wanted.pop()
        if value in weights:
            used[value] = weights[value]
        elif value not in made or len(seen) > MAX_SOURCES:
            return None
        elif value not in seen:
            seen.add(value)
            wanted += [each for each in made[value].input if each]
    if any(each.data_location == TensorProto.EXTERNAL for each in used.values()):
        return None
    condition = helper.make_graph(
        [node for node in graph.node if not seen.isdisjoint(node.output)],
        "condition",
        [],
        [helper.make_empty_tensor_value_info(name)],
        initializer=list(used.values()),
    )
    try:
        found = helper.make_model(condition, opset_imports=model.opset_import)
        return np.asarray(ReferenceEvaluator(found).run(None, {})[0])
    except Exception:  # of any kind: an operator that it lacks
        return None


def add_weight(graph: Any, name: str, value: Any) -> str:
    """Add a constant to a graph; return its name."""
    from onnx import numpy_helper

    graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def copy_of(message: Any) -> Any:
    """Return a copy of a message of ONNX's format."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def dequantise_constants(graph: Any) -> None:
    """Replace ``DequantizeLinear`` of constants of four bits, of which TVM has no tensors.

    ONNX Runtime, which folds what else is constant, leaves that operator as it is.
    """
    from onnx import TensorProto

    short = (TensorProto.INT4, TensorProto.UINT4)
    weights = {each.name: each for each in graph.initializer}
    operands: set[str] = set()
    for place, node in reversed(list(enumerate(graph.node))):
        given = [name for name in node.input if name]
        if node.op_type != "DequantizeLinear" or not weights.keys() >= set(given):
            continue
        if weights[given[0]].data_type in short:
            add_weight(graph, node.output[0], _dequantised(node, [weights[name] for name in given]))
            operands.update(given)
            del graph.node[place]
    used = {name for node in nodes_of(graph) for name in node.input}
    used |= {each.name for each in graph.output}
    # One by one: a new list would copy the weights that stay, which may be gigabytes.
    for place, weight in reversed(list(enumerate(graph.initializer))):
        if weight.name in operands - used:
            del graph.initializer[place]


def _dequantised(node: Any, operands: Sequence[Any]) -> Array:
    """Return the result for constants: numbers, their scale, and maybe their zero point."""
    from onnx import helper, numpy_helper

    numbers, scale, *zero = map(numpy_helper.to_array, operands)
    given = {each.name: each.i for each in node.attribute}
    axis, block = given.get("axis", 1), given.get("block_size", 0)

    def spread(values: Array) -> Array:
        values = values.astype("float32")
        if values.size == 1:
            return values.reshape(())
        if block:  # the last one may be cut off
            return values.repeat(block, axis).take(np.arange(numbers.shape[axis]), axis)
        shape = [1] * numbers.ndim
        shape[axis] = -1
        return values.reshape(shape)

    found = numbers.astype("float32")
    for each in zero:
        found -= spread(each)
    found *= spread(scale)
    kind = given.get("output_dtype", 0) or operands[1].data_type
    floats: Array = found.astype(helper.tensor_dtype_to_np_dtype(kind))
    return floats
