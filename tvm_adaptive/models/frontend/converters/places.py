"""Operators that move elements or choose among them, windows, and reductions."""

from __future__ import annotations

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode, as_text
from tvm_adaptive.models.frontend.converters import elementwise, values
from tvm_adaptive.models.frontend.converters.values import (
    Array,
    Expr,
    constant,
    dtype_of,
    known,
    shape_of,
)


def convert_pad(node: OnnxNode) -> Expr:
    """Convert Pad; a negative pad cuts elements off."""
    op, attributes = relax.op, node.attributes
    x, widths, filling, chosen = node.inputs[0:4]
    rank = len(shape_of(x))
    if node.opset < 11:
        pads = np.asarray(attributes.get("pads", attributes.get("paddings", ())), "int64")
        value = float(attributes.get("value", 0.0))
    else:
        pads = known(widths, "pads").astype("int64")
        given = None if filling is None else known(filling, "the value of a pad")
        value = 0.0 if given is None or not given.size else float(given.reshape(-1)[0])
    if node.opset >= 18 and chosen is not None:
        full = np.zeros((2, rank), "int64")
        full[:, known(chosen, "axes").astype("int64") % rank] = pads.reshape(2, -1)
        pads = full
    pads = pads.reshape(2, rank)
    if (pads < 0).any():
        first, last = -np.minimum(pads, 0)
        ends = [int(n) for n in shape_of(x) - last]
        x = node.builder.emit(op.strided_slice(x, list(range(rank)), first.tolist(), ends))
        pads = np.maximum(pads, 0)
    if not pads.any():
        return x
    mode = node.text("mode", "constant")
    if mode == "constant":
        return op.nn.pad(x, pads.T.reshape(-1).tolist(), pad_value=value)
    rest = {"mode": mode.encode(), "tvm_custom": attributes["tvm_custom"]}
    inputs = [x, constant(pads.reshape(-1), "int64")]
    return node.by_tvm(inputs=inputs, attributes=rest, opset=max(node.opset, 19))


def convert_conv_transpose(node: OnnxNode) -> Expr:
    """Convert ConvTranspose, with its pads from the shape of the output if that is given."""
    attributes = dict(node.attributes)
    wanted = attributes.pop("output_shape", None)
    if wanted:
        extents, kernel = (np.array(shape_of(each)[2:]) for each in node.inputs[0:2])
        n = len(extents)
        strides, dilations = (
            np.array(attributes.get(name, [1] * n)) for name in ("strides", "dilations")
        )
        extra = np.array(attributes.get("output_padding", [0] * n))
        auto = attributes.pop("auto_pad", b"NOTSET")
        reach = (kernel - 1) * dilations + 1
        totals = strides * (extents - 1) + extra + reach - np.array(wanted)[-n:]
        # Pads below zero are elements added at the end.
        attributes["output_padding"] = tuple((extra - np.minimum(totals, 0)).tolist())
        totals = np.maximum(totals, 0)
        attributes["pads"] = _pads_of(totals, as_text(auto))
    return node.by_tvm(attributes=attributes)


