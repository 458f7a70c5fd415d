"""Operators that move elements: transposed convolutions' pads, scatters, sequences, choices."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import onnx_converters
from tvm_adaptive.models.frontend.converters.values import (
    array_of,
    constant,
    dtype_of,
    known,
    shape_of,
    text_of,
)

Expr = Any


def convert_pad(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert Pad; a negative pad cuts elements off."""
    if opset < 11:
        pads = np.asarray(attributes.get("pads", attributes.get("paddings", ())), "int64")
        value = float(attributes.get("value", 0.0))
    else:
        pads = known(inputs[1], "pads").astype("int64")
        given = None if inputs[2] is None else known(inputs[2], "the value of a pad")
        value = 0.0 if given is None or not given.size else float(given.reshape(-1)[0])
    x, rank = inputs[0], len(shape_of(inputs[0]))
    if opset >= 18 and inputs[3] is not None:
        axes = known(inputs[3], "axes").astype("int64") % rank
        full = np.zeros((2, rank), "int64")
        full[:, axes] = pads.reshape(2, -1)
        pads = full.reshape(-1)
    before, after = pads.reshape(2, rank)
    if (cut := np.minimum(pads, 0)).any():
        first, last = -cut.reshape(2, rank)
        ends = [extent - int(n) for extent, n in zip(shape_of(x), last, strict=True)]
        x = builder.emit(
            relax.op.strided_slice(x, list(range(rank)), [int(n) for n in first], ends)
        )
        before, after = np.maximum(before, 0), np.maximum(after, 0)
    if not before.any() and not after.any():
        return x
    mode = text_of(attributes, "mode", "constant")
    rest = {"mode": mode.encode(), "tvm_custom": attributes["tvm_custom"]}
    if mode == "constant":
        widths = [int(n) for pair in zip(before, after, strict=True) for n in pair]
        return relax.op.nn.pad(x, widths, pad_value=value)
    joined = constant(np.concatenate([before, after]), "int64")
    return onnx_converters()["Pad"](builder, _Inputs([x, joined]), rest, scope, max(opset, 19))


class _Inputs(list[Any]):
    """Inputs of a converter of TVM: those left out are None."""

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int) and item >= len(self):
            return None
        return super().__getitem__(item)


