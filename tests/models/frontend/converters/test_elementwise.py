from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.frontend.converters.conftest import outputs_of
from tests.models.frontend.converters.graphs import model_of
from tvm_adaptive.models import outputs_agree
from tvm_adaptive.models.frontend.onnx_import import relax_of_graph

helper = pytest.importorskip("onnx").helper
make = helper.make_node


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_operators_of_which_tvm_knows_a_part(compare):
    inputs = {
        "x": drawn(2, 4, 3),
        "half": drawn(2, 4, 3, seed=1).astype("float16"),
        "n": np.array([[3, -2, 0], [1, 5, -1]]),
        "low": np.array(np.nan, "float32"),
        "most": np.array(2),
    }
    weights = {
        "inf": np.array([[np.inf, -np.inf, 1.0]], "float32"),
        "zeros": np.zeros((1, 4, 3), "float32"),
        "two": np.int64(2),
        "depth": np.int64(4),
        "values": np.array([-1, 7]),
        "one_of_one": np.array([[[3.0]]], "float32"),
        "scale": drawn(3, seed=2),
        "scale16": drawn(3, seed=2).astype("float16"),
        "groups": drawn(4, seed=3),
        "bias": drawn(4, seed=4),
    }
    nodes = [
        make("Constant", [], ["float"], value_float=0.5),
        make("Constant", [], ["int"], value_int=3),
        make("Constant", [], ["ints"], value_ints=[1, 2, 3]),
        make("Mul", ["x", "float"], ["halved"]),
        make("Add", ["n", "ints"], ["added"]),
        make("Pow", ["n", "int"], ["cubes"]),
        make("Sub", ["one_of_one", "x"], ["less"]),
        make("Clip", ["x", "low"], ["unclipped"]),
        make("Clip", ["n", "", "most"], ["at_most"]),
        make("Mul", ["x", "inf"], ["infinite"]),
        make("IsInf", ["infinite"], ["both_signs"]),
        make("IsInf", ["infinite"], ["above"], detect_negative=0),
        make("IsInf", ["infinite"], ["neither"], detect_negative=0, detect_positive=0),
        make("OneHot", ["n", "depth", "values"], ["hot"], axis=1),
        make("Mul", ["x", "zeros"], ["nothing"]),
        make("LpNormalization", ["nothing"], ["still_nothing"], axis=1),
        make("LpNormalization", ["x"], ["unit"]),
        make("EyeLike", ["n"], ["eye"], dtype=helper.TensorProto.DOUBLE, k=-1),
        make("LayerNormalization", ["half", "scale16"], ["narrow"], epsilon=1e-3),
        make("Elu", ["half"], ["elu"], alpha=0.5),
        make("Selu", ["half"], ["selu"]),
        make("ThresholdedRelu", ["half"], ["thresholded"], alpha=0.25),
        make("LayerNormalization", ["x", "scale"], ["unbiased", "mean"]),
        make("GroupNormalization", ["x", "groups", "bias"], ["grouped"], num_groups=2),
        make("Min", ["x", "less", "halved"], ["least"]),
    ]
    compare(nodes, inputs, weights, opset=21)


def test_norms_of_halves_square_in_single_precision(run_graph):
    x = np.full((1, 64), 300.0, "float16")
    (found,) = run_graph([make("LpNormalization", ["x"], ["y"])], {"x": x}, {}, opset=21)
    assert found.dtype == "float16"
    np.testing.assert_allclose(found, 0.125, rtol=1e-3)


def test_images_of_large_halves_are_normalised(run_graph):
    x = np.tile(np.array([-400, 400], "float16"), (1, 2, 8, 4))
    weights = {"s": np.ones(2, "float16"), "b": np.zeros(2, "float16")}
    node = make("InstanceNormalization", ["x", "s", "b"], ["y"])
    (found,) = run_graph([node], {"x": x}, weights)
    np.testing.assert_allclose(found, np.sign(x), rtol=1e-3)


@pytest.mark.parametrize("are_inputs", [False, True])
def test_what_is_no_number_is_not_clipped(run_graph, are_inputs):
    x = np.array([np.nan, -1, 0.3, 2], "float32")
    bounds = {"low": np.float32(0), "high": np.float32(1)}
    inputs = {"x": x, **({k: np.array(v) for k, v in bounds.items()} if are_inputs else {})}
    node = make("Clip", ["x", "low", "high"], ["y"])
    (found,) = run_graph([node], inputs, {} if are_inputs else bounds)
    np.testing.assert_array_equal(found, np.clip(x, 0, 1))


def test_shapes_and_axes_of_the_oldest_files(run_graph):
    x = drawn(2, 3)
    (found,) = run_graph([make("Reshape", ["x"], ["y"], shape=[3, 2])], {"x": x}, {}, 4)
    np.testing.assert_array_equal(found, x.reshape(3, 2))
    (found,) = run_graph([make("Concat", ["x", "x"], ["y"])], {"x": x}, {}, 3)
    np.testing.assert_array_equal(found, np.concatenate([x, x], 1))


def test_before_version_11_the_bounds_of_a_clip_are_attributes(compare):
    nodes = [make("Clip", ["x"], ["y"], min=-0.25), make("Clip", ["x"], ["z"], max=0.5)]
    compare(nodes, {"x": drawn(4, 4)}, {}, opset=10)


