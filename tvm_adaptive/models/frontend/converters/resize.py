"""Resize: TVM's own for images where it is right, a weighted sum of places otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters import values
from tvm_adaptive.models.frontend.converters.values import Array, Expr, constant, dtype_of, shape_of

# Coordinates in which TVM's function for images agrees with ONNX's definition.
_SAME = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
# How Resize rounds places before version 11, where ONNX leaves it open: as ONNX Runtime does.
_SIMPLE = "floor, ceil if smaller"


@dataclasses.dataclass(frozen=True)
class Axis:
    """How one axis is resized."""

    n_in: int
    n_out: int
    scale: float
    start: float = 0.0  # of a region, as a share of the axis
    end: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mode:
    """The attributes of a Resize."""

    method: str = "nearest"
    coordinates: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


def convert_resize(node: OnnxNode) -> Expr:
    """Convert Resize of any rank, mode and axes."""
    x, attributes = node.inputs[0], node.attributes
    mode = Mode(
        node.text("mode", "nearest"),
        node.text("coordinate_transformation_mode", "half_pixel"),
        node.text("nearest_mode", "round_prefer_floor"),
        float(attributes.get("cubic_coeff_a", -0.75)),
        bool(node.number("exclude_outside")),
        bool(node.number("antialias")),
        float(attributes.get("extrapolation_value", 0.0)),
    )
    if node.opset < 11:
        mode = dataclasses.replace(mode, coordinates="asymmetric", rounding=_SIMPLE)
        given: list[Array | None] = [None, values.known(node.inputs[1], "scales"), None]
    else:
        roi = node.inputs[1] if mode.coordinates == "tf_crop_and_resize" else None
        pairs = zip((roi, *node.inputs[2:4]), ("roi", "scales", "sizes"), strict=True)
        given = [None if value is None else values.known(value, name) for value, name in pairs]
    axes = axes_of(node, *given)
    if node.opset >= 11 and "axes" not in attributes and _is_image(x, axes, mode):
        # TVM would round the product of a scale in its own way.
        sizes = constant([each.n_out for each in axes], "int64")
        return node.by_tvm(operator="Resize", inputs=[x, None, None, sizes])
    dtype = dtype_of(x)
    if mode.method == "nearest" or "float" in dtype:
        return resized(node.builder, x, axes, mode)
    found = resized(node.builder, values.cast(node.builder, x, "float32"), axes, mode)
    return values.cast(node.builder, found, dtype)


def convert_upsample(node: OnnxNode) -> Expr:
    """Convert Upsample, the Resize of old models."""
    scales = node.attributes.get("scales")
    if scales is None:
        scales = values.known(node.inputs[1], "scales")
    rest = {"mode": node.text("mode", "nearest")}
    inputs = [node.inputs[0], constant(scales, "float32")]
    return convert_resize(dataclasses.replace(node, inputs=inputs, attributes=rest, opset=10))


def _is_image(x: Expr, axes: Sequence[Axis], mode: Mode) -> bool:
    """Say whether TVM's function for images computes what ONNX defines."""
    plain = not (mode.antialias or mode.exclude_outside) and mode.coordinates in _SAME
    # Between two places, TVM's product of a place and a ratio may fall on either side.
    is_whole = mode.coordinates != "align_corners" and all(
        each.n_out % each.n_in == 0 or each.n_in % each.n_out == 0 for each in axes[2:]
    )
    if mode.method == "nearest" and not is_whole:
        return False
    exact = all(
        abs(each.n_in * each.scale - each.n_out) < 1e-6 and each.n_out > 1 for each in axes[2:]
    )
    fixed = all(each.n_in == each.n_out for each in axes[:2])
    return len(axes) == 4 and plain and exact and fixed and "float" in dtype_of(x)


def axes_of(
    node: OnnxNode, roi: Array | None, scales: Array | None, sizes: Array | None
) -> list[Axis]:
    """Return how each axis is resized."""
    shape = shape_of(node.inputs[0])
    rank = len(shape)
    chosen = [int(axis) % rank for axis in node.attributes.get("axes", range(rank))]
    found = [Axis(n, n, 1.0) for n in shape]
    regions = np.zeros(0) if roi is None else roi.reshape(-1)
    if sizes is not None and sizes.size:
        wanted = [int(n) for n in sizes]
        ratios = [n / shape[axis] for n, axis in zip(wanted, chosen, strict=True)]
        policy = node.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(chosen)
            wanted = [math.floor(ratio * shape[axis] + 0.5) for axis in chosen]
    elif scales is not None and scales.size:
        ratios = [float(each) for each in scales]
        # As ONNX Runtime: of numbers of single precision, so that 10 times 0.7 is 7.
        pairs = zip(chosen, np.asarray(scales, np.float32), strict=True)
        wanted = [int(np.float32(shape[axis]) * ratio) for axis, ratio in pairs]
    else:
        raise ValueError("neither scales nor sizes are given")
    for place, axis in enumerate(chosen):
        ends = (0.0, 1.0)
        if regions.size:
            ends = float(regions[place]), float(regions[place + len(chosen)])
        found[axis] = Axis(shape[axis], wanted[place], ratios[place], *ends)
    return found


