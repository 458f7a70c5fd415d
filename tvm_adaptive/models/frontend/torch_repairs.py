"""What TVM's converters of PyTorch's operators misread: written otherwise, or refused.

They keep type and shape, so that nothing else notices before the outputs are compared. What is
refused goes the next way, through ONNX; what reads memory is refused by all of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def repair(graph: Any) -> None:
    """Write operators of a graph of fixed shapes so that TVM's converters compute the same."""
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(_name_of(node))
        if rewrite is not None:
            with graph.inserting_before(node):
                rewrite(graph, node)


def misread(node: Any) -> str:
    """Return what TVM's converter of a node leaves out; empty if nothing."""
    check = _MISREAD.get(_name_of(node))
    return "" if check is None else check(node)


def reads_memory(node: Any) -> bool:
    """Say whether a view depends on where its operand's elements are in memory.

    TVM and ONNX know the elements alone, and take them to be contiguous and the first.
    """
    if _name_of(node) != "as_strided.default":
        return False
    source = node.args[0].meta["val"]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    return not source.is_contiguous() or (offset is not None and source.storage_offset() != 0)


def _name_of(node: Any) -> str:
    is_call = node.op == "call_function"
    return getattr(node.target, "__name__", "") if is_call else ""


def _called(graph: Any, function: Any, *arguments: Any, **options: Any) -> Any:
    """Return a new node, with an example of its result."""
    import torch

    found = graph.call_function(function, arguments, options)
    values = torch.fx.node.map_arg(arguments, lambda each: each.meta["val"])
    found.meta = {"val": function(*values, **options)}
    return found


def _in_type(graph: Any, node: Any, dtype: Any) -> Any:
    """Return a node with another one's numbers in a type."""
    import torch

    if node.meta["val"].dtype == dtype:
        return node
    return _called(graph, torch.ops.aten._to_copy.default, node, dtype=dtype)


def _scale_second(graph: Any, node: Any) -> None:
    """Multiply the second operand by ``alpha``."""
    import torch

    alpha = node.kwargs.get("alpha", 1)
    first, second = node.args
    node.kwargs = {}
    if alpha == 1:
        return
    if isinstance(second, torch.fx.Node):
        # The product of an integer and a fraction would be an integer.
        second = _in_type(graph, second, node.meta["val"].dtype)
        scaled = _called(graph, torch.ops.aten.mul.Tensor, second, alpha)
    else:
        scaled = alpha * second
    node.args = (first, scaled)


def _select_from_start(_graph: Any, node: Any) -> None:
    """Count an index from the start: TVM reads where it points, also before the tensor."""
    source, axis, place = node.args
    if isinstance(place, int) and place < 0:
        node.args = (source, axis, place + source.meta["val"].shape[axis])


def _index_from_start(graph: Any, node: Any) -> None:
    """Count indices that are tensors of integers from the start."""
    import torch

    source, indices = node.args
    extents = source.meta["val"].shape

    def counted(index: Any, extent: int) -> Any:
        if index is None or index.meta["val"].dtype not in (torch.int32, torch.int64):
            return index  # also masks
        return _called(graph, torch.ops.aten.remainder.Scalar, index, extent)

    node.args = (source, [counted(*pair) for pair in zip(indices, extents, strict=False)])


def _sum_of_window(graph: Any, node: Any) -> None:
    """Divide the sum of a window by the divisor that is given, and not by its places."""
    import torch

    source, window, *rest = node.args
    if len(rest) < 5 or rest[4] is None or rest[2]:  # those at a border that is rounded up differ
        return
    stride, padding, *_, divisor = rest
    n_axes = 2 if "2d" in _name_of(node) else 3
    n_places = math.prod(window) if len(window) == n_axes else window[0] ** n_axes
    mean = _called(graph, node.target, source, window, stride, padding, False, True)
    node.target = torch.ops.aten.mul.Tensor
    node.args = (mean, n_places / divisor)


