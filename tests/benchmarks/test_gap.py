from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.micro import gap
from benchmarks.micro.gap import Roofline, median_nodes, own_calls, own_works
from benchmarks.micro.gap_groups import (
    Block,
    Group,
    Node,
    Work,
    as_fields,
    match,
    openvino_work,
    table,
    work_of_blocks,
)
from tvm_adaptive._tvm import relax
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import BUILTIN, Network, compile_network, export, prepare
from tvm_adaptive.tuning.target import resolve_target


def block(name: str, shape: Any, reduction: Any = (), *reads: Any) -> Block:
    return Block(name, shape, reduction, reads)


def timed(work: Work, ms: float, calls: int = 1) -> Work:
    return dataclasses.replace(work, ms=ms, calls=calls, limit_ms=0.1)


# A block of a text classifier with squeeze and excitation (PP-OCR mobile v2.0), as it is
# prepared here: the product with the gate is fused into the convolution that computes it.
DEPTHWISE = work_of_blocks(
    "depthwise",
    [
        block("pad_temp", (1, 10, 100, 32), (), (1, 6, 96, 32)),
        block("group_conv2d_nhwc", (1, 3, 96, 32), (5, 5, 1), (1, 10, 100, 32), (5, 5, 1, 32)),
        block("T_add", (1, 3, 96, 32), (), (1, 3, 96, 32), (1, 1, 1, 32)),
    ],
    "group_conv2d_nhwc",
    channels_last=True,
)
MEAN = work_of_blocks(
    "mean",
    [
        block("lv69_red", (1, 1, 1, 32), (3, 96), (1, 3, 96, 32)),
        block("T_divide", (1, 1, 1, 32), (), (1, 1, 1, 32)),
    ],
    "lv69_red",
    channels_last=True,
)
GATE = work_of_blocks(
    "gate",
    [
        block("conv2d_nhwc", (1, 1, 1, 32), (1, 1, 8), (1, 1, 1, 8), (1, 1, 8, 32)),
        block("T_maximum", (1, 1, 1, 32), (), (1, 1, 1, 32)),
        block("T_multiply1", (1, 3, 96, 32), (), (1, 1, 1, 32), (1, 3, 96, 32)),
    ],
    "conv2d_nhwc",
    channels_last=True,
)
OPENVINO = [
    Node("x_abcd_acdb", "Reorder", ((1, 3, 48, 192),), (1, 3, 48, 192), 0.02),
    Node("9786", "Convolution", ((1, 32, 6, 96), (32, 1, 1, 5, 5), (32,)), (1, 32, 3, 96), 0.3),
    Node("pool@1", "Reduce", ((1, 32, 3, 96), (2,)), (1, 32, 1, 1), 0.1),
    Node("conv@15", "Convolution", ((1, 8, 1, 1), (32, 8, 1, 1), (32,)), (1, 32, 1, 1), 0.2),
    Node("hard@1", "Math", ((1, 32, 1, 1), (1,), (1,)), (1, 32, 1, 1), 0.04),
    Node("mul@4", "Subgraph", ((1, 32, 3, 96), (1, 32, 1, 1)), (1, 32, 3, 96), 0.08),
]
# The same with a sum that ours has in either.
WITH_SUM = [
    OPENVINO[1],
    Node("Add@5", "Eltwise", ((1, 32, 3, 96), (1, 32, 1, 1)), (1, 32, 3, 96), 0.01),
    *OPENVINO[2:4],
    OPENVINO[-1],
]


def by_name(groups: list[Group]) -> dict[str, Group]:
    return {name: group for group in groups for name in group.names or group.peer_names}


def total(groups: list[Group]) -> tuple[float, float]:
    return sum(group.ms for group in groups), sum(group.peer_ms for group in groups)


