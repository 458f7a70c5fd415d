"""TVM's translation of ONNX models, with converters of our own."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import IRModule

# From a block builder, inputs (None for those left out), attributes, TVM's tables of values
# and the version of the operators to an expression.
OnnxConverter = Callable[[Any, Any, dict[str, Any], Any, int], Any]


@functools.cache  # TVM's table is another one while a model is translated
def onnx_converters() -> dict[str, OnnxConverter]:
    """Return TVM's own converters by ONNX operator."""
    from tvm.relax.frontend.onnx import onnx_frontend

    def converter(kind: Any) -> OnnxConverter:
        return lambda builder, inputs, attributes, scope, opset: kind.get_converter(opset)(
            builder, inputs, attributes, scope
        )

    return {name: converter(kind) for name, kind in onnx_frontend._get_convert_map().items()}


class _Converter:
    """A converter in the form of TVM's classes."""

    def __init__(self, convert: OnnxConverter) -> None:
        self._convert = convert

    def get_converter(self, opset: int) -> Callable[..., Any]:
        """Return the function that converts operators of a version."""
        return lambda builder, inputs, attributes, scope: self._convert(
            builder, inputs, attributes, scope, opset
        )


def relax_of_onnx(
    model: Any, shapes: dict[str, list[int]], converters: dict[str, OnnxConverter] | None = None
) -> IRModule:
    """Translate an ONNX model; weights become constants, inputs keep their names.

    ``converters`` takes the place of TVM's own, which cannot be extended from outside.
    """
    from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

    kept = onnx_frontend._get_convert_map
    if converters is not None:
        table = {name: _Converter(convert) for name, convert in converters.items()}
        onnx_frontend._get_convert_map = lambda: table
    try:
        # Its warnings are about shapes, which are checked later; it prints before it raises.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return from_onnx(model, shape_dict=shapes, sanitize_input_names=False)
    finally:
        onnx_frontend._get_convert_map = kept