def _bounded_on_one_side(graph: Any, node: Any) -> None:
    """Take the larger or smaller integer: TVM makes an integer of the infinite other bound."""
    import torch

    source, *bounds = node.args
    given = dict(zip(("min", "max"), bounds, strict=False)) | dict(node.kwargs)
    found = {name: value for name, value in given.items() if value is not None}
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or len(found) != 1:
        return
    ((name, value),) = found.items()
    if not isinstance(value, int):
        return
    bound = _number(graph, value, node)
    functions = {"min": torch.ops.aten.maximum.default, "max": torch.ops.aten.minimum.default}
    node.target, node.args, node.kwargs = functions[name], (source, bound), {}


def _bounded_by_tensors(graph: Any, node: Any) -> None:
    """Take maxima and minima: TVM also clips at infinity, of which it makes an integer."""
    import torch

    source, *bounds = node.args
    given = dict(zip(("min", "max"), bounds, strict=False)) | dict(node.kwargs)
    functions = {"min": torch.ops.aten.maximum.default, "max": torch.ops.aten.minimum.default}
    steps = [(functions[name], given[name]) for name in functions if given.get(name) is not None]
    for function, bound in steps[:-1]:
        source = _called(graph, function, source, bound)
    function, bound = steps[-1]
    node.target, node.args, node.kwargs = function, (source, bound), {}


def _reduced_in_own_type(graph: Any, node: Any) -> None:
    """Add and multiply in the type of the result: TVM does it in that of the operand."""
    source, *rest = node.args
    node.args = (_in_type(graph, source, node.meta["val"].dtype), *rest)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}


def _norm_in_single_precision(graph: Any, node: Any) -> None:
    """Square and add in single precision: squares of a few hundred are infinite in half."""
    import torch

    source, *rest = node.args
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    node.args, node.kwargs = (_in_type(graph, source, wide), *rest), {}


def _compared_in_common_type(graph: Any, node: Any) -> None:
    """Compare in PyTorch's type: a tensor without axes does not widen the other one."""
    import torch

    dtype = torch.result_type(*(each.meta["val"] for each in node.args))
    node.args = tuple(_in_type(graph, each, dtype) for each in node.args)


def _logarithm_of_one_more(graph: Any, node: Any) -> None:
    """Divide the rounding of 1 + x out of its logarithm: TVM's is 0 of all small x.

    Kahan's correction (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section
    1.14.1, and its problem 1.5).
    """
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    x = _in_type(graph, node.args[0], node.meta["val"].dtype)
    raised = call(ops.add.Tensor, x, 1.0)
    found = call(ops.sub.Tensor, raised, 1.0)
    # Of infinity, the quotient is not a number.
    one = _number(graph, 1.0, node)
    factor = call(ops.where.self, call(ops.gt.Scalar, x, 1.0), one, call(ops.div.Tensor, x, found))
    logarithm = call(ops.mul.Tensor, call(ops.log.default, raised), factor)
    node.target, node.kwargs = ops.where.self, {}
    node.args = (call(ops.eq.Scalar, found, 0.0), x, logarithm)


def _power_without_one(graph: Any, node: Any) -> None:
    """Divide the rounding of exp(x) out of exp(x) - 1: TVM's is 0 of all small x.

    Kahan's correction, as for the logarithm.
    """
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    x = _in_type(graph, node.args[0], node.meta["val"].dtype)
    power = call(ops.exp.default, x)
    found = call(ops.sub.Tensor, power, 1.0)
    quotient = call(ops.div.Tensor, x, call(ops.log.default, power))
    corrected = call(ops.mul.Tensor, found, quotient)
    # Of what is far from 0, nothing is lost, and the logarithm may be infinite.
    is_far = call(ops.gt.Scalar, call(ops.abs.default, x), 1.0)
    nearby = call(ops.where.self, call(ops.eq.Scalar, found, 0.0), x, corrected)
    node.target, node.args, node.kwargs = ops.where.self, (is_far, found, nearby), {}


