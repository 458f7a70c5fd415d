"""Time tuned libraries on an NVIDIA GPU beside PyTorch with cuBLAS and cuDNN, in alternation.

    python -m benchmarks.peers.gpu resnet18=runs/resnet18/resnet18.so --out runs/peers.json
    python -m benchmarks.peers.gpu --show runs/peers.json

PyTorch has a CUDA graph of many calls, so that launches from Python cost nothing, channels last,
and cuDNN's own search; its compiler is not timed. It is timed with and without TensorFloat-32,
which rounds the inputs of products to 10 bits; our kernels compute in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import origin
from benchmarks.remeasure import interleave
from benchmarks.tables import markdown

# Of one CUDA graph: together they take long against its launch.
_CALLS_PER_GRAPH = 50
_MIN_REPEAT_MS = 20
_N_WARM_UP = 5

Call = Callable[[], Any]
Timer = Callable[[], float]  # seconds of one call


def torch_call(workload: str, torch: Any) -> Call:
    """Return PyTorch's own way to compute a workload, on the GPU."""
    if workload == "te:GMM":
        a, b = (torch.rand(1, 128, 128, device="cuda") for _ in range(2))
        return lambda: torch.bmm(a, b)
    if workload == "te:C2D":
        image = torch.rand(1, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        weight = torch.rand(64, 3, 7, 7, device="cuda").to(memory_format=torch.channels_last)
        return lambda: torch.nn.functional.conv2d(image, weight, stride=2, padding=3)
    if workload == "resnet18":
        from torchvision.models import resnet18

        model = resnet18(weights=None).eval().cuda().to(memory_format=torch.channels_last)
        pixels = torch.rand(1, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        return lambda: model(pixels)
    raise ValueError(f"workload must be te:GMM, te:C2D or resnet18 but got {workload!r}.")


def graph_timer(call: Call, torch: Any) -> Timer:
    """Return a timer of a CUDA graph of many calls."""
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(_N_WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS_PER_GRAPH):
                call()
    return _event_timer(graph.replay, _CALLS_PER_GRAPH, torch)


def eager_timer(call: Call, torch: Any) -> Timer:
    """Return a timer of calls from Python."""

    def run() -> None:
        with torch.inference_mode():
            call()

    for _ in range(_N_WARM_UP):
        run()
    return _event_timer(run, 1, torch)


def _event_timer(run: Call, n_calls: int, torch: Any) -> Timer:
    def elapsed_sec(n_runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n_runs):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    elapsed_sec(1)
    n_runs = max(1, int(_MIN_REPEAT_MS / 1e3 / elapsed_sec(1)))
    return lambda: elapsed_sec(n_runs) / (n_runs * n_calls)


def tuned_timer(library: Path, workload: str) -> Timer:
    """Return a timer of a tuned library, by TVM's evaluator with the device's own clock."""
    from tvm_adaptive._tvm import VirtualMachine, device, load_module, tensor

    gpu, module = device("cuda", 0), load_module(str(library))
    rng = np.random.default_rng(0)

    def on_gpu(*shapes: Sequence[int]) -> list[Any]:
        return [tensor(rng.random(shape, np.float32), gpu) for shape in shapes]

    how = {"number": 1, "repeat": 1, "min_repeat_ms": _MIN_REPEAT_MS}
    if workload == "te:GMM":
        args = on_gpu(*[(1, 128, 128)] * 3)
    elif workload == "te:C2D":
        args = on_gpu((1, 224, 224, 3), (7, 7, 3, 64), (1, 112, 112, 64))
    else:
        machine = VirtualMachine(module, gpu)
        machine.save_function("main", "timed", *on_gpu((1, 3, 224, 224)), include_return=False)
        network = machine.time_evaluator("timed", gpu, **how)
        return lambda: float(network().mean)
    kernel = module.time_evaluator(module.entry_name, gpu, **how)
    return lambda: float(kernel(*args).mean)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("libraries", nargs="*", metavar="WORKLOAD=LIBRARY")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write what was timed there, as JSON")
    parser.add_argument("--show", type=Path, help="print what an earlier call wrote there")
    options = parser.parse_args(arguments)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.show is None:
        fields = time_all(options.libraries, options.rounds)
    else:
        fields = json.loads(options.show.read_text())
    if options.out is not None:
        options.out.write_text(json.dumps(fields) + "\n")
    print(f"{fields['gpu']}, PyTorch {fields['torch']}, medians, µs")
    print(table(fields["rows"]))
    return 0


def time_all(libraries: Sequence[str], n_rounds: int) -> dict[str, Any]:
    """Time libraries, each beside PyTorch, in alternation; return seconds per call."""
    import torch

    torch.backends.cudnn.benchmark = True
    found = []
    for each in libraries:
        workload, _, path = each.partition("=")
        timers = {"ours": tuned_timer(Path(path), workload)}
        for name, tf32 in (("float32", False), ("TF32", True)):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            call = torch_call(workload, torch)
            timers[f"PyTorch, {name}"] = graph_timer(call, torch)
            if not tf32:
                timers["PyTorch, eager"] = eager_timer(call, torch)
        # cuDNN chooses when a graph is made, eager calls when they are made.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        errors: dict[str, str] = {}
        secs = interleave(timers, n_rounds, errors)
        found.append({"workload": workload, "secs": secs, "errors": errors})
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {**origin(), **versions, "rows": found}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of medians in microseconds and of ratios to ours."""
    names = list(rows[0]["secs"])
    lines = []
    for row in rows:
        medians = {name: statistics.median(secs) for name, secs in row["secs"].items()}
        cells = [
            f"{medians[name] * 1e6:.2f} ({medians[name] / medians['ours']:.2f} x)"
            for name in names[1:]
        ]
        lines.append([row["workload"], f"{medians['ours'] * 1e6:.2f}", *cells])
    return markdown(["workload", *names], lines)


if __name__ == "__main__":
    sys.exit(main())
