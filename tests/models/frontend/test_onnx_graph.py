"""What happens to an ONNX model before TVM sees it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_adaptive.cli import main
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import load, onnx_graph
from tvm_adaptive.models.frontend.onnx_control import unrolled


def model_of(onnx: Any, nodes: list[Any], inputs: dict[str, Any], weights: Any = None) -> Any:
    make, kinds = onnx.helper, onnx.TensorProto
    graph = make.make_graph(
        nodes,
        "net",
        [make.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in inputs.items()],
        [make.make_tensor_value_info("y", kinds.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])
    model.ir_version = 9
    return model


def save(onnx: Any, model: Any, folder: Path, **options: Any) -> Path:
    path = folder / "net.onnx"
    onnx.save(model, str(path), **options)
    return path


def test_opens_are_told_apart_by_input_and_name(onnx, tmp_path):
    nodes = [onnx.helper.make_node("MatMul", ["a", "b"], ["m"]),
             onnx.helper.make_node("Relu", ["m"], ["y"])]  # fmt: skip
    model = model_of(onnx, nodes, {"a": ["n", None], "b": [4, None]})
    # As exporters write an open extent, too.
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -1
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 0
    path = str(save(onnx, model, tmp_path))
    with pytest.raises(InvalidOptionError, match=r"open: a is nx\?; b is 4x\? \(\? has no name"):
        load(path)
    network = load(path, {"a": (2, 4), "b": (4, 7)})
    assert network.input_shapes == {"a": (2, 4), "b": (4, 7)}
    with pytest.raises(InvalidOptionError, match="open: b is 4x"):
        load(path, {"a": (2, 4)})


def test_the_command_of_the_message_works(onnx, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [onnx.helper.make_node("Conv", ["my image", "w"], ["c"]),
             onnx.helper.make_node("Reshape", ["c", "s"], ["r"]),
             onnx.helper.make_node("MatMul", ["r", "m"], ["y"])]  # fmt: skip
    weights = {
        "w": np.ones((2, 3, 1, 1), "float32"),
        "s": np.array([0, -1]),
        "m": np.ones((2 * 48 * 320, 3), "float32"),
    }
    save(onnx, model_of(onnx, nodes, {"my image": ["N", 3, None, None]}, weights), tmp_path)
    assert main(["tune", "net.onnx", "--trials", "1", "--store", "none"]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error" in each]
    command = "tvm-adaptive tune net.onnx --input-shape 'my image=1x3x48x320'"
    assert command in line
    assert load("net.onnx", {"my image": (1, 3, 48, 320)}).input_shapes
    assert not (tmp_path / "runs").exists()


def test_a_sample_fixes_shapes_and_is_what_is_checked(onnx_file, tmp_path, capsys):
    path = str(onnx_file("resnet", batch="n"))
    image = np.full((2, 3, 32, 32), 0.5, "float32")
    np.savez(tmp_path / "sample.npz", image=image)
    network = load(path, inputs=tmp_path / "sample.npz")
    assert np.array_equal(network.inputs(3)[0], image)
    assert np.array_equal(load(path, inputs={"image": image}).inputs()[0], image)
    for arrays, text in (
        ({"picture": image}, "no input picture"),
        ({"image": image[0]}, "has 4 extents"),
        ({"image": image.astype("float64")}, "is of float64"),
    ):
        np.savez(tmp_path / "sample.npz", **arrays)
        options = ["--inputs", str(tmp_path / "sample.npz"), "--trials", "1", "--store", "none"]
        assert main(["tune", path, *options, "--work-dir", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert text in error
        assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_all_operators_without_a_converter_are_named_at_once(onnx, tmp_path):
    make = onnx.helper.make_node
    nodes = [
        make("Det", ["x"], ["d"], name="first det"),
        make("Det", ["x"], ["e"]),
        make("Bend", ["d"], ["f"], domain="my.own"),
        make("Add", ["e", "f"], ["y"]),
    ]
    model = model_of(onnx, nodes, {"x": [2, 2]})
    model.opset_import.append(onnx.helper.make_opsetid("my.own", 3))
    with pytest.raises(InvalidOptionError) as caught:
        load(str(save(onnx, model, tmp_path)))
    text = str(caught.value)
    assert "Det (2 nodes, first 'first det', opset 17)" in text
    assert "my.own.Bend (1 node, first 'f', opset 3)" in text


def test_what_converters_refuse_is_collected(onnx, tmp_path):
    make = onnx.helper.make_node
    nodes = [
        make("MaxPool", ["x"], ["m", "places"], kernel_shape=[2, 2]),
        make("Cast", ["places"], ["p"], to=onnx.TensorProto.FLOAT),
        make("Add", ["m", "p"], ["a"]),
        make("DFT", ["a"], ["d"], inverse=1, onesided=1, axis=2),
        make("ReduceMax", ["d"], ["y"]),
    ]
    model = model_of(onnx, nodes, {"x": [1, 4, 5, 3]})
    with pytest.raises(InvalidOptionError) as caught:
        load(str(save(onnx, model, tmp_path)))
    text = str(caught.value)
    assert "MaxPool (1 node, first 'm', opset 17: its output 2 is not supported)" in text
    assert "DFT (1 node, first 'd', opset 17: " in text


def test_operators_of_the_future_and_missing_weights(onnx, onnx_models, tmp_path):
    model = onnx_models["resnet"](onnx)
    model.opset_import[0].version = 999
    with pytest.raises(InvalidOptionError, match=r"uses version 999 .*export it with an older one"):
        load(str(save(onnx, model, tmp_path)))
    options = {"save_as_external_data": True, "size_threshold": 0, "location": "net.bin"}
    path = save(onnx, onnx_models["resnet"](onnx), tmp_path, **options)
    (tmp_path / "net.bin").unlink()
    with pytest.raises(InvalidOptionError, match=r"weights in net\.bin are not beside it"):
        load(str(path))


def branch(onnx: Any, operator: str) -> Any:
    node = onnx.helper.make_node(operator, ["x"], ["b"])
    info = onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, None)
    return onnx.helper.make_graph([node], operator, [], [info])


def test_branches_whose_condition_is_known_disappear(onnx, tmp_path, check_import):
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x"], ["s"]),
        make("Gather", ["s", "zero"], ["n"]),
        make("Greater", ["n", "two"], ["is_large"]),
        make("If", ["is_large"], ["y"], then_branch=branch(onnx, "Exp"),
             else_branch=branch(onnx, "Tanh")),
    ]  # fmt: skip
    weights = {"zero": np.array(0), "two": np.array(2)}
    path = save(onnx, model_of(onnx, nodes, {"x": ["n", 4]}, weights), tmp_path)
    check_import(load(str(path), {"x": (3, 4)}))


@pytest.mark.parametrize("other", ["Tanh", "Flatten", "ReduceMax"])
def test_of_other_branches_both_are_computed_where_they_are_alike(
    other, onnx, tmp_path, check_import
):
    make = onnx.helper.make_node
    nodes = [
        make("ReduceSum", ["x"], ["sum"], keepdims=0),
        make("Greater", ["sum", "two"], ["is_large"]),
        make("If", ["is_large"], ["y"], then_branch=branch(onnx, "Exp"),
             else_branch=branch(onnx, other)),
    ]  # fmt: skip
    model = model_of(onnx, nodes, {"x": [3, 4]}, {"two": np.float32(2)})
    if other != "ReduceMax":  # the result of Flatten has the input's shape here
        network = load(str(save(onnx, model, tmp_path)))
        check_import(network, 0)
        check_import(network, 1)
        return
    with pytest.raises(InvalidOptionError, match=r"If \(1 node, first 'y', .*is not constant"):
        load(str(save(onnx, model, tmp_path)))


@pytest.mark.parametrize("operator", ["Div", "Gather"])
def test_a_branch_may_guard_what_it_computes(operator, onnx, tmp_path, check_import):
    """A division by zero would end this process."""
    make, kinds = onnx.helper.make_node, onnx.TensorProto
    operands = ["table", "k"] if operator == "Div" else ["x", "k"]
    nodes = [make(operator, operands, ["found"]), make("Cast", ["found"], ["b"], to=kinds.FLOAT)]
    info = onnx.helper.make_tensor_value_info("b", kinds.FLOAT, None)
    nodes = [
        make("ReduceSum", ["x"], ["sum"], keepdims=0),
        make("Less", ["sum", "zero"], ["is_negative"]),
        make("If", ["is_negative"], ["y"], else_branch=branch(onnx, "Neg"),
             then_branch=onnx.helper.make_graph(nodes, "guarded", [], [info])),
    ]  # fmt: skip
    weights = {"table": np.array([7, -8, 9]), "zero": np.float32(0)}
    model = model_of(onnx, nodes, {"x": [3]}, weights)
    model.graph.input.append(onnx.helper.make_tensor_value_info("k", kinds.INT64, [3]))
    path = str(save(onnx, model, tmp_path))
    wrong = [0, 0, 0] if operator == "Div" else [1 << 40, -(1 << 40), 3]
    for sign, k in ((-1, [1, 2, 1]), (1, [1, 2, 1]), (1, wrong)):
        x = sign * np.arange(1, 4, dtype="float32")
        check_import(load(path, inputs={"x": x, "k": np.array(k)}))


def test_a_number_of_the_sample_decides_a_branch(onnx, tmp_path, check_import):
    make = onnx.helper.make_node
    nodes = [
        make("Equal", ["rate", "wide"], ["is_wide"]),
        make("If", ["is_wide"], ["y"], then_branch=branch(onnx, "Exp"),
             else_branch=branch(onnx, "ReduceMax")),
    ]  # fmt: skip
    model = model_of(onnx, nodes, {"x": ["n", 4]}, {"wide": np.array(16000)})
    rate = onnx.helper.make_tensor_value_info("rate", onnx.TensorProto.INT64, [])
    model.graph.input.append(rate)
    path = str(save(onnx, model, tmp_path))
    with pytest.raises(InvalidOptionError, match=r"If .* give that with --inputs"):
        load(path, {"x": (3, 4)})
    x = np.ones((3, 4), "float32")
    for value, shape in ((16000, (3, 4)), (8000, (1, 1))):
        network = load(path, inputs={"x": x, "rate": np.array(value)})
        assert list(network.input_shapes) == ["x", "rate"]
        outputs = check_import(network)
        assert outputs[0].shape == shape


def test_shapes_are_proposed_that_every_branch_accepts(onnx, tmp_path, check_import):
    """As of detectors of voices, whose windows depend on the rate, an input."""
    make, kinds = onnx.helper.make_node, onnx.TensorProto
    weights = {"fast": np.array([1]), "first": np.array(0), "one": np.array(1)}
    weights |= {f"ends{length}": np.array([length]) for length in (100, 200)}

    def window(length: int) -> Any:
        """Take the sample at ``length``, which Gather refuses in a shorter sound."""
        nodes = [make("Gather", ["x", f"ends{length}"], ["b"], axis=1)]
        info = onnx.helper.make_tensor_value_info("b", kinds.FLOAT, None)
        return onnx.helper.make_graph(nodes, f"window{length}", [], [info])

    inner = make("If", ["is_fast"], ["b"], then_branch=window(200), else_branch=window(100))
    info = onnx.helper.make_tensor_value_info("b", kinds.FLOAT, None)
    nested = onnx.helper.make_graph([inner], "nested", [], [info])
    nodes = [
        make("Reshape", ["rate", "fast"], ["rates"]),
        make("Gather", ["rates", "first"], ["given"]),
        make("Equal", ["given", "one"], ["is_fast"]),
        make("If", ["is_fast"], ["y"], then_branch=nested, else_branch=window(100)),
    ]
    model = model_of(onnx, nodes, {"x": ["n", "length"]}, weights)
    model.graph.input.append(onnx.helper.make_tensor_value_info("rate", kinds.INT64, []))
    path = str(save(onnx, model, tmp_path))
    with pytest.raises(InvalidOptionError, match="--input-shape x=1x512 "):
        load(path)
    for rate, length in ((0, 120), (1, 256)):
        x = np.arange(length, dtype="float32").reshape(1, length)
        network = load(path, inputs={"x": x, "rate": np.array(rate)})
        assert check_import(network)[0] == [[200.0 if rate else 100.0]]


@pytest.mark.parametrize("opset", [11, 17])
def test_loops_of_a_known_count_are_written_out(opset, onnx, tmp_path, check_import):
    ort = pytest.importorskip("onnxruntime")
    make, kinds = onnx.helper, onnx.TensorProto
    body = make.make_graph(
        [
            make.make_node("Cast", ["i"], ["f"], to=kinds.FLOAT),
            make.make_node("Add", ["before", "f"], ["sum"]),
            make.make_node("Mul", ["sum", "x"], ["after"]),
            make.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            make.make_tensor_value_info("i", kinds.INT64, []),
            make.make_tensor_value_info("go", kinds.BOOL, []),
            make.make_tensor_value_info("before", kinds.FLOAT, [2]),
        ],
        [
            make.make_tensor_value_info("go_on", kinds.BOOL, []),
            make.make_tensor_value_info("after", kinds.FLOAT, [2]),
            make.make_tensor_value_info("sum", kinds.FLOAT, [2]),
        ],
    )
    nodes = [
        make.make_node("Loop", ["count", "", "x"], ["last", "sums"], body=body),
        make.make_node("Add", ["last", "sums"], ["y"]),
    ]
    model = model_of(onnx, nodes, {"x": [2]}, {"count": np.array(3)})
    model.opset_import[0].version = opset
    x = np.array([0.5, -1.5], "float32")
    both = [
        ort.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        for each in (model, unrolled(onnx.ModelProto.FromString(model.SerializeToString())))
    ]
    results = [session.run(None, {"x": x})[0] for session in both]
    assert np.array_equal(*results)
    check_import(load(str(save(onnx, model, tmp_path))))


def test_definitions_of_operators_know_default_attributes(onnx, tmp_path, check_import):
    make = onnx.helper.make_node
    nodes = [make("HannWindow", ["n"], ["w"]), make("Mul", ["x", "w"], ["y"])]
    model = model_of(onnx, nodes, {"x": [2, 8]}, {"n": np.array(8)})
    check_import(load(str(save(onnx, model, tmp_path))))


def test_definitions_in_loops_know_default_attributes_and_sparse_weights(
    onnx, tmp_path, check_import
):
    make, kinds = onnx.helper, onnx.TensorProto
    info = make.make_tensor_value_info
    nodes = [
        make.make_node("Celu", ["state"], ["bent"]),
        make.make_node("Mul", ["bent", "factors"], ["next"]),
        make.make_node("Identity", ["stay"], ["stays"]),
    ]
    given = [info("i", kinds.INT64, []), info("stay", kinds.BOOL, [])]
    body = make.make_graph(
        nodes,
        "body",
        [*given, info("state", kinds.FLOAT, [2, 8])],
        [info("stays", kinds.BOOL, []), info("next", kinds.FLOAT, [2, 8])],
    )
    numbers = onnx.numpy_helper.from_array(np.array([0.5, -2.0], "float32"), "factors")
    places = onnx.numpy_helper.from_array(np.array([1, 6]), "places")
    body.sparse_initializer.append(make.make_sparse_tensor(numbers, places, [8]))
    loop = make.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    model = model_of(onnx, [loop], {"x": [2, 8]}, {"n": np.array(3)})
    check_import(load(str(save(onnx, model, tmp_path))))


def test_folding_leaves_no_arithmetic_on_shapes(onnx, onnx_models, tmp_path):
    model = onnx_models["encoder"](onnx, "n")
    onnx_graph.set_shapes(model, {"ids": (2, 16)})
    folded = onnx_graph.fold(model, tmp_path)
    assert not {"Shape", "Constant"} & {node.op_type for node in folded.graph.node}


def test_inputs_that_are_no_tensors_of_numbers_are_named(onnx):
    make, kinds = onnx.helper, onnx.TensorProto
    node = make.make_node("Identity", ["x"], ["y"])
    model = model_of(onnx, [node], {"x": [2, None], "w": [3]}, {"w": np.ones(3, "float32")})
    (declared,) = onnx_graph.declared_inputs(model.graph).values()  # a weight is no input
    assert declared.extents == (2, "?")
    several = make.make_tensor_sequence_value_info("list", kinds.FLOAT, [2])
    texts = make.make_tensor_value_info("words", kinds.STRING, [2])
    for info, text in ((several, "list is a sequence"), (texts, "words holds texts")):
        del model.graph.input[:]
        model.graph.input.append(info)
        with pytest.raises(InvalidOptionError, match=text):
            onnx_graph.declared_inputs(model.graph)


def test_weights_that_old_files_list_as_inputs_become_constants(onnx):
    node = onnx.helper.make_node("Mul", ["x", "w"], ["y"])
    model = model_of(onnx, [node], {"x": ["n", 3], "w": [3]}, {"w": np.ones(3, "float32")})
    model.ir_version = 3
    onnx_graph.set_shapes(model, {"x": (2, 3)})
    assert [each.name for each in model.graph.input] == ["x"]
    assert model.ir_version >= 4
    assert onnx_graph.declared_inputs(model.graph)["x"].extents == (2, 3)


def test_weights_in_other_files_are_found_in_branches_too(onnx):
    far = onnx.numpy_helper.from_array(np.ones(3, "float32"), "w")
    onnx.external_data_helper.set_external_data(far, "branch.bin")
    taken = branch(onnx, "Exp")
    taken.initializer.append(far)
    node = onnx.helper.make_node("If", ["go"], ["y"], then_branch=taken, else_branch=taken)
    assert onnx_graph.external_files(model_of(onnx, [node], {"x": [3]})) == ["branch.bin"]


@pytest.mark.parametrize("more", [(), ("only_basic_optimisations",)])
def test_a_proposed_shape_runs(more, onnx, tmp_path, request):
    for name in more:
        request.getfixturevalue(name)
    nodes = [onnx.helper.make_node("Reshape", ["x", "s"], ["r"]),
             onnx.helper.make_node("MatMul", ["r", "m"], ["y"])]  # fmt: skip
    weights = {"s": np.array([1, -1]), "m": np.ones((3 * 64 * 64, 2), "float32")}
    model = model_of(onnx, nodes, {"x": ["n", 3, None, None]}, weights)
    inputs = list(onnx_graph.declared_inputs(model.graph).values())
    found = onnx_graph.working_proposal(save(onnx, model, tmp_path), inputs, {}, {})
    assert found == {"x": (1, 3, 64, 64)}


def test_what_onnx_runtime_cannot_fold_comes_back_with_its_weights(onnx, tmp_path):
    nodes = [onnx.helper.make_node("Bend", ["x", "w"], ["y"], domain="my.own")]
    model = model_of(onnx, nodes, {"x": [3]}, {"w": np.ones(512, "float32")})
    model.opset_import.append(onnx.helper.make_opsetid("my.own", 1))
    options = {"save_as_external_data": True, "size_threshold": 0, "location": "net.bin"}
    path = save(onnx, model, tmp_path, **options)
    found = onnx_graph.fold(onnx.load(str(path), load_external_data=False), tmp_path)
    assert [node.op_type for node in found.graph.node] == ["Bend"]
    assert onnx.numpy_helper.to_array(found.graph.initializer[0]).sum() == 512


def test_a_definition_takes_the_place_of_an_operator_with_its_defaults(onnx):
    node = onnx.helper.make_node("HannWindow", ["n"], ["y"])
    model = model_of(onnx, [node], {}, {"n": np.array(8)})
    found = onnx_graph.expand_operators(model, ["HannWindow"])
    assert "HannWindow" not in [each.op_type for each in found.graph.node]
    assert onnx_graph.expand_operators(model, []) is model


def ocr_models() -> list[Any]:
    found = importlib.util.find_spec("rapidocr_onnxruntime")
    if found is None or found.origin is None:
        return [pytest.param(Path(), marks=pytest.mark.skip(reason="needs rapidocr_onnxruntime"))]
    return sorted((Path(found.origin).parent / "models").glob("*.onnx"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ocr_models(), ids=lambda path: path.stem)
def test_models_of_a_package_are_imported_as_they_are(path, check_import):
    shape = {"det": (1, 3, 96, 96), "rec": (1, 3, 48, 64), "cls": (1, 3, 48, 192)}
    (kind,) = (kind for kind in shape if f"_{kind}_" in path.stem)
    with pytest.raises(InvalidOptionError, match="--input-shape x=1x3x"):
        load(str(path))
    check_import(load(str(path), {"x": shape[kind]}))


def test_a_single_number_has_no_axes_in_its_framework_either(onnx, tmp_path, check_import):
    make, kinds = onnx.helper, onnx.TensorProto
    table = np.arange(1, 41, dtype="float32").reshape(10, 4)
    graph = make.make_graph(
        [make.make_node("Gather", ["table", "i"], ["y"])],
        "net",
        [make.make_tensor_value_info("i", kinds.INT64, [])],
        [make.make_tensor_value_info("y", kinds.FLOAT, [4])],
        [onnx.numpy_helper.from_array(table, "table")],
    )
    opsets = [make.make_opsetid("", 17)]
    model = make.make_model(graph, opset_imports=opsets, ir_version=9)
    network = load(str(save(onnx, model, tmp_path)))
    (found,) = network.original.run([np.array(3, "int64")])
    assert found.shape == (4,)
    check_import(network)
