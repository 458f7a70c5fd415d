"""TVM's translation of ONNX models, with converters of our own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tvm_adaptive._tvm import IRModule


@dataclasses.dataclass(frozen=True)
class OnnxNode:
    """A node of a graph, as its converter gets it."""

    operator: str
    builder: Any  # of blocks
    inputs: Any  # None for those left out
    attributes: dict[str, Any]
    scope: Any  # TVM's tables of values
    opset: int  # version of the operators

    def number(self, name: str, default: int = 0) -> int:
        """Return an attribute that is an integer."""
        return int(self.attributes.get(name, default))

    def text(self, name: str, default: str) -> str:
        """Return an attribute that is a text."""
        return as_text(self.attributes.get(name, default))

    def by_tvm(self, **changes: Any) -> Any:
        """Convert the node, with other values of some fields, as TVM does."""
        changed = dataclasses.replace(self, **changes)
        return onnx_converters()[changed.operator](changed)


# From a node to an expression.
OnnxConverter = Callable[[OnnxNode], Any]


def as_text(value: Any) -> str:
    """Return a text of ONNX, which may be bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


@functools.cache  # TVM's table is another one while a model is translated
def onnx_converters() -> dict[str, OnnxConverter]:
    """Return TVM's own converters by ONNX operator."""
    from tvm.relax.frontend.onnx import onnx_frontend

    def converter(kind: Any) -> OnnxConverter:
        return lambda node: kind.get_converter(node.opset)(
            node.builder, onnx_frontend.onnx_input(node.inputs), node.attributes, node.scope
        )

    return {name: converter(kind) for name, kind in onnx_frontend._get_convert_map().items()}


class _Converter:
    """A converter in the form of TVM's classes."""

    def __init__(self, operator: str, convert: OnnxConverter) -> None:
        self._operator, self._convert = operator, convert

    def get_converter(self, opset: int) -> Callable[..., Any]:
        """Return the function that converts operators of a version."""
        return lambda builder, inputs, attributes, scope: self._convert(
            OnnxNode(self._operator, builder, inputs, attributes, scope, opset)
        )


def relax_of_onnx(model: Any, converters: Mapping[str, OnnxConverter]) -> IRModule:
    """Translate an ONNX model; weights become constants, inputs keep their names.

    ``converters`` takes the place of TVM's own table, which cannot be extended from outside.
    """
    from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

    kept = onnx_frontend._get_convert_map
    table = {name: _Converter(name, convert) for name, convert in converters.items()}
    onnx_frontend._get_convert_map = lambda: table
    try:
        # Its warnings are about shapes, which are checked later; it prints before it raises.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return from_onnx(model, sanitize_input_names=False)
    finally:
        onnx_frontend._get_convert_map = kept