def resized(builder: Any, x: Expr, axes: Sequence[Axis], mode: Mode) -> Expr:
    """Resize one axis after the other."""
    op = relax.op
    dtype, rank = dtype_of(x), len(axes)
    for place, axis in enumerate(axes):
        is_same = axis.n_in == axis.n_out and (axis.start, axis.end) == (0.0, 1.0)
        if is_same and axis.scale == 1.0:
            continue
        indices, weights, outside = taps(axis, mode)
        wide = [-1 if each == place else 1 for each in range(rank)]
        total = None
        for column, weight in zip(indices.T, weights.T, strict=True):
            part = builder.emit(op.take(x, constant(column, "int64"), axis=place))
            if not np.all(weight == 1.0):
                part = op.multiply(part, constant(weight.reshape(wide), dtype))
            total = builder.emit(part if total is None else op.add(total, part))
        if outside.any():
            mask = constant(outside.reshape(wide), "bool")
            total = builder.emit(op.where(mask, constant(mode.extrapolation, dtype), total))
        x = total
    return x


def taps(axis: Axis, mode: Mode) -> tuple[Array, Array, Array]:
    """Return the places and weights of each element, and which ones lie outside."""
    positions = _positions(axis, mode)
    outside = np.zeros(axis.n_out, bool)
    if mode.coordinates == "tf_crop_and_resize":
        outside = (positions < 0) | (positions > axis.n_in - 1)
    if mode.method == "nearest":
        rounding = mode.rounding
        if rounding == _SIMPLE:
            rounding = "ceil" if axis.scale < 1.0 else "floor"
        indices = _rounded(positions, rounding)[:, None]
        return np.clip(indices, 0, axis.n_in - 1), np.ones(indices.shape), outside
    reach = 1 if mode.method == "linear" else 2
    # Fewer elements than before: each is an average of all that it covers.
    stretch = min(axis.scale, 1.0) if mode.antialias else 1.0
    first = np.floor(positions).astype(int) - math.ceil(reach / stretch) + 1
    indices = first[:, None] + np.arange(2 * math.ceil(reach / stretch))
    distance = np.abs(indices - positions[:, None]) * stretch
    weights = np.maximum(1 - distance, 0) if reach == 1 else _cubic(distance, mode.cubic)
    if mode.antialias or mode.exclude_outside:
        if mode.exclude_outside:
            weights = np.where((indices < 0) | (indices >= axis.n_in), 0, weights)
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(indices, 0, axis.n_in - 1), weights, outside


# Of places before they are divided; the second one is of opsets 11 and 12.
_SHIFTS = {"asymmetric": 0.0, "tf_half_pixel_for_nn": 0.5}


def _positions(axis: Axis, mode: Mode) -> Array:
    """Return where the elements of the result lie on the axis."""
    x = np.arange(axis.n_out, dtype="float64")
    kind = mode.coordinates
    if kind == "align_corners":
        return x * (axis.n_in - 1) / (axis.n_out - 1) if axis.n_out != 1 else 0 * x
    if kind in _SHIFTS:
        return (x + _SHIFTS[kind]) / axis.scale
    if kind == "tf_crop_and_resize":
        if axis.n_out == 1:
            return 0 * x + 0.5 * (axis.start + axis.end) * (axis.n_in - 1)
        step = (axis.end - axis.start) * (axis.n_in - 1) / (axis.n_out - 1)
        return axis.start * (axis.n_in - 1) + x * step
    if kind == "pytorch_half_pixel" and axis.n_out == 1:
        return 0 * x
    positions = (x + 0.5) / axis.scale - 0.5
    if kind == "half_pixel_symmetric":
        positions += axis.n_in / 2 * (1 - axis.n_out / (axis.scale * axis.n_in))
    elif kind not in ("half_pixel", "pytorch_half_pixel"):
        raise ValueError(f"coordinate_transformation_mode {kind} is unknown")
    return positions


def _rounded(positions: Array, mode: str) -> Array:
    functions: dict[str, Callable[[Array], Array]] = {
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if mode not in functions:
        raise ValueError(f"nearest_mode {mode} is unknown")
    # A third of two is no integer by a rounding error.
    return np.asarray(functions[mode](np.round(positions, 9))).astype(int)


def _cubic(distance: Array, a: float) -> Array:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))
