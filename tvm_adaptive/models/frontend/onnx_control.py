"""Write ONNX's loops and branches out in plain operators.

TVM's importer has no loops, and the functions behind a branch could not be tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The nodes of a body, times the steps: more would take minutes to translate.
_MAX_NODES = 20_000
# Branches within branches.
_MAX_DEPTH = 8
# One number stays the same in these.
_SAME_NUMBER = ("Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze")
# Nodes that a condition is computed by; those on shapes of inputs are left to folding.
_MAX_CONDITION = 100
# Since this version, the axes of Unsqueeze are an input.
_AXES_AS_INPUT = 13


def unrolled(model: Any) -> Any:
    """Return a model whose loops are written out as far as their counts are constant.

    The condition of a ``Loop`` must be constantly true; outputs that grow with each step
    are joined at the end.
    """
    graph = model.graph
    nodes = list(graph.node)
    if not any(node.op_type == "Loop" for node in nodes):
        return model
    constants = _constants(graph)
    opset = max((each.version for each in model.opset_import if not each.domain), default=0)
    result = []
    for place, node in enumerate(nodes):
        written = _written_out(node, f"loop{place}", constants, graph)
        if written is not None and opset < _AXES_AS_INPUT:
            written = [_with_axes(each) for each in written]
        result += [node] if written is None else written
    del graph.node[:]
    graph.node.extend(result)
    return model


def _constants(graph: Any) -> dict[str, Any]:
    """Return small constants by name; those with data in other files are no counts."""
    from onnx import TensorProto, numpy_helper

    tensors = {
        each.name: each
        for each in graph.initializer
        if each.data_location != TensorProto.EXTERNAL
        and np.prod(list(each.dims), dtype=object) <= 1
    }
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensors[node.output[0]] = attribute.t
    return {
        name: numpy_helper.to_array(tensor).reshape(-1)
        for name, tensor in tensors.items()
        if tensor.data_location != TensorProto.EXTERNAL
    }


def _written_out(
    node: Any, prefix: str, constants: Mapping[str, Any], graph: Any
) -> list[Any] | None:
    """Return the nodes of a loop's steps; None if it must stay."""
    from onnx import helper, numpy_helper

    if node.op_type != "Loop" or not node.input[0] or not node.output:
        return None
    count = constants.get(node.input[0])
    start = constants.get(node.input[1]) if node.input[1] else np.ones(1, bool)
    (body,) = (each.g for each in node.attribute if each.name == "body")
    if count is None or start is None or not start.all() or not _stays_true(body):
        return None
    n_steps = int(count[0])
    if n_steps < 1 or n_steps * len(body.node) > _MAX_NODES:
        return None
    carried = list(node.input[2:])
    n_carried = len(carried)
    scanned: list[list[str]] = [[] for _ in body.output[1 + n_carried :]]
    result: list[Any] = []
    for step in range(n_steps):
        name = f"{prefix}_{step}"
        graph.initializer.append(numpy_helper.from_array(np.array(step), f"{name}_step"))
        graph.initializer.append(numpy_helper.from_array(np.array(True), f"{name}_go"))
        given = [f"{name}_step", f"{name}_go", *carried]
        names = dict(zip((each.name for each in body.input), given, strict=True))
        for weight in body.initializer:
            copy = graph.initializer.add()
            copy.CopyFrom(weight)
            copy.name = names[weight.name] = f"{name}_{weight.name}"
        result += _renamed(body.node, names, name)
        outputs = [names.get(each.name, each.name) for each in body.output[1:]]
        carried = outputs[:n_carried]
        for values, value in zip(scanned, outputs[n_carried:], strict=True):
            values.append(value)
    for output, value in zip(node.output, carried, strict=False):
        if output:
            result.append(helper.make_node("Identity", [value], [output]))
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, "int64"), f"{prefix}_axis"))
    for output, values in zip(node.output[n_carried:], scanned, strict=False):
        rows = [f"{value}_row_{output}" for value in values]
        for value, row in zip(values, rows, strict=True):
            result.append(helper.make_node("Unsqueeze", [value, f"{prefix}_axis"], [row]))
        if output:
            result.append(helper.make_node("Concat", rows, [output], axis=0))
    return result


def _with_axes(node: Any) -> Any:
    """Return a node of :func:`_written_out` for older versions of the operators."""
    from onnx import helper

    if node.op_type != "Unsqueeze" or len(node.input) < 2:
        return node
    return helper.make_node("Unsqueeze", [node.input[0]], list(node.output), axes=[0])