def test_convolutions_match_across_layouts() -> None:
    own = [timed(DEPTHWISE, 0.5), timed(MEAN, 0.2), timed(GATE, 0.4)]
    groups = match(own, [openvino_work(node) for node in OPENVINO])
    found = by_name(groups)
    assert found["depthwise"].words == "depthwise 5x5, 1x32x3x96"
    assert found["depthwise"].behind_ms == pytest.approx(0.2)
    assert found["mean"].peer_names == ["pool@1"]
    # What ours has fused into the gate is the peer's gate, too.
    assert found["gate"].peer_ms == pytest.approx(0.2 + 0.04 + 0.08)
    assert (found["gate"].peer_calls, found["gate"].peer_shared_ms) == (1, pytest.approx(0.12))
    # The conversion of the input's layout has nothing on our side.
    assert (found["x_abcd_acdb"].ms, found["x_abcd_acdb"].calls) == (0.0, 0)
    assert total(groups) == pytest.approx((1.1, sum(node.ms for node in OPENVINO)))


def test_work_that_ends_a_function_is_shared_only_if_no_other_contains_it() -> None:
    peer = [openvino_work(node) for node in WITH_SUM]
    alone = by_name(match([timed(DEPTHWISE, 0.5)], peer))
    assert alone["depthwise"].peer_ms == pytest.approx(0.3 + 0.01 + 0.08)
    both = by_name(match([timed(DEPTHWISE, 0.5), timed(GATE, 0.4)], peer))
    assert both["depthwise"].peer_ms == pytest.approx(0.3)
    assert both["gate"].peer_ms == pytest.approx(0.2 + 0.01 + 0.08)


def test_shares_are_by_calls() -> None:
    twice = timed(GATE, 0.4, calls=3)
    narrow = block("conv2d_nhwc", (1, 1, 1, 32), (1, 1, 4), (1, 1, 1, 4), (1, 1, 4, 32))
    product = block("T_multiply", (1, 3, 96, 32))
    other = work_of_blocks("narrow", [narrow, product], "conv2d_nhwc", channels_last=True)
    groups = match([twice, timed(other, 0.1)], [openvino_work(OPENVINO[-1])])
    assert by_name(groups)["gate"].peer_ms == pytest.approx(0.06)
    assert by_name(groups)["narrow"].peer_ms == pytest.approx(0.02)


def test_zeros_of_a_transposed_convolution_are_not_counted() -> None:
    inputs = ((1, 24, 160, 160), (24, 1, 2, 2), (1,))
    peer = openvino_work(Node("u", "Deconvolution", inputs, (1, 1, 320, 320), 1))
    blocks = [
        block("data_dilate", (1, 319, 319, 24), (), (1, 160, 160, 24)),
        block("data_pad", (1, 321, 321, 24), (), (1, 319, 319, 24)),
        block(
            "conv2d_transpose_nhwc",
            (1, 320, 320, 1),
            (2, 2, 24),
            (1, 321, 321, 24),
            (2, 2, 24, 1),
        ),
    ]
    flop = 2.0 * 320 * 320 * 96
    own = work_of_blocks("up", blocks, "conv2d_transpose_nhwc", channels_last=True, flop=flop)
    assert own.signature == peer.signature
    # Three of four products are with a zero.
    assert own.flop == pytest.approx(flop / 4, rel=0.02)
    # Without them, as it is prepared here.
    each = block(
        "conv2d_transpose_nhwc",
        (1, 320, 320, 1),
        (1, 1, 24),
        (1, 160, 160, 24),
        (2, 2, 24, 1),
    )
    own = work_of_blocks("up", [each], "conv2d_transpose_nhwc", channels_last=True, flop=flop / 4)
    assert own.signature == peer.signature
    assert own.flop == flop / 4


