"""The networks that starter records are made from, the most valuable first.

Each has one operator with its usual epilogue and goes through the preparation of any other
network, so that families, layouts, packed weights and fused epilogues are those of networks'
tasks. Feature maps have channels last, as preparation gives them.

The extents are round numbers of several kinds (powers of two; 24, 48, 96, 192; feature maps of
80, 40, 20 and 10), not copied from networks: records are fitted to other extents anyway.
No workload is a task of ResNet, MobileNet-V2, SqueezeNet, VGG, the Transformer's encoder or
BERT as built in, which `tests/benchmarks/test_starter.py` checks. Other types than float32,
batches above 1, dilation, convolutions in one and three dimensions, and recurrent networks are
left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import IRModule, relax
from tvm_adaptive.models.forms.tiles import LEAST_CHANNELS

Shape = tuple[int, ...]
Build = Callable[["Graph", list[Any]], Any]

# Of random weights and biases; their values do not matter to a schedule.
_SCALE = 0.1


@dataclasses.dataclass(frozen=True)
class Workload:
    """One network: its name and how it is built."""

    name: str
    shapes: tuple[Shape, ...]  # of its inputs
    build: Build
    has_forms: bool = False  # whether its operator also competes in Winograd's forms

    def module(self) -> IRModule:
        """Return the network as a Relax module with its weights inside."""
        builder = relax.BlockBuilder()
        inputs = [
            relax.Var(f"x{place}", relax.TensorType(shape, "float32"))
            for place, shape in enumerate(self.shapes)
        ]
        with builder.function("main", inputs):
            with builder.dataflow():
                result = builder.emit_output(self.build(Graph(builder), inputs))
            builder.emit_func_output(result)
        return builder.get()


class Graph:
    """Emits operators of one network; its weights are drawn in the order of use."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._rng = np.random.default_rng(0)

    def emit(self, expression: Any) -> Any:
        """Return an expression as a variable."""
        return self._builder.emit(expression)

    def weight(self, *shape: int) -> Any:
        """Return a constant of random values."""
        drawn = _SCALE * self._rng.standard_normal(shape, dtype=np.float32)
        return relax.const(drawn, "float32")

    def finish(self, x: Any, end: str, others: Sequence[Any] = ()) -> Any:
        """Apply an epilogue: parts joined by ``-``, in their order."""
        op, left = relax.op, list(others)
        for part in end.split("-") if end else ():
            if part == "add":
                x = self.emit(op.add(x, left.pop(0)))
            elif part == "mul":
                x = self.emit(op.multiply(x, left.pop(0)))
            elif part == "relu":
                x = self.emit(op.nn.relu(x))
            elif part == "relu6":
                x = self.emit(op.clip(x, 0, 6))
            elif part == "gelu":
                x = self.emit(op.nn.gelu(x))
            elif part == "sigmoid":
                x = self.emit(op.sigmoid(x))
            elif part == "silu":
                x = self.emit(op.multiply(x, self.emit(op.sigmoid(x))))
            elif part == "hardswish":
                x = self.emit(op.multiply(x, self._hard_sigmoid(x)))
            elif part == "hardsigmoid":
                x = self._hard_sigmoid(x)
            else:
                raise ValueError(f"no epilogue is called {part}")
        return x

    def _hard_sigmoid(self, x: Any) -> Any:
        op = relax.op
        gate = self.emit(op.clip(self.emit(op.add(x, relax.const(3.0, "float32"))), 0, 6))
        return self.emit(op.divide(gate, relax.const(6.0, "float32")))


