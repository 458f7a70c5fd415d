"""ONNX models as graphs: their inputs, what stands in the way of an import, and folding.

Folding is done by ONNX Runtime's basic optimisations, with the inputs' shapes fixed. onnxslim
leaves as many nodes but takes 1.5 to 14 times as long; onnxsim takes up to 5 times as long and
leaves up to half more nodes (``docs/models.md`` has the figures). ONNX Runtime is also the one
that takes weights of more than 2 GB by their files, and it computes the reference outputs anyway.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError, summary_line
from tvm_adaptive.models.frontend.open_extents import NAMELESS, InputShape, proposals
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

STANDARD_DOMAINS = ("", "ai.onnx")
# Since this version of the operators, the axes of Squeeze and Unsqueeze, and the sizes of Split,
# are inputs.
AXES_AS_INPUT = 13
_STRINGS = 8  # onnx.TensorProto.STRING
# Since this version of the format, weights need not be inputs.
_IR_OF_PLAIN_WEIGHTS = 4
_NUMPY_TYPES = {"float": "float32", "double": "float64"}
_OF_SHAPES = ("Shape", "Size", "ConstantOfShape", "Range")
# Longer attempts to find shapes that a model accepts would look like a hang.
_PROPOSAL_SEC = 20.0
# Once a shape runs and only gives nothing, a better one is worth less of the user's time.
_EMPTY_SEC = 3.0
_EXTERNAL_BYTES = 1024
# It puts reshapes around each linear layer, between which nothing else would be fused.
_NOT_WANTED = ("MatMulAddFusion",)


def declared_inputs(graph: Any) -> dict[str, InputShape]:
    """Return the declared shapes of a graph's inputs, without those that have a weight."""
    weights = {each.name for each in graph.initializer}
    found = {}
    for info in graph.input:
        if info.name in weights:
            continue
        tensor = info.type.tensor_type
        if not info.type.HasField("tensor_type"):
            kind = info.type.WhichOneof("value") or "nothing"
            raise InvalidOptionError(
                f"Input {info.name} is a {kind.removesuffix('_type')}, but inputs must be tensors."
            )
        if tensor.elem_type == _STRINGS:
            raise InvalidOptionError(f"Input {info.name} holds texts, but inputs must be numbers.")
        extents = tuple(_extent(each) for each in tensor.shape.dim)
        found[info.name] = InputShape(info.name, extents if tensor.HasField("shape") else None)
    return found


def _extent(extent: Any) -> int | str:
    # Exporters write an open extent as a name, as 0 or -1, or not at all.
    if extent.HasField("dim_value") and extent.dim_value > 0:
        return int(extent.dim_value)
    return str(extent.dim_param).strip() or NAMELESS


def external_files(model: Any) -> list[str]:
    """Return the files in which a model keeps weights, relative to its own folder."""
    return sorted({entry.value for entry in _locations(model)})


def follow_links(model: Any, folder: Path) -> Path:
    """Let a model name the files behind links to its weights; return the folder of these.

    ONNX Runtime reads nothing outside of that folder. The cache of the Hugging Face hub
    consists of links to files of another folder.
    """
    names = external_files(model)
    links = {name: (folder / name).resolve() for name in names if (folder / name).is_symlink()}
    folders = {path.parent for path in links.values()}
    # What leads out of the folder without a link is refused by ONNX Runtime.
    if not links or any(".." in Path(name).parts for name in names):
        return folder
    if len(folders) > 1 or len(links) < len(names):
        raise InvalidOptionError(
            f"Weights of the model in {folder} are links into several folders, which ONNX Runtime "
            "does not read: copy the files there."
        )
    for entry in _locations(model):
        entry.value = links[entry.value].name
    return folders.pop()


def _locations(model: Any) -> list[Any]:
    """Return the entries that name the files of weights."""
    tensors = [weight for graph in graphs_of(model) for weight in graph.initializer]
    for attribute in (each for node in nodes_of(model.graph) for each in node.attribute):
        tensors += [attribute.t, *attribute.tensors]
    entries = [entry for tensor in tensors for entry in tensor.external_data]
    return [entry for entry in entries if entry.key == "location"]


