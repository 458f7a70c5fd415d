"""What TVM's converters of PyTorch's operators leave out, so that a model goes another way.

What is refused goes through ONNX; what reads memory is refused by all ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def misread(node: Any) -> str:
    """Return what TVM's converter of a node leaves out; empty if nothing."""
    check = _MISREAD.get(name_of(node))
    return "" if check is None else check(node)


def reads_memory(node: Any) -> bool:
    """Say whether a view depends on where its operand's elements are in memory.

    TVM and ONNX know the elements alone, and take them to be contiguous and the first.
    """
    if name_of(node) != "as_strided.default":
        return False
    source = node.args[0].meta["val"]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    return not source.is_contiguous() or (offset is not None and source.storage_offset() != 0)


def name_of(node: Any) -> str:
    """Return the name of the operator that a node calls; empty if it calls none."""
    is_call = node.op == "call_function"
    return getattr(node.target, "__name__", "") if is_call else ""


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
