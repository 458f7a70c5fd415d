from __future__ import annotations

import math

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import call_counts, outputs_agree
from tvm_adaptive.models.builtin.encoder import bert_base

# Of one layer: four projections, two dense layers, two normalisations.
N_PARAMETERS = 12 * (4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768)


@pytest.mark.slow
def test_size_is_that_of_the_paper():
    params = bert_base().params
    assert sum(math.prod(value.shape) for value in params.values()) == N_PARAMETERS


def test_torch_computes_the_same(cases, torch_encoder):
    case = cases["bert_base"]
    expected = torch_encoder(case.network, heads=4, activation="gelu", epsilon=1e-12)
    assert outputs_agree(case.reference, expected(case.inputs))


def test_gelu_is_not_relu(cases, torch_encoder):
    case = cases["bert_base"]
    other = torch_encoder(case.network, heads=4, activation="relu", epsilon=1e-12)
    assert not outputs_agree(case.reference, other(case.inputs))


def test_gelu_is_part_of_its_product(cases):
    counts = call_counts(cases["bert_base"].prepared["prepack"].mod)
    (function,) = [name for name in counts if "gelu" in name]
    assert "matmul" in function
    assert "add" in function


def test_heads_must_divide_the_features():
    with pytest.raises(InvalidOptionError, match="multiple of heads but got 768 and 7"):
        bert_base(heads=7)