def conv(
    c_in: int, c_out: int, kernel: int, size: int, end: str, *, stride: int = 1, groups: int = 1
) -> Workload:
    """Return a convolution with a bias; ``groups == c_in`` makes it depthwise."""
    kind = "depthwise" if groups == c_in else "grouped" if groups > 1 else "conv"
    padding = kernel // 2
    size_out = (size + 2 * padding - kernel) // stride + 1
    n_others = end.count("add")

    def build(graph: Graph, inputs: list[Any]) -> Any:
        x = graph.emit(
            relax.op.nn.conv2d(
                inputs[0],
                graph.weight(kernel, kernel, c_in // groups, c_out),
                strides=stride,
                padding=padding,
                groups=groups,
                data_layout="NHWC",
                kernel_layout="HWIO",
            )
        )
        x = graph.emit(relax.op.add(x, graph.weight(1, 1, 1, c_out)))
        return graph.finish(x, end, inputs[1:])

    shape_out = (1, size_out, size_out, c_out)
    shapes = ((1, size, size, c_in), *(shape_out for _ in range(n_others)))
    parts = [kind, f"{kernel}x{kernel}", c_in, c_out, size, f"s{stride}"]
    if kind == "grouped":
        parts.append(f"g{groups}")
    name = "-".join(str(part) for part in [*parts, end] if part)
    has_forms = kind == "conv" and (kernel, stride) == (3, 1) and c_in >= LEAST_CHANNELS
    return Workload(name, shapes, build, has_forms)


def depthwise(channels: int, kernel: int, size: int, end: str, *, stride: int = 1) -> Workload:
    """Return a depthwise convolution with a bias."""
    return conv(channels, channels, kernel, size, end, stride=stride, groups=channels)


def transposed(c_in: int, c_out: int, kernel: int, size: int, end: str) -> Workload:
    """Return a transposed convolution that doubles height and width, with a bias."""
    before = (kernel - 1) // 2 if kernel > 2 else 0

    def build(graph: Graph, inputs: list[Any]) -> Any:
        x = graph.emit(
            relax.op.nn.conv2d_transpose(
                inputs[0],
                graph.weight(kernel, kernel, c_in, c_out),
                strides=2,
                padding=before,
                output_padding=2 * before - kernel + 2,
                data_layout="NHWC",
                kernel_layout="HWIO",
            )
        )
        x = graph.emit(relax.op.add(x, graph.weight(1, 1, 1, c_out)))
        return graph.finish(x, end)

    name = f"transposed-{kernel}x{kernel}-{c_in}-{c_out}-{size}-{end}".removesuffix("-")
    return Workload(name, ((1, size, size, c_in),), build)


def dense(m: int, k: int, n: int, end: str) -> Workload:
    """Return a product with constant weights, (m, k) by (k, n), and a bias."""
    shape_in, shape_out = ((1, k), (1, n)) if m == 1 else ((1, m, k), (1, m, n))

    def build(graph: Graph, inputs: list[Any]) -> Any:
        x = graph.emit(relax.op.matmul(inputs[0], graph.weight(k, n)))
        x = graph.emit(relax.op.add(x, graph.weight(n)))
        return graph.finish(x, end, inputs[1:])

    shapes = (shape_in, *(shape_out for _ in range(end.count("add"))))
    return Workload(f"dense-{m}-{k}-{n}-{end}".removesuffix("-"), shapes, build)


def batched(batch: int, m: int, k: int, n: int, *, scaled: bool = False) -> Workload:
    """Return a batched product of two inputs, as attention has them."""

    def build(graph: Graph, inputs: list[Any]) -> Any:
        x = graph.emit(relax.op.matmul(*inputs))
        if scaled:
            x = graph.emit(relax.op.multiply(x, relax.const(1 / math.sqrt(k), "float32")))
        return x

    name = f"batched-{batch}-{m}-{k}-{n}{'-scaled' if scaled else ''}"
    return Workload(name, ((1, batch, m, k), (1, batch, k, n)), build)


def simple(name: str, shapes: Sequence[Shape], build: Build) -> Workload:
    """Return a network without weights, named after its first input's shape, too."""
    extents = "-".join(str(extent) for extent in shapes[0])
    return Workload(f"{name}-{extents}", tuple(shapes), build)


def chain(end: str, shape: Shape) -> Workload:
    """Return a chain of elementwise operators."""
    n_others = sum(part in ("add", "mul") for part in end.split("-"))
    shapes = [shape] * (1 + n_others)
    return simple(end, shapes, lambda graph, inputs: graph.finish(inputs[0], end, inputs[1:]))


def mean(size: int, channels: int) -> Workload:
    """Return the mean over height and width."""
    return simple(
        "mean",
        [(1, size, size, channels)],
        lambda graph, x: graph.emit(relax.op.mean(x[0], [1, 2], keepdims=True)),
    )


def global_pool(size: int, channels: int) -> Workload:
    """Return an adaptive average pooling to one pixel."""
    return simple(
        "global-pool",
        [(1, size, size, channels)],
        lambda graph, x: graph.emit(relax.op.nn.adaptive_avg_pool2d(x[0], (1, 1), layout="NHWC")),
    )


def pool(kind: str, kernel: int, stride: int, size: int, channels: int) -> Workload:
    """Return a pooling of windows, by maximum or by average."""
    operator = relax.op.nn.max_pool2d if kind == "max" else relax.op.nn.avg_pool2d
    padding = kernel // 2 if kernel % 2 else 0

    def build(graph: Graph, inputs: list[Any]) -> Any:
        window = [(each, each) for each in (kernel, stride, padding)]
        return graph.emit(operator(inputs[0], *window, layout="NHWC"))

    name = f"{kind}-pool-{kernel}x{kernel}-s{stride}"
    return simple(name, [(1, size, size, channels)], build)


def resize(method: str, size: int, channels: int) -> Workload:
    """Return a resizing to twice the height and width."""

    def build(graph: Graph, inputs: list[Any]) -> Any:
        rounding = {"rounding_method": "floor"} if method == "nearest_neighbor" else {}
        return graph.emit(
            relax.op.image.resize2d(
                inputs[0],
                relax.ShapeExpr([2 * size, 2 * size]),
                layout="NHWC",
                method=method,
                coordinate_transformation_mode=(
                    "asymmetric" if method == "nearest_neighbor" else "half_pixel"
                ),
                **rounding,
            )
        )

    return simple(f"resize-{method}", [(1, size, size, channels)], build)


def concat(size: int, *channels: int) -> Workload:
    """Return a concatenation of channels."""
    shapes = [(1, size, size, each) for each in channels]
    return simple("concat", shapes, lambda graph, x: graph.emit(relax.op.concat(x, -1)))


def permute(axes: Sequence[int], *shape: int) -> Workload:
    """Return a transposition."""
    name = "permute-" + "".join(map(str, axes))
    return simple(name, [shape], lambda graph, x: graph.emit(relax.op.permute_dims(x[0], axes)))


_POINTWISE = [
    conv(24, 96, 1, 40, "relu"),
    conv(192, 48, 1, 20, "add"),
    conv(48, 192, 1, 20, "hardswish"),
    conv(256, 128, 1, 20, "relu"),
    conv(96, 24, 1, 40, ""),
    conv(192, 384, 1, 10, "silu"),
    conv(16, 64, 1, 80, "relu6"),
    conv(512, 256, 1, 10, "add-relu"),
    conv(384, 96, 1, 10, ""),
    conv(96, 192, 1, 20, "silu"),
    conv(32, 48, 1, 80, "relu"),
    conv(448, 112, 1, 7, "relu"),
    conv(48, 96, 1, 40, "", stride=2),
    conv(128, 512, 1, 10, "relu6"),
    conv(288, 72, 1, 12, ""),
    conv(24, 24, 1, 112, "hardswish"),
    conv(192, 48, 1, 1, "relu"),
    conv(48, 192, 1, 1, "hardsigmoid"),
]
_SQUARE = [
    conv(48, 48, 3, 40, "relu"),
    conv(96, 96, 3, 20, "add-relu"),
    conv(192, 192, 3, 10, "relu"),
    conv(24, 48, 3, 80, "relu", stride=2),
    conv(3, 24, 3, 160, "hardswish", stride=2),
    conv(64, 64, 3, 40, "relu"),
    conv(128, 128, 3, 20, "silu"),
    conv(96, 192, 3, 20, "relu", stride=2),
    conv(256, 256, 3, 10, "add-relu"),
    conv(48, 96, 3, 40, "silu", stride=2),
    conv(24, 24, 3, 112, "relu"),
    conv(320, 320, 3, 7, "relu"),
    conv(160, 80, 3, 24, ""),
    conv(3, 32, 3, 96, "relu6"),
    conv(192, 384, 3, 20, "relu", stride=2),
    conv(16, 16, 3, 80, "add-relu"),
]
_DEPTHWISE = [
    depthwise(96, 3, 40, "relu6"),
    depthwise(192, 3, 20, "hardswish"),
    depthwise(24, 3, 80, "relu"),
    depthwise(96, 3, 40, "relu6", stride=2),
    depthwise(264, 5, 10, "hardswish"),
    depthwise(384, 3, 10, "relu6"),
    depthwise(72, 5, 40, "relu", stride=2),
    depthwise(192, 3, 20, "silu", stride=2),
    depthwise(96, 5, 20, "hardswish"),
    depthwise(48, 3, 112, "relu6", stride=2),
    depthwise(768, 3, 7, "relu6"),
    depthwise(96, 7, 40, ""),
]
_DENSE = [
    dense(96, 256, 1024, "relu"),
    dense(1, 640, 1000, ""),
    dense(64, 384, 1536, "gelu"),
    dense(192, 768, 192, "add"),
    dense(384, 384, 384, ""),
    dense(1, 2048, 1024, "relu"),
    dense(16, 256, 256, "relu"),
    dense(64, 1536, 384, "add"),
    dense(40, 120, 5000, ""),
    dense(192, 192, 768, "gelu"),
    dense(256, 1024, 1024, ""),
    dense(1, 4096, 1024, "relu"),
    dense(320, 320, 1280, "silu"),
    dense(1, 384, 96, "sigmoid"),
]
_OTHERS = [
    batched(4, 96, 64, 96, scaled=True),
    mean(20, 192),
    conv(24, 48, 5, 40, "relu"),
    batched(4, 96, 96, 64),
    conv(3, 48, 7, 128, "relu", stride=2),
    conv(96, 96, 3, 20, "relu", groups=4),
    transposed(96, 48, 2, 20, ""),
    global_pool(10, 384),
    pool("max", 3, 2, 80, 48),
    transposed(48, 24, 4, 40, "relu"),
    chain("add-relu", (1, 40, 40, 96)),
    batched(6, 192, 32, 192, scaled=True),
    pool("avg", 3, 1, 20, 96),
    resize("nearest_neighbor", 20, 96),
    concat(20, 96, 96),
    conv(96, 64, 5, 10, "relu", stride=2),
    conv(192, 192, 3, 20, "relu", groups=8),
    chain("mul-add", (1, 20, 20, 192)),
    permute((0, 2, 1, 3), 1, 96, 4, 64),
    batched(6, 192, 192, 32),
    mean(40, 96),
    pool("max", 2, 2, 40, 96),
    resize("linear", 20, 64),
    chain("gelu", (1, 96, 1024)),
    chain("hardswish", (1, 40, 40, 72)),
    conv(16, 16, 7, 40, "relu"),
    permute((0, 3, 1, 2), 1, 20, 20, 192),
    transposed(128, 64, 3, 10, "relu"),
    batched(12, 64, 32, 64),
    chain("silu", (1, 80, 80, 24)),
    concat(40, 48, 24, 24),
    pool("avg", 2, 2, 40, 48),
]


def _in_turns(*groups: Sequence[Workload]) -> Iterator[Workload]:
    """Yield the first of each group, then the second of each, ..."""
    for row in itertools.zip_longest(*groups):
        yield from (each for each in row if each is not None)


# Convolutions and products are most of a network's time; any prefix has all of these kinds.
WORKLOADS: tuple[Workload, ...] = (
    *_in_turns(_POINTWISE, _SQUARE, _DEPTHWISE, _DENSE),
    *_OTHERS,
)
