"""ONNX files."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import IRModule
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.frontend import onnx_graph
from tvm_adaptive.models.frontend.onnx_control import (
    compared_numbers,
    decided,
    is_controlled,
    merged,
    taken,
    unrolled,
)
from tvm_adaptive.models.frontend.onnx_import import expanded, relax_of_graph
from tvm_adaptive.models.frontend.open_extents import InputShape, key_of, open_message
from tvm_adaptive.models.frontend.reader import Array, Form, Inference, Numbers, Shapes
from tvm_adaptive.models.frontend.shapes import by_name, match

_MISFIT = "is no ONNX model, or a damaged one"


def read_onnx(path: Path, shapes: Shapes, numbers: Numbers | None = None) -> IRModule:
    """Read an ONNX file; ``numbers`` decide branches that depend on such inputs."""
    model = _load(path)
    _check_versions(path, model)
    inputs = onnx_graph.declared_inputs(model.graph)
    given = _close(path, model, by_name(shapes, list(inputs), str(path)))
    onnx_graph.set_shapes(model, given)
    with as_invalid_option(f"{path} {_MISFIT}"):
        model = expanded(onnx_graph.inline_functions(model))
        if is_controlled(model):
            model = taken(decided(model, numbers or {}))
        model = onnx_graph.fold(model, path.parent)
        if is_controlled(model):
            model = onnx_graph.fold(merged(unrolled(model)), path.parent)
    return relax_of_graph(path, model)


def _load(path: Path) -> Any:
    """Return the model of a file, without weights in other files."""
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors
        raise InvalidOptionError(f"{path} {_MISFIT}: {summary_line(error)}") from error
    if not model.graph.node:  # to protobuf, an empty file is an empty model
        raise InvalidOptionError(f"{path} {_MISFIT}: it does nothing.")
    missing = [
        name for name in onnx_graph.external_files(model) if not (path.parent / name).is_file()
    ]
    if missing:
        raise InvalidOptionError(
            f"{path} {_MISFIT}: its weights in {', '.join(missing)} are not beside it."
        )
    return model


def _check_versions(path: Path, model: Any) -> None:
    """Raise InvalidOptionError for operators that are newer than the package onnx."""
    import onnx

    opset, known = onnx_graph.opset_of(model), onnx.defs.onnx_opset_version()
    if opset > known:
        raise InvalidOptionError(
            f"{path} uses version {opset} of ONNX's operators, but onnx {onnx.__version__} knows "
            f"those up to {known}; export it with an older one (opset_version in PyTorch)."
        )


def _close(
    path: Path, model: Any, given: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs; raise InvalidOptionError if one stays open."""
    inputs = onnx_graph.declared_inputs(model.graph)
    values: dict[tuple[str, int], int] = {}
    for key, extents in given.items():
        match(inputs[key], extents, values)
    # A name has one value, in every input.
    known = {
        key: InputShape(
            key,
            shape.extents
            and tuple(
                values.get(key_of(key, place, each), each) if isinstance(each, str) else each
                for place, each in enumerate(shape.extents)
            ),
        )
        for key, shape in inputs.items()
        if key not in given
    }
    still_open = [shape for shape in known.values() if shape.is_open]
    closed = {**given, **{key: onnx_graph.closed_extents(shape) for key, shape in known.items()}}
    if still_open:
        for shape in still_open:
            del closed[shape.name]
        numbers = compared_numbers(model)
        proposal = onnx_graph.working_proposal(path, still_open, closed, numbers)
        named = {key: each for key, each in proposal.items() if inputs[key].is_open}
        raise InvalidOptionError(open_message(str(path), still_open, named))
    return closed


def open_session(path: Path, inputs: Sequence[Array], n_threads: int | None) -> Inference:
    """Open a file in ONNX Runtime; by its path, since a model in memory is limited to 2 GB."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if n_threads is not None:
        options.intra_op_num_threads = n_threads
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    # Values of its own, so that no inference includes conversions of arrays. Outputs bound
    # beforehand would be refused in files that declare wrong shapes of them.
    value_of = onnxruntime.OrtValue.ortvalue_from_numpy
    values = {
        argument.name: value_of(np.ascontiguousarray(value))
        for argument, value in zip(session.get_inputs(), inputs, strict=True)
    }
    names = [result.name for result in session.get_outputs()]
    return Inference(
        lambda: session.run_with_ort_values(names, values),
        lambda results: [np.array(result.numpy()) for result in results],
    )


def _framework() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"ONNX Runtime {importlib.metadata.version('onnxruntime')}"
    return "ONNX Runtime"


ONNX = Form(
    read_onnx,
    _MISFIT,
    "onnx",
    "'tvm-adaptive[onnx]'",
    _framework,
    open_session,
    takes_numbers=True,
    beside=True,
)
