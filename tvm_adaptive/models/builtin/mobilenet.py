"""MobileNet-V2 as it is deployed: batch normalisation folded into the convolution before it.

Sandler, Howard, Zhu, Zhmoginov, Chen, *MobileNetV2: Inverted Residuals and Linear
Bottlenecks*, CVPR 2018, tables 1 and 2.
"""

from __future__ import annotations

import numpy as np

from tvm_adaptive._tvm import nn
from tvm_adaptive.models.builtin import layers
from tvm_adaptive.models.builtin.layers import GAIN_AFTER_RELU, Array, draw_weight
from tvm_adaptive.models.network import Network, network_of_nn

# Table 2: expansion, output channels in units of 8, blocks, stride of the first block.
STAGES = (
    (1, 2, 1, 1),
    (6, 3, 2, 2),
    (6, 4, 3, 2),
    (6, 8, 4, 2),
    (6, 12, 3, 1),
    (6, 20, 3, 2),
    (6, 40, 1, 1),
)
STEM_UNITS = 4
HEAD_UNITS = 160
# A sum adds the variances of its branches. A quarter from each of ten inverted residuals
# lets activations grow threefold, so that ReLU6 does clip some.
_RESIDUAL_GAIN = GAIN_AFTER_RELU / 4
# Uncentred weights map ReLU(z), of mean square 1/2, back to variance 1 (He et al.,
# ICCV 2015, equation 10).
_DEPTHWISE_GAIN = 2.0


class InvertedResidual(nn.Module):  # type: ignore[misc]
    """Expand by 1x1, filter each channel by 3x3, project by 1x1 without an activation."""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        inner = in_channels * expansion
        self.expand = nn.Conv2D(in_channels, inner, 1) if expansion != 1 else None
        self.depthwise = nn.Conv2D(inner, inner, 3, stride=stride, padding=1, groups=inner)
        self.joins_sum = stride == 1 and in_channels == channels
        if self.joins_sum:  # draw_parameter draws it smaller, by its name
            self.residual = nn.Conv2D(inner, channels, 1)
        else:
            self.project = nn.Conv2D(inner, channels, 1)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, in_channels, h, w) to (n, channels, h / stride, w / stride)."""
        inner = x if self.expand is None else nn.op.relu6(self.expand(x))
        inner = nn.op.relu6(self.depthwise(inner))
        return x + self.residual(inner) if self.joins_sum else self.project(inner)


class MobileNetV2(nn.Module):  # type: ignore[misc]
    """Seventeen inverted residuals; see :func:`mobilenet_v2`."""

    def __init__(self, unit: int, classes: int) -> None:
        channels = unit * STEM_UNITS
        self.stem = nn.Conv2D(3, channels, 3, stride=2, padding=1)
        blocks = []
        for expansion, units, repeats, stride in STAGES:
            for step in (stride, *[1] * (repeats - 1)):
                blocks.append(InvertedResidual(channels, unit * units, step, expansion))
                channels = unit * units
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Conv2D(channels, unit * HEAD_UNITS, 1)
        self.classifier = nn.Linear(unit * HEAD_UNITS, classes)

    def forward(self, image: nn.Tensor) -> nn.Tensor:
        """Map images (n, 3, h, w) to class scores (n, classes)."""
        x = nn.op.relu6(self.stem(image))
        for block in self.blocks:
            x = block(x)
        return self.classifier(
            layers.flatten(layers.global_average_pool(nn.op.relu6(self.head(x))))
        )


def mobilenet_v2(
    *, batch: int = 1, image_size: int = 224, width: int = 32, classes: int = 1000, seed: int = 0
) -> Network:
    """Build MobileNet-V2 with random weights, in NCHW and float32."""
    layers.check_sizes(batch=batch, image_size=image_size, width=width, classes=classes)
    layers.check_multiple("width", width, STEM_UNITS)
    module = MobileNetV2(width // STEM_UNITS, classes)
    shapes = {"image": (batch, 3, image_size, image_size)}
    return network_of_nn("mobilenet_v2", module, shapes, draw_parameter, seed)


def draw_parameter(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Draw one weight or bias; the gain depends on the layer, which the dotted name gives."""
    if len(shape) == 1:
        return layers.draw_bias(rng, shape)
    kind = name.split(".")[-2]
    if kind == "depthwise":
        return draw_weight(rng, shape, _DEPTHWISE_GAIN, centred=False)
    # Outputs of a bottleneck, and the image, have mean zero already.
    gains = {"residual": _RESIDUAL_GAIN, "project": GAIN_AFTER_RELU, "classifier": GAIN_AFTER_RELU}
    return draw_weight(rng, shape, gains.get(kind, 1.0))