def _exact_remainder(graph: Any, node: Any) -> None:
    """Take the remainder of the operands: TVM multiplies a rounded quotient."""
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    if not node.meta["val"].dtype.is_floating_point:
        return
    x, y = _in_types_of(graph, node)
    rest, is_other = _rest(graph, x, y)
    node.target, node.kwargs = ops.where.self, {}
    node.args = (is_other, call(ops.add.Tensor, rest, y), rest)


def _exact_floor(graph: Any, node: Any) -> None:
    """Divide what the remainder leaves, as PyTorch does: TVM rounds the quotient first."""
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    is_floor = "floor" in (_name_of(node)[:5], node.kwargs.get("rounding_mode"))
    if not is_floor:
        return
    x, y = _in_types_of(graph, node)
    if not node.meta["val"].dtype.is_floating_point:
        if not isinstance(y, torch.fx.Node):  # TVM's number is of 32 bits
            node.args = (x, _number(graph, y, node))
        return
    rest, is_other = _rest(graph, x, y)
    quotient = call(ops.div.Tensor, call(ops.sub.Tensor, x, rest), y)
    quotient = call(ops.where.self, is_other, call(ops.sub.Tensor, quotient, 1.0), quotient)
    # A whole number but for rounding.
    found = call(ops.add.Tensor, quotient, 0.5)
    node.target, node.args, node.kwargs = ops.floor.default, (found,), {}
    if isinstance(y, torch.fx.Node):  # what is divided by zero has no remainder
        floor, plain = call(ops.floor.default, found), call(ops.div.Tensor, x, y)
        node.target, node.args = ops.where.self, (call(ops.eq.Scalar, y, 0.0), plain, floor)
    elif y == 0:
        node.target, node.args = ops.div.Tensor, (x, y)


def _in_types_of(graph: Any, node: Any) -> list[Any]:
    """Return a node's operands in the type of its result; numbers as they are."""
    import torch

    dtype = node.meta["val"].dtype
    return [
        _in_type(graph, each, dtype) if isinstance(each, torch.fx.Node) else each
        for each in node.args
    ]


