"""SqueezeNet 1.1.

Iandola, Han, Moskewicz, Ashraf, Dally, Keutzer, *SqueezeNet: AlexNet-level accuracy with
50x fewer parameters*, 2016, in the authors' revision 1.1: a 3x3 stem, and pooling after
the first, third and fifth stage, which costs 2.4 times less for the same accuracy.
"""

from __future__ import annotations

from tvm_adaptive._tvm import nn
from tvm_adaptive.errors import check_at_least
from tvm_adaptive.models.builtin import layers
from tvm_adaptive.models.network import Network, network_of_nn

# Squeezed channels of each fire module, in quarters of the stem's channels.
FIRES = (1, 1, 2, 2, 3, 3, 4, 4)
POOLED_FIRES = (0, 2, 4)  # the fire modules that follow a pooling
EXPANSION = 4  # each half of a fire module's output has that many times its squeezed channels
_SMALLEST_IMAGE = 31  # in pixels; the third pooling still has one whole window
_UNITS = 4  # of the stem's channels


class Fire(nn.Module):  # type: ignore[misc]
    """Squeeze to few channels, expand by 1x1 and by 3x3, and concatenate."""

    def __init__(self, in_channels: int, squeezed: int) -> None:
        self.squeeze = nn.Conv2D(in_channels, squeezed, 1)
        self.expand1 = nn.Conv2D(squeezed, EXPANSION * squeezed, 1)
        self.expand3 = nn.Conv2D(squeezed, EXPANSION * squeezed, 3, padding=1)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, in_channels, h, w) to (n, 8 * squeezed, h, w)."""
        x = nn.op.relu(self.squeeze(x))
        return nn.op.concat([nn.op.relu(self.expand1(x)), nn.op.relu(self.expand3(x))], dim=1)


class SqueezeNet(nn.Module):  # type: ignore[misc]
    """Revision 1.1; see :func:`squeezenet1_1`."""

    def __init__(self, width: int, classes: int) -> None:
        unit = width // _UNITS
        self.stem = nn.Conv2D(3, width, 3, stride=2)
        widths = [width, *(2 * EXPANSION * unit * squeezed for squeezed in FIRES)]
        self.fires = nn.ModuleList(
            [
                Fire(channels, unit * squeezed)
                for channels, squeezed in zip(widths[:-1], FIRES, strict=True)
            ]
        )
        self.classifier = nn.Conv2D(widths[-1], classes, 1)

    def forward(self, image: nn.Tensor) -> nn.Tensor:
        """Map images (n, 3, h, w) to class scores (n, classes)."""
        x = nn.op.relu(self.stem(image))
        for index, fire in enumerate(self.fires):
            pooled = index in POOLED_FIRES
            x = fire(layers.max_pool(x, size=3, stride=2, padding=0) if pooled else x)
        return layers.flatten(layers.global_average_pool(nn.op.relu(self.classifier(x))))


def squeezenet1_1(
    *, batch: int = 1, image_size: int = 224, width: int = 64, classes: int = 1000, seed: int = 0
) -> Network:
    """Build SqueezeNet 1.1 with random weights, in NCHW and float32.

    Pooling windows that do not fit are dropped; at 224 pixels all of them fit.
    """
    layers.check_sizes(batch=batch, image_size=image_size, width=width, classes=classes)
    check_at_least("image_size", image_size, _SMALLEST_IMAGE)
    layers.check_multiple("width", width, _UNITS)
    module = SqueezeNet(width, classes)
    shapes = {"image": (batch, 3, image_size, image_size)}
    return network_of_nn("squeezenet1_1", module, shapes, layers.draw_for_relu, seed)
