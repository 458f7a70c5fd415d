from __future__ import annotations

import numpy as np
import pytest

helper = pytest.importorskip("onnx").helper
make = helper.make_node


def test_integers_are_computed_exactly(compare):
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.standard_normal((4, 6)).astype("float32"),
        "a": rng.integers(0, 256, (4, 6), "uint8"),
        "image": rng.integers(0, 256, (1, 3, 5, 5), "uint8"),
    }
    weights = {
        "scale": np.float32(0.03),
        "zero": np.uint8(120),
        "per_row": np.array([0.01, 0.02, 0.04, 0.08], "float32"),
        "zero_of_row": np.array([3, 0, -5, 1], "int8"),
        "blocks": np.array([[0.01, 0.5], [0.02, 0.25], [0.04, 0.125], [0.08, 1.0]], "float32"),
        "single": np.array([0.02], "float32"),
        "b": rng.integers(-20, 20, (6, 2), "int8"),
        "per_column": np.array([0.01, 0.02], "float32"),
        "zero_of_column": np.array([1, -2], "int8"),
        "kernel": rng.integers(-20, 20, (2, 3, 3, 3), "int8"),
        "zero_of_channel": np.array([1, -2], "int8"),
    }
    nodes = [
        make("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        make("QuantizeLinear", ["x", "scale"], ["without_zero"]),
        make("QuantizeLinear", ["x", "per_row", "zero_of_row"], ["rows"], axis=0),
        make("DequantizeLinear", ["rows", "per_row", "zero_of_row"], ["back"], axis=0),
        make("QuantizeLinear", ["x", "blocks"], ["blocked"], axis=1, block_size=3,
             output_dtype=helper.TensorProto.INT8),
        make("DequantizeLinear", ["blocked", "blocks"], ["from_blocks"], axis=1, block_size=3),
        make("QLinearMatMul", ["a", "scale", "zero", "b", "per_column", "zero_of_column", "scale",
                               "zero"], ["product"]),
        make("ConvInteger", ["image", "kernel", "zero"], ["sums"]),
        make("DequantizeLinear", ["a", "single", "zero_alone"], ["alone"]),
    ]  # fmt: skip
    compare(nodes, inputs, weights | {"zero_alone": np.array([7], "uint8")}, opset=21)


def test_numbers_that_are_all_zero_have_a_scale(compare):
    inputs = {"x": np.array([[0.1, -2.0, 3.7]], "float32"), "nothing": np.zeros((2, 3), "float32")}
    nodes = [
        make("DynamicQuantizeLinear", [each], [f"{each}_q", f"{each}_scale", f"{each}_zero"])
        for each in inputs
    ]
    compare(nodes, inputs, {}, by_reference=True)


def test_types_that_are_not_supported_are_named(refusal):
    x = {"x": np.ones((2, 2), "float32")}
    to = helper.TensorProto.FLOAT8E4M3FN
    node = make("QuantizeLinear", ["x", "scale"], ["y"], output_dtype=to)
    assert "QuantizeLinear" in refusal([node], x, {"scale": np.float32(1)}, opset=21)
