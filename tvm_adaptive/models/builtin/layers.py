"""What several built-in networks share: pooling, and random weights.

Tuning depends on shapes, not on trained values. The weights still have to keep activations
finite and to make outputs depend on inputs: outputs that have died out, or that are equal
for every input, would hide a wrong schedule.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tvm_adaptive._tvm import nn, relax
from tvm_adaptive.errors import InvalidOptionError

Array = npt.NDArray[np.float32]

BIAS_STD = 0.1  # small against activations of unit scale, yet an omitted bias shows
# Variance, times the number of inputs, at which a weight of mean zero maps ReLU(z) back to
# the variance of z: ReLU of a standard normal has variance 1/2 - 1/(2 pi).
GAIN_AFTER_RELU = 1 / (1 / 2 - 1 / (2 * math.pi))


def check_sizes(**sizes: int) -> None:
    """Raise :class:`InvalidOptionError` unless every size is a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidOptionError(f"{name} must be a positive integer but got {value!r}.")


def check_multiple(name: str, value: int, unit: int) -> None:
    """Raise :class:`InvalidOptionError` unless ``value`` is a multiple of ``unit``."""
    if value % unit:
        raise InvalidOptionError(f"{name} must be a multiple of {unit} but got {value}.")


def max_pool(x: nn.Tensor, size: int, stride: int, padding: int) -> nn.Tensor:
    """Pool (n, c, h, w) over windows of ``size`` x ``size``."""
    return nn.wrap_nested(
        relax.op.nn.max_pool2d(
            x._expr, (size, size), (stride, stride), (padding, padding), layout="NCHW"
        ),
        "max_pool2d",
    )


def global_average_pool(x: nn.Tensor) -> nn.Tensor:
    """Average (n, c, h, w) over its pixels to (n, c, 1, 1)."""
    return nn.wrap_nested(
        relax.op.nn.adaptive_avg_pool2d(x._expr, (1, 1), layout="NCHW"), "global_average_pool"
    )


def flatten(x: nn.Tensor) -> nn.Tensor:
    """Reshape (n, ...) to (n, product of the other extents)."""
    return nn.op.reshape(x, (x.shape[0], -1))


def draw_bias(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw a normal bias of standard deviation 0.1."""
    bias = rng.standard_normal(shape, dtype=np.float32)
    bias *= np.float32(BIAS_STD)
    return bias


def draw_weight(
    rng: np.random.Generator, shape: tuple[int, ...], gain: float, *, centred: bool = True
) -> Array:
    """Draw a normal weight of variance ``gain / inputs``, of mean zero per output if centred."""
    weight = rng.standard_normal(shape, dtype=np.float32)
    if centred:
        weight -= weight.mean(axis=tuple(range(1, len(shape))), keepdims=True)
    weight *= np.float32(math.sqrt(gain / math.prod(shape[1:])))
    return weight


def draw_for_relu(rng: np.random.Generator, _name: str, shape: tuple[int, ...]) -> Array:
    """Draw a weight, or a bias if ``shape`` has one axis, of a layer between two ReLUs."""
    return draw_bias(rng, shape) if len(shape) == 1 else draw_weight(rng, shape, GAIN_AFTER_RELU)