def _stays_true(body: Any) -> bool:
    """Say whether a body hands its condition on, or sets it to true."""
    made = {output: node for node in body.node for output in node.output}
    name = _source_of(body.output[0].name, made, ("Identity",))
    if name == body.input[1].name:
        return True
    known = _constants(body).get(name)
    return known is not None and bool(known.all())


def _renamed(nodes: Any, names: dict[str, str], prefix: str) -> list[Any]:
    """Return copies of nodes whose own values have other names; adds those to ``names``."""
    import onnx

    found = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}_{node.name}" if node.name else ""
        del copy.input[:], copy.output[:]
        copy.input.extend(names.get(each, each) for each in node.input)
        for output in node.output:
            if output:
                names[output] = f"{prefix}_{output}"
            copy.output.append(names.get(output, output))
        for attribute in copy.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _rename_outer(graph, names)
        found.append(copy)
    return found


def _rename_outer(graph: Any, names: Mapping[str, str]) -> None:
    """Give values that a subgraph takes from outside their other names."""
    own = {each.name for each in (*graph.initializer, *graph.input)}
    own |= {output for node in graph.node for output in node.output}
    _rename_inputs(graph, {name: new for name, new in names.items() if name not in own})


def _rename_inputs(graph: Any, outer: Mapping[str, str]) -> None:
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = outer.get(name, name)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename_outer(inner, outer)
    for output in graph.output:
        output.name = outer.get(output.name, output.name)


def is_controlled(model: Any) -> bool:
    """Say whether a model has loops or branches."""
    return any(node.op_type in ("If", "Loop") for node in model.graph.node)


def decided(model: Any, numbers: Mapping[str, int]) -> Any:
    """Return a model in which some inputs of one number have the value that they have now.

    They remain inputs, so that the model is called as before, but nothing depends on them.
    """
    import onnx
    from onnx import helper, numpy_helper

    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph = found.graph
    names: dict[str, str] = {}
    for info in graph.input:
        kind = info.type.tensor_type.elem_type
        if info.name in numbers and kind not in (onnx.TensorProto.FLOAT, onnx.TensorProto.STRING):
            shape = [extent.dim_value for extent in info.type.tensor_type.shape.dim]
            value = np.full(shape, numbers[info.name], helper.tensor_dtype_to_np_dtype(kind))
            names[info.name] = f"{info.name}_decided"
            graph.initializer.append(numpy_helper.from_array(value, names[info.name]))
    _rename_inputs(graph, names)
    return found


def compared_numbers(model: Any) -> dict[str, list[int]]:
    """Return the numbers that inputs are compared with, for what depends on them."""
    inputs = {each.name for each in model.graph.input}
    made = {output: node for node in model.graph.node for output in node.output}
    found: dict[str, list[int]] = {}
    for node in model.graph.node:
        if node.op_type != "Equal":
            continue
        for one, other in (node.input, reversed(node.input)):
            source = _source_of(one, made, _SAME_NUMBER)
            value = _value_of(other, model) if source in inputs else None
            if value is not None and value.size == 1:
                found.setdefault(source, []).append(int(value.item()))
    return found


def _source_of(name: str, made: Mapping[str, Any], operators: Sequence[str]) -> str:
    """Return the value that operators only hand on."""
    for _ in made:  # a damaged graph may be a circle
        if name not in made or made[name].op_type not in operators or not made[name].input:
            break
        name = made[name].input[0]
    return name


def taken(model: Any) -> Any:
    """Return a model with one branch of each ``If`` whose condition depends on constants alone.

    ONNX Runtime's folding also removes such branches, but some of them crash it.
    """
    for depth in range(_MAX_DEPTH):
        found = _taken_once(model, f"taken{depth}")
        if found is None:
            break
        model = found
    return model


def _taken_once(model: Any, prefix: str) -> Any | None:
    """Take the branches that are known in the graph; None if there are none."""
    import onnx
    from onnx import helper

    conditions = [
        _value_of(node.input[0], model) if node.op_type == "If" else None
        for node in model.graph.node
    ]
    if all(condition is None for condition in conditions):
        return None
    candidate = onnx.ModelProto()
    candidate.CopyFrom(model)
    graph = candidate.graph
    nodes: list[Any] = []
    for place, (node, condition) in enumerate(zip(model.graph.node, conditions, strict=True)):
        if condition is None:
            nodes.append(node)
            continue
        kind = "then_branch" if condition.all() else "else_branch"
        inner, results = _inlined(node, kind, f"{prefix}_{place}", graph)
        ends = zip(node.output, results, strict=True)
        nodes += inner + [helper.make_node("Identity", [found], [name]) for name, found in ends]
    del graph.node[:]
    graph.node.extend(nodes)
    return candidate