# Attention over 40 positions in 8 heads of 15 (PP-OCRv4, text recognition).
def test_products_match_and_attention_of_one_side_stays_alone() -> None:
    linear = work_of_blocks(
        "linear",
        [
            block("matmul", (1, 40, 360), (120,), (1, 40, 120), (120, 360)),
            block("T_add", (1, 40, 360), (), (1, 40, 360), (360,)),
        ],
        "matmul",
        channels_last=True,
    )
    scores = work_of_blocks(
        "scores",
        [block("matmul", (1, 8, 40, 40), (15,), (1, 8, 40, 15), (1, 8, 15, 40))],
        "matmul",
        channels_last=True,
    )
    shares = work_of_blocks(
        "shares",
        [
            block("T_softmax_maxelem", (320,), (40,), (320, 40)),
            block("T_softmax_norm", (320, 40), (), (320, 40), (320,)),
        ],
        "T_softmax_maxelem",
        channels_last=True,
    )
    own = [timed(linear, 0.6), timed(scores, 0.1), timed(shares, 0.1)]
    heads = ((1, 8, 40, 15),) * 3
    openvino = [
        Node("fc", "FullyConnected", ((1, 40, 120), (360, 120), (360,)), (1, 40, 360), 0.1),
        Node("mha", "Subgraph", heads, (1, 40, 8, 15), 0.1, "MatMul.2,Softmax.0,MatMul.4"),
    ]
    found = by_name(match(own, [openvino_work(node) for node in openvino]))
    assert found["linear"].words == "matrix product of 120, 40x360"
    assert found["linear"].peer_ms == 0.1
    assert found["mha"].words == "fused attention, 1x40x8x15"
    assert (found["scores"].peer_ms, found["shares"].peer_ms) == (0.0, 0.0)
    apart = [
        openvino[0],
        Node("MatMul.2", "MatMul", ((1, 8, 40, 15), (1, 8, 15, 40)), (1, 8, 40, 40), 0.2),
        Node("Softmax.0", "Softmax", ((1, 8, 40, 40),), (1, 8, 40, 40), 0.3),
    ]
    groups = match(own, [openvino_work(node) for node in apart])
    assert all(group.calls == group.peer_calls == 1 for group in groups)
    assert by_name(groups)["scores"].words == "batched product of 15, 1x8x40x40"


def test_a_matrix_for_a_whole_batch_is_one_product() -> None:
    flat = work_of_blocks(
        "linear",
        [block("matmul", (196, 384), (96,), (196, 96), (96, 384))],
        "matmul",
        channels_last=True,
    )
    weight, data, result = (384, 96), (1, 14, 14, 96), (1, 14, 14, 384)
    node = Node("fc", "FullyConnected", (data, weight, (384,)), result, 0.1)
    (group,) = match([timed(flat, 0.2)], [openvino_work(node)])
    assert (group.words, group.peer_ms) == ("matrix product of 96, 196x384", 0.1)


def test_attention_in_one_function_is_the_peers() -> None:
    heads = ((1, 40, 8, 16),) * 3
    blocks = [
        block("attention", (1, 40, 8, 16), (), *heads),
        block("T_add", (1, 40, 8, 16), (), (1, 40, 8, 16)),
    ]
    own = work_of_blocks("attention", blocks, "", channels_last=True)
    node = Node("mha", "ScaledDotProductAttention", heads, (1, 8, 40, 16), 0.1)
    (group,) = match([timed(own, 0.2)], [openvino_work(node)])
    assert (group.calls, group.peer_calls, group.peer_ms) == (1, 1, 0.1)


def test_what_is_unknown_keeps_its_name() -> None:
    works = [
        openvino_work(Node("t", "TopK", ((1, 9),), (1, 3), 0.1)),
        work_of_blocks("s", (), "", channels_last=False),
    ]
    assert [work.words for work in works] == ["other: TopK, 1x3", "other: s"]
    assert len(match(works[1:], works[:1])) == 2


def test_what_is_computed_for_whole_tiles_alone_is_not_counted() -> None:
    a, b, end = (1, 197, 64), (1, 64, 197), block("T_add", (1, 197, 197), (), (1, 197, 197))
    plain = [block("matmul", (1, 197, 197), (64,), a, b), end]
    wide = [
        block("columns_pad", (1, 64, 208), (), b),
        block("matmul", (1, 198, 208), (64,), a, (1, 64, 208)),
        block("rows", (1, 197, 197), (), (1, 198, 208)),
        end,
    ]
    works = [work_of_blocks("w", each, "matmul", channels_last=True) for each in (plain, wide)]
    assert works[0] == works[1]


