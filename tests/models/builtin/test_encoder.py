from __future__ import annotations

import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models import (
    compile_network,
    extract,
    outputs_agree,
    prepare,
    run_network,
    transformer,
)
from tvm_adaptive.models.builtin.encoder import draw_parameter

# Of one layer: four projections, two dense layers, two normalisations.
N_PARAMETERS = 6 * (4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512)


def test_size_is_that_of_the_paper():
    params = transformer().params
    assert sum(math.prod(value.shape) for value in params.values()) == N_PARAMETERS


def test_torch_computes_the_same(cases, torch_encoder):
    case = cases["transformer"]
    expected = torch_encoder(case.network, heads=4, activation="relu", epsilon=1e-5)
    assert outputs_agree(case.reference, expected(case.inputs))


def test_every_position_sees_every_other(cases):
    case = cases["transformer"]
    compiled = case.untuned["keep"]
    disturbed = case.inputs[0].copy()
    disturbed[0, 0] = -disturbed[0, 0]
    moved = np.abs(run_network(compiled, [disturbed])[0] - case.reference[0]).max(axis=(0, 2))
    assert (moved > 1e-4).all()


def test_batches_are_independent(cases, small):
    case, network = cases["transformer"], small("transformer", batch=2)
    compiled = compile_network(prepare(network, case.target), None, case.target)
    pair = np.concatenate([network.random_inputs(seed=9)[0][:1], case.inputs[0]])
    (both,) = run_network(compiled, [pair])
    assert outputs_agree([both[1:]], case.reference)


def test_layers_share_their_tasks(cases):
    case = cases["transformer"]
    tasks = extract(case.prepared["prepack"], case.target)
    assert len(tasks) == 4
    assert {task.weight % 2 for task in tasks} == {0}


def test_heads_must_divide_the_features():
    with pytest.raises(InvalidOptionError, match="multiple of heads but got 512 and 7"):
        transformer(heads=7)


@pytest.mark.parametrize(("name", "mean"), [("norm1.weight", 1.0), ("norm1.bias", 0.0)])
def test_normalisations_scale_by_about_one(name, mean):
    drawn = draw_parameter(np.random.default_rng(0), f"layers.0.{name}", (1000,))
    assert drawn.dtype == np.float32
    assert drawn.mean() == pytest.approx(mean, abs=0.02)
    assert drawn.std() == pytest.approx(0.1, rel=0.1)
