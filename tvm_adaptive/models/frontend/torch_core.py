"""A convolutional program of PyTorch in core operators, without tracing it anew.

``run_decompositions`` traces a program with fake tensors, which takes seconds: 2 for ResNet-18, 6
for DenseNet-121. What these consist of has one counterpart each, as PyTorch decomposes it itself.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

from tvm_adaptive.models.frontend.torch_misread import extents_of_node

# Operators that TVM translates as they are.
_KEPT = frozenset(
    {
        *("add.Tensor", "avg_pool2d.default", "cat.default", "conv1d.default", "conv2d.default"),
        *("flatten.using_ints", "gelu.default", "max_pool2d.default"),
        *("mean.dim", "mul.Tensor", "permute.default", "relu.default"),
        *("hardsigmoid.default", "hardswish.default", "hardtanh.default", "sigmoid.default"),
        *("relu6.default", "silu.default"),
    }
)
# Operators that write to their input; those without the last underscore do not.
_IN_PLACE = frozenset(
    {
        *("add_.Tensor", "mul_.Tensor", "relu_.default", "sigmoid_.default"),
        *("hardsigmoid_.default", "hardswish_.default", "hardtanh_.default", "silu_.default"),
        "relu6_.default",
    }
)
# Operators whose result may share memory with their input.
_VIEWS = frozenset({"dropout.default", "dropout_.default", "flatten.using_ints", "permute.default"})


class _NotPlainError(Exception):
    """PyTorch itself must decompose the program."""


def core_of_plain(program: Any) -> Any | None:
    """Return an exported program in core operators, which shares its weights.

    None for one with other operators, with mutated inputs or buffers, in training mode, or with
    in-place operators on what others read.
    """
    import torch
    from torch.export.graph_signature import OutputKind, TensorArgument

    outputs = program.graph_signature.output_specs
    if any(
        spec.kind is not OutputKind.USER_OUTPUT or not isinstance(spec.arg, TensorArgument)
        for spec in outputs
    ):
        return None
    graph = copy.deepcopy(program.graph)  # of the nodes alone
    calls = [node for node in graph.nodes if node.op == "call_function"]
    try:
        rewrites = [(node, _rewrite_of(node)) for node in calls]
    except _NotPlainError:
        return None
    for node, rewrite in rewrites:
        if rewrite is not None:
            with graph.inserting_before(node):
                found = rewrite(graph, node)
            node.replace_all_uses_with(found)
            graph.erase_node(node)
    core = copy.copy(program)
    core._graph_module = torch.fx.GraphModule(program.graph_module, graph)
    core._graph_signature = copy.deepcopy(program.graph_signature)
    return core


_Rewrite = Callable[[Any, Any], Any]  # from a graph and a node to what takes the node's place


def _rewrite_of(node: Any) -> _Rewrite | None:
    """Return how a node is rewritten, None if it stays; raise an error if that is not known."""
    name = getattr(node.target, "__name__", "")
    if name in _KEPT:
        return None
    if name in _IN_PLACE:
        _check_alone(node.args[0])
        return _functional
    if name == "linear.default" and len(extents_of_node(node)) == 2:
        return None
    if name not in _REWRITES:
        raise _NotPlainError
    rewrite, is_plain = _REWRITES[name]
    if not is_plain(node) or not all(isinstance(n, int) for n in extents_of_node(node)):
        raise _NotPlainError
    return rewrite


def _check_alone(source: Any) -> None:
    """Raise _NotPlainError unless nothing else can see that a value is overwritten."""
    is_result = getattr(source, "op", "") == "call_function"
    if not is_result or len(source.users) > 1 or source.target.__name__ in _VIEWS:
        raise _NotPlainError


def _functional(graph: Any, node: Any) -> Any:
    import torch

    name, overload = node.target.__name__.split(".")
    target = getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload)
    return _call(graph, target, node.args, node.meta, node.kwargs)


def _batch_norm(graph: Any, node: Any) -> Any:
    import torch

    target = torch.ops.aten._native_batch_norm_legit_no_training.default
    *tensors, _, momentum, epsilon = tuple(node.args)[:8]
    found = _call(graph, target, (*tensors, momentum, epsilon), {"val": (node.meta["val"],)})
    return _call(graph, operator.getitem, (found, 0), node.meta)


def _layer_norm(graph: Any, node: Any) -> Any:
    import torch

    target = torch.ops.aten.native_layer_norm.default
    given = tuple(node.args)[:5]
    args = given + (None, None, None, None, 1e-5)[len(given) :]
    found = _call(graph, target, args, {"val": (node.meta["val"],)})
    return _call(graph, operator.getitem, (found, 0), node.meta)


def _linear(graph: Any, node: Any) -> Any:
    """Make one product of matrices of all rows, as PyTorch does."""
    import torch

    data, weight, *bias = node.args
    value, rows = node.meta["val"], data.meta["val"].flatten(0, -2)
    view = torch.ops.aten.view.default
    flat = _call(graph, view, (data, list(rows.shape)), {"val": rows})
    args, meta = (flat, weight, *bias), {"val": value.flatten(0, -2)}
    found = _call(graph, torch.ops.aten.linear.default, args, meta)
    return _call(graph, view, (found, extents_of_node(node)), node.meta)


def _global_mean(graph: Any, node: Any) -> Any:
    import torch

    return _call(graph, torch.ops.aten.mean.dim, (node.args[0], [-1, -2], True), node.meta)


def _input(_graph: Any, node: Any) -> Any:
    return node.args[0]


def _always(_node: Any) -> bool:
    return True


# With the condition that a node has to meet: not in training, to a single place, of rows.
_REWRITES: dict[str, tuple[_Rewrite, Callable[[Any], bool]]] = {
    "adaptive_avg_pool2d.default": (_global_mean, lambda node: list(node.args[1]) == [1, 1]),
    "batch_norm.default": (_batch_norm, lambda node: not node.args[5]),
    "dropout.default": (_input, lambda node: not node.args[2]),
    "dropout_.default": (_input, lambda node: not node.args[2]),
    "layer_norm.default": (_layer_norm, _always),
    "linear.default": (_linear, lambda node: len(extents_of_node(node)) > 2),
}


def _call(
    graph: Any, target: Any, args: tuple[Any, ...], meta: dict[str, Any], kwargs: Any = None
) -> Any:
    found = graph.call_function(target, args, kwargs or {})
    found.meta = dict(meta)
    return found
