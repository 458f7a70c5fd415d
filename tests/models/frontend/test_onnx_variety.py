"""What files of exporters contain beside the newest operators, against ONNX Runtime."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import Network, compile_network, prepare, run_network
from tvm_adaptive.models.frontend import load
from tvm_adaptive.models.frontend.onnx_values import dequantise_constants
from tvm_adaptive.tuning.target import resolve_target

onnx = pytest.importorskip("onnx")
make, kinds = onnx.helper, onnx.TensorProto
RNG = np.random.default_rng(0)
Check = Callable[..., Any]
MICROSOFT = "com.microsoft"
LOWEST = float(np.finfo("float32").min)


def drawn(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("float32")


def integers(*shape: int) -> Any:
    return RNG.integers(0, 256, shape, "uint8")


def model_of(
    nodes: list[Any],
    inputs: dict[str, tuple[int, list[Any]]],
    weights: dict[str, Any],
    outputs: tuple[str, ...] = ("y",),
    opset: int = 17,
    *,
    tensors: Sequence[Any] = (),
) -> Any:
    arrays = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items()]
    graph = make.make_graph(
        nodes,
        "net",
        [make.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [make.make_empty_tensor_value_info(name) for name in outputs],
        [*arrays, *tensors],
    )
    opsets = [make.make_opsetid("", opset), make.make_opsetid(MICROSOFT, 1)]
    return make.make_model(graph, opset_imports=opsets, ir_version=9)


def computed(network: Network, inputs: list[Any]) -> list[Any]:
    target = resolve_target("cpu")
    return run_network(compile_network(prepare(network, target), None, target), inputs)


@pytest.fixture
def check(tmp_path: Path, check_import: Check) -> Check:
    def run(*arguments: Any, **options: Any) -> None:
        path = tmp_path / "net.onnx"
        onnx.save(model_of(*arguments, **options), str(path))
        check_import(load(str(path)))

    return run


def node(
    operator: str, inputs: str, outputs: str = "y", domain: str = "", **attributes: Any
) -> Any:
    given, made = (
        ["" if name == "-" else name for name in each.split()] for each in (inputs, outputs)
    )
    return make.make_node(operator, given, made, domain=domain, **attributes)


X = {"x": (kinds.FLOAT, [2, 6, 8])}
IMAGE = {"x": (kinds.FLOAT, [1, 2, 10, 20])}
SCALE = {"scale": np.float32(0.03), "zero": np.uint8(120), "wide": np.float32(0.08)}
# Not drawn by RNG, whose later draws decide on which side ties of other tests are.
WEIGHTS = np.random.default_rng(1).standard_normal((8, 24)).astype("float32")
HEADS = {"w": WEIGHTS, "b": WEIGHTS[7]}
QUANTISED_HEADS = {**SCALE, **HEADS, "w": (120 + 40 * WEIGHTS).clip(0, 255).astype("uint8")}
ROWS = {"regions": np.array([[0, 8, 40, 100], [16, 0, 70, 64]], "float32"), "of": np.array([0, 0])}

CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], int]] = {
    "a split into one part": (
        [node("Split", "x", "p", axis=1), node("Relu", "p")], X, {}, 11,
    ),
    "a split into one part, by an input": (
        [node("Split", "x n", "p", axis=1), node("Relu", "p")], X, {"n": np.array([6])}, 17,
    ),
    "the place of the largest, counted from the end": (
        [node("ArgMax", "x", axis=-1), ], X, {}, 9,
    ),
    "the place of the smallest, counted from the end": (
        [node("ArgMin", "x", axis=-2, keepdims=0)], X, {}, 9,
    ),
    "a list without elements": (
        [make.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=3)],
        {"x": (kinds.FLOAT, [4, 2, 5])},
        {"w": drawn(1, 12, 5), "r": drawn(1, 12, 3)}, 17,
    ),
    "activations in small letters": (
        [node("LSTM", "x w r", hidden_size=3, activations=["sigmoid", "tanh", "relu"])],
        {"x": (kinds.FLOAT, [4, 2, 5])},
        {"w": drawn(1, 12, 5), "r": drawn(1, 12, 3)}, 17,
    ),
    "channels of an image": ([node("MeanVarianceNormalization", "x")], IMAGE, {}, 13),
    "attention of ONNX Runtime": (
        [node("Attention", "x w b", domain=MICROSOFT, num_heads=2)],
        X, {"w": drawn(8, 24), "b": drawn(24)}, 17,
    ),
    "attention with hidden keys": (
        [node("Attention", "x w b mask", domain=MICROSOFT, num_heads=2)],
        X, {"w": drawn(8, 24), "b": drawn(24),
            "mask": np.array([6 * [1], [1, 1, 1, 1, 0, 0]], "int32")}, 17,
    ),
    "attention with numbers of keys": (
        [node("Attention", "x w b lengths", domain=MICROSOFT, num_heads=2)],
        X, {"w": drawn(8, 24), "b": drawn(24), "lengths": np.array([6, 4], "int32")}, 17,
    ),
    "attention with a mask for each query": (
        [node("Attention", "x w - mask", domain=MICROSOFT, num_heads=2, scale=0.7,
              qkv_hidden_sizes=[8, 8, 4])],
        X, {"w": drawn(8, 20), "mask": np.tril(np.ones((2, 6, 6), "int32"))}, 17,
    ),
    "heads of queries, keys and values": (
        [node("MultiHeadAttention", "x x x b mask", domain=MICROSOFT, num_heads=2)],
        X, {"b": drawn(24), "mask": np.array([6 * [1], [1, 1, 1, 1, 0, 0]], "int32")}, 17,
    ),
    "heads of another sequence, and those of earlier steps": (
        [node("MultiHeadAttention", "x other other - - added pk pv", "y k v", domain=MICROSOFT,
              num_heads=2, scale=0.4)],
        X, {"other": drawn(2, 5, 8), "added": drawn(1, 2, 6, 8), "pk": drawn(2, 2, 3, 4),
            "pv": drawn(2, 2, 3, 4)}, 17,
    ),
    "weights of four bits": (
        [node("MatMulNBits", "x packed scales", domain=MICROSOFT, K=8, N=5, bits=4, block_size=16)],
        X, {"packed": np.arange(40, dtype="uint8").reshape(5, 1, 8) * 6, "scales": drawn(5)}, 17,
    ),
    "weights of four bits in blocks with zero points": (
        [node("MatMulNBits", "wide packed scales zeros", domain=MICROSOFT, K=40, N=3, bits=4,
              block_size=16)],
        {"wide": (kinds.FLOAT, [2, 40])},
        {"packed": np.arange(72, dtype="uint8").reshape(3, 3, 8) * 3, "scales": drawn(9),
         "zeros": np.array([0x21, 0x03, 0x87, 0x04, 0xF9, 0x0A], "uint8")}, 17,
    ),
    "regions that are scaled": (
        [node("RoiAlign", "x regions of", output_height=3, output_width=2, sampling_ratio=2,
              spatial_scale=0.125)], IMAGE, ROWS, 16,
    ),
    "regions that are scaled, of old files": (
        [node("RoiAlign", "x regions of", output_height=3, output_width=2, sampling_ratio=2,
              spatial_scale=0.125)], IMAGE, ROWS, 11,
    ),
    "a scale that single precision rounds down": (
        [node("Resize", "x scales", mode="nearest")],
        IMAGE, {"scales": np.array([1, 1, 0.7, 1.65], "float32")}, 10,
    ),
    "the same for lines between places": (
        [node("Resize", "x - scales", mode="linear")],
        IMAGE, {"scales": np.array([1, 1, 0.7, 0.9], "float32")}, 13,
    ),
    "corner to corner by a scale that does not divide": (
        [node("Resize", "x - scales", mode="linear",
              coordinate_transformation_mode="align_corners")],
        IMAGE, {"scales": np.array([1, 1, 1.55, 1.54], "float32")}, 13,
    ),
    "nearest places of half pixels, of old files": (
        [node("Resize", "x roi scales", mode="nearest", nearest_mode="floor",
              coordinate_transformation_mode="tf_half_pixel_for_nn")],
        IMAGE, {"scales": np.array([1, 1, 2, 1.5], "float32"), "roi": np.zeros(0, "float32")}, 11,
    ),
    "a region that is not used": (
        [node("Resize", "x roi scales", mode="linear")], IMAGE,
        {"scales": np.array([1, 1, 2, 2], "float32"),
         "roi": np.array([1, 1, 1, 1, 2, 2, 2, 2], "float32")}, 11,
    ),
    "an output that is left out": (
        [make.make_node("MaxPool", ["x"], ["y", ""], kernel_shape=[2, 2])], IMAGE, {}, 13,
    ),
    "a list that begins empty": (
        [make.make_node("SequenceEmpty", [], ["list"]),
         make.make_node("SequenceInsert", ["list", "x"], ["one"]),
         node("Neg", "x", "minus"),
         make.make_node("SequenceInsert", ["one", "minus"], ["both"]),
         make.make_node("ConcatFromSequence", ["both"], ["y"], axis=1)], X, {}, 13,
    ),
    "GELU by a logistic function": ([node("QuickGelu", "x", domain=MICROSOFT)], X, {}, 17),
    "a residual without its mean taken off": (
        [node("SkipSimplifiedLayerNormalization", "x skip gamma", "n - - s", domain=MICROSOFT),
         node("Add", "n s")], X, {"skip": drawn(2, 6, 8), "gamma": drawn(8)}, 17,
    ),
    "an operator of ONNX Runtime in ONNX's domain": (
        [node("Celu", "x", "c"), node("SimplifiedLayerNormalization", "c gamma")],
        X, {"gamma": drawn(8)}, 17,
    ),
    **{
        f"a convolution with {name or 'a residual'}": (
            [node("FusedConv", "x w b r" if residual else "x w b", domain=MICROSOFT,
                  kernel_shape=[3, 3], pads=[1, 1, 1, 1], **given)],
            IMAGE, {"w": drawn(4, 2, 3, 3), "b": drawn(4), "r": drawn(1, 4, 10, 20)}, 17,
        )
        for name, residual, given in (
            ("Relu", False, {"activation": "Relu"}),
            ("Tanh", True, {"activation": "Tanh"}),
            ("LeakyRelu", False, {"activation": "LeakyRelu", "activation_params": [0.3]}),
            ("HardSigmoid", False, {"activation": "HardSigmoid", "activation_params": [0.1, 0.4]}),
            ("Clip", False, {"activation": "Clip", "activation_params": [-0.5, 0.5]}),
        )
    },
    "a product with an activation": (
        [node("FusedGemm", "m w b", domain=MICROSOFT, transB=1, alpha=0.5,
              activation="LeakyRelu", activation_alpha=0.3)],
        {"m": (1, [5, 8])}, {"w": drawn(4, 8), "b": drawn(4)}, 17,
    ),
    **{
        f"a product transposed by {given}": (
            [node("FusedMatMul", "x w", domain=MICROSOFT, alpha=0.7, **given)],
            X, {"w": drawn(*shape)}, 17,
        )
        for given, shape in (
            ({"transB": 1}, (2, 5, 8)),
            ({"transA": 1}, (2, 6, 5)),
            ({"transBatchA": 1}, (6, 8, 5)),
            ({"transA": 1, "transBatchA": 1, "transBatchB": 1}, (2, 6, 5)),
        )
    },
    "GELU of ONNX Runtime": ([node("Gelu", "x", domain=MICROSOFT)], X, {}, 17),
    "a residual and its normalisation": (
        [node("SkipLayerNormalization", "x skip gamma", "n - - s", domain=MICROSOFT, epsilon=1e-5),
         node("Add", "n s")], X, {"skip": drawn(2, 6, 8), "gamma": drawn(8)}, 17,
    ),
    "a residual with all that it may have": (
        [node("SkipLayerNormalization", "x skip gamma beta bias", domain=MICROSOFT)],
        X, {"skip": drawn(2, 6, 8), "gamma": drawn(8), "beta": drawn(8), "bias": drawn(8)}, 17,
    ),
    "attention with hidden keys, to what came before": (
        [node("Attention", "x w b mask", domain=MICROSOFT, num_heads=2, unidirectional=1)],
        X, {**HEADS, "mask": np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], "int32")}, 17,
    ),
    "hidden by the lowest number, to what came before": (
        [node("Attention", "x w b lengths", domain=MICROSOFT, num_heads=2, unidirectional=1,
              mask_filter_value=LOWEST)],
        X, {**HEADS, "lengths": np.array([6, 0], "int32")}, 17,
    ),
    "heads of earlier steps, to what came before": (
        [node("MultiHeadAttention", "x x x - - - pk pv", "y k v", domain=MICROSOFT, num_heads=2,
              unidirectional=1)],
        X, {"pk": WEIGHTS[:2].reshape(2, 2, 3, 4), "pv": WEIGHTS[2:4].reshape(2, 2, 3, 4)}, 17,
    ),
    "quantised attention": (
        [node("QAttention", "x w b scale small mask zero zero", domain=MICROSOFT, num_heads=2)],
        {"x": (kinds.UINT8, [2, 6, 8])},
        {**QUANTISED_HEADS, "small": np.float32(0.005),
         "mask": np.array([6 * [1], [1, 1, 1, 1, 0, 0]], "int32")}, 17,
    ),
    "quantised attention to what came before, with a scale for each column": (
        [node("QAttention", "x w b scale columns - zero zeros", domain=MICROSOFT, num_heads=2,
              unidirectional=1)],
        {"x": (kinds.UINT8, [2, 6, 8])},
        {**QUANTISED_HEADS, "zeros": np.arange(100, 124, dtype="uint8"),
         "columns": np.linspace(0.002, 0.008, 24, dtype="float32")}, 17,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operators_as_exporters_write_them(case: str, check: Check) -> None:
    nodes, inputs, weights, opset = CASES[case]
    if case == "a list without elements":
        nodes[0].attribute.append(make.make_attribute("activation_alpha", [], attr_type=6))
    check(nodes, inputs, weights, opset=opset)


QUANTISED = {
    "QLinearAdd": node("QLinearAdd", "q scale zero b wide zero wide zero", "r", MICROSOFT),
    "QLinearMul": node("QLinearMul", "q scale zero b wide zero wide zero", "r", MICROSOFT),
    "QLinearSigmoid": node("QLinearSigmoid", "q wide zero scale zero", "r", MICROSOFT),
    "QLinearLeakyRelu": node(
        "QLinearLeakyRelu", "q wide zero scale zero", "r", MICROSOFT, alpha=0.1
    ),
    "QLinearGlobalAveragePool": node(
        "QLinearGlobalAveragePool", "q scale zero scale zero", "r", MICROSOFT, channels_last=0
    ),
    "QLinearAveragePool": node(
        "QLinearAveragePool", "q scale zero scale zero", "r", MICROSOFT, kernel_shape=[2, 2]
    ),
    "QLinearSoftmax": node(
        "QLinearSoftmax", "q wide zero small zero", "r", MICROSOFT, axis=1, opset=11
    ),
    "QLinearSoftmax, as of today": node(
        "QLinearSoftmax", "q wide zero small zero", "r", MICROSOFT, axis=1, opset=13
    ),
    "QLinearWhere": node("QLinearWhere", "mask q scale zero b wide zero wide zero", "r", MICROSOFT),
    "QLinearConcat": node(
        "QLinearConcat", "wide zero q scale zero b wide zero", "r", MICROSOFT, axis=1
    ),
}


@pytest.mark.parametrize("operator", QUANTISED)
def test_quantised_operators_of_onnx_runtime(operator: str, tmp_path: Path) -> None:
    import onnxruntime

    path = tmp_path / "net.onnx"
    mask = RNG.integers(0, 2, (4, 6)).astype(bool)
    weights = {**SCALE, "b": integers(1, 2, 4, 6), "mask": mask, "small": np.float32(1 / 256)}
    inputs = {"q": (kinds.UINT8, [1, 2, 4, 6])}
    onnx.save(model_of([QUANTISED[operator]], inputs, weights, ("r",)), str(path))
    q = integers(1, 2, 4, 6)
    (found,) = computed(load(str(path)), [q])
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {"q": q})
    assert found.dtype == expected.dtype
    # A tie is rounded by the last digit of the scales' quotient.
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1
    assert np.sum(found != expected) <= max(1, found.size // 10)


@pytest.mark.parametrize("operator", ["QLinearAdd", "QLinearMul"])
def test_ties_of_an_odd_zero_point(operator: str, tmp_path: Path) -> None:
    import onnxruntime

    if operator == "QLinearAdd" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("on Arm, ONNX Runtime rounds its ties in another way")
    path = tmp_path / "net.onnx"
    inputs = {name: (kinds.UINT8, [256, 16]) for name in ("a", "b")}
    weights = {"fine": np.float32(0.25), "wide": np.float32(0.5), "zero": np.uint8(121)}
    pair = node(operator, "a fine zero b wide zero wide zero", domain=MICROSOFT)
    onnx.save(model_of([pair], inputs, weights), str(path))
    a = np.arange(256, dtype="uint8").repeat(16).reshape(256, 16)
    b = np.tile(np.arange(114, 130, dtype="uint8"), (256, 1))
    (found,) = computed(load(str(path)), [a, b])
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {"a": a, "b": b})
    np.testing.assert_array_equal(found, expected)


QUANTISED_PRODUCTS = {
    "QGemm": node(
        "QGemm", "q scale zero w columns zeros bias wide zero", "r", MICROSOFT, alpha=0.5
    ),
    "QGemm of rows": node(
        "QGemm", "q scale zero t columns zeros bias", "r", MICROSOFT, transA=1, transB=1
    ),
    "MatMulIntegerToFloat": node(
        "MatMulIntegerToFloat", "q w scale columns zero zeros shift", "r", MICROSOFT
    ),
    "MatMulIntegerToFloat without zero points": node(
        "MatMulIntegerToFloat", "q w scale wide", "r", MICROSOFT
    ),
}


@pytest.mark.parametrize("operator", QUANTISED_PRODUCTS)
def test_quantised_products_of_onnx_runtime(operator: str, tmp_path: Path) -> None:
    import onnxruntime

    path = tmp_path / "net.onnx"
    weights = {
        **SCALE,
        "w": integers(4, 5),
        "t": integers(5, 4),
        "zeros": integers(5),
        "shift": drawn(5),
        "columns": np.abs(drawn(5)) / 10,
        "bias": RNG.integers(-99, 99, 5).astype("int32"),
    }
    shape = (4, 3) if "rows" in operator else (3, 4)
    inputs = {"q": (kinds.UINT8, list(shape))}
    onnx.save(model_of([QUANTISED_PRODUCTS[operator]], inputs, weights, ("r",)), str(path))
    q = integers(*shape)
    (found,) = computed(load(str(path)), [q])
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {"q": q})
    assert found.dtype == expected.dtype
    tolerance = 1 if found.dtype == np.uint8 else 1e-4 * np.abs(expected).max()
    assert np.abs(found.astype(float) - expected.astype(float)).max() <= tolerance


def test_quantised_embeddings_of_onnx_runtime(check: Check) -> None:
    rng = np.random.default_rng(0)
    shapes = {"words": (10, 8), "places": (6, 8), "parts": (2, 8), "gamma": (8,), "beta": (8,)}
    tables = {name: rng.integers(0, 256, shape, "uint8") for name, shape in shapes.items()}
    segments = {"segments": np.array([6 * [0], [0, 0, 0, 1, 1, 1]], "int32")}
    names = ["ids", "segments", *tables, "mask", *5 * ["scale"], *5 * ["zero"]]
    embedding = node("QEmbedLayerNormalization", " ".join(names), "y lengths", MICROSOFT)
    inputs = {name: (kinds.INT32, [2, 6]) for name in ("ids", "mask")}
    check([embedding], inputs, SCALE | tables | segments, ("y", "lengths"))


@pytest.mark.parametrize("block_size", [4, 5])
@pytest.mark.parametrize("kind", ["INT4", "UINT4"])
def test_constants_of_four_bits(kind: str, block_size: int, check: Check) -> None:
    least, has_zeros = (-8, False) if kind == "INT4" else (0, True)
    rng = np.random.default_rng(0)
    blocks = {"axis": 0, "block_size": block_size}
    nodes = [
        node("DequantizeLinear", "q s z" if has_zeros else "q s", "w", **blocks),
        node("MatMul", "x w"),
    ]
    tensors = [
        make.make_tensor(
            name,
            getattr(kinds, kind),
            shape,
            rng.integers(least, least + 16, shape).flatten().tolist(),
        )
        for name, shape in (("q", [8, 6]), ("z", [2, 6]))[: 1 + has_zeros]
    ]
    check(nodes, X, {"s": rng.uniform(0.1, 1, (2, 6)).astype("float32")}, opset=21, tensors=tensors)


def test_constants_of_four_bits_are_written_out() -> None:
    nodes = [
        node("DequantizeLinear", "q s", "whole", MICROSOFT),
        node("DequantizeLinear", "q columns zeros", "by_column", axis=-1),
        node("DequantizeLinear", "bytes s", "others"),
        node("Sum", "whole by_column others s"),
    ]
    weights = {
        "s": np.float32(0.5),
        "columns": np.array([0.25, 2], "float32"),
        "bytes": np.array([[1, 2], [3, 4]], "int8"),
    }
    tensors = [
        make.make_tensor("q", kinds.INT4, [2, 2], [-8, 7, 1, 0]),
        make.make_tensor("zeros", kinds.INT4, [2], [1, -2]),
    ]
    model = model_of(nodes, {}, weights, opset=21, tensors=tensors)
    dequantise_constants(model.graph)
    assert [list(each.output) for each in model.graph.node] == [["others"], ["y"]]
    found = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    assert set(found) == {"s", "bytes", "whole", "by_column"}
    np.testing.assert_array_equal(found["whole"], [[-4, 3.5], [0.5, 0]])
    np.testing.assert_array_equal(found["by_column"], [[-2.25, 18], [0, 4]])
    assert found["whole"].dtype == found["by_column"].dtype == "float32"


def test_a_product_that_quantises_its_operand(check: Check) -> None:
    weights = {**SCALE, "w": integers(8, 5), "shift": drawn(5)}
    product = node("DynamicQuantizeMatMul", "x w scale zero shift", domain=MICROSOFT)
    check([product], X, weights)


def test_a_result_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    weights = {"w": drawn(8, 24), "b": drawn(24)}
    attention = node("Attention", "x w b", "y present", MICROSOFT, num_heads=2)
    path = tmp_path / "net.onnx"
    onnx.save(model_of([attention], X, weights, ("y", "present")), str(path))
    with pytest.raises(InvalidOptionError, match=r"Attention.*output 2 is not supported"):
        load(str(path))


def test_a_channel_without_variance_is_zero(tmp_path: Path) -> None:
    """As ONNX defines it; ONNX Runtime gives no number."""
    path = tmp_path / "net.onnx"
    nodes = [node("Mul", "x zeros", "m"), node("MeanVarianceNormalization", "m")]
    zeros = {"zeros": np.array([0, 1], "float32").reshape(1, 2, 1, 1)}
    onnx.save(model_of(nodes, IMAGE, zeros, opset=13), str(path))
    (found,) = computed(load(str(path)), [drawn(1, 2, 10, 20)])
    assert not found[:, 0].any()
    np.testing.assert_allclose(found[:, 1].std(), 1.0, rtol=1e-5)


def test_sparse_weights(tmp_path: Path) -> None:
    values = onnx.numpy_helper.from_array(np.array([3.0, -1.0], "float32"), "w")
    places = onnx.numpy_helper.from_array(np.array([2, 7]), "w_places")
    model = model_of([node("Mul", "x w")], X, {})
    model.graph.sparse_initializer.append(make.make_sparse_tensor(values, places, [8]))
    path = tmp_path / "net.onnx"
    onnx.save(model, str(path))
    x = drawn(2, 6, 8)
    (found,) = computed(load(str(path)), [x])
    np.testing.assert_allclose(found[..., 2], 3 * x[..., 2], rtol=1e-6)
    np.testing.assert_allclose(found[..., 7], -x[..., 7], rtol=1e-6)
    assert not np.any(found[..., [0, 1, 3, 4, 5, 6]])


@pytest.mark.parametrize("location", ["weights.bin", "weights/w.bin"])
def test_weights_in_other_files(location: str, tmp_path: Path, check_import: Check) -> None:
    path = tmp_path / "net.onnx"
    (tmp_path / location).parent.mkdir(exist_ok=True)
    model = model_of([node("MatMul", "x w")], X, {"w": drawn(8, 300)})
    onnx.save(model, str(path), save_as_external_data=True, location=location, size_threshold=0)
    check_import(load(str(path)))


@pytest.mark.parametrize("has_weights_beside", [False, True])
def test_links_to_files_as_in_the_cache_of_hugging_face(
    has_weights_beside: bool, tmp_path: Path, check_import: Check
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    model = model_of([node("MatMul", "x w")], X, {"w": drawn(8, 300)})
    options: dict[str, Any] = {}
    if has_weights_beside:
        options = {"save_as_external_data": True, "location": "net.onnx_data", "size_threshold": 0}
    onnx.save(model, str(snapshot / "net.onnx"), **options)
    for name, digest in (("net.onnx", "0af3"), ("net.onnx_data", "9c41")):
        if (snapshot / name).exists():
            os.replace(snapshot / name, blobs / digest)
            (snapshot / name).symlink_to(blobs / digest)
    network = load(str(snapshot / "net.onnx"))
    assert network.name == "net"
    assert network.original.file(tmp_path).suffix == ".onnx"
    check_import(network)


def test_links_into_several_folders_are_refused(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model" / "net.onnx"
    folder.mkdir()
    nodes = [node("MatMul", "x w", "m"), node("MatMul", "m v")]
    model = model_of(nodes, X, {"w": drawn(8, 300), "v": drawn(300, 8)})
    onnx.save(model, str(path), save_as_external_data=True, all_tensors_to_one_file=False,
              size_threshold=0)  # fmt: skip
    os.replace(folder / "w", tmp_path / "elsewhere")
    (folder / "w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidOptionError, match="links into several folders"):
        load(str(path))


def test_a_name_of_an_extent_may_look_like_an_expression(
    tmp_path: Path, check_import: Check
) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model_of([node("Relu", "x")], {"x": (kinds.FLOAT, ["(n)", 4])}, {}), str(path))
    with pytest.raises(InvalidOptionError, match="--input-shape x=1x4"):
        load(str(path))
    check_import(load(str(path), {"x": (3, 4)}))


def test_extents_that_depend_on_values_meet_numbers(tmp_path: Path, check_import: Check) -> None:
    nodes = [
        node("NonZero", "x", "places"),
        node("Cast", "places", "floats", to=kinds.FLOAT),
        node("Mul", "floats two"),
    ]
    path = tmp_path / "net.onnx"
    onnx.save(model_of(nodes, X, {"two": np.array([2.0], "float32")}), str(path))
    check_import(load(str(path)))


def test_only_what_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    model = model_of([node("Celu", "x", "c"), node("Unheard", "x", "u")], X, {}, ("c", "u"))
    onnx.save(model, str(path))
    with pytest.raises(InvalidOptionError, match=r"cannot import .*: Unheard") as caught:
        load(str(path))
    assert "Celu" not in str(caught.value)