def _pads_of(totals: Array, auto_pad: str) -> tuple[int, ...]:
    """Return the pads before and after each axis, of what both have together."""
    halves = [totals // 2, totals - totals // 2]
    # As ONNX has it: only SAME_UPPER puts the odd one at the end.
    first, last = halves if auto_pad == "SAME_UPPER" else halves[::-1]
    return (*first.tolist(), *last.tolist())


def convert_col2im(node: OnnxNode) -> Expr:
    """Convert Col2Im: a transposed convolution puts the elements of each block in their places."""
    x = node.inputs[0]
    image, block = known(node.inputs[1], "image_shape"), known(node.inputs[2], "block_shape")
    if len(image) != 2:
        raise ValueError(f"images of {len(image)} axes are not supported, only those of two")
    strides, dilations = (node.attributes.get(name, (1, 1)) for name in ("strides", "dilations"))
    pads = node.attributes.get("pads", (0, 0, 0, 0))
    reach = (block - 1) * dilations + 1
    room = image + np.add(pads[:2], pads[2:]) - reach
    n_each = int(np.prod(block))
    batch, channels, _ = shape_of(x)
    groups = channels // n_each
    kernel = np.tile(np.eye(n_each).reshape(n_each, 1, *block), (groups, 1, 1, 1))
    shape = [batch, channels, *map(int, room // strides + 1)]
    return relax.op.nn.conv2d_transpose(
        node.builder.emit(relax.op.reshape(x, shape)),
        constant(kernel, dtype_of(x)),
        strides=list(strides),
        padding=list(pads),
        output_padding=[int(n) for n in room % strides],
        dilation=list(dilations),
        groups=groups,
    )


def convert_scatter_elements(node: OnnxNode) -> Expr:
    """Convert ScatterElements to ScatterND, whose function has blocks that TVM schedules."""
    op, emit = relax.op, node.builder.emit
    data, indices, updates = node.inputs[0:3]
    shape, grids = shape_of(data), np.indices(shape_of(indices))
    axis = node.number("axis") % len(shape)
    reduction = node.text("reduction", "none")
    indices = values.from_start(node.builder, indices, shape[axis])
    parts = [constant(grid[..., None], "int64") for grid in grids]
    parts[axis] = emit(op.expand_dims(indices, [-1]))
    joined = parts[0] if len(parts) == 1 else emit(op.concat(parts, -1))
    return op.scatter_nd(data, joined, updates, "update" if reduction == "none" else reduction)


def convert_reverse_sequence(node: OnnxNode) -> Expr:
    """Convert ReverseSequence by an index for each place."""
    op, emit = relax.op, node.builder.emit
    x, lengths = node.inputs[0:2]
    shape = shape_of(x)
    batch, time = node.number("batch_axis", 1), node.number("time_axis", 0)
    steps = np.arange(shape[time])
    rows = [shape[batch], 1] if batch < time else [1, shape[batch]]
    columns = [1, shape[time]] if batch < time else [shape[time], 1]
    n = emit(op.reshape(values.cast(node.builder, lengths, "int64"), rows))
    k = constant(steps.reshape(columns), "int64")
    mirrored = op.subtract(op.subtract(n, constant(1, "int64")), k)
    index = emit(op.where(op.less(k, n), mirrored, k))
    wide = [extent if place in (batch, time) else 1 for place, extent in enumerate(shape)]
    index = emit(op.reshape(index, wide))
    return op.gather_elements(x, emit(op.broadcast_to(index, shape)), axis=time)


def convert_top_k(node: OnnxNode) -> Expr:
    """Convert TopK; where any order is allowed, it is sorted."""
    # TVM reads k as an attribute before version 11; it is an input since version 10.
    opset = 11 if node.opset == 10 else node.opset
    return node.by_tvm(attributes={**node.attributes, "sorted": 1}, opset=opset)


def convert_slice(node: OnnxNode) -> Expr:
    """Convert Slice, whose bounds are attributes before version 10, which TVM lacks."""
    if node.opset >= 10:
        return node.by_tvm()
    starts, ends = (node.attributes[name] for name in ("starts", "ends"))
    axes = node.attributes.get("axes", range(len(starts)))
    bounds = [constant(list(each), "int64") for each in (starts, ends, axes)]
    return node.by_tvm(inputs=[node.inputs[0], *bounds], attributes={}, opset=13)


def convert_windows(node: OnnxNode) -> Expr:
    """Convert Conv or a pool, with pads in numbers.

    For "SAME", TVM copies the images of a convolution, with channels first, and the pads of its
    pools may be below zero, or too few. Where sizes are rounded up, its LpPool multiplies the mean
    of a window that is cut off by the places of a whole one.
    """
    if node.operator == "LpPool" and dtype_of(node.inputs[0]) in values.HALVES:
        return elementwise.convert_in_single_precision(node, convert_windows)
    attributes = dict(node.attributes)
    auto = as_text(attributes.pop("auto_pad", "NOTSET"))
    is_rounded_up = bool(attributes.pop("ceil_mode", 0))
    is_same = auto.startswith("SAME")
    if not is_same and not (is_rounded_up and node.operator == "LpPool"):
        return node.by_tvm()
    extents = np.array(shape_of(node.inputs[0])[2:])
    ones = [1] * len(extents)
    strides, dilations = (np.array(attributes.get(n, ones)) for n in ("strides", "dilations"))
    kernel = attributes.get("kernel_shape") or shape_of(node.inputs[1])[2:]
    reach = (np.array(kernel) - 1) * dilations + 1
    if is_same:
        results = -(-extents // strides)
        totals = np.maximum((results - 1) * strides + reach - extents, 0)
        attributes["pads"] = _pads_of(totals, auto)
        return node.by_tvm(attributes=attributes)
    first, last = np.reshape(attributes.get("pads", [0, 0] * len(extents)), (2, -1))
    results = -((reach - extents - first - last) // strides) + 1
    # A window that would begin behind the image is left out.
    results -= (results - 1) * strides >= extents + first
    last = np.maximum((results - 1) * strides + reach - extents - first, 0)
    attributes["pads"] = (*first.tolist(), *last.tolist())
    return node.by_tvm(attributes=attributes)


def convert_non_max_suppression(node: OnnxNode) -> Expr:
    """Convert NonMaxSuppression: a box at the threshold stays, which TVM would remove.

    TVM has limits of its own where they are left out or no constants, and takes scores of zero
    and less for what it has removed.
    """
    op, emit = relax.op, node.builder.emit
    boxes, scores, *limits = node.inputs[0:5]
    names = ("max_output_boxes_per_class", "iou_threshold", "score_threshold")
    most, overlap, least = (
        None if value is None else known(value, name).reshape(-1)[0]
        for value, name in zip(limits, names, strict=True)
    )
    # TVM takes an overlap of zero, also a subnormal one, as none to look for.
    tiny = np.finfo("float32").tiny
    above = max(np.nextafter(np.float32(overlap or 0.0), np.float32(2)), tiny)
    if least is None:  # all stay; those above zero as exact as they are
        lowest, zero = emit(op.min(scores)), constant(0.0, "float32")
        shifted = op.subtract(scores, op.subtract(lowest, constant(1.0, "float32")))
        raised = op.maximum(scores, constant(tiny, "float32"))
        scores = emit(op.where(op.less(lowest, zero), shifted, raised))
        least = np.float32(0.0)
    elif least < 0:
        scores, least = emit(op.subtract(scores, constant(least, "float32"))), np.float32(0.0)
    # TVM makes room for as many; no class can keep more boxes than there are.
    n_most = min(int(most or 0), shape_of(boxes)[1])
    limits = [constant(n_most, "int64"), constant(above, "float32"), constant(least, "float32")]
    return node.by_tvm(inputs=[boxes, scores, *limits])


def convert_cum_prod(node: OnnxNode) -> Expr:
    """Convert CumProd."""
    op, emit = relax.op, node.builder.emit
    x, axis = node.inputs[0], values.known_number(node.inputs[1], "axis")
    is_reversed = node.number("reverse")
    x = emit(op.flip(x, axis)) if is_reversed else x
    x = emit(op.cumprod(x, axis, exclusive=bool(node.number("exclusive"))))
    return op.flip(x, axis) if is_reversed else x


def convert_extreme(node: OnnxNode) -> Expr:
    """Convert ReduceMax or ReduceMin, also of truth values, and of what is all infinite.

    TVM begins with the least finite number, or the largest: of its half, twice is infinite.
    """
    emit, (x, *axes) = node.builder.emit, list(node.inputs)
    dtype = dtype_of(x)
    if dtype in ("float32", "float64"):
        half = emit(relax.op.multiply(x, constant(0.5, dtype)))
        found = emit(node.by_tvm(inputs=[half, *axes]))
        return relax.op.multiply(found, constant(2.0, dtype))
    wide = {"bool": "int32", **dict.fromkeys(values.HALVES, "float32")}.get(dtype)
    if wide is None:
        return node.by_tvm()
    found = emit(node.by_tvm(inputs=[values.cast(node.builder, x, wide), *axes]))
    return values.cast(node.builder, found, dtype)


def convert_sequence_insert(node: OnnxNode) -> Expr:
    """Convert SequenceInsert, whose position may count from the end."""
    parts, (_, value, position) = list(node.inputs[0]), node.inputs[0:3]
    n = len(parts)
    place = n if position is None else values.known_number(position, "position")
    if not -n <= place <= n:
        raise ValueError(f"position {place} is not within a list of {n}")
    parts.insert(place + n if place < 0 else place, value)
    return relax.Tuple(parts)


def convert_composite_reduction(node: OnnxNode) -> Expr:
    """Convert a reduction of absolute values or squares; over no axes, each has its own."""
    op = relax.op
    x, *axes = list(node.inputs)
    is_over_none = all(each is None or not values.known(each, "axes").size for each in axes)
    if node.opset < 18 or not node.number("noop_with_empty_axes") or not is_over_none:
        # Squares of a few hundred are infinite in half precision.
        return elementwise.convert_in_single_precision(node)
    if node.operator == "ReduceSumSquare":
        return op.multiply(x, x)
    return op.log(x) if node.operator == "ReduceLogSum" else op.abs(x)


def convert_log_sum_exp(node: OnnxNode) -> Expr:
    """Convert ReduceLogSumExp; infinite elements are not subtracted from themselves."""
    op, emit = relax.op, node.builder.emit
    x, *given = list(node.inputs)
    axes = list(node.attributes.get("axes", ()))
    if given and given[0] is not None:
        axes = [int(axis) for axis in values.known(given[0], "axes")]
    if not axes and node.number("noop_with_empty_axes"):
        return x
    most = emit(op.max(x, axes or None, keepdims=True))
    most = emit(op.where(op.isfinite(most), most, constant(0, dtype_of(x))))
    total = emit(op.sum(op.exp(op.subtract(x, most)), axes or None, keepdims=True))
    total = emit(op.add(op.log(total), most))
    return total if node.number("keepdims", 1) else op.squeeze(total, axes or None)


def convert_split(node: OnnxNode) -> Expr:
    """Convert Split, also into a single part."""
    return node.inputs[0] if node.attributes["tvm_custom"]["num_outputs"] == 1 else node.by_tvm()


def convert_roi_align(node: OnnxNode) -> Expr:
    """Convert RoiAlign; TVM shifts regions before they are scaled, ONNX afterwards."""
    if node.text("mode", "avg") == "max":
        raise ValueError("mode max is not supported")
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    if node.text("coordinate_transformation_mode", default) != "half_pixel":
        return node.by_tvm()
    x, regions, *rest = list(node.inputs)
    scale = float(node.attributes.get("spatial_scale", 1.0))
    shift = constant(0.5 - 0.5 / scale, dtype_of(regions))
    shifted = node.builder.emit(relax.op.add(regions, shift))
    return node.by_tvm(inputs=[x, shifted, *rest])


def convert_unsqueeze(node: OnnxNode) -> Expr:
    """Convert Unsqueeze, whose axes may be a single number since they are an input."""
    x, axes = node.inputs[0:2]
    found = None if axes is None else values.array_of(axes)
    if found is None or found.ndim == 1:
        return node.by_tvm()
    return node.by_tvm(inputs=[x, constant(found.reshape(-1), "int64")])
