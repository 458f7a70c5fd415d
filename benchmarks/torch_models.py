"""The built-in networks in PyTorch, to time the vendor's library on: shapes, not weights.

oneDNN on CPUs, cuDNN and cuBLAS on NVIDIA GPUs. Convolutions have biases and no batch
normalisation, which is what both have after folding.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

_WARM_UP_RUNS = 10


def why_no_torch(device: str) -> str:
    """Return why PyTorch cannot take part; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
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


def resnet18(nn: Any) -> Any:
    return _basic_resnet(nn, (2, 2, 2, 2))


def resnet34(nn: Any) -> Any:
    return _basic_resnet(nn, (3, 4, 6, 3))


def _basic_resnet(nn: Any, blocks: Sequence[int]) -> Any:
    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for depth, width in zip(blocks, (64, 128, 256, 512), strict=True):
        for block in range(depth):
            stride = 2 if width > 64 and block == 0 else 1
            layers.append(_residual(nn, before, width, stride))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def _residual(nn: Any, before: int, after: int, stride: int) -> Any:
    main = nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1), nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1)
    )
    same = stride == 1 and before == after
    skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride)
    return nn.Sequential(_sum(nn, main, skip), nn.ReLU())


def resnet50(nn: Any) -> Any:
    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for depth, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(depth):
            stride = 2 if width > 64 and block == 0 else 1
            main = nn.Sequential(
                *(nn.Conv2d(before, width, 1), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, stride, 1), nn.ReLU()),
                nn.Conv2d(width, 4 * width, 1),
            )
            skip = nn.Identity() if block > 0 else nn.Conv2d(before, 4 * width, 1, stride)
            layers.append(nn.Sequential(_sum(nn, main, skip), nn.ReLU()))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _sum(nn: Any, *branches: Any) -> Any:
    class Sum(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(branches)

        def forward(self, x: Any) -> Any:
            return sum(branch(x) for branch in self.branches)

    return Sum()


def _concat(nn: Any, *branches: Any) -> Any:
    import torch

    class Concat(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(branches)

        def forward(self, x: Any) -> Any:
            return torch.cat([branch(x) for branch in self.branches], dim=1)

    return Concat()


def vgg16(nn: Any) -> Any:
    layers: list[Any] = []
    before = 3
    for depth, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            layers += [nn.Conv2d(before, width, 3, 1, 1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(4096, 1000))


def squeezenet1_1(nn: Any) -> Any:
    layers: list[Any] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU()]
    before = 64
    for number, squeezed in enumerate((16, 16, 32, 32, 48, 48, 64, 64)):
        if number in (0, 2, 4):
            layers.append(nn.MaxPool2d(3, 2))
        after = 4 * squeezed
        expand1 = nn.Sequential(nn.Conv2d(squeezed, after, 1), nn.ReLU())
        expand3 = nn.Sequential(nn.Conv2d(squeezed, after, 3, 1, 1), nn.ReLU())
        layers += [nn.Conv2d(before, squeezed, 1), nn.ReLU(), _concat(nn, expand1, expand3)]
        before = 2 * after
    head = [nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head)


def mobilenet_v2(nn: Any) -> Any:
    layers: list[Any] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6()]
    before = 32
    stages: Sequence[tuple[int, int, int, int]] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, after, repeats, first_stride in stages:
        for block in range(repeats):
            stride = first_stride if block == 0 else 1
            inner = before * expansion
            parts = [] if expansion == 1 else [nn.Conv2d(before, inner, 1), nn.ReLU6()]
            parts += [nn.Conv2d(inner, inner, 3, stride, 1, groups=inner), nn.ReLU6()]
            branch = nn.Sequential(*parts, nn.Conv2d(inner, after, 1))
            joins = stride == 1 and before == after
            layers.append(_sum(nn, nn.Identity(), branch) if joins else branch)
            before = after
    head = [nn.Conv2d(320, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(1280, 1000))


def _encoder(layers: int, hidden: int, heads: int, inner: int, activation: str) -> Any:
    def make(nn: Any) -> Any:
        layer = nn.TransformerEncoderLayer(
            hidden, heads, inner, dropout=0.0, activation=activation, batch_first=True
        )
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    return make


_IMAGE = (1, 3, 224, 224)
# Name of the workload: how to make the model, and the shape of its input.
TORCH_MODELS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "resnet18": (resnet18, _IMAGE),
    "resnet34": (resnet34, _IMAGE),
    "resnet50": (resnet50, _IMAGE),
    "vgg16": (vgg16, _IMAGE),
    "squeezenet1_1": (squeezenet1_1, _IMAGE),
    "mobilenet_v2": (mobilenet_v2, _IMAGE),
    "transformer": (_encoder(6, 512, 8, 2048, "relu"), (1, 128, 512)),
    "bert_base": (_encoder(12, 768, 12, 3072, "gelu"), (1, 128, 768)),
}
