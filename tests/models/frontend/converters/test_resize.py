"""The places and weights of a resized axis, against ONNX's own reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_adaptive._tvm.onnx_frontend import OnnxNode
from tvm_adaptive.models.frontend.converters.resize import Axis, Mode, axes_of, taps

onnx = pytest.importorskip("onnx")
reference = pytest.importorskip("onnx.reference")

MODES = {
    **{f"nearest {kind}": {"nearest_mode": kind} for kind in (
        "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"
    )},
    **{f"linear {kind}": {"mode": "linear", "coordinate_transformation_mode": kind} for kind in (
        "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"
    )},
    "cubic": {"mode": "cubic", "cubic_coeff_a": -0.5},
    "cubic inside": {"mode": "cubic", "exclude_outside": 1},
    "antialiased linear": {"mode": "linear", "antialias": 1},
    "antialiased cubic": {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
    "region": {
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "mode": "linear",
        "extrapolation_value": 7.0,
    },
}  # fmt: skip


def resizing(shape, **attributes):
    """Return a node that resizes a value of some shape."""
    value = SimpleNamespace(ty=SimpleNamespace(shape=shape))
    return OnnxNode("Resize", None, [value], attributes, None, 19)


def mode_of(attributes):
    return Mode(
        attributes.get("mode", "nearest"),
        attributes.get("coordinate_transformation_mode", "half_pixel"),
        attributes.get("nearest_mode", "round_prefer_floor"),
        attributes.get("cubic_coeff_a", -0.75),
        bool(attributes.get("exclude_outside", 0)),
        bool(attributes.get("antialias", 0)),
        attributes.get("extrapolation_value", 0.0),
    )


def expected(x, attributes, **given):
    """Resize one axis as ONNX's reference does."""
    names = ["x", *(name if name in given else "" for name in ("roi", "scales", "sizes"))]
    while not names[-1]:
        names.pop()
    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("Resize", names, ["y"], **attributes)],
        "resize",
        [helper.make_tensor_value_info("x", kinds.DOUBLE, x.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [onnx.numpy_helper.from_array(value, name) for name, value in given.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    return reference.ReferenceEvaluator(model).run(None, {"x": x})[0]


def applied(x, axis, mode):
    indices, weights, outside = taps(axis, mode)
    return np.where(outside, mode.extrapolation, (x[indices] * weights).sum(1))


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("n_out", [1, 3, 5, 12])
def test_an_axis_is_resized_as_onnx_defines_it(name, n_out):
    attributes = MODES[name]
    x = np.array([3.0, -1.0, 4.0, 1.5, -5.0])
    given = {"sizes": np.array([n_out])}
    if name == "region":
        given["roi"] = np.array([-0.25, 0.75])
    (axis,) = axes_of(resizing(x.shape), given.get("roi"), None, given["sizes"])
    found = applied(x, axis, mode_of(attributes))
    assert np.allclose(found, expected(x, attributes, **given), atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([name for name in MODES if name != "region"]),
)
def test_a_constant_stays_as_it_is(n_in, n_out, name):
    axis = Axis(n_in, n_out, n_out / n_in)
    indices, weights, outside = taps(axis, mode_of(MODES[name]))
    assert not outside.any()
    assert indices.min() >= 0
    assert indices.max() < n_in
    assert np.allclose(weights.sum(1), 1)


@pytest.mark.parametrize(
    ("policy", "extents"), [("stretch", [8, 3]), ("not_larger", [6, 3]), ("not_smaller", [8, 4])]
)
def test_sizes_may_keep_the_ratio_of_the_axes(policy, extents):
    node = resizing([2, 4, 2], axes=[1, -1], keep_aspect_ratio_policy=policy.encode())
    found = axes_of(node, None, None, np.array([8, 3]))
    assert [axis.n_out for axis in found] == [2, *extents]


def test_scales_round_down_and_other_axes_stay():
    found = axes_of(resizing([2, 5, 7], axes=[1, 2]), None, np.array([0.5, 1.5]), None)
    assert found == [Axis(2, 2, 1.0), Axis(5, 2, 0.5), Axis(7, 10, 1.5)]


def test_what_is_unknown_or_missing_is_named():
    with pytest.raises(ValueError, match="neither scales nor sizes"):
        axes_of(resizing([4]), None, np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match="nearest_mode odd is unknown"):
        taps(Axis(4, 8, 2.0), Mode(rounding="odd"))
    with pytest.raises(ValueError, match="coordinate_transformation_mode odd is unknown"):
        taps(Axis(4, 8, 2.0), Mode(coordinates="odd"))


@pytest.mark.parametrize(("n", "size"), [(6, 21), (16, 14), (7, 2), (4, 8)])
def test_places_halfway_between_two_are_exact(compare, n, size):
    x = np.random.default_rng(0).standard_normal((1, 1, n, n)).astype("float32")
    node = onnx.helper.make_node("Resize", ["x", "", "", "s"], ["y"], mode="nearest")
    compare([node], {"x": x}, {"s": np.array([1, 1, size, size])}, opset=13)


def test_images_of_integers_are_computed_in_float(compare):
    image = np.random.default_rng(0).integers(0, 255, (1, 2, 4, 6)).astype("uint8")
    node = onnx.helper.make_node("Resize", ["x", "", "s"], ["y"], mode="linear")
    compare([node], {"x": image}, {"s": np.array([1, 1, 2, 2], "float32")})
