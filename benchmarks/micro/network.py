"""Time compiled networks and PyTorch on this machine, in one interleaved run.

Give it libraries that `tvm-adaptive tune` left in its work directories; each is loaded
in a process of its own and timed round after round, so that drift meets all alike.
PyTorch (oneDNN, frozen trace, same threads) takes part where torch is installed.

    python benchmarks/micro/network.py ours=runs/a/resnet18.so stock=runs/b/resnet18.so
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.cores import thread_env, usable_physical_cores
from tvm_adaptive.models import load_workload, try_exported
from tvm_adaptive.workers import WorkerPool

ROUND_SEC = 1.0
RUN_TIMEOUT_SEC = 120.0
# Threads of the one before spin for a while after their last inference.
SETTLE_SEC = 1.0


def library_timer(path: str, cores: int) -> Callable[[], float]:
    """Return a function that times one round of a library, in milliseconds."""
    pool = WorkerPool(1, env=thread_env(cores))
    inputs = load_workload("resnet18").random_inputs()

    def one_round() -> float:
        (outcome,) = pool.map(try_exported, [(path, inputs)], RUN_TIMEOUT_SEC)
        if outcome.error is not None:
            raise outcome.error
        return float(outcome.value[1]) * 1e3

    return one_round


def torch_round(cores: int) -> float:
    """Time a round of PyTorch's frozen trace, in milliseconds; runs in a worker."""
    import torch
    from torch import nn

    torch.set_num_threads(cores)
    torch.manual_seed(0)
    traced = torch.jit.freeze(torch.jit.trace(resnet18(nn).eval(), torch.randn(1, 3, 224, 224)))
    image = torch.randn(1, 3, 224, 224)
    samples = []
    with torch.inference_mode():
        for _ in range(10):
            traced(image)
        end = time.perf_counter() + ROUND_SEC
        while time.perf_counter() < end:
            start = time.perf_counter()
            traced(image)
            samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e3


def resnet18(nn: Any) -> Any:
    """Return ResNet-18 as an nn.Module, batch normalisation folded as in our own."""
    import torch

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, before: int, after: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(before, after, 3, stride, 1)
            self.second = nn.Conv2d(after, after, 3, 1, 1)
            same = stride == 1 and before == after
            self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride)

        def forward(self, x: Any) -> Any:
            y = self.second(torch.relu(self.first(x)))
            return torch.relu(y + self.skip(x))

    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Block(before, width, 1 if width == 64 else 2), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def torch_timer(cores: int) -> Callable[[], float]:
    """Return a function that times one round of PyTorch, in milliseconds."""
    pool = WorkerPool(1)

    def one_round() -> float:
        (outcome,) = pool.map(torch_round, [(cores,)], RUN_TIMEOUT_SEC)
        if outcome.error is not None:
            raise outcome.error
        return float(outcome.value)

    return one_round


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="networks side by side")
    parser.add_argument("libraries", nargs="+", metavar="NAME=LIBRARY")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", type=int, default=usable_physical_cores())
    parser.add_argument("--out", help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    timers = {}
    for pair in options.libraries:
        name, path = pair.split("=", 1)
        timers[name] = library_timer(path, options.cores)
    try:
        import torch  # noqa: F401

        timers["pytorch"] = torch_timer(options.cores)
    except ImportError:
        print("torch is not installed: PyTorch is left out", file=sys.stderr)
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(options.rounds):
        for name in list(timers) if number % 2 == 0 else list(timers)[::-1]:
            time.sleep(SETTLE_SEC)
            samples[name].append(timers[name]())
    first = next(iter(samples))
    base = float(np.median(samples[first]))
    print(f"| | median ms | range | against {first} |\n|---|---|---|---|")
    for name, each in samples.items():
        middle = float(np.median(each))
        print(
            f"| {name} | {middle:.2f} | {min(each):.2f} to {max(each):.2f} | {middle / base:.2f} |"
        )
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"cores": options.cores, "ms": samples}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
