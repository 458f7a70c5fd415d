"""VGG-16, configuration D: with biases, without batch normalisation.

Simonyan, Zisserman, *Very Deep Convolutional Networks for Large-Scale Image Recognition*,
ICLR 2015, table 1.
"""

from __future__ import annotations

import itertools

from tvm_adaptive._tvm import nn
from tvm_adaptive.models.builtin import layers
from tvm_adaptive.models.network import Network, network_of_nn

# Convolutions of each stage, and its channels as a multiple of the first stage's.
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
REDUCTION = 2 ** len(STAGES)


class VGG16(nn.Module):  # type: ignore[misc]
    """Thirteen convolutions and three dense layers; see :func:`vgg16`."""

    def __init__(self, image_size: int, width: int, hidden: int, classes: int) -> None:
        channels = [3, *(width * multiple for depth, multiple in STAGES for _ in range(depth))]
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2D(inputs, outputs, 3, padding=1)
                for inputs, outputs in itertools.pairwise(channels)
            ]
        )
        features = channels[-1] * (image_size // REDUCTION) ** 2
        self.hidden1 = nn.Linear(features, hidden)
        self.hidden2 = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, image: nn.Tensor) -> nn.Tensor:
        """Map images (n, 3, h, w) to class scores (n, classes)."""
        x = image
        convolutions = iter(self.convolutions)
        for depth, _ in STAGES:
            for _ in range(depth):
                x = nn.op.relu(next(convolutions)(x))
            x = layers.max_pool(x, size=2, stride=2, padding=0)
        x = nn.op.relu(self.hidden1(layers.flatten(x)))
        return self.classifier(nn.op.relu(self.hidden2(x)))


def vgg16(
    *,
    batch: int = 1,
    image_size: int = 224,
    width: int = 64,
    hidden: int = 4096,
    classes: int = 1000,
    seed: int = 0,
) -> Network:
    """Build VGG-16 with 138 million random weights, in NCHW and float32."""
    layers.check_sizes(
        batch=batch, image_size=image_size, width=width, hidden=hidden, classes=classes
    )
    layers.check_multiple("image_size", image_size, REDUCTION)
    module = VGG16(image_size, width, hidden, classes)
    shapes = {"image": (batch, 3, image_size, image_size)}
    return network_of_nn("vgg16", module, shapes, layers.draw_for_relu, seed)