def make_dense(graph: Any) -> None:
    """Write sparse weights of a graph out."""
    from onnx import numpy_helper

    for sparse in graph.sparse_initializer:
        values, places = map(numpy_helper.to_array, (sparse.values, sparse.indices))
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if places.ndim == 1:
            dense.reshape(-1)[places] = values
        else:
            dense[tuple(places.T)] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    del graph.sparse_initializer[:]


def set_shapes(model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Fix the inputs of a model to shapes; what was inferred for others is dropped."""
    # Old files list weights as inputs, too; ONNX Runtime would not take them for constant.
    weights = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    if len(inputs) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = max(model.ir_version, _IR_OF_PLAIN_WEIGHTS)
    for info in model.graph.input:
        if info.name in shapes:
            dims = info.type.tensor_type.shape
            del dims.dim[:]
            dims.SetInParent()
            for extent in shapes[info.name]:
                dims.dim.add().dim_value = extent
    del model.graph.value_info[:]
    for info in model.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")


def opset_of(model: Any, domain: str = "") -> int:
    """Return the version of a domain's operators in a model; 0 if it names none."""
    domains = STANDARD_DOMAINS if domain in STANDARD_DOMAINS else (domain,)
    found = [each.version for each in model.opset_import if each.domain in domains]
    return int(max(found, default=0))


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and its subgraphs."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from nodes_of(inner)


def graphs_of(model: Any) -> list[Any]:
    """Return the graph of a model, and the subgraphs of its nodes."""
    return [model.graph, *(inner for node in nodes_of(model.graph) for inner in inner_graphs(node))]


def inner_graphs(node: Any) -> Iterator[Any]:
    """Yield the subgraphs of a node."""
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else attribute.graphs)


def weight_types(graph: Any) -> list[Any]:
    """Return the types of a graph's weights, as it declares those of other values."""
    from onnx.helper import make_tensor_value_info as declare

    return [declare(each.name, each.data_type, each.dims) for each in graph.initializer]


def expand_operators(model: Any, operators: Sequence[str]) -> Any:
    """Replace operators by what ONNX's specification defines them to be, where it does."""
    import onnx
    from onnx import inliner

    if not operators:
        return model
    try:
        chosen = [("", operator) for operator in operators]
        # Some definitions depend on the types of inputs.
        typed = onnx.shape_inference.infer_shapes(model)
        _set_defaults(typed, operators)
        typed.graph.value_info.extend(weight_types(typed.graph))
        return inliner.inline_selected_functions(typed, chosen, inline_schema_functions=True)
    except Exception as error:  # onnx before 1.20 has no such argument; its own, of any kind
        logger.info("ONNX does not expand %s: %s", ", ".join(operators), summary_line(error))
    return model


def name_of(node: Any) -> str:
    """Return the name of a node, or that of its first output."""
    return str(node.name or next(iter(node.output), ""))


def operator_of(node: Any) -> str:
    """Return the operator of a node, with its domain unless it is ONNX's own."""
    return node.op_type if node.domain in STANDARD_DOMAINS else f"{node.domain}.{node.op_type}"


def _set_defaults(model: Any, operators: Sequence[str]) -> None:
    """Write default attributes of operators out, which their definitions refer to."""
    import onnx

    for node in nodes_of(model.graph):
        if node.domain in STANDARD_DOMAINS and node.op_type in operators:
            try:
                schema = onnx.defs.get_schema(node.op_type, opset_of(model), "")
            except onnx.defs.SchemaError:  # an operator that is not ONNX's
                continue
            given = {each.name for each in node.attribute}
            defaults = (each.default_value for each in schema.attributes.values())
            node.attribute.extend(each for each in defaults if each.name and each.name not in given)


def missing_message(path: Path, model: Any, missing: Sequence[tuple[Any, str]]) -> str:
    """Return one line about all nodes that stand in the way, each with the reason if known."""
    counts = collections.Counter(operator_of(node) for node, _ in missing)
    firsts = {operator_of(node): (node, reason) for node, reason in reversed(missing)}
    listed = []
    for operator, n in sorted(counts.items()):
        node, reason = firsts[operator]
        nodes = f"{n} node{'s' if n > 1 else ''}, first {name_of(node)!r}"
        opset = f"opset {opset_of(model, node.domain)}"
        listed.append(f"{operator} ({nodes}, {opset}{reason and ': '}{reason})")
    return (
        f"TVM cannot import {path}: {'; '.join(listed)}. Replace them in the model, or export it "
        "without them."
    )


