"""ResNet-18, -34 and -50 as they are deployed: batch normalisations folded into convolutions.

He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, CVPR 2016, table 1
(the columns of 18, 34 and 50 layers) and the projection shortcuts of option B. As usual
today, the 50-layer network takes its strides in the 3x3 convolutions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive._tvm import nn
from tvm_adaptive.models.builtin import layers
from tvm_adaptive.models.builtin.layers import Array
from tvm_adaptive.models.network import Network, network_of_nn

# A sum adds the variances of its branches. Halving the variance of the convolutions keeps
# activations within one order of magnitude over the eight blocks.
_RESIDUAL_SCALE = math.sqrt(0.5)


class BasicBlock(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions and a shortcut, with ReLU after the first and after the sum."""

    expansion = 1  # output channels in multiples of those that the block works on

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        self.conv1 = nn.Conv2D(in_channels, channels, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2D(channels, channels, 3, padding=1)
        self.shortcut = _shortcut(in_channels, channels, stride)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, in_channels, h, w) to (n, channels, h / stride, w / stride)."""
        branch = self.conv2(nn.op.relu(self.conv1(x)))
        return nn.op.relu(branch + (x if self.shortcut is None else self.shortcut(x)))


class Bottleneck(nn.Module):  # type: ignore[misc]
    """A 3x3 convolution between 1x1 convolutions that reduce and restore the channels."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        self.reduce = nn.Conv2D(in_channels, channels, 1)
        self.conv = nn.Conv2D(channels, channels, 3, stride=stride, padding=1)
        self.expand = nn.Conv2D(channels, self.expansion * channels, 1)
        self.shortcut = _shortcut(in_channels, self.expansion * channels, stride)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, in_channels, h, w) to (n, 4 * channels, h / stride, w / stride)."""
        branch = self.expand(nn.op.relu(self.conv(nn.op.relu(self.reduce(x)))))
        return nn.op.relu(branch + (x if self.shortcut is None else self.shortcut(x)))


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Conv2D | None:
    """Return the projection of a shortcut (option B), None for the identity."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Conv2D(in_channels, out_channels, 1, stride=stride)


class ResNet(nn.Module):  # type: ignore[misc]
    """A stem, four stages of blocks and a classifier; see :func:`resnet18`."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: Sequence[int], width: int, classes: int
    ) -> None:
        self.stem = nn.Conv2D(3, width, 7, stride=2, padding=3)
        blocks, in_channels = [], width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for index in range(depth):
                blocks.append(block(in_channels, channels, 2 if stage > 0 and index == 0 else 1))
                in_channels = block.expansion * channels
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Linear(in_channels, classes)

    def forward(self, image: nn.Tensor) -> nn.Tensor:
        """Map images (n, 3, h, w) to class scores (n, classes)."""
        x = layers.max_pool(nn.op.relu(self.stem(image)), size=3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.classifier(layers.flatten(layers.global_average_pool(x)))


def _resnet(
    name: str,
    block: type[BasicBlock | Bottleneck],
    depths: Sequence[int],
    *,
    batch: int = 1,
    image_size: int = 224,
    width: int = 64,
    classes: int = 1000,
    seed: int = 0,
) -> Network:
    """Build a ResNet with random weights, in NCHW and float32.

    Weights are normal with the variance of He et al. (ICCV 2015, equation 10), halved for
    convolutions that feed a sum, and of mean zero for each output channel: without that,
    the mean of the activations, which is the same for every image, would drown the rest.
    Batch normalisation is folded: each convolution has a bias, and only ReLU follows it.
    """
    layers.check_sizes(batch=batch, image_size=image_size, width=width, classes=classes)
    module = ResNet(block, depths, width, classes)
    shapes = {"image": (batch, 3, image_size, image_size)}
    return network_of_nn(name, module, shapes, draw_parameter, seed)


resnet18 = functools.partial(_resnet, "resnet18", BasicBlock, (2, 2, 2, 2))
resnet34 = functools.partial(_resnet, "resnet34", BasicBlock, (3, 4, 6, 3))
resnet50 = functools.partial(_resnet, "resnet50", Bottleneck, (3, 4, 6, 3))


def draw_parameter(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Draw one weight or bias."""
    if len(shape) == 1:
        return (rng.standard_normal(shape) * layers.BIAS_STD).astype(np.float32)
    std = math.sqrt(2.0 / math.prod(shape[1:]))
    if name.endswith(("conv2.weight", "expand.weight", "shortcut.weight")):
        std *= _RESIDUAL_SCALE
    weight = rng.standard_normal(shape) * std
    weight -= weight.mean(axis=tuple(range(1, len(shape))), keepdims=True)
    return weight.astype(np.float32)