def test_a_product_of_places_is_the_pointwise_convolution() -> None:
    image, kernel = (1, 13, 13, 512), (1, 1, 512, 1000)
    convolution = [block("conv2d_nhwc", (1, 13, 13, 1000), (1, 1, 512), image, kernel)]
    product = [
        block("matmul", (170, 1008), (512,), (169, 512), (512, 1008)),
        block("rows", (169, 1000), (), (170, 1008)),
    ]
    works = [
        work_of_blocks("w", each, each[0].name, channels_last=True)
        for each in (convolution, product)
    ]
    assert works[0].signature == works[1].signature


def test_groups_may_have_an_axis_of_their_own() -> None:
    image, kernel = (1, 58, 58, 128), (3, 3, 4, 128)
    as_asked = [block("group_conv2d_nhwc", (1, 56, 56, 128), (3, 3, 4), image, kernel)]
    name = "group_conv2d_nhwc"
    with_axis = [
        block(name, (1, 56, 56, 32, 4), (3, 3, 4), image, (3, 3, 4, 32, 4)),
        block("channels", (1, 56, 56, 128), (), (1, 56, 56, 32, 4)),
    ]
    works = [work_of_blocks("w", each, name, channels_last=True) for each in (as_asked, with_axis)]
    assert works[0] == works[1]
    assert works[0].words == "grouped convolution 3x3 of 4, 1x128x56x56"


def test_the_rows_of_a_table_add_up() -> None:
    own = [timed(DEPTHWISE, 0.5), timed(MEAN, 0.2), timed(GATE, 0.4)]
    groups = match(own, [openvino_work(node) for node in OPENVINO])
    head, *rows, all_row, outside, whole = table(groups, (1.5, 1.0), 2, "openvino").splitlines()
    assert head.split()[-5:-3] == ["behind", "ms"]
    assert len(rows) == 3
    assert rows[-1].startswith("2 other groups")

    def ms(row: str) -> np.ndarray:
        cells = [cell for cell in row.split("  ") if cell.strip()]
        first = next(place for place, cell in enumerate(cells) if "." in cell and "x" not in cell)
        return np.array([float(cell) for cell in cells[first : first + 3]])

    assert sum(map(ms, rows)) == pytest.approx(ms(all_row), abs=2e-3)
    assert ms(all_row) + ms(outside) == pytest.approx(ms(whole), abs=2e-3)
    assert ms(whole) == pytest.approx([1.5, 1.0, 0.5])
    assert as_fields(groups[0])["behind_ms"] == groups[0].behind_ms


def test_every_function_of_a_network_is_recognised() -> None:
    target = resolve_target("cpu")
    mobile = prepare(BUILTIN["mobilenet_v2"](), target, prepack=None)
    works = [work for work, _ in own_works(mobile.mod, mobile.layout).values()]
    kinds = {work.words.split(",")[0] for work in works}
    assert {"depthwise 3x3", "convolution 3x3 of 3", "convolution 1x1 of 384"} <= kinds
    assert not [work.words for work in works if work.words.startswith("other")]
    encoder = prepare(BUILTIN["transformer"](), target, prepack=None)
    works = [work for work, _ in own_works(encoder.mod, "keep").values()]
    kinds = {work.words.split(" of")[0].split(",")[0] for work in works}
    assert {"matrix product", "fused attention"} <= kinds


def test_functions_of_forms_count_for_the_convolutions_that_they_replace() -> None:
    prepared = prepare(BUILTIN["resnet18"](), resolve_target("cpu"), prepack=None, forms=True)
    assert prepared.alternatives is not None
    works = own_works(prepared.mod, prepared.layout)
    found = gap.works_of_forms(prepared.alternatives, works)
    assert set(found) == set(prepared.alternatives.functions)
    words = {work.words.split(",")[0] for work, _ in found.values()}
    assert words == {f"convolution 3x3 of {n}" for n in (64, 128, 256, 512)}
    products = [work.flop for name, (work, _) in found.items() if "4x4_product" in name]
    assert max(products) < 0.4 * max(work.flop for work, _ in works.values())


def softmaxes(tmp_path: Path) -> tuple[str, Any]:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.softmax(x))
            z = builder.emit_output(relax.op.nn.softmax(y))
        builder.emit_func_output(z)
    network = Network("net", builder.get(), {}, {"x": (4, 8)}, {"x": "float32"})
    target = resolve_target("cpu")
    prepared = prepare(network, target)
    path = str(tmp_path / "net.so")
    export(compile_network(prepared, None, target), path)
    return path, prepared