def fold(model: Any, folder: Path) -> Any:
    """Compute what depends on constants and fixed shapes alone; weights may be in ``folder``.

    Branches whose condition is known disappear. A model that ONNX Runtime cannot fold comes
    back as it is, with its weights.
    """
    import onnx

    try:
        with ScratchFolder("fold") as scratch:
            folded = _folded(model, folder, scratch / "folded.onnx")
        # Operators that ONNX Runtime writes out in simpler ones are folded the second time.
        if any(node.op_type in _OF_SHAPES for node in folded.graph.node):
            with contextlib.suppress(Exception), ScratchFolder("fold") as scratch:
                return _folded(folded, folder, scratch / "folded.onnx")
        return folded
    except MemoryError:
        raise
    except Exception as error:  # ONNX Runtime's own; it is missing, or does not know an operator
        logger.info("ONNX Runtime does not fold this model: %s", summary_line(error))
    onnx.load_external_data_for_model(model, str(folder))
    return model


def _folded(model: Any, folder: Path, result: Path) -> Any:
    import onnx
    import onnxruntime

    options = _options(folder)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(result)
    prefix = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{prefix}_file_name", f"{result.stem}.bin")
    options.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(_EXTERNAL_BYTES))
    # Operators of float16 for which the provider has no kernel become those of float32.
    _session(model.SerializeToString(), options, disabled_optimizers=list(_NOT_WANTED))
    return onnx.load(str(result))


def working_proposal(
    path: Path,
    inputs: Sequence[InputShape],
    given: Mapping[str, Sequence[int]],
    numbers: Mapping[str, Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    """Return shapes that ONNX Runtime accepts; the likeliest if there are none.

    ``numbers`` are values of inputs that branches depend on; all branches must accept them.
    """
    fixed = {key: tuple(extents) for key, extents in given.items()}
    candidates = proposals(inputs)
    best = first = next(candidates)
    best_runs = False
    end_sec = time.monotonic() + _PROPOSAL_SEC
    with contextlib.suppress(Exception):  # without ONNX Runtime, or with a model it refuses
        session = session_of_file(path, _options(None))
        for found in (first, *candidates):
            n_results = _result_size(session, {**fixed, **found}, numbers)
            if n_results:
                return {**fixed, **found}
            # Empty results, as of a detector of nothing: something better may follow.
            if n_results == 0 and not best_runs:
                best, best_runs = found, True
                end_sec = min(end_sec, time.monotonic() + _EMPTY_SEC)
            if time.monotonic() > end_sec:
                break
    return {**fixed, **best}


def _result_size(
    session: Any, shapes: Mapping[str, Sequence[int]], numbers: Mapping[str, Sequence[int]]
) -> int | None:
    """Return the elements of the smallest result; None if the model refuses the shapes."""
    feeds: dict[str, npt.NDArray[Any]] = {}
    for info in session.get_inputs():
        shape = shapes.get(info.name, info.shape)
        kind = info.type.partition("(")[2].rstrip(")")  # of "tensor(float16)"
        feeds[info.name] = np.zeros(shape, _NUMPY_TYPES.get(kind, kind))
    sizes: list[int] = []
    names = list(feeds)
    others = [(name, value) for name in names for value in numbers.get(name, ())]
    try:
        for name, value in [(names[0], 0), *others]:
            results = session.run(None, {**feeds, name: np.full_like(feeds[name], value)})
            sizes.append(min((int(np.size(each)) for each in results), default=0))
    except Exception:  # ONNX Runtime's own, for shapes that do not fit
        return None
    return min(sizes)


def session_of_file(path: Path, options: Any) -> Any:
    """Open a file in ONNX Runtime, with its basic optimisations alone where all of them fail."""
    import onnxruntime

    try:
        return _session(str(path), options)
    except Exception as error:  # ONNX Runtime's own: some versions fail for files of float16
        logger.info("ONNX Runtime cannot optimise %s fully: %s", path, summary_line(error))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return _session(str(path), options)


def _session(model: bytes | str, options: Any, **how: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"], **how)


def _options(folder: Path | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # it writes to stderr what it raises as well
    options.add_session_config_entry("session.disable_prepacking", "1")
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(folder))
    return options
