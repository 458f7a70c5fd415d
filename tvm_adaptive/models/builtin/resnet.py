"""ResNet-18, -34 and -50 as they are deployed: batch normalisations folded into convolutions.

He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, CVPR 2016, table 1
(the columns of 18, 34 and 50 layers) and the projection shortcuts of option B. As usual
today, the 50-layer network takes its strides in the 3x3 convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive._tvm import nn
from tvm_adaptive.models.builtin.layers import BIAS_STD, flatten, global_average_pool, max_pool
from tvm_adaptive.models.network import Network, check_positive, network_of_module

# A bottleneck's output has so many times the channels that it works on.
EXPANSION = 4
# A sum adds the variances of its branches; halving what the convolutions bring keeps
# activations within one order of magnitude over the eight blocks.
_RESIDUAL_SCALE = math.sqrt(0.5)


class BasicBlock(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions and a shortcut, with ReLU after the first and after the sum."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        self.conv1 = nn.Conv2D(in_channels, channels, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2D(channels, channels, 3, padding=1)
        self.shortcut = (
            nn.Conv2D(in_channels, channels, 1, stride=stride)
            if stride != 1 or in_channels != channels
            else None
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, in_channels, h, w) to (n, channels, h / stride, w / stride)."""
        branch = self.conv2(nn.op.relu(self.conv1(x)))
        return nn.op.relu(branch + (x if self.shortcut is None else self.shortcut(x)))


class Bottleneck(nn.Module):  # type: ignore[misc]
    """A 3x3 convolution between two 1x1 that take channels away and bring them back."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        self.reduce = nn.Conv2D(in_channels, channels, 1)
        self.conv = nn.Conv2D(channels, channels, 3, stride=stride, padding=1)
        self.expand = nn.Conv2D(channels, EXPANSION * channels, 1)
        self.shortcut = (
            nn.Conv2D(in_channels, EXPANSION * channels, 1, stride=stride)
            if stride != 1 or in_channels != EXPANSION * channels
            else None
        )

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, in_channels, h, w) to (n, 4 * channels, h / stride, w / stride)."""
        branch = self.expand(nn.op.relu(self.conv(nn.op.relu(self.reduce(x)))))
        return nn.op.relu(branch + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):  # type: ignore[misc]
    """A stem, four stages of blocks and a classifier; see :func:`resnet18`."""

    def __init__(
        self,
        make_block: Callable[[int, int, int], nn.Module],
        blocks: Sequence[int],
        expansion: int,
        width: int,
        classes: int,
    ) -> None:
        self.stem = nn.Conv2D(3, width, 7, stride=2, padding=3)
        made, before = [], width
        for stage, n_blocks in enumerate(blocks):
            channels = width * 2**stage
            for block in range(n_blocks):
                made.append(make_block(before, channels, 2 if stage > 0 and block == 0 else 1))
                before = expansion * channels
        self.blocks = nn.ModuleList(made)
        self.classifier = nn.Linear(before, classes)

    def forward(self, image: nn.Tensor) -> nn.Tensor:
        """Map images (n, 3, h, w) to class scores (n, classes)."""
        x = max_pool(nn.op.relu(self.stem(image)), size=3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.classifier(flatten(global_average_pool(x)))


# Block, blocks of each stage, and how many times its channels a block puts out.
_BUILT_OF: dict[str, tuple[Callable[[int, int, int], nn.Module], tuple[int, ...], int]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2), 1),
    "resnet34": (BasicBlock, (3, 4, 6, 3), 1),
    "resnet50": (Bottleneck, (3, 4, 6, 3), EXPANSION),
}


def resnet18(
    *,
    batch: int = 1,
    image_size: int = 224,
    width: int = 64,
    classes: int = 1000,
    seed: int = 0,
) -> Network:
    """Build ResNet-18 with random weights, in NCHW and float32.

    Tuning depends on shapes, not on what the network has learnt, so the weights are
    drawn at random: normal with the variance of He et al. (ICCV 2015, equation 10),
    halved for convolutions that feed a sum, and of mean zero for each output channel:
    without that, the mean of the activations, which is the same for every image, would
    drown the rest. Outputs stay finite and tell images apart.
    Batch normalisation is folded: each convolution has a bias and nothing follows it
    but ReLU.
    """
    return _network(
        "resnet18", batch=batch, image_size=image_size, width=width, classes=classes, seed=seed
    )


def resnet34(
    *,
    batch: int = 1,
    image_size: int = 224,
    width: int = 64,
    classes: int = 1000,
    seed: int = 0,
) -> Network:
    """Build ResNet-34 with random weights, in NCHW and float32; see :func:`resnet18`."""
    return _network(
        "resnet34", batch=batch, image_size=image_size, width=width, classes=classes, seed=seed
    )


def resnet50(
    *,
    batch: int = 1,
    image_size: int = 224,
    width: int = 64,
    classes: int = 1000,
    seed: int = 0,
) -> Network:
    """Build ResNet-50 with random weights, in NCHW and float32; see :func:`resnet18`."""
    return _network(
        "resnet50", batch=batch, image_size=image_size, width=width, classes=classes, seed=seed
    )


def _network(
    name: str, *, batch: int, image_size: int, width: int, classes: int, seed: int
) -> Network:
    check_positive(batch=batch, image_size=image_size, width=width, classes=classes)
    make_block, blocks, expansion = _BUILT_OF[name]
    rng = np.random.default_rng(seed)
    return network_of_module(
        name,
        ResNet(make_block, blocks, expansion, width, classes),
        {"image": (batch, 3, image_size, image_size)},
        lambda parameter, shape: draw_parameter(rng, parameter, shape),
    )


def draw_parameter(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.typing.NDArray[np.float32]:
    """Draw one weight or bias."""
    if len(shape) == 1:
        return (rng.standard_normal(shape) * BIAS_STD).astype(np.float32)
    fan_in = math.prod(shape[1:])
    std = math.sqrt(2.0 / fan_in)
    if name.endswith(("conv2.weight", "expand.weight", "shortcut.weight")):
        std *= _RESIDUAL_SCALE
    weight = rng.standard_normal(shape) * std
    weight -= weight.mean(axis=tuple(range(1, len(shape))), keepdims=True)
    return weight.astype(np.float32)
