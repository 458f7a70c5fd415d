"""From a folded ONNX graph to Relax, with all that stands in the way in one message."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np

from tvm_adaptive._tvm import IRModule, relax
from tvm_adaptive._tvm.onnx_frontend import (
    OnnxConverter,
    OnnxNode,
    onnx_converters,
    relax_of_onnx,
)
from tvm_adaptive.errors import InvalidOptionError, as_invalid_option, summary_line
from tvm_adaptive.models.frontend import onnx_graph
from tvm_adaptive.models.frontend.converters import (
    ALSO_OF_MICROSOFT,
    BY_DEFINITION,
    MICROSOFT,
    NOT_STANDARD,
    OWN,
)
from tvm_adaptive.models.frontend.converters.values import aligned, numpy_type_of
from tvm_adaptive.models.network import with_output_names

logger = logging.getLogger(__name__)

_CONTROL = ("If", "Loop", "Scan")
# Types of attributes: floats, ints and strings.
_LISTS = (6, 7, 8)
_INTS = 7
_REFUSED = re.compile(r"Node (\d+) cannot handle ShapeExpr")
_OPEN_SHAPE = "it takes a shape that depends on values, which is not supported here"
# TVM makes numbers up for the further results of these.
_SINGLE_RESULT = ("Attention",)
_CONTROL_REASON = (
    "its condition or count is not constant; if it depends on an input of one number, give that "
    "with --inputs"
)
_REASONS = {"If": _CONTROL_REASON, "Loop": _CONTROL_REASON, "Scan": "loops over rows are unknown"}


def relax_of_graph(path: Path, model: Any) -> IRModule:
    """Translate a graph with fixed shapes; raise InvalidOptionError with all that is missing."""
    converters = _converters()
    missing = [
        (node, _REASONS.get(node.op_type, ""))
        for node in onnx_graph.nodes_of(model.graph)
        if not _is_known(node, converters)
    ]
    mod = None
    if not missing:
        conversion = _Conversion(model)
        with as_invalid_option(f"TVM cannot import {path}"):
            mod = conversion.run(converters)
        missing = conversion.failed
    if missing or mod is None:
        raise InvalidOptionError(onnx_graph.missing_message(path, model, missing))
    return with_output_names(mod, [output.name for output in model.graph.output])


def expanded(model: Any) -> Any:
    """Replace the model's own functions, and operators without a converter, by what they do."""
    from onnx import inliner

    if model.functions:
        model = inliner.inline_local_functions(model)
    converters = _converters()
    without = {
        node.op_type
        for node in onnx_graph.nodes_of(model.graph)
        if node.domain in onnx_graph.STANDARD_DOMAINS
        and (node.op_type in BY_DEFINITION or not _is_known(node, converters))
    }
    return onnx_graph.expand_operators(model, sorted(without.difference(_CONTROL)))


def _converters() -> dict[str, OnnxConverter]:
    return onnx_converters() | OWN


def _is_known(node: Any, converters: dict[str, OnnxConverter]) -> bool:
    if node.op_type in _CONTROL:
        return False
    if node.domain in onnx_graph.STANDARD_DOMAINS:
        return node.op_type in converters and node.op_type not in NOT_STANDARD
    return node.domain == MICROSOFT and node.op_type in NOT_STANDARD | ALSO_OF_MICROSOFT


class _Conversion:
    """One translation; an operator that fails is noted, and the rest translated."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._types: dict[str, tuple[tuple[int, ...], str]] | None = None
        self._nodes: dict[str, Any] = {}
        self.failed: list[tuple[Any, str]] = []  # nodes, and why

    def run(self, converters: dict[str, OnnxConverter]) -> IRModule | None:
        """Return the translated model; None if that ended at an operator that failed."""
        import onnx

        for place, node in enumerate(self._model.graph.node):
            # A converter gets the name of a node and nothing else of it.
            original = onnx.NodeProto()
            original.CopyFrom(node)
            node.name = str(place)
            while len(node.output) > 1 and not node.output[-1]:  # TVM would count it
                del node.output[-1]
            # TVM cannot read an empty list, which says no more than no list.
            lists = ("ints", "floats", "strings")
            empty = [
                each
                for each in node.attribute
                if each.type in _LISTS and not any(getattr(each, kind) for kind in lists)
            ]
            for attribute in empty:
                node.attribute.remove(attribute)
                if node.op_type == "Constant":
                    kind = "int64" if attribute.type == _INTS else "float32"
                    nothing = onnx.numpy_helper.from_array(np.zeros(0, kind))
                    node.attribute.append(onnx.helper.make_attribute("value", nothing))
            self._nodes[node.name] = original
        guarded = {name: self._guard(convert) for name, convert in converters.items()}
        try:
            return relax_of_onnx(self._model, guarded)
        except Exception as error:
            # Outside of converters, TVM names a node by what it is called here.
            refused = _REFUSED.search(str(error))
            if refused is not None and refused[1] in self._nodes:
                self.failed.append((self._nodes[refused[1]], _OPEN_SHAPE))
            if not self.failed:
                raise
            logger.info("the translation ended: %s", summary_line(error))
            return None

    def _guard(self, convert: OnnxConverter) -> OnnxConverter:
        def guarded(given: OnnxNode) -> Any:
            node = self._nodes[given.attributes["tvm_custom"]["name"]]
            builder = given.builder
            try:
                result = convert(aligned(given))
                result = builder.normalize(result) if isinstance(result, relax.Expr) else result
                _check_outputs(node, result)
                return result
            except MemoryError:
                raise
            except Exception as error:  # TVM's own, of any kind
                logger.info("%s: %s", onnx_graph.name_of(node), error)
                self.failed.append((node, summary_line(error)))
                return self._placeholder(builder, node)

        return guarded

    def _placeholder(self, builder: Any, node: Any) -> Any:
        """Return something of a node's type, to check the rest; KeyError if it is not known."""
        if self._types is None:
            self._types = _inferred_types(self._model)
        types = [self._types[name] for name in node.output if name]
        results = [builder.normalize(relax.op.zeros(*each)) for each in types]
        return results[0] if len(results) == 1 else relax.Tuple(results)


def _check_outputs(node: Any, result: Any) -> None:
    """Raise ValueError if an operator has more outputs than were converted."""
    fields = getattr(result, "fields", None)
    if fields is None:
        fields = getattr(getattr(result, "ty", None), "fields", [result])
    used = [place for place, name in enumerate(node.output, start=1) if name]
    is_single = node.domain == MICROSOFT and node.op_type in _SINGLE_RESULT
    n_results = 1 if is_single else max(1, len(fields))  # a sequence may be empty
    if used and used[-1] > n_results:
        raise ValueError(f"its output {used[-1]} is not supported")


def _inferred_types(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return static shapes and types of a graph's values, as far as ONNX infers them."""
    import onnx

    found = {}
    with contextlib.suppress(Exception):  # ONNX's own; a model of more than 2 GB
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        for info in (*graph.value_info, *graph.output):
            tensor = info.type.tensor_type
            dims = tensor.shape.dim
            if tensor.HasField("shape") and all(each.HasField("dim_value") for each in dims):
                shape = tuple(int(each.dim_value) for each in dims)
                found[info.name] = (shape, numpy_type_of(tensor.elem_type))
    return found
