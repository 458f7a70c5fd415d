"""Operators that TVM lacks or has wrong, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_adaptive.models import (
    call_counts,
    compile_network,
    outputs_agree,
    prepare,
    run_network,
)
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.target import resolve_target


@pytest.fixture
def check(onnx, tmp_path: Path, check_import):
    """Write a graph, import it, and compare it with ONNX Runtime."""

    def run(nodes, inputs, weights, outputs=("y",), opset=17):
        make, kinds = onnx.helper, onnx.TensorProto
        graph = make.make_graph(
            nodes,
            "net",
            [make.make_tensor_value_info(name, getattr(kinds, kind), shape)
             for name, (kind, shape) in inputs.items()],
            [make.make_empty_tensor_value_info(name) for name in outputs],
            [onnx.numpy_helper.from_array(np.asarray(value), name)
             for name, value in weights.items()],
        )  # fmt: skip
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)])
        model.ir_version = 9
        path = tmp_path / "net.onnx"
        onnx.save(onnx.shape_inference.infer_shapes(model), str(path))
        network = load(str(path))
        check_import(network)
        return network

    return run


helper = pytest.importorskip("onnx").helper


def drawn(*shape, seed=0, scale=0.5):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype("float32")


def recurrent_weights(n_gates, directions=1, n_in=3, n_hidden=4):
    return {
        "w": drawn(directions, n_gates * n_hidden, n_in, seed=1),
        "r": drawn(directions, n_gates * n_hidden, n_hidden, seed=2),
        "b": drawn(directions, 2 * n_gates * n_hidden, seed=3),
    }


STATES = {"h": drawn(2, 2, 4, seed=4), "c": drawn(2, 2, 4, seed=5), "p": drawn(2, 12, seed=6)}
LENGTHS = {"n": np.array([3, 5], "int32")}


AFFINE = {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}


@pytest.mark.parametrize(
    ("operator", "direction", "more", "how"),
    [
        ("LSTM", "forward", {}, {}),
        ("LSTM", "bidirectional", STATES, {"clip": 0.4}),
        ("LSTM", "reverse", LENGTHS, {"input_forget": 1}),
        ("GRU", "bidirectional", {"h": STATES["h"]}, {}),
        ("GRU", "reverse", LENGTHS, {"linear_before_reset": 1}),
        ("RNN", "bidirectional", {"h": STATES["h"]}, {}),
        ("RNN", "forward", LENGTHS, AFFINE),
    ],
)
def test_recurrent_layers(operator, direction, more, how, check):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    weights = recurrent_weights(gates, 2 if direction == "bidirectional" else 1) | more
    places = ["x", "w", "r", "b", "n", "h", *(["c", "p"] if operator == "LSTM" else [])]
    names = [name if name in weights or name == "x" else "" for name in places]
    outputs = ["y", "y_h", *(["y_c"] if operator == "LSTM" else [])]
    node = helper.make_node(operator, names, outputs, hidden_size=4, direction=direction, **how)
    check([node], {"x": ("FLOAT", [5, 2, 3])}, weights, outputs)


def test_a_state_comes_in_and_goes_out_and_many_steps_share_their_functions(onnx, check):
    node = onnx.helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "c"], ["y", "hn", "cn"],
                                 hidden_size=4)  # fmt: skip
    inputs = {"x": ("FLOAT", [40, 1, 3]), "h": ("FLOAT", [1, 1, 4]), "c": ("FLOAT", [1, 1, 4])}
    network = check([node], inputs, recurrent_weights(4), ["y", "hn", "cn"])
    prepared = prepare(network, resolve_target("cpu"))
    assert len(prepared.mod.functions) < 20


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_with_channels_last(groups, onnx, check):
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "a"], ["c1"], pads=[1, 1, 1, 1]),
        make("ConvTranspose", ["c1", "t", "bias"], ["c2"], strides=[2, 3], pads=[1, 0, 2, 1],
             output_padding=[1, 2], dilations=[1, 2], group=groups),
        make("Conv", ["c2", "b"], ["y"]),
    ]  # fmt: skip
    weights = {"a": drawn(4, 3, 3, 3), "t": drawn(4, 6 // groups, 3, 2), "b": drawn(5, 6, 1, 1)}
    network = check(nodes, {"x": ("FLOAT", [1, 3, 5, 6])}, weights | {"bias": drawn(6)})
    target = resolve_target("cpu")
    for layout in ("keep", "NHWC"):
        prepared = prepare(network, target, layout)
        inputs = network.random_inputs(1)
        found = run_network(compile_network(prepared, None, target), inputs)
        assert outputs_agree(found, network.original.run(inputs))


def test_pads_that_are_computed_from_shapes(onnx, check):
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x"], ["s"]),
        make("Gather", ["s", "last"], ["n"]),
        make("Sub", ["wanted", "n"], ["more"]),
        make("Concat", ["zeros", "more"], ["pads"], axis=0),
        make("Pad", ["x", "pads"], ["p"], mode="reflect"),
        make("Pad", ["p", "cut", "value"], ["y"]),
    ]
    weights = {
        "last": np.array([1]),
        "wanted": np.array([7]),
        "zeros": np.array([0, 2, 0]),
        "cut": np.array([1, -1, 0, 2]),
        "value": np.float32(0.5),
    }
    check(nodes, {"x": ("FLOAT", [2, 5])}, weights)


def test_resizes(onnx, check):
    cases = [
        ([1, 2, 8, 6], {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}),
        ([1, 2, 3, 2], {"mode": "linear"}),
        ([1, 2, 5, 7], {"mode": "cubic", "exclude_outside": 1}),
        ([1, 2, 2, 2], {"mode": "linear", "antialias": 1}),
        ([1, 3, 4, 3], {"mode": "nearest", "nearest_mode": "floor"}),
    ]
    nodes = [
        onnx.helper.make_node("Resize", ["x", "", "", f"s{place}"], [f"y{place}"], **attributes)
        for place, (_, attributes) in enumerate(cases)
    ]
    sizes = {f"s{place}": np.array(extents) for place, (extents, _) in enumerate(cases)}
    outputs = [f"y{place}" for place in range(len(cases))]
    check(nodes, {"x": ("FLOAT", [1, 2, 4, 3])}, sizes, outputs, opset=18)


def test_quantised_models_are_computed_in_float(onnx, check):
    make = onnx.helper.make_node
    nodes = [
        make("QuantizeLinear", ["x", "s", "z"], ["q"]),
        make("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "s2", "z2", "b"], ["c"]),
        make("DequantizeLinear", ["c", "s2", "z2"], ["y"]),
    ]
    weights = {
        "s": np.float32(0.02),
        "z": np.uint8(128),
        "w": np.arange(-20, 34).reshape(2, 3, 3, 3).astype("int8"),
        "ws": np.array([0.01, 0.02], "float32"),
        "wz": np.zeros(2, "int8"),
        "s2": np.float32(0.05),
        "z2": np.uint8(120),
        "b": np.array([30, -20], "int32"),
    }
    check(nodes, {"x": ("FLOAT", [1, 3, 5, 5])}, weights)


SINGLE_OPERATORS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("TopK", {"k": np.array([3])}, {"axis": 1, "sorted": 1}),
    ("ScatterElements", {"i": np.array([[1, -1]]), "u": drawn(1, 2)}, {"axis": 1}),
    ("ReverseSequence", {"n": np.array([1, 3, 2, 6])}, {"batch_axis": 0, "time_axis": 1}),
    ("LpNormalization", {}, {"p": 1, "axis": 0}),
    ("Pow", {"e": np.int64(3)}, {}),
    ("HardSwish", {}, {}),
    ("Mish", {}, {}),
    ("Celu", {}, {"alpha": 0.7}),
    ("CumSum", {"a": np.int64(1)}, {"reverse": 1, "exclusive": 1}),
    ("STFT", {"n": np.int64(2), "w": drawn(4)}, {"onesided": 1}),
    ("Clip", {"low": np.float32(-0.5), "high": np.float32("nan")}, {}),
    ("Clip", {"low": np.float32(-0.5), "high": np.float32(0.25)}, {}),
    ("Einsum", {"w": drawn(6, 3)}, {"equation": "ij,jk->ki"}),
]


def test_single_operators(onnx, check):
    nodes, weights, outputs = [], {}, []
    for place, (operator, own, attributes) in enumerate(SINGLE_OPERATORS):
        names = {name: f"{name}{place}" for name in own}
        weights |= {names[name]: value for name, value in own.items()}
        results = [f"y{place}", f"z{place}"][: 2 if operator == "TopK" else 1]
        outputs += results
        nodes.append(onnx.helper.make_node(operator, ["x", *names.values()], results, **attributes))
    check(nodes, {"x": ("FLOAT", [4, 6])}, weights, outputs, opset=18)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"pads": [1, 0, 0, 1], "strides": [2, 1]},
        {"dilations": [1, 2]},
    ],
)
def test_blocks_become_an_image(how, onnx, check):
    node = onnx.helper.make_node("Col2Im", ["x", "image", "block"], ["y"], **how)
    (top, left, bottom, right) = how.get("pads", (0, 0, 0, 0))
    strides, dilations = how.get("strides", (1, 1)), how.get("dilations", (1, 1))
    rows = (6 + top + bottom - dilations[0] - 1) // strides[0] + 1
    columns = (5 + left + right - 2 * dilations[1] - 1) // strides[1] + 1
    weights = {"image": np.array([6, 5]), "block": np.array([2, 3])}
    check([node], {"x": ("FLOAT", [1, 18, rows * columns])}, weights, opset=18)


def test_operators_with_several_outputs_and_types(onnx, check):
    make = onnx.helper.make_node
    nodes = [
        make("Constant", [], ["halves"], value_floats=[0.5] * 6),
        make("Add", ["x", "halves"], ["moved"]),
        make("ArgMax", ["moved"], ["first"], axis=1, keepdims=0),
        make("OneHot", ["first", "depth", "two"], ["hot"], axis=0),
        make("Pow", ["first", "three"], ["cubes"]),
        make("EyeLike", ["moved"], ["eye"], k=1),
        make("Dropout", ["moved"], ["kept", "mask"]),
        make("LayerNormalization", ["kept", "scale"], ["normal", "mean", "deviation"]),
        make("Pad", ["normal", "pads"], ["cut"], mode="edge"),
        make("Div", ["one", "x"], ["quotient"]),
        make("IsInf", ["quotient"], ["infinite"], detect_negative=0),
        make("Not", ["infinite"], ["finite"]),
        make("Unsqueeze", ["x", "last"], ["column"]),
        make("DFT", ["column"], ["spectrum"], axis=1),
    ]
    weights = {
        "depth": np.int64(6),
        "two": np.array([0.25, 2.0], "float32"),
        "three": np.float32(3.0),
        "scale": drawn(6, seed=1),
        "pads": np.array([0, -1, 0, 2]),
        "one": np.array([1.0], "float32"),
        "last": np.array([2]),
    }
    outputs = [*("hot", "cubes", "eye", "kept", "mask", "normal", "mean", "deviation"), "cut"]
    outputs += ["finite", "spectrum"]
    check(nodes, {"x": ("FLOAT", [4, 6])}, weights, outputs)


@pytest.mark.parametrize("operator", ["GroupNormalization", "InstanceNormalization"])
def test_normalizations_of_images(operator, onnx, check):
    opset, how = (21, {"num_groups": 2}) if operator.startswith("G") else (17, {})
    node = onnx.helper.make_node(operator, ["x", "s", "b"], ["y"], **how)
    weights = {"s": drawn(4, seed=1), "b": drawn(4, seed=2)}
    check([node], {"x": ("FLOAT", [2, 4, 3, 5])}, weights, opset=opset)


def test_sums_of_several_inputs_keep_the_layout_of_images(onnx, check):
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "a"], ["c"]),
        make("Sum", ["c", "x", "c"], ["s"]),
        make("Max", ["s", "x"], ["m"]),
        make("Mean", ["m", "s", "x"], ["y"]),
    ]
    network = check(nodes, {"x": ("FLOAT", [1, 4, 5, 5])}, {"a": drawn(4, 4, 1, 1)})
    assert prepare(network, resolve_target("cpu")).layout == "NHWC"


def test_a_hard_swish_that_is_written_out_needs_no_transposition(onnx, check):
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "a"], ["c"]),
        make("Add", ["c", "three"], ["s"]),
        make("Clip", ["s", "zero", "six"], ["l"]),
        make("Mul", ["c", "l"], ["m"]),
        make("Div", ["m", "six"], ["d"]),
        make("Conv", ["d", "a"], ["y"]),
    ]
    weights = {"a": drawn(4, 4, 3, 3), "zero": np.float32(0), "six": np.float32(6)}
    network = check(
        nodes, {"x": ("FLOAT", [1, 4, 9, 9])}, weights | {"three": np.array([3.0], "float32")}
    )
    counts = call_counts(prepare(network, resolve_target("cpu")).mod)
    # One at each end of the network.
    assert sum("transpose" in name for name in counts) == 2
    assert counts.total() == 4


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_onnx_own_tests_of_operators_with_converters_of_ours():
    nodes = pytest.importorskip("benchmarks.zoo.nodes")
    from tvm_adaptive.models.frontend.converters import OWN

    # Types that numpy has only through other packages; arithmetic that C leaves open.
    odd = ("e4m3", "e5m2", "int4", "int2", "float4", "bfloat16", "training", "FLOAT", "INT")
    chosen = [
        case
        for case in nodes.cases()
        if {node.op_type for node in case.model.graph.node} <= set(OWN)
        and not any(text in case.name for text in odd)
    ]
    assert len(chosen) > 100
    states = {case.name: nodes.check(case) for case in chosen}
    failed = {name: why for name, (state, why) in states.items() if state != nodes.PASSES}
    assert len(failed) <= 0.1 * len(chosen), failed
