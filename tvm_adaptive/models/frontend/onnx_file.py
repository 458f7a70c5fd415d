"""ONNX files."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import IRModule
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.frontend import onnx_control, onnx_graph
from tvm_adaptive.models.frontend.onnx_import import expanded, relax_of_graph
from tvm_adaptive.models.frontend.onnx_sequences import with_parts
from tvm_adaptive.models.frontend.onnx_values import dequantise_constants
from tvm_adaptive.models.frontend.open_extents import InputShape, open_message
from tvm_adaptive.models.frontend.reader import Array, FileFormat, Inference, Numbers
from tvm_adaptive.models.frontend.shapes import Shapes, matched

_MISFIT = "is no ONNX model, or a damaged one"


def read_onnx(path: Path, shapes: Shapes, numbers: Numbers | None = None) -> IRModule:
    """Read an ONNX file; ``numbers`` decide branches that depend on such inputs."""
    model = _load(path)
    _check_versions(path, model)
    inputs = onnx_graph.declared_inputs(model.graph)
    onnx_graph.set_shapes(model, _close(path, model, inputs, shapes))
    folder = onnx_graph.follow_links(model, path.parent)
    with as_invalid_option(f"{path} {_MISFIT}"):
        model = expanded(model)
        if onnx_control.is_controlled(model):
            model = onnx_control.taken(onnx_control.decided(model, numbers or {}))
        model = with_parts(onnx_graph.fold(model, folder))
        if onnx_control.is_controlled(model):
            written = onnx_control.merged(onnx_control.unrolled(model))
            # Some definitions of operators depend on types, which are unknown inside a loop.
            model = with_parts(expanded(onnx_graph.fold(written, folder)))
        dequantise_constants(model.graph)
    return relax_of_graph(path, model)


def _load(path: Path) -> Any:
    """Return the model of a file, without weights in other files."""
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors
        raise InvalidOptionError(f"{path} {_MISFIT}: {summary_line(error)}") from error
    for graph in onnx_graph.graphs_of(model):
        onnx_graph.make_dense(graph)
    if not model.graph.node:  # to protobuf, an empty file is an empty model
        raise InvalidOptionError(f"{path} {_MISFIT}: it does nothing.")
    files = onnx_graph.external_files(model)
    if missing := [name for name in files if not (path.parent / name).is_file()]:
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
    path: Path, model: Any, inputs: Mapping[str, InputShape], shapes: Shapes
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs; raise InvalidOptionError if one stays open."""
    given, values = matched(inputs, shapes, str(path), expressions=True)
    # A name has one value, in every input.
    rest = [each.with_values(values) for key, each in inputs.items() if key not in given]
    closed = given | {each.name: each.numbers for each in rest if not each.is_open}
    if still_open := [each for each in rest if each.is_open]:
        numbers = onnx_control.compared_numbers(model)
        proposal = onnx_graph.working_proposal(path, still_open, closed, numbers)
        named = {key: each for key, each in proposal.items() if inputs[key].is_open}
        raise InvalidOptionError(open_message(str(path), still_open, named))
    return closed


def open_session(
    path: Path, inputs: Sequence[Array], n_threads: int | None, *, is_plain: bool = False
) -> Inference:
    """Open a file in ONNX Runtime; by its path, since a model in memory is limited to 2 GB.

    A plain session has a kernel for each operator, and rounds otherwise than the usual one.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if is_plain:
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.graph_optimization_level = level
    if n_threads is not None:
        options.intra_op_num_threads = n_threads
    # A prepared network has no subnormal weights, which make inferences slower on some processors.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    session = onnx_graph.session_of_file(path, options)
    # Values of its own, so that no inference includes conversions of arrays. Outputs bound
    # beforehand would be refused in files that declare wrong shapes of them.
    value_of = onnxruntime.OrtValue.ortvalue_from_numpy
    # A single number keeps its rank of zero, which numpy's ascontiguousarray makes one.
    values = {
        argument.name: value_of(np.asarray(value, order="C"))
        for argument, value in zip(session.get_inputs(), inputs, strict=True)
    }
    names = [result.name for result in session.get_outputs()]
    return Inference(
        lambda: session.run_with_ort_values(names, values),
        lambda results: [np.array(result.numpy()) for result in results],
    )


ONNX = FileFormat(
    read_onnx,
    _MISFIT,
    "onnx",
    "'tvm-adaptive[onnx]'",
    ("ONNX Runtime", "onnxruntime"),
    open_session,
    open_plainly=functools.partial(open_session, is_plain=True),
    peer="ort",
    takes_numbers=True,
    beside=True,
    least_version=(1, 16),  # of the extra
)
