"""ONNX files."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import relax_of_onnx
from tvm_adaptive.errors import InvalidOptionError, essence, refused
from tvm_adaptive.importers.shapes import by_name, match, network_of_imported
from tvm_adaptive.models.network import Network, Original


def network_of_onnx(path: Path, name: str, shapes: Mapping[str, Sequence[int]]) -> Network:
    """Read an ONNX file.

    Parameters
    ----------
    path : Path
    name : str
        Of the network.
    shapes : mapping of str to sequence of int
        As for :func:`~tvm_adaptive.importers.load`.

    Raises
    ------
    InvalidOptionError
        When the package onnx is missing, the file is no ONNX model, an operator is
        unknown to TVM, or a shape stays dynamic.
    """
    if importlib.util.find_spec("onnx") is None:
        raise InvalidOptionError(
            f"Reading {path} needs the package onnx: pip install 'tvm-adaptive[onnx]'."
        )
    import onnx

    try:
        model = onnx.load(str(path))
    except Exception as error:  # protobuf's errors, and those of weights in other files
        raise InvalidOptionError(
            f"{path} is no ONNX model, or a damaged one: {essence(error)}"
        ) from error
    if not model.graph.node:  # to protobuf, an empty file is an empty model
        raise InvalidOptionError(f"{path} is no ONNX model, or a damaged one: it does nothing.")
    weights = {each.name for each in model.graph.initializer}
    inputs = {each.name: each for each in model.graph.input if each.name not in weights}
    given = by_name(shapes, list(inputs), str(path))
    values: dict[str, int] = {}
    for key, extents in given.items():
        match(key, _extents(inputs[key]), extents, values)
    with refused(f"TVM cannot import {path}"):
        mod = relax_of_onnx(model, {key: list(extents) for key, extents in given.items()})
    return network_of_imported(name, mod, given, original=_original(model))


def _extents(info: Any) -> list[int | str]:
    """Return the extents of an input: numbers, or names of what is open."""
    return [
        int(extent.dim_value) if extent.HasField("dim_value") else extent.dim_param or f"?{place}"
        for place, extent in enumerate(info.type.tensor_type.shape.dim)
    ]


def _original(model: Any) -> Original | None:
    """Return the model as ONNX Runtime runs it; None where that is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = None
    with contextlib.suppress(Exception):  # an operator, or a version, that it does not know
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
    if session is None:
        return None
    names = [each.name for each in session.get_inputs()]

    def run(inputs: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        outputs = session.run(None, dict(zip(names, inputs, strict=True)))
        return [np.asarray(output) for output in outputs]

    return Original(f"ONNX Runtime {onnxruntime.__version__}", run)
