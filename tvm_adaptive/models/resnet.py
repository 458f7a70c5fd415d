"""ResNet-18 as it is deployed: every batch normalisation folded into the convolution before it.

He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, CVPR 2016, table 1
(the 18-layer column) and the projection shortcuts of option B.
"""

from __future__ import annotations

import math

import numpy as np

from tvm_adaptive._tvm import nn
from tvm_adaptive.models.layers import BIAS_STD, flatten, global_average_pool, max_pool
from tvm_adaptive.models.network import Network, check_positive, network_of_module

STAGES = 4
BLOCKS_PER_STAGE = 2
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


class ResNet18(nn.Module):  # type: ignore[misc]
    """The 18-layer network; see :func:`resnet18`."""

    def __init__(self, width: int, classes: int) -> None:
        self.stem = nn.Conv2D(3, width, 7, stride=2, padding=3)
        channels = [width * 2**stage for stage in range(STAGES)]
        self.blocks = nn.ModuleList(
            [
                BasicBlock(
                    channels[max(stage - 1, 0)] if block == 0 else channels[stage],
                    channels[stage],
                    stride=2 if stage > 0 and block == 0 else 1,
                )
                for stage in range(STAGES)
                for block in range(BLOCKS_PER_STAGE)
            ]
        )
        self.classifier = nn.Linear(channels[-1], classes)

    def forward(self, image: nn.Tensor) -> nn.Tensor:
        """Map images (n, 3, h, w) to class scores (n, classes)."""
        x = max_pool(nn.op.relu(self.stem(image)), size=3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.classifier(flatten(global_average_pool(x)))


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

    Parameters
    ----------
    batch : int, default 1
    image_size : int, default 224
        Height and width in pixels; the network divides it by 32.
    width : int, default 64
        Channels of the first stage; smaller ones make quick tests.
    classes : int, default 1000
    seed : int, default 0
        Of the weights.

    Raises
    ------
    InvalidOptionError
        When a size is not a positive integer.
    """
    check_positive(batch=batch, image_size=image_size, width=width, classes=classes)
    rng = np.random.default_rng(seed)
    return network_of_module(
        "resnet18",
        ResNet18(width, classes),
        {"image": (batch, 3, image_size, image_size)},
        lambda name, shape: draw_parameter(rng, name, shape),
    )


def draw_parameter(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.typing.NDArray[np.float32]:
    """Draw one weight or bias.

    Parameters
    ----------
    rng : numpy.random.Generator
    name : str
        Dotted name within the module; decides whether the output joins a sum.
    shape : tuple of int
        (outputs, inputs, ...) for a weight, (outputs,) for a bias.
    """
    if len(shape) == 1:
        return (rng.standard_normal(shape) * BIAS_STD).astype(np.float32)
    fan_in = math.prod(shape[1:])
    std = math.sqrt(2.0 / fan_in)
    if name.endswith(("conv2.weight", "shortcut.weight")):
        std *= _RESIDUAL_SCALE
    weight = rng.standard_normal(shape) * std
    weight -= weight.mean(axis=tuple(range(1, len(shape))), keepdims=True)
    return weight.astype(np.float32)
