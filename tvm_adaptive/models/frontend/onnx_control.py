"""Write ONNX's loops and branches out in plain operators.

TVM's importer has no loops, and the functions behind a branch could not be tuned.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.models.frontend.onnx_graph import (
    AXES_AS_INPUT,
    inner_graphs,
    nodes_of,
    opset_of,
)
from tvm_adaptive.models.frontend.onnx_values import (
    MAX_SOURCES,
    add_weight,
    copy_of,
    made_by,
    types_of,
    value_of,
    with_types,
)

# The nodes of a body, times the steps: more would take minutes to translate.
_MAX_NODES = 20_000
# Branches within branches.
_MAX_DEPTH = 8
# One number stays the same in these.
_SAME_NUMBER = ("Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze")
# Results of both branches, by the prefix of the choice.
_OF_BRANCH = re.compile(r"(if\d+_\d+)_(then|else)_branch_")
# Operators that end the process, or read outside of a tensor, for some numbers of an operand: the
# place of that operand, and a number of it that is always right.
_DIVISIONS = dict.fromkeys(("Div", "Mod"), (1, 1))
_TRUSTING = {
    **_DIVISIONS,
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "ReverseSequence"), (1, 0)),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), (1, 0)),
    "RoiAlign": (2, 0),
}


def is_controlled(model: Any) -> bool:
    """Say whether a model has loops or branches."""
    return any(node.op_type in ("If", "Loop") for node in model.graph.node)


def unrolled(model: Any) -> Any:
    """Return a model whose loops are written out as far as their counts are constant.

    The condition of a ``Loop`` must be constantly true; outputs that grow with each step
    are joined at the end. Loops in loops follow, and branches that depend on the step.
    """
    n_nodes_left = [_MAX_NODES]
    for depth in range(_MAX_DEPTH):
        write = functools.partial(_written_out, n_nodes_left)
        found = _rewritten(model, "Loop", f"loop{depth}_", write)
        if found is None:
            break
        model = taken(found, f"loop{depth}_")
    return model


def taken(model: Any, prefix: str = "") -> Any:
    """Return a model with one branch of each ``If`` whose condition depends on constants alone.

    ONNX Runtime's folding also removes such branches, but some of them crash it.
    """
    for depth in range(_MAX_DEPTH):
        found = _rewritten(model, "If", f"{prefix}taken{depth}_", _taken_branch)
        if found is None:
            break
        model = found
    return model


def merged(model: Any) -> Any:
    """Return a model that computes both branches of each ``If`` and chooses between the results.

    Only where those have the same shapes and types; other branches stay. A branch may guard what
    it computes: indices and divisors of the other one become numbers that do no harm.
    """
    for depth in range(_MAX_DEPTH):
        pairs: _Pairs = {}
        found = _rewritten(model, "If", f"if{depth}_", functools.partial(_both_branches, pairs))
        typed = None if found is None else with_types(found)
        if typed is None:
            break
        alike = _alike(typed, pairs)
        if len(alike) < len(pairs):
            write = functools.partial(_both_branches, {}, only=alike)
            found = _rewritten(model, "If", f"if{depth}_", write)
            typed = None if found is None else with_types(found)
        if typed is None:
            break
        model = _guarded(typed, alike)
    return model


def decided(model: Any, numbers: Mapping[str, int]) -> Any:
    """Return a model in which numbers that decide branches have the value that they have now.

    They remain inputs, so that the model is called as before, but nothing depends on them.
    """
    import onnx

    found = copy_of(model)
    numbers = {name: numbers[name] for name in _deciding_inputs(model.graph) if name in numbers}
    names: dict[str, str] = {}
    for info in found.graph.input:
        tensor = info.type.tensor_type
        kind = tensor.elem_type
        if info.name in numbers and kind not in (onnx.TensorProto.FLOAT, onnx.TensorProto.STRING):
            shape = [extent.dim_value for extent in tensor.shape.dim]
            value = np.full(shape, numbers[info.name], onnx.helper.tensor_dtype_to_np_dtype(kind))
            names[info.name] = add_weight(found.graph, f"{info.name}_decided", value)
    _rename_inputs(found.graph.node, names)
    return found


def _deciding_inputs(graph: Any) -> list[str]:
    """Return the inputs that a few operators compute a condition or a count from."""
    nodes = list(nodes_of(graph))
    made = {output: node for node in nodes for output in node.output}
    wanted = [node.input[0] for node in nodes if node.op_type == "If"]
    wanted += [name for node in nodes if node.op_type == "Loop" for name in node.input[:2] if name]
    inputs = {each.name for each in graph.input}
    found: dict[str, None] = {}
    for condition in wanted:
        sources = _sources_of(condition, made)
        found |= dict.fromkeys(name for name in sources or () if name in inputs)
    return list(found)


def _sources_of(name: str, made: Mapping[str, Any]) -> set[str] | None:
    """Return what a value is computed from, but for shapes; None for many operators."""
    found: set[str] = set()
    wanted, seen = [name], set[str]()
    while wanted:
        value = wanted.pop()
        if value in seen:
            continue
        seen.add(value)
        if len(seen) > MAX_SOURCES:
            return None
        if value not in made:
            found.add(value)
        elif made[value].op_type not in ("Shape", "Size"):
            node = made[value]
            # Branches also compute from what is around them.
            inner = [each for graph in inner_graphs(node) for each in nodes_of(graph)]
            wanted += [name for each in (node, *inner) for name in each.input if name]
    return found


def compared_numbers(model: Any) -> dict[str, list[int]]:
    """Return the numbers that inputs are compared with, for what depends on them."""
    inputs = {each.name for each in model.graph.input}
    made = made_by(model.graph)
    found: dict[str, list[int]] = {}
    for node in model.graph.node:
        if node.op_type != "Equal":
            continue
        for one, other in (node.input, reversed(node.input)):
            source = _source_of(one, made, _SAME_NUMBER)
            value = value_of(other, model.graph, model) if source in inputs else None
            if value is not None and value.size == 1 and np.isfinite(value).all():
                found.setdefault(source, []).append(int(value.item()))
    return found


# From a node, a prefix for names, the graph that the nodes will belong to, and the model that
# the node is of, to the nodes in its place; None if it stays.
_Write = Callable[[Any, str, Any, Any], list[Any] | None]
# The results of both branches of each ``If``, by its prefix.
_Pairs = dict[str, list[tuple[str, str]]]


def _rewritten(model: Any, operator: str, prefix: str, write: _Write) -> Any | None:
    """Return a model with others in the place of nodes of an operator; None if all stay."""
    if all(node.op_type != operator for node in model.graph.node):
        return None
    found = copy_of(model)
    nodes: list[Any] = []
    is_changed = False
    for place, node in enumerate(model.graph.node):
        is_of_it = node.op_type == operator
        written = write(node, f"{prefix}{place}", found.graph, model) if is_of_it else None
        nodes += [node] if written is None else written
        is_changed |= written is not None
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found if is_changed else None


def _written_out(
    n_nodes_left: list[int], node: Any, prefix: str, graph: Any, model: Any
) -> list[Any] | None:
    """Return the nodes of a loop's steps; None if it must stay."""
    from onnx import helper

    if not node.input[0] or not node.output:
        return None
    body, n_carried = _body_of(node, "body"), len(node.input) - 2
    count = value_of(node.input[0], model.graph, model)
    start = value_of(node.input[1], model.graph, model) if node.input[1] else np.array(True)
    if count is None or start is None or not start.all() or not _stays_true(body, model):
        return None
    n_nodes = max(1, sum(1 for _ in nodes_of(body)))
    # Without a step there is nothing to put behind one another.
    n_least = 0 if len(node.output) <= n_carried else 1
    if count.size != 1 or not n_least <= int(count.item()) <= n_nodes_left[0] // n_nodes:
        return None
    n_nodes_left[0] -= int(count.item()) * n_nodes
    weights = _added_weights(body, prefix, graph)
    carried = list(node.input[2:])
    scanned: list[list[str]] = []  # by step
    result: list[Any] = []
    for step in range(int(count.item())):
        name = f"{prefix}_{step}"
        given = [
            add_weight(graph, f"{name}.step", step),
            add_weight(graph, f"{name}.go", True),
            *carried,
        ]
        names = dict(zip((each.name for each in body.input), given, strict=True))
        nodes, (_, *outputs) = _inlined(body, weights | names, name)
        result += nodes
        carried = outputs[:n_carried]
        scanned.append(outputs[n_carried:])
    axis: list[str] = []
    axes: dict[str, Any] = {"axes": [0]}
    if opset_of(model) >= AXES_AS_INPUT:
        axis, axes = [add_weight(graph, f"{prefix}_axis", np.zeros(1, "int64"))], {}
    ends = zip(node.output[n_carried:], zip(*scanned, strict=True), strict=False)
    for place, (output, values) in enumerate(ends):
        rows = [f"{prefix}_row{place}_{step}" for step in range(len(values))]
        for value, row in zip(values, rows, strict=True):
            result.append(helper.make_node("Unsqueeze", [value, *axis], [row], **axes))
        if output:
            result.append(helper.make_node("Concat", rows, [output], axis=0))
    return _handed_on(result, zip(node.output, carried, strict=False))


