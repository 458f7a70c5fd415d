from __future__ import annotations

import pytest

from benchmarks.torch_models import TORCH_MODELS, time_torch, why_no_torch

torch = pytest.importorskip("torch", reason="the vendor's library is optional")
pytest.importorskip("torchvision", reason="it has the networks")

N_PARAMETERS = {"transformer": 18_914_304, "bert_base": 85_054_464}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(N_PARAMETERS))
def test_encoders_have_the_published_size(name: str) -> None:
    make, shape = TORCH_MODELS[name]
    with torch.device("meta"):  # shapes without values
        model = make(torch.nn).eval()
        result = model(torch.empty(*shape))
    assert sum(each.numel() for each in model.parameters()) == N_PARAMETERS[name]
    assert tuple(result.shape) == shape


@pytest.mark.slow
def test_a_frozen_network_has_no_normalisation() -> None:
    assert time_torch("mobilenet_v2", None, "cpu", seconds=0.0) > 0.0
    make, shape = TORCH_MODELS["mobilenet_v2"]
    with torch.inference_mode():
        graph = torch.jit.freeze(torch.jit.trace(make(torch.nn).eval(), torch.ones(*shape)))
    assert not graph.graph.findAllNodes("aten::batch_norm")


def test_a_device_that_torch_does_not_have_is_said() -> None:
    assert why_no_torch("cpu") == ""
    assert why_no_torch("abacus") == "this torch has no device abacus"
