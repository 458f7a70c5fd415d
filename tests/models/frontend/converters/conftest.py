"""Many nodes in one graph, converted in this process and compiled at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.frontend.converters.graphs import model_of
from tvm_adaptive._tvm import relax
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import compile_network, outputs_agree, prepare, run_network
from tvm_adaptive.models.frontend.onnx_import import relax_of_graph
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.tuning.target import resolve_target


def outputs_of(mod, inputs):
    shapes = {name: value.shape for name, value in inputs.items()}
    network = network_of_imported("net", mod, shapes)
    target = resolve_target("cpu")
    compiled = compile_network(prepare(network, target, "keep"), None, target)
    return run_network(compiled, [inputs[name] for name in network.input_shapes])


@pytest.fixture
def run_relax():
    """Return what a function of an expression computes for an array."""

    def run(function, x):
        variable = relax.Var("x", relax.TensorType(x.shape, str(x.dtype)))
        builder = relax.BlockBuilder()
        with builder.function("main", [variable]):
            with builder.dataflow():
                results = builder.emit_output(relax.Tuple(function(variable)))
            builder.emit_func_output(results)
        return outputs_of(builder.get(), {"x": x})

    return run


@pytest.fixture
def compare(onnx):
    """Compare every result that no other node uses with that of ONNX Runtime.

    Or with that of ONNX's own reference, for what ONNX Runtime does not compute.
    """
    ort = pytest.importorskip("onnxruntime")

    def run(nodes, inputs, weights, opset=17, *, by_reference=False):
        model = model_of(nodes, inputs, weights, opset)
        if by_reference:
            session = pytest.importorskip("onnx.reference").ReferenceEvaluator(model)
        else:
            session = ort.InferenceSession(
                model.SerializeToString(), providers=["CPUExecutionProvider"]
            )
        expected = session.run(None, inputs)
        names = [each.name for each in model.graph.output]
        outputs = outputs_of(relax_of_graph(Path("net.onnx"), model), inputs)
        for name, found, wanted in zip(names, outputs, expected, strict=True):
            assert found.shape == wanted.shape, name
            assert found.dtype == wanted.dtype, name
            assert outputs_agree([found], [wanted]), name

    return run


@pytest.fixture
def run_graph(onnx):
    """Return what a graph computes."""

    def run(nodes, inputs, weights, opset=17):
        model = model_of(nodes, inputs, weights, opset)
        return outputs_of(relax_of_graph(Path("net.onnx"), model), inputs)

    return run


@pytest.fixture
def refusal(onnx):
    """Return why a graph cannot be imported."""

    def run(nodes, inputs, weights, opset=17):
        model = model_of(nodes, inputs, weights, opset)
        with pytest.raises(InvalidOptionError, match="TVM cannot import") as caught:
            relax_of_graph(Path("net.onnx"), model)
        return str(caught.value)

    return run