def _value_of(name: str, model: Any) -> Any | None:
    """Compute a value that depends on few small constants alone; None for another."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    made = {output: node for node in model.graph.node for output in node.output}
    weights = {each.name: each for each in model.graph.initializer}
    nodes: list[Any] = []
    used: dict[str, Any] = {}
    wanted = [name]
    while wanted:
        value = wanted.pop()
        if value in weights:
            used[value] = weights[value]
            is_far = used[value].data_location == TensorProto.EXTERNAL
        else:
            is_far = value not in made
        if is_far or len(nodes) > _MAX_CONDITION:
            return None
        if value not in weights and made[value] not in nodes:
            nodes.append(made[value])
            wanted += [each for each in made[value].input if each]
    graph = helper.make_graph(
        [node for node in model.graph.node if node in nodes],
        *("condition", [], [helper.make_empty_tensor_value_info(name)]),
        initializer=list(used.values()),
    )
    try:
        found = helper.make_model(graph, opset_imports=model.opset_import)
        return np.asarray(ReferenceEvaluator(found).run(None, {})[0])
    except Exception:  # of any kind: an operator that it lacks
        return None


def _inlined(node: Any, kind: str, prefix: str, graph: Any) -> tuple[list[Any], list[str]]:
    """Return the nodes and results of a branch; its weights go to ``graph``."""
    (branch,) = (each.g for each in node.attribute if each.name == kind)
    names: dict[str, str] = {}
    for weight in branch.initializer:
        copy = graph.initializer.add()
        copy.CopyFrom(weight)
        copy.name = names[weight.name] = f"{prefix}_{kind}_{weight.name}"
    nodes = _renamed(branch.node, names, f"{prefix}_{kind}")
    return nodes, [names.get(each.name, each.name) for each in branch.output]


def merged(model: Any) -> Any:
    """Return a model that computes both branches of each ``If`` and chooses between the results.

    Only where those have the same shapes and types; other branches stay.
    """
    for depth in range(_MAX_DEPTH):
        found = _merged_once(model, f"if{depth}")
        if found is None:
            break
        model = found
    return model


def _merged_once(model: Any, prefix: str) -> Any | None:
    """Merge the branches of the graph, not those inside of them; None if nothing changes."""
    import onnx
    from onnx import helper, numpy_helper

    candidate = onnx.ModelProto()
    candidate.CopyFrom(model)
    graph = candidate.graph
    nodes: list[Any] = []
    pairs: list[tuple[str, str]] = []
    for place, node in enumerate(model.graph.node):
        if node.op_type != "If":
            nodes.append(node)
            continue
        name = f"{prefix}_{place}"
        graph.initializer.append(numpy_helper.from_array(np.zeros(0, "int64"), f"{name}_shape"))
        nodes.append(helper.make_node("Reshape", [node.input[0], f"{name}_shape"], [f"{name}_is"]))
        results = []
        for kind in ("then_branch", "else_branch"):
            inner, outputs = _inlined(node, kind, name, graph)
            nodes += inner
            results.append(outputs)
        for output, first, second in zip(node.output, *results, strict=True):
            nodes.append(helper.make_node("Where", [f"{name}_is", first, second], [output]))
            pairs.append((first, second))
    if not pairs:
        return None
    del graph.node[:]
    graph.node.extend(nodes)
    return candidate if _are_alike(candidate, pairs) else None


def _are_alike(model: Any, pairs: Sequence[tuple[str, str]]) -> bool:
    """Say whether each pair of values is known to have one shape and type."""
    import onnx

    try:
        graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    except Exception:  # ONNX's own: for a branch that the shapes do not fit, for large models
        return False
    types = {each.name: each.type for each in (*graph.value_info, *graph.input, *graph.output)}
    for weight in graph.initializer:
        info = onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        types[weight.name] = info.type
    found = [(types.get(first), types.get(second)) for first, second in pairs]
    return all(
        first is not None and first == second and first.tensor_type.HasField("shape")
        for first, second in found
    )
