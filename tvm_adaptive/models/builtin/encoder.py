"""The encoder of the Transformer, base size.

Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, sections 3.1 to 3.3 and the
row "base" of table 3: layers are normalised after each sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tvm_adaptive._tvm import nn
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.builtin.layers import Array, draw_bias, draw_weight
from tvm_adaptive.models.network import Network, check_positive, network_of_module

EPSILON = 1e-5
_BEHIND_ACTIVATION = "outer.weight"
_SCALES = ("norm1.weight", "norm2.weight")

Activation = Callable[[nn.Tensor], nn.Tensor]


class EncoderSizes(NamedTuple):
    """What :func:`transformer` explains."""

    batch: int
    sequence: int
    layers: int
    hidden: int
    heads: int
    inner: int


class SelfAttention(nn.Module):  # type: ignore[misc]
    """Scaled dot products of every position with every other, in several heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, positions, hidden) to the same shape."""
        n, positions, hidden = x.shape
        by_head = (n, positions, self.heads, hidden // self.heads)

        def split(projected: nn.Tensor, axes: list[int]) -> nn.Tensor:
            return nn.op.permute_dims(nn.op.reshape(projected, by_head), axes)

        query = split(self.query(x), [0, 2, 1, 3])
        key = split(self.key(x), [0, 2, 3, 1])
        value = split(self.value(x), [0, 2, 1, 3])
        scores = nn.op.matmul(query, key) * (1 / math.sqrt(hidden // self.heads))
        mixed = nn.op.permute_dims(nn.op.matmul(nn.op.softmax(scores), value), [0, 2, 1, 3])
        return self.output(nn.op.reshape(mixed, (n, positions, hidden)))


class EncoderLayer(nn.Module):  # type: ignore[misc]
    """Self-attention and two dense layers, each added to its input and then normalised."""

    def __init__(self, sizes: EncoderSizes, activation: Activation, epsilon: float) -> None:
        self.attention = SelfAttention(sizes.hidden, sizes.heads)
        self.norm1 = nn.LayerNorm(sizes.hidden, epsilon)
        self.inner = nn.Linear(sizes.hidden, sizes.inner)
        self.outer = nn.Linear(sizes.inner, sizes.hidden)
        self.norm2 = nn.LayerNorm(sizes.hidden, epsilon)
        self.activation = activation

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, positions, hidden) to the same shape."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.outer(self.activation(self.inner(x))))


class Encoder(nn.Module):  # type: ignore[misc]
    """Layers one after the other; see :func:`transformer`."""

    def __init__(self, sizes: EncoderSizes, activation: Activation, epsilon: float) -> None:
        self.layers = nn.ModuleList(
            [EncoderLayer(sizes, activation, epsilon) for _ in range(sizes.layers)]
        )

    def forward(self, embedded: nn.Tensor) -> nn.Tensor:
        """Map embedded tokens (n, positions, hidden) to the same shape."""
        for layer in self.layers:
            embedded = layer(embedded)
        return embedded


def transformer(
    *,
    batch: int = 1,
    sequence: int = 128,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    inner: int = 2048,
    seed: int = 0,
) -> Network:
    """Build the Transformer's encoder with random weights, in float32.

    Its input are the tokens of one full sequence, embedded, positions added: looking
    them up is no work that could be tuned.
    """
    sizes = EncoderSizes(batch, sequence, layers, hidden, heads, inner)
    return encoder_network("transformer", sizes, nn.op.relu, EPSILON, seed)


def encoder_network(
    name: str, sizes: EncoderSizes, activation: Activation, epsilon: float, seed: int
) -> Network:
    """Build an encoder with random weights."""
    check_positive(**sizes._asdict())
    if sizes.hidden % sizes.heads:
        raise InvalidOptionError(
            f"hidden must be a multiple of heads but got {sizes.hidden} and {sizes.heads}."
        )
    rng = np.random.default_rng(seed)
    return network_of_module(
        name,
        Encoder(sizes, activation, epsilon),
        {"embedded": (sizes.batch, sizes.sequence, sizes.hidden)},
        lambda parameter, shape: draw_parameter(rng, parameter, shape),
    )


def draw_parameter(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Draw one weight or bias; the scale of a normalisation is drawn around one."""
    if len(shape) > 1:
        # The normalisation after each sum sets the scale; only behind the activation do
        # inputs have a mean.
        return draw_weight(rng, shape, gain=1.0, centred=name.endswith(_BEHIND_ACTIVATION))
    shift = draw_bias(rng, shape)
    return shift + np.float32(1) if name.endswith(_SCALES) else shift
