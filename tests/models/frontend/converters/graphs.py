"""ONNX models of a few nodes."""

from __future__ import annotations

import numpy as np
import pytest


def model_of(nodes, inputs, weights, opset=17):
    """Return a model of a graph, whose results are what no other node uses."""
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    used = {name for node in nodes for name in node.input}
    results = [name for node in nodes for name in node.output if name and name not in used]
    graph = make.make_graph(
        nodes,
        "net",
        [
            make.make_tensor_value_info(
                name, make.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in inputs.items()
        ],
        [make.make_empty_tensor_value_info(name) for name in results],
        [
            onnx.numpy_helper.from_array(np.asarray(value), name)
            for name, value in weights.items()
            if name in used
        ],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)])
    model.ir_version = 9
    return model