def _rest(graph: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the remainder with the sign of ``x``, and whether ``y`` has another one."""
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    if not isinstance(y, torch.fx.Node):
        rest = call(ops.fmod.Scalar, x, y)
        return rest, call(ops.lt.Scalar if y > 0 else ops.gt.Scalar, rest, 0.0)
    rest = call(ops.fmod.Tensor, x, y)
    signs = call(ops.mul.Tensor, call(ops.sign.default, rest), call(ops.sign.default, y))
    return rest, call(ops.lt.Scalar, signs, 0.0)


def _number(graph: Any, value: float, node: Any) -> Any:
    """Return a number as a tensor without axes, of the type of a node's result."""
    import torch

    dtype = node.meta["val"].dtype
    found = graph.call_function(torch.ops.aten.full.default, ([], value), {"dtype": dtype})
    found.meta = {"val": torch.full([], value, dtype=dtype)}
    return found


def _nearest_by_factor(graph: Any, node: Any) -> None:
    """Take the nearest places by the factors that are given: TVM divides extents instead."""
    import torch

    ops = torch.ops.aten
    source, _, given = (*node.args, None)[:3]
    if given is None:
        return
    extents = list(zip(extents_of_node(source)[2:], extents_of_node(node)[2:], strict=True))
    # PyTorch divides by a factor unless the extent is doubled or stays.
    factors = [
        after / before if after in (before, 2 * before) else given[axis]
        for axis, (before, after) in enumerate(extents)
    ]
    triples = [(*pair, factor) for pair, factor in zip(extents, factors, strict=True)]
    if all(before * factor == after for before, after, factor in triples):
        return

    call = functools.partial(_called, graph)
    taken = source
    with source.meta["val"].fake_mode:
        for axis, (before, after, factor) in enumerate(triples, 2):
            places = call(ops.arange.start_step, 0, after, 1, dtype=torch.float32)
            # As PyTorch does it, in single precision.
            scaled = call(ops.mul.Tensor, places, 1.0 / factor)
            floor = call(ops.clamp.default, call(ops.floor.default, scaled), 0, before - 1)
            index = call(ops._to_copy.default, floor, dtype=torch.int64)
            taken = call(ops.index_select.default, taken, axis, index)
    node.replace_all_uses_with(taken)
    graph.erase_node(node)


def _whole_bound(graph: Any, node: Any) -> None:
    """Compare integers with a whole number: TVM cuts a fraction off, and 2 is true."""
    import torch

    source, number = node.args
    if source.meta["val"].dtype == torch.bool and number not in (0, 1):
        source = _in_type(graph, source, torch.int32)
        node.args = (source, number)
    if source.meta["val"].dtype.is_floating_point or not isinstance(number, float):
        return
    if number.is_integer():
        return
    name = _name_of(node).partition(".")[0]
    if math.isfinite(number) and name not in ("eq", "ne"):
        bound = math.ceil(number) if name in ("lt", "ge") else math.floor(number)
        node.args = (source, bound)
        return
    # The same for all integers.
    is_true = getattr(operator, name)(0, number)
    node.target = torch.ops.aten.eq.Tensor if is_true else torch.ops.aten.ne.Tensor
    node.args = (source, source)


_REWRITES: dict[str, Callable[[Any, Any], None]] = {
    "add.Tensor": _scale_second,
    "sub.Tensor": _scale_second,
    "select.int": _select_from_start,
    "index.Tensor": _index_from_start,
    "avg_pool2d.default": _sum_of_window,
    "avg_pool3d.default": _sum_of_window,
    "clamp.default": _bounded_on_one_side,
    "clamp.Tensor": _bounded_by_tensors,
    "cumsum.default": _reduced_in_own_type,
    "cumprod.default": _reduced_in_own_type,
    "linalg_vector_norm.default": _norm_in_single_precision,
    "log1p.default": _logarithm_of_one_more,
    "expm1.default": _power_without_one,
    "div.Tensor_mode": _exact_floor,
    "floor_divide.default": _exact_floor,
    "remainder.Scalar": _exact_remainder,
    "remainder.Tensor": _exact_remainder,
    "prod.default": _reduced_in_own_type,
    "sum.default": _reduced_in_own_type,
    "sum.dim_IntList": _reduced_in_own_type,
    "upsample_nearest2d.vec": _nearest_by_factor,
    **{f"{name}.Scalar": _whole_bound for name in _COMPARISONS},
    **{f"{name}.Tensor": _compared_in_common_type for name in _COMPARISONS},
}


def _scaled_elu(node: Any) -> str:
    return "its scales" if any(each != 1 for each in node.args[2:4]) else ""


def _own_divisor(node: Any) -> str:
    return "its divisor" if len(node.args) > 6 and node.args[6] is not None else ""


def _uneven_nearest(node: Any) -> str:
    """TVM takes the nearest place, PyTorch the one below; they agree for whole factors."""
    pairs = zip(extents_of_node(node.args[0])[2:], extents_of_node(node)[2:], strict=True)
    return "which places are nearest" if any(after % before for before, after in pairs) else ""


def _own_factors(node: Any) -> str:
    """Where the result's extent is rounded, the factor that is given is not their ratio."""
    _, _, is_aligned, factors = (*node.args, None)[:4]
    if is_aligned:  # TVM divides by the number of places but one
        return "a single place" if 1 in extents_of_node(node)[2:] else ""
    if not factors:
        return ""
    triples = zip(
        extents_of_node(node.args[0])[2:], factors, extents_of_node(node)[2:], strict=True
    )
    is_exact = all(before * factor == after for before, factor, after in triples)
    return "" if is_exact else "its factors"


def _antialias(_node: Any) -> str:
    return "that it smooths"


def _training(_node: Any) -> str:
    return "that it is in training: export the model after .eval()"


def _random(_node: Any) -> str:
    """TVM draws once, when the model is read, or leaves the numbers out."""
    return "that its numbers are random"


def _whole_power(node: Any) -> str:
    """TVM's powers are of floats."""
    return "" if node.meta["val"].dtype.is_floating_point else "that it is of integers"


def _several_images(node: Any) -> str:
    """TVM normalises each image by itself."""
    return "that images share their mean" if extents_of_node(node.args[0])[0] > 1 else ""


def _multiplied_indices(node: Any) -> str:
    """Beside an axis that is taken whole, TVM multiplies indices out, whatever their shapes."""
    indices = node.args[1]
    places = [place for place, each in enumerate(indices) if each is not None]
    if len(places) < 2 or len(places) == len(indices):
        return ""
    # A column and a row, which are multiplied out in truth.
    first, *rest = (extents_of_node(indices[place]) for place in places)
    is_grid = len(rest) == 1 and first[1:] == [1] and rest[0][:-1] in ([], [1])
    is_adjacent = places == list(range(places[0], len(indices)))
    return "" if is_grid and is_adjacent else "which indices belong together"


def _placed_values(node: Any) -> str:
    """TVM reads values in the order of the indices, of which it takes one for each axis."""
    data, indices, values, *accumulates = node.args
    is_whole = len(indices) == len(extents_of_node(data)) and all(
        each is not None for each in indices
    )
    if not any(accumulates) and is_whole:
        shape = np.broadcast_shapes(*(tuple(extents_of_node(each)) for each in indices))
        if tuple(extents_of_node(values)) == shape:
            return ""
    return "where its values belong"


def _smaller_index(node: Any) -> str:
    """TVM takes the other axes of data and index to have the same extents."""
    data, axis, index, source = node.args
    before, after = extents_of_node(data), extents_of_node(index)
    del before[axis], after[axis]
    is_number = isinstance(source, int | float)
    is_alike = before == after and (is_number or extents_of_node(source) == extents_of_node(index))
    return "" if is_alike else "where its values belong"


def _scaled_regions(node: Any) -> str:
    """TVM shifts regions before they are scaled."""
    is_aligned = len(node.args) > 6 and bool(node.args[6])
    return "where its regions begin" if is_aligned and node.args[2] != 1.0 else ""


def _memory(node: Any) -> str:
    return "where elements are in memory" if reads_memory(node) else ""


_MISREAD: dict[str, Callable[[Any], str]] = {
    "elu.default": _scaled_elu,
    "avg_pool2d.default": _own_divisor,
    "avg_pool3d.default": _own_divisor,
    "upsample_nearest2d.vec": _uneven_nearest,
    "upsample_bilinear2d.vec": _own_factors,
    "upsample_bicubic2d.vec": _own_factors,
    "_upsample_bilinear2d_aa.default": _antialias,
    "_upsample_bicubic2d_aa.default": _antialias,
    "index.Tensor": _multiplied_indices,
    "index_put.default": _placed_values,
    "scatter.src": _smaller_index,
    "scatter.value": _smaller_index,
    "roi_align.default": _scaled_regions,
    "as_strided.default": _memory,
    "pow.Scalar": _whole_power,
    "pow.Tensor_Tensor": _whole_power,
    "bernoulli.p": _random,
    "exponential.default": _random,
    "randn.default": _random,
    "randn_like.default": _random,
    "native_dropout.default": _training,
    "_native_batch_norm_legit_functional.default": _training,
    "_native_batch_norm_legit.no_stats": _several_images,
}


def extents_of_node(node: Any) -> list[int]:
    """Return the extents of a graph's value."""
    return list(node.meta["val"].shape)
