"""What TVM's converters of PyTorch's operators misread, written otherwise.

They keep type and shape, so that nothing else notices before the outputs are compared.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from tvm_adaptive.models.frontend.torch_misread import extents_of_node, name_of

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def repair(graph: Any) -> None:
    """Write operators of a graph of fixed shapes so that TVM's converters compute the same."""
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(name_of(node))
        if rewrite is not None:
            with graph.inserting_before(node):
                rewrite(graph, node)


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


def _single_at_least(dtype: Any) -> Any:
    """Return a type of floats, or single precision instead of half."""
    import torch

    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _scale_second(graph: Any, node: Any) -> None:
    """Multiply the second operand by ``alpha``."""
    import torch

    alpha = node.kwargs.get("alpha", 1)
    first, second = node.args
    node.kwargs = {}
    if node.meta["val"].dtype == torch.bool:
        _either(graph, node)
        return
    if alpha == 1:
        return
    if isinstance(second, torch.fx.Node):
        # The product of an integer and a fraction would be an integer.
        second = _in_type(graph, second, node.meta["val"].dtype)
        scaled = _called(graph, torch.ops.aten.mul.Tensor, second, alpha)
    else:
        scaled = alpha * second
    node.args = (first, scaled)


def _both(graph: Any, node: Any) -> None:
    """Write a product of truth values as their conjunction: LLVM has no such product."""
    _as_logical(graph, node, "logical_and")


def _either(graph: Any, node: Any) -> None:
    """Write a sum of truth values as their disjunction."""
    _as_logical(graph, node, "logical_or")


def _as_logical(graph: Any, node: Any, name: str) -> None:
    import torch

    if node.meta["val"].dtype != torch.bool:
        return
    node.args = tuple(
        each if isinstance(each, torch.fx.Node) else _number(graph, bool(each), node)
        for each in node.args
    )
    node.target, node.kwargs = getattr(torch.ops.aten, name).default, {}


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
    n_axes = 2 if "2d" in name_of(node) else 3
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
    # What is no number stays so: of two that do not compare, TVM takes the second.
    for function, bound in steps[:-1]:
        source = _called(graph, function, bound, source)
    function, bound = steps[-1]
    node.target, node.args, node.kwargs = function, (bound, source), {}


def _reduced_in_own_type(graph: Any, node: Any) -> None:
    """Add and multiply in the type of the result: TVM does it in that of the operand."""
    source, *rest = node.args
    node.args = (_in_type(graph, source, node.meta["val"].dtype), *rest)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}


def _norm_in_single_precision(graph: Any, node: Any) -> None:
    """Square and add in single precision: squares of a few hundred are infinite in half."""
    source, *rest = node.args
    dtype = node.meta["val"].dtype
    wide = _single_at_least(dtype)
    node.args, node.kwargs = (_in_type(graph, source, wide), *rest), {}


def _extreme(graph: Any, node: Any) -> None:
    """Begin at infinity, and reduce truth values as integers.

    TVM begins with the least finite number, or the largest: of its half, twice is infinite.
    """
    import torch

    source, *rest = node.args
    dtype = node.meta["val"].dtype
    function, ops, call = node.target, torch.ops.aten, functools.partial(_called, graph)
    if dtype == torch.bool:
        found = call(function, _in_type(graph, source, torch.int32), *rest, **node.kwargs)
    elif dtype.is_floating_point:
        wide = _single_at_least(dtype)
        half = call(ops.mul.Tensor, _in_type(graph, source, wide), 0.5)
        found = call(ops.mul.Tensor, call(function, half, *rest, **node.kwargs), 2.0)
    else:
        return
    node.target, node.args, node.kwargs = ops._to_copy.default, (found,), {"dtype": dtype}


