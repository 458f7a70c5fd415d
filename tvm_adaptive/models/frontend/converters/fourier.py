"""Fourier transforms as matrix products, which are tuned like any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import relax
from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters import values
from tvm_adaptive.models.frontend.converters.values import Expr, constant, dtype_of, shape_of

# The matrix of a longer one has more than 256 MB.
_MAX_LENGTH = 4096


def convert_dft(node: OnnxNode) -> Expr:
    """Convert DFT, forwards or inverse."""
    op, emit = relax.op, node.builder.emit
    x, length, place_of_axis = node.inputs[0:3]
    rank = len(shape_of(x))
    is_inverse, is_onesided = bool(node.number("inverse")), bool(node.number("onesided"))
    if is_inverse and is_onesided:
        raise ValueError("an inverse transform of one side is not supported")
    axis = node.number("axis", 1)
    if node.opset >= 20:
        axis = -2 if place_of_axis is None else values.known_number(place_of_axis, "axis")
    axis %= rank
    order = [place for place in range(rank - 1) if place != axis] + [axis, rank - 1]
    x = emit(op.permute_dims(x, order)) if order != list(range(rank)) else x
    if length is not None:
        x = _resized(node.builder, x, values.known_number(length, "dft_length"))
    *rest, n, parts = shape_of(x)
    matrix = dft_matrix(n, parts, is_inverse=is_inverse, is_onesided=is_onesided)
    flat = emit(op.reshape(x, [*rest, n * parts]))
    result = emit(op.matmul(flat, constant(matrix, dtype_of(x))))
    result = emit(op.reshape(result, [*rest, matrix.shape[1] // 2, 2]))
    back = [int(place) for place in np.argsort(order)]
    return op.permute_dims(result, back) if back != list(range(rank)) else result


def convert_stft(node: OnnxNode) -> Expr:
    """Convert STFT of a real signal."""
    op, emit = relax.op, node.builder.emit
    signal, frame_step, window, frame_length = node.inputs[0:4]
    shape = shape_of(signal)
    if len(shape) == 3 and shape[2] == 2:
        raise ValueError("complex signals are not supported")
    signal = emit(op.reshape(signal, shape[:2]))
    step = values.known_number(frame_step, "frame_step")
    if frame_length is None and window is None:
        raise ValueError("neither a window nor a frame_length is given")
    n = (
        shape_of(window)[0]
        if frame_length is None
        else values.known_number(frame_length, "frame_length")
    )
    n_frames = 1 + (shape[1] - n) // step
    places = np.arange(n_frames)[:, None] * step + np.arange(n)
    frames = emit(op.take(signal, constant(places.reshape(-1), "int64"), axis=1))
    frames = emit(op.reshape(frames, [shape[0], n_frames, n]))
    if window is not None:
        frames = emit(op.multiply(frames, window))
    is_onesided = bool(node.number("onesided", 1))
    matrix = dft_matrix(n, 1, is_inverse=False, is_onesided=is_onesided)
    result = emit(op.matmul(frames, constant(matrix, dtype_of(signal))))
    return op.reshape(result, [shape[0], n_frames, matrix.shape[1] // 2, 2])


def dft_matrix(
    n: int, parts: int, *, is_inverse: bool, is_onesided: bool
) -> npt.NDArray[np.float64]:
    """Return the matrix from ``n`` numbers of one or two parts to complex ones."""
    if n > _MAX_LENGTH:
        raise ValueError(f"{n} elements are more than {_MAX_LENGTH}")
    bins = n // 2 + 1 if is_onesided else n
    # Reduced first: large angles lose digits.
    angle = 2 * np.pi * (np.outer(np.arange(n), np.arange(bins)) % n) / n
    sign = 1.0 if is_inverse else -1.0
    real, imaginary = np.cos(angle), sign * np.sin(angle)
    matrix = np.empty((n, parts, bins, 2))
    matrix[:, 0, :, 0], matrix[:, 0, :, 1] = real, imaginary
    if parts == 2:
        matrix[:, 1, :, 0], matrix[:, 1, :, 1] = -imaginary, real
    return matrix.reshape(n * parts, bins * 2) / (n if is_inverse else 1)


def _resized(builder: Any, x: Expr, n: int) -> Expr:
    """Cut the axis before the last, or extend it by zeros."""
    rank, present = len(shape_of(x)), shape_of(x)[-2]
    if present > n:
        return builder.emit(relax.op.strided_slice(x, [rank - 2], [0], [n]))
    if present < n:
        widths = [0] * (2 * rank)
        widths[2 * (rank - 2) + 1] = n - present
        return builder.emit(relax.op.nn.pad(x, widths, pad_value=0.0))
    return x
