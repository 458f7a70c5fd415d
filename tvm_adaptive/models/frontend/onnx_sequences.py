"""Lists of the parts of a tensor, written as the parts themselves.

TVM makes parts of equal sizes where ONNX makes those of one size and a rest, and keeps the axis
of single places. With the parts written out, the length of a list is a constant, too, which a
loop over them counts to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_adaptive.models.frontend.onnx_graph import AXES_AS_INPUT, opset_of
from tvm_adaptive.models.frontend.onnx_values import (
    add_weight,
    copy_of,
    made_by,
    types_of,
    value_of,
    with_types,
)


def with_parts(model: Any) -> Any:
    """Return a model of fixed shapes without ``SplitToSequence``, where the extent is known."""
    if all(node.op_type != "SplitToSequence" for node in model.graph.node):
        return model
    types = types_of((with_types(model) or model).graph)
    found = copy_of(model)
    nodes: list[Any] = []
    for node in model.graph.node:
        is_split = node.op_type == "SplitToSequence"
        written = _parts(node, types, found.graph, model) if is_split else None
        nodes += [copy_of(node)] if written is None else written
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    _count(found.graph)
    return found


def _parts(node: Any, types: dict[str, Any], graph: Any, model: Any) -> list[Any] | None:
    """Return the nodes that split a tensor and list its parts; None if its extent is not known."""
    from onnx import helper

    attributes = {each.name: each.i for each in node.attribute}
    given = node.input[1] if len(node.input) > 1 else ""
    split = value_of(given, model.graph, model) if given else np.array(1)
    extents = _extents(types.get(node.input[0]))
    axis = attributes.get("axis", 0)
    if split is None or not -len(extents) <= axis < len(extents) or not extents[axis]:
        return None
    n, name = extents[axis], node.output[0]
    sizes = list(map(int, np.atleast_1d(split)))
    if split.ndim == 0:
        sizes = [min(sizes[0], n - start) for start in range(0, n, sizes[0])]
    parts = [f"{name}.part{place}" for place in range(len(sizes))]
    by_input = opset_of(model) >= AXES_AS_INPUT
    lengths = [add_weight(graph, f"{name}.sizes", np.array(sizes))] if by_input else []
    options = {} if by_input else {"split": sizes}
    found = [helper.make_node("Split", [node.input[0], *lengths], parts, axis=axis, **options)]
    # ONNX Runtime, and PyTorch's exporter, drop the axis of single places also if 1 is written.
    if not attributes.get("keepdims", 1) and split.ndim == 0 and set(sizes) == {1}:
        axes = [add_weight(graph, f"{name}.axis", np.array([axis]))] if by_input else []
        options = {} if by_input else {"axes": [axis]}
        places = [f"{each}.place" for each in parts]
        found += [
            helper.make_node("Squeeze", [part, *axes], [place], **options)
            for part, place in zip(parts, places, strict=True)
        ]
        parts = places
    return [*found, helper.make_node("SequenceConstruct", parts, [name])]


def _extents(known: Any) -> list[int]:
    """Return the extents of a type, 0 for one that is not known; none if there are none."""
    return [] if known is None else [each.dim_value for each in known.tensor_type.shape.dim]


def _count(graph: Any) -> None:
    """Write the lengths of lists that are constructed as constants."""
    from onnx import helper, numpy_helper

    made = made_by(graph)
    for node in graph.node:
        source = made.get(node.input[0]) if node.op_type == "SequenceLength" else None
        if source is not None and source.op_type == "SequenceConstruct":
            value = numpy_helper.from_array(np.array(len(source.input)))
            node.CopyFrom(helper.make_node("Constant", [], [*node.output], value=value))
