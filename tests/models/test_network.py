from __future__ import annotations

import pytest
from tvm import relax, tirx

from tests.models.networks import module_of
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import network as network_file
from tvm_adaptive.models.network import network_of_relax


def identity(ty):
    builder = relax.BlockBuilder()
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        builder.emit_func_output(x)
    return builder.get()


def test_what_has_no_weight_is_an_input(small):
    network = small("resnet18")
    again = network_of_relax("again", network.mod, network.params)
    assert again.input_shapes == network.input_shapes
    assert again.input_dtypes == network.input_dtypes


def test_without_weights_every_parameter_is_an_input(small):
    network = small("vgg16")
    again = network_of_relax("again", network.mod, {})
    assert list(again.input_shapes) == ["image", *network.params]
    assert again.input_shapes["classifier.bias"] == (10,)


def test_weights_must_be_parameters():
    mod = identity(relax.TensorType((2,), "int64"))
    assert network_of_relax("net", mod, {}).input_dtypes == {"x": "int64"}
    with pytest.raises(InvalidOptionError, match="params must name parameters of main but got w"):
        network_of_relax("net", mod, {"w": None})


@pytest.mark.parametrize(
    ("ty", "text"),
    [
        (relax.TensorType(ndim=2, dtype="float32"), "x of main must be a tensor of known shape"),
        (relax.ShapeType(ndim=2), "x of main must be a tensor of known shape"),
        (
            relax.TensorType((tirx.Var("n", "int64"), 4), "float32"),
            r"x of main has the dynamic shape nx4; .* --input-shape x=1x4",
        ),
    ],
)
def test_shapes_of_inputs_must_be_known(ty, text):
    with pytest.raises(InvalidOptionError, match=text):
        network_of_relax("net", identity(ty), {})


def test_outputs_must_be_tensors():
    def build(emit, x):
        return relax.Tuple([x, relax.Tuple([emit(relax.op.shape_of(x))])])

    with pytest.raises(InvalidOptionError, match="Output 1 of main is of the kind ShapeType"):
        network_of_relax("net", module_of({"x": (4,)}, build), {})


def test_an_input_of_a_type_that_numpy_lacks_is_refused(monkeypatch):
    # Which those are depends on what else is installed.
    monkeypatch.setattr(network_file, "_has_numpy_type", lambda dtype: dtype != "bfloat16")
    mod = identity(relax.TensorType((2,), "bfloat16"))
    with pytest.raises(InvalidOptionError, match="x of main is of type bfloat16"):
        network_of_relax("net", mod, {})


@pytest.mark.parametrize(("dtype", "known"), [("float16", True), ("bool", True), ("posit8", False)])
def test_types_of_numpy(dtype, known):
    assert network_file._has_numpy_type(dtype) is known