def _handed_on(nodes: list[Any], results: Iterable[tuple[str, str]]) -> list[Any]:
    """Return nodes whose values have the names of the results that they become.

    Only where it cannot be a list is a value handed on by ``Identity``, which takes none before
    version 14.
    """
    from onnx import helper

    made = {output for node in nodes for output in node.output}
    names: dict[str, str] = {}
    ends = []
    for result, value in results:
        if result and value in made and value not in names:
            names[value] = result
        elif result:
            ends.append(helper.make_node("Identity", [names.get(value, value)], [result]))
    _rename_inputs(nodes, names)
    for node in nodes:
        node.output[:] = [names.get(each, each) for each in node.output]
    return nodes + ends


def _stays_true(body: Any, model: Any) -> bool:
    """Say whether a body hands its condition on, or sets it to true."""
    name = _source_of(body.output[0].name, made_by(body), ("Identity",))
    if name == body.input[1].name:
        return True
    known = value_of(name, body, model)
    return known is not None and bool(known.all())


def _taken_branch(node: Any, prefix: str, graph: Any, model: Any) -> list[Any] | None:
    """Return the nodes of the branch that is taken; None if that is not known."""
    condition = value_of(node.input[0], model.graph, model)
    if condition is None:
        return None
    kind = "then_branch" if condition.all() else "else_branch"
    body, prefix = _body_of(node, kind), f"{prefix}_{kind}"
    nodes, results = _inlined(body, _added_weights(body, prefix, graph), prefix)
    return _handed_on(nodes, zip(node.output, results, strict=True))


