from __future__ import annotations

import numpy as np
import pytest

make = pytest.importorskip("onnx").helper.make_node


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_operators_that_move_elements(compare):
    inputs = {
        "x": drawn(2, 3, 4, 5),
        "lengths": np.array([1, 4, 2, 3]),
        "rows": np.array([[0, -1, 2], [1, 0, -3]], "int32"),
        "truth": np.array([[True, False], [True, True]]),
        "sequence": drawn(4, 5),
    }
    weights = {
        "kernel": drawn(3, 2, 3, 3, seed=1),
        "pads": np.array([1, -1, 2, 0]),
        "axes": np.array([1, -1]),
        "updates": drawn(2, 3, seed=2),
    }
    nodes = [
        make("Pad", ["x", "pads", "", "axes"], ["cut"]),
        make("Pad", ["x", "pads", "", "axes"], ["mirrored"], mode="reflect"),
        make("ConvTranspose", ["x", "kernel"], ["wider"], strides=[2, 2], output_shape=[9, 12]),
        make("ConvTranspose", ["x", "kernel"], ["narrower"], strides=[2, 2], output_shape=[8, 9],
             auto_pad="SAME_UPPER"),
        make("ReverseSequence", ["sequence", "lengths"], ["by_data"], batch_axis=0, time_axis=1),
        make("ScatterElements", ["sequence", "rows", "updates"], ["added"], reduction="add"),
        make("ReduceMax", ["truth"], ["any"], keepdims=0),
        make("ReduceMin", ["truth", "axes_of_truth"], ["all"], keepdims=0),
    ]  # fmt: skip
    compare(nodes, inputs, weights | {"axes_of_truth": np.array([1])}, opset=20)


def test_before_version_11_the_pads_are_attributes(compare):
    node = make("Pad", ["x"], ["y"], pads=[0, 1, 2, 0], value=0.5)
    same = make("Pad", ["x"], ["z"], pads=[0, 0, 0, 0])
    compare([node, same], {"x": drawn(2, 3)}, {}, opset=10)


def test_what_cannot_be_converted_says_why(refusal):
    inputs = {"x": drawn(1, 8, 4), "pads": np.zeros(6, "int64")}
    assert "pads must be constant" in refusal([make("Pad", ["x", "pads"], ["y"])], inputs, {})
    weights = {"image": np.array([2, 3, 4]), "block": np.array([2, 2, 2])}
    assert "images of 3 axes are not supported" in refusal(
        [make("Col2Im", ["x", "image", "block"], ["y"])], inputs, weights, opset=18
    )
