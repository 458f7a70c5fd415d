"""How the result of a convolution is divided into the tiles of minimal filtering."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm_adaptive._tvm import tirx
from tvm_adaptive.models.forms.convolution import KERNEL_SIZE, Convolution
from tvm_adaptive.models.forms.minimal_filtering import Filtering, minimal_filtering

# Fewer channels do not pay for the transforms.
LEAST_CHANNELS = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the result of a convolution is divided into square tiles."""

    convolution: Convolution
    filtering: Filtering

    @property
    def size(self) -> int:
        """Rows and columns of a tile."""
        return self.filtering.n_results

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles in an image; the last may be partly outside."""
        height, width = self.convolution.shape[4:6]
        return -(-height // self.size), -(-width // self.size)

    @property
    def n_tiles(self) -> int:
        """Tiles of a batch."""
        rows, columns = self.grid
        return self.convolution.shape[0] * rows * columns

    @property
    def n_products(self) -> int:
        """Matrix products, one for each element of a tile."""
        return self.filtering.n_inputs**2

    def origin(self, tile: Any) -> tuple[Any, Any, Any]:
        """Return image, first row and first column of a tile's results."""
        rows, columns = self.grid
        image = tirx.floordiv(tile, rows * columns)
        row = tirx.floordiv(tirx.floormod(tile, rows * columns), columns)
        return image, row * self.size, tirx.floormod(tile, columns) * self.size


def tiles_of(convolution: Convolution, size: int) -> Tiles | None:
    """Return the tiles of a convolution; None where they cannot pay."""
    _, _, _, n_channels, *_, n_filters = convolution.shape
    if min(n_channels, n_filters) < LEAST_CHANNELS or convolution.uses_data_again:
        return None
    return Tiles(convolution, minimal_filtering(size, KERNEL_SIZE))