def _both_branches(
    pairs: _Pairs,
    node: Any,
    prefix: str,
    graph: Any,
    _model: Any,
    *,
    only: Collection[str] | None = None,
) -> list[Any] | None:
    """Return the nodes of both branches, and of the choice between pairs of their results."""
    from onnx import helper

    if only is not None and prefix not in only:
        return None
    shape, condition = add_weight(graph, f"{prefix}_shape", np.zeros(0, "int64")), f"{prefix}_is"
    nodes = [helper.make_node("Reshape", [node.input[0], shape], [condition])]
    results = []
    for kind in ("then_branch", "else_branch"):
        body, name = _body_of(node, kind), f"{prefix}_{kind}"
        inner, outputs = _inlined(body, _added_weights(body, name, graph), name)
        nodes += inner
        results.append(outputs)
    pairs[prefix] = list(zip(*results, strict=True))
    for output, (first, second) in zip(node.output, pairs[prefix], strict=True):
        nodes.append(helper.make_node("Where", [condition, first, second], [output]))
    return nodes


def _alike(model: Any, pairs: _Pairs) -> set[str]:
    """Return for which prefixes each pair of values is known to have one shape and type."""
    types = types_of(model.graph)

    def is_alike(pair: tuple[str, str]) -> bool:
        first, second = map(types.get, pair)
        if first is None or first != second:
            return False
        return bool(first.tensor_type.HasField("shape"))

    return {prefix for prefix, found in pairs.items() if all(map(is_alike, found))}