def test_the_calls_of_a_library_are_timed(tmp_path: Path) -> None:
    path, prepared = softmaxes(tmp_path)
    calls, instrument_ms = gap.profile_calls(path, [np.zeros((4, 8), np.float32)], 0.0)
    assert [name for name, _ in calls] == ["softmax", "softmax"]
    assert 0.0 < instrument_ms < 1.0
    works = own_works(prepared.mod, prepared.layout)
    (work,) = own_calls([calls, calls], works, Roofline(1e9, 1e9))
    assert (work.calls, work.words) == (2, "softmax, 4x8")
    assert work.ms == pytest.approx(sum(ms for _, ms in calls))
    # 64 values are read and written, and more operations than that are done.
    assert work.limit_ms == pytest.approx(max(work.flop, 256.0) / 1e6)


def test_a_library_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="tune it again"):
        own_calls([[("conv", 1.0)]], {"conv2d": (DEPTHWISE, 1.0)}, Roofline(1.0, 1.0))


def test_a_function_of_the_runtime_has_a_time() -> None:
    works = {"mean": (MEAN, 1e3)}
    found = own_calls([[("mean", 1.0), ("sort", 3.0)]], works, Roofline(1e9, 1e9))
    assert [(work.words, work.ms) for work in found] == [(MEAN.words, 1.0), ("other: sort", 3.0)]


def test_rounds_with_other_names_are_the_same_nodes() -> None:
    first, *_ = OPENVINO
    rounds = [
        [first._replace(name=f"{number}_{k}", ms=number + k) for k in range(2)]
        for number in (1, 5, 2)
    ]
    assert [node.ms for node in median_nodes(rounds)] == [2, 3]


def test_the_peer_is_profiled(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    onnx = pytest.importorskip("onnx")
    helper, f32 = onnx.helper, onnx.TensorProto.FLOAT
    weight = helper.make_tensor("w", f32, (4, 3, 3, 3), np.ones(108, np.float32))
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")],
        "net",
        [helper.make_tensor_value_info("x", f32, (1, 3, 8, 8))],
        [helper.make_tensor_value_info("y", f32, (1, 4, 6, 6))],
        [weight],
    )
    path = tmp_path / "net.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    inputs = [np.ones((1, 3, 8, 8), np.float32)]
    works = [openvino_work(node) for node in gap.profile_openvino(path, inputs, 1, 0.0)]
    (work,) = [work for work in works if work.words.startswith("convolution")]
    assert work.words == "convolution 3x3 of 3, 1x4x6x6"
    assert 0.0 < work.ms < math.inf


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gap.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def profile(model: str, *groups: Group) -> gap.Profile:
    return gap.Profile(model, "OpenVINO", 2, Roofline(1e9, 1e9), (2.0, 3.0), 0.0, list(groups))


def test_only_what_both_sides_have_is_behind() -> None:
    alone = Group("fused attention", calls=1, ms=9.0)
    shared = [Group("softmax", 1, 1, ms=0.5, peer_ms=0.3), Group("pooling", 1, 1, 0.1, 0.4)]
    row = gap.summary([profile("net", alone, *shared)]).splitlines()[1].split()
    assert row == ["net", "2.000", "3.000", "1.50", "0.200", "softmax", "(+0.200)"]
    assert "0.000" in gap.summary([profile("net", alone)])


def test_a_run_that_is_refused_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def profile_run(run: Path, rounds: int) -> gap.Profile:
        if run.name == "a":
            raise InvalidOptionError("a has no library")
        return profile(run.name, Group("softmax", 1, 1, 0.5, 0.3))

    monkeypatch.setattr(gap, "profile_run", profile_run)
    out = tmp_path / "gap.json"
    assert gap.main([*(str(tmp_path / name) for name in "abc"), "--out", str(out)]) == 0
    found = json.loads(out.read_text())["profiles"]
    assert [each["model"] for each in found] == ["b", "c"]
    assert capsys.readouterr().err == "a has no library\n"
