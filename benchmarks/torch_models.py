"""The built-in networks in PyTorch, to time the vendor's library on: shapes, not weights.

oneDNN on CPUs, cuDNN and cuBLAS on NVIDIA GPUs. Freezing folds batch normalisations into
convolutions, as ours are.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

_WARM_UP_RUNS = 10


def why_no_torch(device: str) -> str:
    """Return why PyTorch cannot take part; empty if it can."""
    for name in ("torch", "torchvision"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    if device != "cpu":
        import torch

        if device != "cuda" or not torch.cuda.is_available():
            return f"this torch has no device {device}"
    return ""


def time_torch(workload: str, n_threads: int | None, device: str, seconds: float) -> float:
    """Return the median milliseconds of one inference of a frozen trace.

    Parameters
    ----------
    workload : str
        A name in :data:`TORCH_MODELS`.
    n_threads : int or None
    device : str
        ``"cpu"`` or ``"cuda"``.
    seconds : float
        To spend on timing.
    """
    import torch

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    run = _traced(workload, device)
    samples = []
    with torch.inference_mode():
        for _ in range(_WARM_UP_RUNS):
            run()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not samples:
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e3


# The worker keeps a model from round to round: tracing takes seconds.
_models: dict[tuple[str, str], Callable[[], None]] = {}


def _traced(workload: str, device: str) -> Callable[[], None]:
    import torch

    if (workload, device) not in _models:
        torch.manual_seed(0)
        make, shape = TORCH_MODELS[workload]
        value = torch.randn(*shape).to(device)
        model = make(torch.nn).eval().to(device)
        with torch.inference_mode():
            traced = torch.jit.freeze(torch.jit.trace(model, value))

        def run() -> None:
            traced(value)
            if device == "cuda":
                torch.cuda.synchronize()

        _models[workload, device] = run
    return _models[workload, device]


def _image_network(name: str) -> Callable[[Any], Any]:
    def make(_nn: Any) -> Any:
        from torchvision import models

        return getattr(models, name)(weights=None)

    return make


def _encoder(layers: int, hidden: int, heads: int, inner: int, activation: str) -> Any:
    def make(nn: Any) -> Any:
        layer = nn.TransformerEncoderLayer(
            hidden, heads, inner, dropout=0.0, activation=activation, batch_first=True
        )
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    return make


_IMAGE = (1, 3, 224, 224)
_IMAGE_NETWORKS = ("resnet18", "resnet34", "resnet50", "vgg16", "squeezenet1_1", "mobilenet_v2")
# Name of the workload: how to make the model, and the shape of its input.
TORCH_MODELS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    **{name: (_image_network(name), _IMAGE) for name in _IMAGE_NETWORKS},
    "transformer": (_encoder(6, 512, 8, 2048, "relu"), (1, 128, 512)),
    "bert_base": (_encoder(12, 768, 12, 3072, "gelu"), (1, 128, 768)),
}