@dataclasses.dataclass(frozen=True)
class _Branch:
    """What the nodes of a merged branch can refer to."""

    condition: str
    is_then: bool
    types: dict[str, Any]
    made: dict[str, Any]
    weights: frozenset[str]

    def within(self, inner: Any) -> _Branch:
        """Return the same for a subgraph of one of its nodes."""
        return dataclasses.replace(
            self,
            types=self.types | types_of(inner),
            made=self.made | made_by(inner),
            weights=self.weights | {each.name for each in inner.initializer},
        )

    def guarded(self, node: Any) -> list[Any]:
        """Return a node, behind the choice of its operand if any number may be in that."""
        from onnx import helper, numpy_helper

        node = copy_of(node)
        for inner in inner_graphs(node):
            within = self.within(inner)
            nodes = [each for one in inner.node for each in within.guarded(one)]
            del inner.node[:]
            inner.node.extend(nodes)
        place, harmless = _TRUSTING.get(node.op_type, (len(node.input), 0))
        if place >= len(node.input) or self._is_constant(node.input[place]):
            return [node]
        kind = self._kind_of(node, place)
        if node.op_type in _DIVISIONS and kind.kind not in "iu":
            return [node]
        name = f"{node.output[0]}.{self.condition}"
        number, chosen = f"{name}.number", f"{name}.chosen"
        value = numpy_helper.from_array(np.asarray(harmless, kind))
        constant = helper.make_node("Constant", [], [number], value=value)
        pair = [node.input[place], number] if self.is_then else [number, node.input[place]]
        node.input[place] = chosen
        return [constant, helper.make_node("Where", [self.condition, *pair], [chosen]), node]

    def _is_constant(self, name: str) -> bool:
        sources = _sources_of(name, self.made)
        return sources is not None and sources <= self.weights

    def _kind_of(self, node: Any, place: int) -> np.dtype[Any]:
        """Return the type of an operand; those of a division have the one of its result."""
        from onnx import helper

        names = [node.input[place]]
        names += [*node.input, *node.output] if node.op_type in _DIVISIONS else []
        types = (self.types[each].tensor_type for each in names if each in self.types)
        kinds = (each.elem_type for each in types if each.elem_type)
        found = next(kinds, None)
        return np.dtype(np.int64 if found is None else helper.tensor_dtype_to_np_dtype(found))


def _guarded(model: Any, prefixes: Collection[str]) -> Any:
    """Return a typed model whose merged branches do no harm where they are not taken."""
    graph = model.graph
    weights = frozenset(each.name for each in graph.initializer)
    types, made = types_of(graph), made_by(graph)
    nodes: list[Any] = []
    for node in graph.node:
        of_branch = _OF_BRANCH.match(next(filter(None, node.output), ""))
        if of_branch is None or of_branch[1] not in prefixes:
            nodes.append(copy_of(node))
            continue
        condition, is_then = f"{of_branch[1]}_is", of_branch[2] == "then"
        branch = _Branch(condition, is_then, types, made, weights)
        nodes += branch.guarded(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def _body_of(node: Any, kind: str) -> Any:
    (body,) = (each.g for each in node.attribute if each.name == kind)
    return body


def _added_weights(body: Any, prefix: str, graph: Any) -> dict[str, str]:
    """Add a body's weights to a graph; return their new names."""
    names = {}
    for weight in body.initializer:
        copy = copy_of(weight)
        # Unlike the names of what is added beside the body.
        copy.name = names[weight.name] = f"{prefix}.{weight.name}"
        graph.initializer.append(copy)
    return names


def _inlined(body: Any, names: Mapping[str, str], prefix: str) -> tuple[list[Any], list[str]]:
    """Return the nodes and results of a body whose inputs and weights have names."""
    names = dict(names)
    nodes = []
    for node in body.node:
        copy = copy_of(node)
        copy.name = f"{prefix}_{node.name}" if node.name else ""
        _rename_inputs([copy], names)
        for place, output in enumerate(node.output):
            if output:
                copy.output[place] = names[output] = f"{prefix}_{output}"
        nodes.append(copy)
    return nodes, [names.get(each.name, each.name) for each in body.output]


def _rename_inputs(nodes: Iterable[Any], names: Mapping[str, str]) -> None:
    """Let nodes, and their subgraphs, take values of other names."""
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for inner in inner_graphs(node):
            own = {each.name for each in (*inner.initializer, *inner.input)} | set(made_by(inner))
            outer = {name: new for name, new in names.items() if name not in own}
            _rename_inputs(inner.node, outer)
            for output in inner.output:
                output.name = outer.get(output.name, output.name)


def _source_of(name: str, made: Mapping[str, Any], operators: Sequence[str]) -> str:
    """Return the value that operators only hand on."""
    for _ in made:  # a damaged graph may be a circle
        if name not in made or made[name].op_type not in operators or not made[name].input:
            break
        name = made[name].input[0]
    return name