def _sorted_in_known_type(graph: Any, node: Any) -> None:
    """Sort numbers of a type that TVM's function sorts; it fails when it is called."""
    import torch

    source, *rest = node.args
    dtype = source.meta["val"].dtype
    narrow = (torch.bool, torch.uint8, torch.int8, torch.int16)
    wide = {torch.bfloat16: torch.float32, **dict.fromkeys(narrow, torch.int32)}.get(dtype)
    if wide is None:
        return
    node.args = (_in_type(graph, source, wide), *rest)
    for values in [each for each in node.users if each.args[1] == 0]:  # the other ones are places
        values.meta["val"] = values.meta["val"].to(wide)
        readers = list(values.users)
        with graph.inserting_after(values):
            back = _called(graph, torch.ops.aten._to_copy.default, values, dtype=dtype)
        for reader in readers:
            reader.replace_input_with(values, back)


def _compared_in_common_type(graph: Any, node: Any) -> None:
    """Compare in PyTorch's type: a tensor without axes does not widen the other one."""
    import torch

    first, second = node.args
    ops, name = torch.ops.aten, name_of(node).partition(".")[0]
    if first is second and name in ("eq", "ne") and first.meta["val"].dtype.is_floating_point:
        # TVM takes each number to be equal to itself.
        is_none = _called(graph, ops.isnan.default, first)
        node.target = ops.logical_not.default if name == "eq" else ops.clone.default
        node.args = (is_none,)
        return
    dtype = torch.result_type(*(each.meta["val"] for each in node.args))
    dtype = torch.int32 if dtype == torch.bool else dtype  # LLVM compares no truth values
    node.args = tuple(_in_type(graph, each, dtype) for each in node.args)


def _logarithm_of_one_more(graph: Any, node: Any) -> None:
    """Take the logarithm of 1 + x exactly: TVM's is 0 of all small x."""
    import torch

    x = _in_type(graph, node.args[0], node.meta["val"].dtype)
    node.target, node.args, node.kwargs = torch.ops.aten.where.self, _log1p(graph, node, x), {}


def _area_tangent(graph: Any, node: Any) -> None:
    """Take half the difference of two such logarithms: TVM's atanh is 0 of all small x."""
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    x = _in_type(graph, node.args[0], node.meta["val"].dtype)
    up, down = (
        call(ops.where.self, *_log1p(graph, node, each)) for each in (x, call(ops.neg.default, x))
    )
    node.target, node.kwargs = ops.mul.Tensor, {}
    node.args = (call(ops.sub.Tensor, up, down), 0.5)


def _log1p(graph: Any, node: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return a condition and two values of which it chooses the logarithm of 1 + x.

    Kahan's correction divides the rounding of 1 + x out (Higham, Accuracy and Stability of
    Numerical Algorithms, 2002, section 1.14.1, and its problem 1.5).
    """
    import torch

    ops, call = torch.ops.aten, functools.partial(_called, graph)
    raised = call(ops.add.Tensor, x, 1.0)
    found = call(ops.sub.Tensor, raised, 1.0)
    # Of infinity, the quotient is not a number.
    one = _number(graph, 1.0, node)
    factor = call(ops.where.self, call(ops.gt.Scalar, x, 1.0), one, call(ops.div.Tensor, x, found))
    logarithm = call(ops.mul.Tensor, call(ops.log.default, raised), factor)
    return call(ops.eq.Scalar, found, 0.0), x, logarithm


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
    is_floor = "floor" in (name_of(node)[:5], node.kwargs.get("rounding_mode"))
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
    number = int(number) if isinstance(number, bool) else number
    if source.meta["val"].dtype == torch.bool:  # which LLVM does not compare
        source = _in_type(graph, source, torch.int32)
    node.args = (source, number)
    if source.meta["val"].dtype.is_floating_point or not isinstance(number, float):
        return
    if number.is_integer():
        return
    name = name_of(node).partition(".")[0]
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
    "atanh.default": _area_tangent,
    "log1p.default": _logarithm_of_one_more,
    "mul.Tensor": _both,
    "minimum.default": _both,
    "maximum.default": _either,
    **dict.fromkeys(("max.default", "min.default"), _extreme),
    **dict.fromkeys(
        ("topk.default", "sort.default", "max.dim", "median.dim"), _sorted_in_known_type
    ),
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