def convert_conv_transpose(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert ConvTranspose, with its pads from the shape of the output if that is given."""
    attributes = dict(attributes)
    wanted = attributes.pop("output_shape", None)
    if wanted:
        extents, kernel = shape_of(inputs[0])[2:], shape_of(inputs[1])[2:]
        n = len(extents)
        strides = attributes.get("strides", [1] * n)
        dilations = attributes.get("dilations", [1] * n)
        extra = attributes.get("output_padding", [0] * n)
        auto = attributes.pop("auto_pad", b"NOTSET")
        totals = [
            strides[i] * (extents[i] - 1)
            + extra[i]
            + (kernel[i] - 1) * dilations[i]
            + 1
            - list(wanted)[-n:][i]
            for i in range(n)
        ]
        # Pads below zero are elements added at the end.
        attributes["output_padding"] = tuple(extra[i] - min(totals[i], 0) for i in range(n))
        totals = [max(total, 0) for total in totals]
        smaller = [total // 2 for total in totals]
        larger = [total - total // 2 for total in totals]
        # As ONNX has it: only SAME_UPPER puts the odd one at the end.
        first, last = (smaller, larger) if auto == b"SAME_UPPER" else (larger, smaller)
        attributes["pads"] = (*first, *last)
    return onnx_converters()["ConvTranspose"](builder, inputs, attributes, scope, opset)


def convert_col2im(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert Col2Im: a transposed convolution puts the elements of each block in their places."""
    x = inputs[0]
    image, block = known(inputs[1], "image_shape"), known(inputs[2], "block_shape")
    if len(image) != 2:
        raise ValueError(f"images of {len(image)} axes are not supported, only those of two")
    strides, dilations = (attributes.get(name, (1, 1)) for name in ("strides", "dilations"))
    pads = attributes.get("pads", (0, 0, 0, 0))
    reach = (block - 1) * dilations + 1
    room = image + np.add(pads[:2], pads[2:]) - reach
    n_each = int(np.prod(block))
    batch, channels, _ = shape_of(x)
    groups = channels // n_each
    kernel = np.tile(np.eye(n_each).reshape(n_each, 1, *block), (groups, 1, 1, 1))
    return relax.op.nn.conv2d_transpose(
        builder.emit(relax.op.reshape(x, [batch, channels, *map(int, room // strides + 1)])),
        constant(kernel, dtype_of(x)),
        strides=list(strides),
        padding=list(pads),
        output_padding=[int(n) for n in room % strides],
        dilation=list(dilations),
        groups=groups,
    )


def convert_scatter_elements(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert ScatterElements to ScatterND, whose function has blocks that TVM schedules."""
    op = relax.op
    data, indices, updates = inputs[0], inputs[1], inputs[2]
    shape, places = shape_of(data), shape_of(indices)
    axis = int(attributes.get("axis", 0)) % len(shape)
    reduction = text_of(attributes, "reduction", "none")
    if dtype_of(indices) != "int64":
        indices = builder.emit(op.astype(indices, "int64"))
    extent = constant(shape[axis], "int64")
    zero = constant(0, "int64")
    indices = builder.emit(op.where(op.less(indices, zero), op.add(indices, extent), indices))
    grids = np.indices(places)
    parts = [
        builder.emit(op.expand_dims(indices, [-1]))
        if place == axis
        else constant(grids[place][..., None], "int64")
        for place in range(len(shape))
    ]
    joined = parts[0] if len(parts) == 1 else builder.emit(op.concat(parts, -1))
    names = {"none": "update"}
    return op.scatter_nd(data, joined, updates, names.get(reduction, reduction))


def convert_reverse_sequence(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert ReverseSequence by an index for each place."""
    op = relax.op
    x, lengths = inputs[0], inputs[1]
    shape = shape_of(x)
    batch, time = int(attributes.get("batch_axis", 1)), int(attributes.get("time_axis", 0))
    steps = np.arange(shape[time])
    fixed = array_of(lengths)
    rows = [shape[batch], 1] if batch < time else [1, shape[batch]]
    columns = [1, shape[time]] if batch < time else [shape[time], 1]
    if fixed is not None:
        n, k = fixed.reshape(rows), steps.reshape(columns)
        index = constant(np.where(k < n, n - 1 - k, k), "int64")
    else:
        n = builder.emit(op.reshape(op.astype(lengths, "int64"), rows))
        k = constant(steps.reshape(columns), "int64")
        mirrored = op.subtract(op.subtract(n, constant(1, "int64")), k)
        index = builder.emit(op.where(op.less(k, n), mirrored, k))
    wide = [extent if place in (batch, time) else 1 for place, extent in enumerate(shape)]
    index = builder.emit(op.reshape(index, wide))
    return op.gather_elements(x, builder.emit(op.broadcast_to(index, shape)), axis=time)


def convert_top_k(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert TopK; where any order is allowed, it is sorted."""
    return onnx_converters()["TopK"](builder, inputs, {**attributes, "sorted": 1}, scope, opset)


def convert_non_max_suppression(
    builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
) -> Expr:
    """Convert NonMaxSuppression: a box at the threshold stays, which TVM would remove."""
    given = _Inputs(list(inputs))
    threshold = None if given[3] is None else array_of(given[3])
    if threshold is not None:
        above = np.nextafter(threshold.astype("float32"), np.float32(2))
        given[3] = constant(above, "float32")
    return onnx_converters()["NonMaxSuppression"](builder, given, attributes, scope, opset)


def convert_cum_prod(
    builder: Any, inputs: Any, attributes: dict[str, Any], _scope: Any, _opset: int
) -> Expr:
    """Convert CumProd."""
    op = relax.op
    x = inputs[0]
    axis = int(known(inputs[1], "axis").reshape(-1)[0])
    is_reversed = bool(attributes.get("reverse", 0))
    x = builder.emit(op.flip(x, axis)) if is_reversed else x
    x = builder.emit(op.cumprod(x, axis, exclusive=bool(attributes.get("exclusive", 0))))
    return op.flip(x, axis) if is_reversed else x


def convert_reduced_truth(name: str) -> Any:
    """Return a converter of ReduceMax or ReduceMin that knows truth values."""

    def convert(
        builder: Any, inputs: Any, attributes: dict[str, Any], scope: Any, opset: int
    ) -> Expr:
        stock = onnx_converters()[name]
        if dtype_of(inputs[0]) != "bool":
            return stock(builder, inputs, attributes, scope, opset)
        wide = builder.emit(relax.op.astype(inputs[0], "int32"))
        rest = _Inputs([wide, *list(inputs)[1:]])
        result = builder.emit(stock(builder, rest, attributes, scope, opset))
        return relax.op.astype(result, "bool")

    return convert
