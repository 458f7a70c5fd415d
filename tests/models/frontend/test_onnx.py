from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvm_adaptive.cli import main
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import load
from tvm_adaptive.models.frontend.onnx_file import open_session
from tvm_adaptive.tuning.resume import read_settings

ARCHITECTURES = ["resnet", "mobilenet", "encoder"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_imported_network_computes_what_onnx_runtime_computes(name, onnx_file, check_import):
    network = load(str(onnx_file(name)))
    assert network.name == name
    assert network.original.framework.startswith("ONNX Runtime")
    check_import(network)


def test_inputs_keep_their_names_and_types(onnx_file):
    assert load(str(onnx_file("encoder"))).input_dtypes == {"ids": "int64"}
    assert load(str(onnx_file("resnet"))).input_shapes == {"image": (1, 3, 32, 32)}


@pytest.mark.parametrize(("name", "key"), [("resnet", "image"), ("mobilenet", "")])
def test_a_dynamic_shape_is_fixed_by_an_option(name, key, onnx_file, check_import):
    path = str(onnx_file(name, batch="n"))
    with pytest.raises(InvalidOptionError, match="--input-shape image=1x3x32x32"):
        load(path)
    network = load(path, {key: (2, 3, 32, 32)})
    assert network.input_shapes == {"image": (2, 3, 32, 32)}
    check_import(network)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"picture": (1, 3, 32, 32)}, "no input picture: the inputs of .* are image"),
        ({"image": (1, 0, 32, 32)}, "must be positive"),
        ({"image": (1, 32)}, "has 4 extents"),
        ({"image": (1, 4, 32, 32)}, "has the shape nx3x32x32, where 3 is not 4"),
    ],
)
def test_shapes_that_do_not_fit(shapes, text, onnx_file):
    with pytest.raises(InvalidOptionError, match=text):
        load(str(onnx_file("resnet", batch="n")), shapes)


@pytest.fixture
def file_of(onnx, tmp_path):
    """Return a function that writes a model of nodes, which takes ``x``, to a file."""

    def write(nodes, shape, weights, outputs, opset=17):
        make, float32 = onnx.helper, onnx.TensorProto.FLOAT
        graph = make.make_graph(
            nodes,
            "net",
            [make.make_tensor_value_info("x", float32, shape)],
            [make.make_empty_tensor_value_info(name) for name in outputs],
            [onnx.numpy_helper.from_array(np.array(value), key) for key, value in weights.items()],
        )
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)])
        model.ir_version = 8
        onnx.save(model, str(tmp_path / "net.onnx"))
        return str(tmp_path / "net.onnx")

    return write


@pytest.mark.parametrize("opset", [11, 17])
def test_parts_of_a_tensor(onnx, file_of, check_import, opset):
    make = onnx.helper.make_node
    nodes = [
        make("SplitToSequence", ["x", "one"], ["rows"], axis=1, keepdims=0),
        make("SequenceAt", ["rows", "one"], ["row"]),
        make("SplitToSequence", ["x"], ["places"], axis=0, keepdims=0),
        make("SequenceAt", ["places", "zero"], ["place"]),
        make("SplitToSequence", ["x", "four"], ["parts"], axis=-1),
        make("SequenceAt", ["parts", "zero"], ["part"]),
        make("SequenceAt", ["parts", "one"], ["rest"]),
        make("SequenceLength", ["parts"], ["n"]),
        make("SplitToSequence", ["x", "sizes"], ["pieces"], axis=2, keepdims=0),
        make("SequenceAt", ["pieces", "last"], ["piece"]),
    ]
    weights = {"zero": 0, "one": 1, "four": 4, "last": -1, "sizes": [1, 3, 1]}
    outputs = ["row", "place", "part", "rest", "n", "piece"]
    network = load(file_of(nodes, (2, 3, 5), weights, outputs, opset))
    check_import(network)


def loop_of(onnx, nodes, state):
    """Return a loop over ``i`` with one state, which ends as ``y``."""
    make, kinds = onnx.helper, onnx.TensorProto
    scalars = [
        make.make_tensor_value_info("i", kinds.INT64, []),
        make.make_tensor_value_info("go", kinds.BOOL, []),
    ]
    result = make.make_tensor_value_info("go_on", kinds.BOOL, [])
    nodes = [*nodes, make.make_node("Identity", ["go"], ["go_on"])]
    body = make.make_graph(nodes, "body", [*scalars, state("before")], [result, state("after")])
    return make.make_node("Loop", ["n", "", "start"], ["y"], body=body)


def test_a_loop_over_the_parts_of_a_tensor(onnx, file_of, check_import):
    """As PyTorch writes ``for part in x.unbind(0)`` of a script."""
    make, float32 = onnx.helper.make_node, onnx.TensorProto.FLOAT
    steps = [make("SequenceAt", ["parts", "i"], ["part"]), make("Add", ["before", "part"], ["sum"])]
    steps.append(make("Tanh", ["sum"], ["after"]))
    loop = loop_of(
        onnx, steps, lambda name: onnx.helper.make_tensor_value_info(name, float32, [2, 8])
    )
    nodes = [
        make("SplitToSequence", ["x", "one"], ["parts"], axis=0, keepdims=0),
        make("SequenceLength", ["parts"], ["n"]),
        loop,
    ]
    weights = {"one": 1, "start": np.zeros((2, 8), "float32")}
    check_import(load(file_of(nodes, (4, 2, 8), weights, ["y"])))


