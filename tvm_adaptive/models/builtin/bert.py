"""BERT's encoder, base size.

Devlin, Chang, Lee, Toutanova, *BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding*, NAACL 2019, section 3: the Transformer's encoder with GELU.
"""

from __future__ import annotations

from tvm_adaptive._tvm import nn
from tvm_adaptive.models.builtin.encoder import EncoderSizes, encoder_network
from tvm_adaptive.models.network import Network

EPSILON = 1e-12  # of the authors' code


def bert_base(
    *,
    batch: int = 1,
    sequence: int = 128,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    inner: int = 3072,
    seed: int = 0,
) -> Network:
    """Build BERT-base's encoder with random weights, in float32.

    Its input is what the embedding hands on for one full sequence: looking tokens up
    is no work that could be tuned.
    """
    sizes = EncoderSizes(batch, sequence, layers, hidden, heads, inner)
    return encoder_network("bert_base", sizes, nn.op.gelu, EPSILON, seed)
