"""Encoders of the Transformer and of BERT, base size.

Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, sections 3.1 to 3.3 and the
row "base" of table 3: layers are normalised after each sum. Devlin, Chang, Lee, Toutanova,
*BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*, NAACL
2019, section 3: the same encoder with GELU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from tvm_adaptive._tvm import nn
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.builtin.layers import Array, check_sizes, draw_bias, draw_weight
from tvm_adaptive.models.network import Network, network_of_nn

EPSILON = 1e-5
BERT_EPSILON = 1e-12  # of the authors' code

Activation = Callable[[nn.Tensor], nn.Tensor]


class SelfAttention(nn.Module):  # type: ignore[misc]
    """Scaled dot-product attention with several heads."""

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

    def __init__(
        self, hidden: int, heads: int, inner: int, activation: Activation, epsilon: float
    ) -> None:
        self.attention = SelfAttention(hidden, heads)
        self.norm1 = nn.LayerNorm(hidden, epsilon)
        self.inner = nn.Linear(hidden, inner)
        self.outer = nn.Linear(inner, hidden)
        self.norm2 = nn.LayerNorm(hidden, epsilon)
        self.activation = activation

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Map (n, positions, hidden) to the same shape."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.outer(self.activation(self.inner(x))))


class Encoder(nn.Module):  # type: ignore[misc]
    """Several layers in a row; see :func:`transformer`."""

    def __init__(self, layers: list[EncoderLayer]) -> None:
        self.layers = nn.ModuleList(layers)

    def forward(self, embedded: nn.Tensor) -> nn.Tensor:
        """Map embedded tokens (n, positions, hidden) to the same shape."""
        for layer in self.layers:
            embedded = layer(embedded)
        return embedded


def _encoder(
    name: str,
    activation: Activation,
    epsilon: float,
    *,
    batch: int = 1,
    sequence: int = 128,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    inner: int = 2048,
    seed: int = 0,
) -> Network:
    """Build an encoder with random weights, in float32; its tokens are embedded already."""
    sizes = {"batch": batch, "sequence": sequence, "layers": layers}
    check_sizes(**sizes, hidden=hidden, heads=heads, inner=inner)
    if hidden % heads:
        raise InvalidOptionError(
            f"hidden must be a multiple of heads but got {hidden} and {heads}."
        )
    stack = [EncoderLayer(hidden, heads, inner, activation, epsilon) for _ in range(layers)]
    # A table lookup would offer nothing to tune.
    shapes = {"embedded": (batch, sequence, hidden)}
    return network_of_nn(name, Encoder(stack), shapes, draw_parameter, seed)


transformer = functools.partial(_encoder, "transformer", nn.op.relu, EPSILON)
bert_base = functools.partial(
    _encoder, "bert_base", nn.op.gelu, BERT_EPSILON, layers=12, hidden=768, heads=12, inner=3072
)


def draw_parameter(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Draw one weight or bias; the scale of a normalisation is drawn around one."""
    if len(shape) > 1:
        # The normalisation after each sum sets the scale. Only inputs of the outer layer,
        # which come from the activation, have a mean.
        return draw_weight(rng, shape, gain=1.0, centred=name.endswith("outer.weight"))
    shift = draw_bias(rng, shape)
    return shift + np.float32(1) if name.endswith(("norm1.weight", "norm2.weight")) else shift
