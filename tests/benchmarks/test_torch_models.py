from __future__ import annotations

import pytest

from benchmarks.torch_models import TORCH_MODELS, why_no_torch

torch = pytest.importorskip("torch", reason="the vendor's library is optional")

# As published; where a batch normalisation (two numbers per channel) is folded into a bias
# (one), less one per channel: 4800 of ResNet-18's 11689512, 8512 of ResNet-34's 21797672, 26560
# of ResNet-50's 25557032, 17056 of MobileNet-V2's 3504872.
N_PARAMETERS = {
    "resnet18": 11_684_712,
    "resnet34": 21_789_160,
    "resnet50": 25_530_472,
    "vgg16": 138_357_544,
    "squeezenet1_1": 1_235_496,
    "mobilenet_v2": 3_487_816,
    "transformer": 18_914_304,
    "bert_base": 85_054_464,
}
IMAGE_NETWORKS = (
    "resnet18",
    "resnet34",
    "resnet50",
    "vgg16",
    "squeezenet1_1",
    "mobilenet_v2",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TORCH_MODELS))
def test_models_have_the_published_size(name: str) -> None:
    make, shape = TORCH_MODELS[name]
    with torch.device("meta"):  # shapes without values
        model = make(torch.nn).eval()
        result = model(torch.empty(*shape))
    assert sum(each.numel() for each in model.parameters()) == N_PARAMETERS[name]
    assert tuple(result.shape) == ((1, 1000) if name in IMAGE_NETWORKS else shape)


def test_a_device_that_torch_does_not_have_is_said() -> None:
    assert why_no_torch("cpu") == ""
    assert why_no_torch("abacus") == "this torch has no device abacus"