@pytest.mark.parametrize(
    ("node", "weights", "text"),
    [
        (make("Dropout", ["x", "", "yes"], ["y"]), {"yes": np.array(True)}, "for inference"),
        (
            make("BatchNormalization", ["x", "s", "s", "s", "s"], ["y"], training_mode=1),
            {"s": np.ones(4, "float32")},
            "training_mode 1 is not supported",
        ),
        (make("SpaceToDepth", ["x"], ["y"], blocksize=2, mode="CRD"), {}, "mode CRD is not"),
        (make("Cast", ["x"], ["y"], to=helper.TensorProto.INT4), {}, "type int4 is not supported"),
        (make("OneHot", ["x", "x", "x"], ["y"]), {}, "depth must be constant"),
    ],
)
def test_what_cannot_be_converted_says_why(node, weights, text, refusal):
    assert text in refusal([node], {"x": drawn(1, 4, 2, 2)}, weights, opset=21)


def test_normalization_with_weights_of_fewer_axes(compare):
    nodes = [
        make("LayerNormalization", ["x", "scale", "bias"], ["y"], axis=1),
        make("LayerNormalization", ["x", "scale", "bias"], ["z"], axis=2),
    ]
    weights = {"scale": drawn(4, seed=1), "bias": drawn(4, seed=2)}
    compare(nodes, {"x": drawn(2, 4, 4)}, weights)


def test_powers_of_integers_are_cut_off_unless_they_are_whole(compare):
    names = ("half", "three", "whole")
    nodes = [make("Pow", ["n", name], [f"to_{name}"]) for name in names]
    weights = {"half": np.float32(0.5), "three": np.int32(3), "whole": np.float32(3.0)}
    compare(nodes, {"n": np.array([2, 3, 5, 7, 8, 1000], "int32")}, weights)


def test_operators_of_double_precision(compare):
    nodes = [
        make("Elu", ["x"], ["elu"], alpha=0.3),
        make("Selu", ["x"], ["selu"]),
        make("ThresholdedRelu", ["x"], ["thresholded"], alpha=0.25),
    ]
    x = np.concatenate([drawn(2, 20).astype("float64").reshape(-1), [-np.inf, 0.25, 0.0]])
    compare(nodes, {"x": x}, {}, by_reference=True)


def test_old_files_name_the_axis_of_the_second_operand():
    """Before version 7; of images, biases have their channels. ONNX's reference has no axis."""
    x, bias, plane = drawn(2, 3, 3, 3), drawn(3, seed=1), drawn(3, 3, seed=2)
    nodes = [
        make("Add", ["x", "bias"], ["sum"], broadcast=1, axis=1),
        make("Div", ["x", "plane"], ["quotient"], broadcast=1, axis=1),
        make("Mul", ["x", "bias"], ["product"], broadcast=1),
        make("Less", ["x", "bias"], ["less"], broadcast=1, axis=2),
    ]
    model = model_of(nodes, {"x": x}, {"bias": bias, "plane": plane}, opset=6)
    found = outputs_of(relax_of_graph(Path("net.onnx"), model), {"x": x})
    expected = [
        x + bias[:, None, None],
        x / plane[:, :, None],
        x * bias,
        x < bias[:, None],
    ]
    assert outputs_agree(found, expected)


@pytest.mark.parametrize(("opset", "shape"), [(6, (3, 1, 1)), (7, (3,))])
def test_slopes_of_old_files_are_those_of_channels(opset, shape):
    """ONNX's reference broadcasts them from the last axis, whatever the version."""
    x, slope = drawn(2, 3, 3, 3), np.array([0.1, 0.5, 0.9], "float32")
    model = model_of([make("PRelu", ["x", "slope"], ["y"])], {"x": x}, {"slope": slope}, opset)
    found = outputs_of(relax_of_graph(Path("net.onnx"), model), {"x": x})
    assert outputs_agree(found, [np.where(x < 0, x * slope.reshape(shape), x)])


def test_softplus_of_what_is_far_below_zero(run_graph):
    x = np.array([-87.0, -40.0, -20.0, -5.0, 0.0, 3.0, 50.0, 1e30, np.inf, -np.inf], "float32")
    (found,) = run_graph([make("Softplus", ["x"], ["y"])], {"x": x}, {})
    np.testing.assert_allclose(found, np.logaddexp(0.0, x.astype("float64")), rtol=2e-6)


def test_what_is_no_number_does_not_equal_itself(run_graph):
    x = np.array([np.nan, 1, -np.inf], "float32")
    nodes = [
        make("Equal", ["x", "x"], ["is_number"]),
        make("Not", ["is_number"], ["is_none"]),
        make("Where", ["is_none", "zero", "x"], ["y"]),
        make("Identity", ["x"], ["alias"]),
        make("Equal", ["x", "alias"], ["is_equal"]),
    ]
    y, is_equal = run_graph(nodes, {"x": x}, {"zero": np.float32(0)})
    np.testing.assert_array_equal(y, [0, 1, -np.inf])
    np.testing.assert_array_equal(is_equal, [False, True, True])


def test_truth_values_are_compared(compare):
    inputs = {"a": np.array([[True, False, True]]), "b": np.array([[True], [False]])}
    nodes = [
        make("Equal", ["a", "b"], ["equal"]),
        make("Equal", ["yes", "a"], ["is_true"]),
        make("Equal", ["n", "n"], ["always"]),
    ]
    compare(nodes, {**inputs, "n": np.array([1, 2])}, {"yes": np.array(True)})


def test_area_tangents_of_small_numbers(run_graph):
    x = np.array([1e-8, -1e-8, 1e-30, 0.0, 2e-3, -0.5, 0.999, -0.999], "float32")
    (found,) = run_graph([make("Atanh", ["x"], ["y"])], {"x": x}, {})
    np.testing.assert_allclose(found, np.arctanh(x.astype("float64")), rtol=2e-6)
