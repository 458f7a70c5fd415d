"""ONNX files."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import IRModule, relax_of_onnx
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.frontend.reader import Array, Form, Shapes
from tvm_adaptive.models.frontend.shapes import by_name, match

_MISFIT = "is no ONNX model, or a damaged one"


def read_onnx(path: Path, shapes: Shapes) -> IRModule:
    """Read an ONNX file."""
    import onnx

    try:
        model = onnx.load(str(path))
    except Exception as error:  # protobuf's errors, and those of weights in other files
        raise InvalidOptionError(f"{path} {_MISFIT}: {summary_line(error)}") from error
    if not model.graph.node:  # to protobuf, an empty file is an empty model
        raise InvalidOptionError(f"{path} {_MISFIT}: it does nothing.")
    weights = {each.name for each in model.graph.initializer}
    inputs = {each.name: each for each in model.graph.input if each.name not in weights}
    given = by_name(shapes, list(inputs), str(path))
    values: dict[str, int] = {}
    for key, extents in given.items():
        match(key, _extents(inputs[key]), extents, values)
    with as_invalid_option(f"TVM cannot import {path}"):
        return relax_of_onnx(model, {key: list(extents) for key, extents in given.items()})


def _extents(info: Any) -> list[int | str]:
    """Return the extents of an input: numbers, or names of open ones."""
    return [
        int(extent.dim_value) if extent.HasField("dim_value") else extent.dim_param or f"?{place}"
        for place, extent in enumerate(info.type.tensor_type.shape.dim)
    ]


def _run(path: Path, inputs: Sequence[Array]) -> list[Array]:
    """Run a file in ONNX Runtime; by its path, since a model in memory is limited to 2 GB."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, inputs, strict=True)))
    return [np.asarray(output) for output in outputs]


def _framework() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"ONNX Runtime {importlib.metadata.version('onnxruntime')}"
    return "ONNX Runtime"


ONNX = Form(read_onnx, _MISFIT, "onnx", "'tvm-adaptive[onnx]'", _framework, _run, beside=True)