@pytest.mark.parametrize("opset", [13, 17])
def test_a_list_that_a_loop_fills(onnx, file_of, check_import, opset):
    """Until version 14, ``Identity`` takes no lists."""
    make, helper = onnx.helper.make_node, onnx.helper
    steps = [
        make("Gather", ["x", "i"], ["row"]),
        make("Tanh", ["row"], ["bent"]),
        make("SequenceInsert", ["before", "bent"], ["after"]),
    ]
    loop = loop_of(
        onnx,
        steps,
        lambda name: helper.make_tensor_sequence_value_info(name, onnx.TensorProto.FLOAT, None),
    )
    nodes = [
        make("SequenceEmpty", [], ["start"]),
        loop,
        make("ConcatFromSequence", ["y"], ["z"], axis=0, new_axis=1),
    ]
    check_import(load(file_of(nodes, (3, 4), {"n": 3}, ["z"], opset)))


def test_a_shape_that_depends_on_values_names_its_node(onnx, file_of):
    make = onnx.helper.make_node
    nodes = [
        make("NonZero", ["x"], ["places"]),
        make("Shape", ["places"], ["shape"]),
        make("ReduceProd", ["shape"], ["n"], name="count", keepdims=0),
    ]
    with pytest.raises(InvalidOptionError, match=r"ReduceProd \(1 node, first 'count'.*depends on"):
        load(file_of(nodes, (3, 4), {}, ["n"]))


def test_an_operator_that_tvm_does_not_know_is_named(onnx, tmp_path):
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [make.make_node("Det", ["x"], ["y"])],
        "net",
        [make.make_tensor_value_info("x", kind, [4, 4])],
        [make.make_tensor_value_info("y", kind, [])],
    )
    path = tmp_path / "det.onnx"
    onnx.save(make.make_model(graph), str(path))
    with pytest.raises(
        InvalidOptionError, match=r"TVM cannot import .*: Det \(1 node, first 'y', opset"
    ):
        load(str(path))


@pytest.mark.parametrize("text", [b"", b"not a model", b"\x00" * 64])
def test_what_is_no_model(text, tmp_path, onnx):
    path = tmp_path / "net.onnx"
    path.write_bytes(text)
    with pytest.raises(InvalidOptionError, match="is no ONNX model, or a damaged one"):
        load(str(path))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data, onnx, onnx_models, tmp_path_factory):
    whole = bytearray(onnx_models["resnet"](onnx).SerializeToString())
    # Weights are most of the file; its structure is at both ends.
    place = st.one_of(st.integers(0, 600), st.integers(len(whole) - 600, len(whole) - 1))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(place)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "net.onnx"
    path.write_bytes(whole[: data.draw(place)] if data.draw(st.booleans()) else whole)
    with contextlib.suppress(InvalidOptionError):
        assert load(str(path)).name == "net"


def test_without_onnx_the_message_says_what_to_install(onnx_file, monkeypatch):
    path = onnx_file("resnet")
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidOptionError, match=r"pip install 'tvm-adaptive\[onnx\]'"):
        load(str(path))


@pytest.mark.usefixtures("only_basic_optimisations")
def test_a_file_opens_with_fewer_optimisations_where_all_fail(onnx_file):
    inference = open_session(onnx_file("resnet"), [np.ones((1, 3, 32, 32), "float32")], 1)
    (found,) = inference.outputs(inference.run())
    assert found.shape == (1, 10)


def test_the_command_tunes_a_file(onnx, tmp_path, capsys):
    data = Path(onnx.__file__).parent / "backend/test/data/pytorch-converted/test_Conv2d"
    model = onnx.load(str(data / "model.onnx"))
    (image,) = (each for each in model.graph.input if each.name == "0")
    image.type.tensor_type.shape.dim[0].dim_param = "n"
    path = tmp_path / "convolution.onnx"
    onnx.save(model, str(path))
    shape = [each.dim_value or 1 for each in image.type.tensor_type.shape.dim]
    np.savez(tmp_path / "sample.npz", **{"0": np.ones(shape, "float32")})
    (tmp_path / "quick.toml").write_text("[finish]\ntop_k = 1\nmax_task_sec = 0.5\n")
    command = ["tune", str(path), "--trials", "6", "--config", str(tmp_path / "quick.toml")]
    command += ["--inputs", str(tmp_path / "sample.npz"), "--work-dir", str(tmp_path / "run")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "outputs agree with ONNX Runtime" in printed.err
    assert "outputs       agree with ONNX Runtime" in printed.out
    assert re.search(r"(faster than|slower than|as fast as) ONNX Runtime .* ms, was", printed.out)
    assert (tmp_path / "run" / "convolution.so").exists()
    assert read_settings(tmp_path / "run")[0].inputs == str(tmp_path / "sample.npz")
