from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.frontend.converters.graphs import model_of
from tvm_adaptive.models import call_counts, prepare
from tvm_adaptive.models.frontend.onnx_import import relax_of_graph
from tvm_adaptive.models.frontend.shapes import network_of_imported
from tvm_adaptive.tuning.target import resolve_target

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


def test_pools_of_the_same_size_are_padded_as_onnx_has_it(compare):
    nodes = [
        make("MaxPool", ["odd"], ["upper"], kernel_shape=[3, 2], strides=[2, 2],
             auto_pad="SAME_UPPER"),
        make("MaxPool", ["odd"], ["lower"], kernel_shape=[3, 2], strides=[2, 2],
             auto_pad="SAME_LOWER"),
        make("MaxPool", ["odd"], ["valid"], kernel_shape=[2, 2], auto_pad="VALID"),
        make("AveragePool", ["odd"], ["average"], kernel_shape=[3, 2], strides=[2, 2],
             auto_pad="SAME_LOWER"),
        make("LpPool", ["odd"], ["norm"], kernel_shape=[3, 3], strides=[2, 2],
             auto_pad="SAME_UPPER"),
    ]  # fmt: skip
    compare(nodes, {"odd": drawn(1, 2, 5, 7)}, {}, opset=19)


@pytest.mark.parametrize(
    ("auto_pad", "stride", "pads"),
    [("SAME_UPPER", 1, [2, 2]), ("SAME_UPPER", 2, [1, 2]), ("SAME_LOWER", 2, [2, 1])],
)
def test_pools_of_the_same_size_may_have_gaps(compare, run_graph, auto_pad, stride, pads):
    """As ONNX defines it; ONNX Runtime pads as if there were none, but knows pads in numbers."""

    def pools(**pad):
        how = {"kernel_shape": [3], "dilations": [2], "strides": [stride], **pad}
        return [
            make("AveragePool", ["x"], ["average"], **how),
            make("AveragePool", ["x"], ["with_pads"], **how, count_include_pad=1),
            make("LpPool", ["x"], ["norm"], **how),
            make("MaxPool", ["x"], ["largest"], **how),
        ]

    inputs = {"x": drawn(1, 1, 8)}
    compare(pools(pads=pads), inputs, {}, opset=19)
    expected = run_graph(pools(pads=pads), inputs, {}, opset=19)
    found = run_graph(pools(auto_pad=auto_pad), inputs, {}, opset=19)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (1, 1, 8 // stride)
        np.testing.assert_array_equal(one, other)


def test_norms_of_windows_that_are_cut_off(compare, run_graph):
    node = make("LpPool", ["x"], ["y"], kernel_shape=[2], strides=[2], ceil_mode=1, p=1)
    ones = np.ones((1, 1, 5), "float32")
    (found,) = run_graph([node], {"x": ones}, {}, opset=18)
    np.testing.assert_allclose(found, [[[2, 2, 1]]], rtol=1e-6)
    how = {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1}
    nodes = [
        node,
        make("LpPool", ["image"], ["image_norm"], **how),
        make("LpPool", ["image"], ["padded"], **how, pads=[1, 0, 1, 1]),
        make("LpPool", ["image"], ["with_gaps"], **how, dilations=[2, 1]),
        # Its last window would begin in the pads at the end.
        make("LpPool", ["x"], ["short"], kernel_shape=[2], strides=[3], pads=[0, 1], ceil_mode=1),
    ]
    compare(nodes, {"x": drawn(1, 1, 5), "image": drawn(1, 2, 6, 8, seed=1)}, {}, opset=18)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_a_convolution_of_the_same_size_pads_by_itself(compare, auto_pad):
    how = {"strides": [2, 2], "auto_pad": auto_pad}
    node = make("Conv", ["x", "kernel"], ["y"], **how)
    inputs, weights = {"x": drawn(1, 2, 6, 8)}, {"kernel": drawn(4, 2, 3, 3, seed=1)}
    compare([node], inputs, weights)
    mod = relax_of_graph(Path("net.onnx"), model_of([node], inputs, weights))
    network = network_of_imported("net", mod, {"x": (1, 2, 6, 8)})
    counts = call_counts(prepare(network, resolve_target("cpu"), "NHWC").mod)
    assert not any("pad" in name for name in counts)


def test_a_pool_that_skips_has_no_pad(run_graph):
    """TF-slim's subsampling, which ONNX Runtime refuses: the kernel is smaller than its step."""
    node = make("MaxPool", ["x"], ["y"], kernel_shape=[1, 1], strides=[2, 2], auto_pad="SAME_UPPER")
    x = drawn(1, 2, 6, 4)
    (found,) = run_graph([node], {"x": x}, {}, opset=12)
    np.testing.assert_array_equal(found, x[:, :, ::2, ::2])


def test_operators_as_they_were_before_version_11(compare):
    nodes = [
        make("TopK", ["x", "k"], ["values", "places"], axis=1),
        make("Resize", ["image", "smaller"], ["shrunk"], mode="nearest"),
        make("Resize", ["image", "larger"], ["grown"], mode="nearest"),
    ]
    weights = {
        "k": np.array([3]),
        "smaller": np.array([1, 1, 0.6, 0.6], "float32"),
        "larger": np.array([1, 1, 1.5, 2], "float32"),
    }
    compare(nodes, {"x": drawn(2, 5), "image": drawn(1, 1, 5, 4)}, weights, opset=10)
    slices = [
        make("Slice", ["x"], ["columns"], axes=[1], starts=[-3], ends=[100]),
        make("Slice", ["x"], ["corner"], starts=[0, 1], ends=[1, -1]),
    ]
    compare(slices, {"x": drawn(2, 5)}, {}, opset=9)


def test_the_limits_of_suppression_are_those_of_the_model(compare, refusal):
    rng = np.random.default_rng(0)
    corners = rng.random((1, 12, 2)).astype("float32")
    inputs = {
        "boxes": np.concatenate([corners, corners + 0.4], 2),
        "scores": rng.random((1, 1, 12)).astype("float32") - 0.5,
        "limit": np.array([3]),
    }
    weights = {"most": np.array([20]), "few": np.array([2]), "overlap": np.float32(0.3)}
    # As exporters write it for all boxes.
    weights |= {"least": np.float32(-0.2), "all": np.array([2**63 - 1])}
    limits = [
        ("most",),
        ("all", "overlap"),
        ("most", "overlap"),
        ("few", "overlap", "least"),
        ("most", "", "least"),
    ]
    given = {name: inputs[name] for name in ("boxes", "scores")}
    # Of a class that no image shows.
    tiny = {"boxes": given["boxes"], "scores": given["scores"] * np.float32(1e-9) + 1e-9}
    compare([make("NonMaxSuppression", ["boxes", "scores", "few"], ["y"])], tiny, weights)
    for each in limits:
        compare([make("NonMaxSuppression", ["boxes", "scores", *each], ["y"])], given, weights)
    node = make("NonMaxSuppression", ["boxes", "scores", "limit"], ["chosen"])
    assert "max_output_boxes_per_class must be constant" in refusal([node], inputs, {})


def test_a_reduction_over_no_axes_changes_each_number(compare):
    operators = "L1", "L2", "SumSquare", "LogSum", "Sum", "LogSumExp"
    nodes = [
        make(f"Reduce{operator}", ["x", *axes], [f"{operator}{len(axes)}"], noop_with_empty_axes=1)
        for operator in operators
        for axes in ([], ["none"])
    ]
    nodes += [make("ReduceSumSquare", ["x", "last"], ["rows"], noop_with_empty_axes=1)]
    weights = {"none": np.zeros(0, "int64"), "last": np.array([-1])}
    x = np.array([[-3.0, 0.5], [2.0, -1.0]], "float32")
    compare(nodes, {"x": np.abs(x)}, weights, opset=18, by_reference=True)
    compare(nodes[:6], {"x": x}, weights, opset=18, by_reference=True)


def test_sums_of_exponentials_of_infinities(run_graph):
    x = np.array([[-np.inf, -np.inf], [np.inf, 0.0], [1.0, 2.0]], "float32")
    rows = np.logaddexp(x[:, 0], x[:, 1])
    nodes = [make("ReduceLogSumExp", ["x"], ["rows"], axes=[1], keepdims=0)]
    nodes += [make("ReduceLogSumExp", ["x"], ["all"])]
    found = run_graph(nodes, {"x": x}, {}, opset=13)
    np.testing.assert_allclose(found[0], rows, rtol=1e-6)
    np.testing.assert_array_equal(found[1], [[np.inf]])
    nodes = [make("ReduceLogSumExp", ["x", "axes"], ["y"])]
    (found,) = run_graph(nodes, {"x": x}, {"axes": np.array([-1])}, 18)
    np.testing.assert_allclose(found[:, 0], rows, rtol=1e-6)
    nodes = [make("ReduceLogSumExp", ["x", "axes"], ["y"], noop_with_empty_axes=1)]
    (found,) = run_graph(nodes, {"x": x}, {"axes": np.zeros(0, "int64")}, 18)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extremes_of_infinities(run_graph, dtype):
    least = np.finfo(dtype).min
    x = np.array([[-np.inf, -np.inf], [1, -np.inf], [least, -np.inf], [least, 3]], dtype)
    for name, values, expected in (("ReduceMax", x, x.max(1)), ("ReduceMin", -x, (-x).min(1))):
        node = make(name, ["x"], ["y"], axes=[1], keepdims=0)
        (found,) = run_graph([node], {"x": values}, {}, 13)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", [-2, -1, 0, 1, 2])
def test_a_place_in_a_list_may_count_from_the_end(compare, place):
    nodes = [
        make("SequenceConstruct", ["x", "b"], ["list"]),
        make("SequenceInsert", ["list", "c", "place"], ["longer"]),
        make("ConcatFromSequence", ["longer"], ["y"], axis=0),
    ]
    inputs = {"x": drawn(2, 3), "b": drawn(2, 3, seed=1), "c": drawn(2, 3, seed=2)}
    compare(nodes, inputs, {"place": np.int64(place)})


def test_norms_of_windows_of_large_halves(run_graph):
    x = np.tile(np.array([-400, 400], "float16"), (1, 2, 8, 4))
    (whole,) = run_graph([make("GlobalLpPool", ["x"], ["y"])], {"x": x}, {})
    np.testing.assert_allclose(whole, 400 * 8, rtol=2e-3)
    node = make("LpPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    (found,) = run_graph([node], {"x": x}, {}, 18)
    assert found.dtype == "float16"
    np.testing.assert_allclose(found, 400 * 2, rtol=2e-3)


def test_sums_of_halves(run_graph):
    x = np.ones((2, 4096), "float16")
    nodes = [make("Einsum", ["x", "w"], ["product"], equation="ij,jk->ik")]
    nodes += [make("ReduceL2", ["x"], ["norm"], axes=[1])]
    found = run_graph(nodes, {"x": x}, {"w": np.ones((4096, 3), "float16")}, opset=13)
    assert [each.dtype for each in found] == ["float16", "float16"]
    np.testing.assert_array_equal(found[0], 4096.0)
    np.testing.assert_array_equal(found[1], 64.0)


@pytest.mark.parametrize("axis", [1, -1])
def test_a_new_axis_may_be_a_single_number(compare, axis):
    """As PyTorch's export writes it."""
    nodes = [make("Unsqueeze", ["x", "axis"], ["wide"]), make("Neg", ["wide"], ["y"])]
    compare(nodes, {"x": drawn(2, 3)}, {"axis": np.int64(axis)})
