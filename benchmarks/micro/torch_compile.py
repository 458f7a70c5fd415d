"""Time models by ``torch.compile(model, backend="tvm_adaptive")`` beside their tuned library.

    python -m benchmarks.micro.torch_compile runs/torch-compile --budget 60s
    python -m benchmarks.micro.torch_compile runs/torch-compile --table

The library is the one that the backend has tuned in the same process. It is called by TVM's
evaluator, as a program in C would; the compiled module is called with PyTorch's tensors. Both, and
the module as PyTorch runs it, are timed in turns. A model has a process of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.commands import library_of
from benchmarks.machine import origin
from benchmarks.remeasure import interleave
from benchmarks.rows import append_row, read_rows
from benchmarks.tables import markdown
from benchmarks.zoo.catalog import Model
from tvm_adaptive.cli.arguments import parse_duration

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from benchmarks.zoo.modules import Made

ROWS_FILE = "torch_compile.jsonl"
_IMAGE = (1, 3, 224, 224)
IMAGE_MODELS = {
    "resnet18": Model("torchvision", "resnet18", _IMAGE),
    "deit_tiny_patch16_224": Model("timm", "deit_tiny_patch16_224", _IMAGE),
    "mobilenetv3_small_100": Model("timm", "mobilenetv3_small_100", _IMAGE),
}
NAMES = (*IMAGE_MODELS, "distilbert")
# Until the threads of the one before have fallen asleep: they wait actively for 0.1 s.
_SETTLE_SEC = 0.5
_TURN_SEC = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.torch_compile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--budget", type=parse_duration, default=60.0, metavar="TIME")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one, in here
    options = parser.parse_args(arguments)
    rows = read_rows(options.out / ROWS_FILE, "model")
    for name in () if options.table else options.models:
        if name in rows:
            continue
        if options.here:
            append_row(options.out / ROWS_FILE, row_of(name, options))
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.micro.torch_compile", str(options.out)]
        command += ["--models", name, "--budget", f"{options.budget:g}s", "--here"]
        subprocess.run([*command, "--rounds", str(options.rounds)], check=True)
    print(table(list(read_rows(options.out / ROWS_FILE, "model").values())))
    return 0


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune a model by ``torch.compile``, and time it in turns."""
    import torch

    from tvm_adaptive.models.run import time_exported
    from tvm_adaptive.tuning.config import DEFAULT
    from tvm_adaptive.workers.cores import usable_physical_cores

    torch.set_num_threads(usable_physical_cores())
    made, work_dir = made_of(name), (options.out / name).resolve()
    settings = {"budget_sec": options.budget, "seed": 0, "work_dir": work_dir}
    settings["config"] = DEFAULT.replace(store="none")
    torch.compiler.reset()
    compiled = torch.compile(made.module, backend="tvm_adaptive", options=settings)
    inputs = tuple(made.inputs.values())
    with torch.inference_mode():
        expected, found = (first_of(each(*inputs)) for each in (made.module, compiled))
        largest = float((expected - found).abs().max() / expected.abs().max())
        library = library_of(work_dir / "run")
        if library is None:
            raise OSError(f"torch.compile has left no library of {name}: several graphs, or none")
        arrays = [value.numpy() for value in inputs]
        timers: Mapping[str, Callable[[], float]] = {
            "library": lambda: time_exported(library, arrays, "cpu", _TURN_SEC),
            "torch.compile": lambda: secs_per_call(lambda: compiled(*inputs)),
            "PyTorch": lambda: secs_per_call(lambda: made.module(*inputs)),
        }
        errors: dict[str, str] = {}
        secs = interleave(timers, options.rounds, errors, settle_sec=_SETTLE_SEC)
        if errors:
            raise OSError(f"{name}: {errors}")
    return {
        "model": name,
        "budget_sec": options.budget,
        **origin(),
        "torch": torch.__version__,
        "largest_difference": largest,
        "secs": secs,
    }


def made_of(name: str) -> Made:
    """Return a model's module with its inputs."""
    from benchmarks.peers.models import distilbert
    from benchmarks.zoo.modules import make

    return distilbert() if name == "distilbert" else make(IMAGE_MODELS[name])


def first_of(outputs: Any) -> Any:
    """Return a module's output, or the first of several."""
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def secs_per_call(call: Callable[[], object]) -> float:
    """Return the median seconds of calls that last a turn, as of TVM's evaluator."""
    call()
    secs: list[float] = []
    while math.fsum(secs) < _TURN_SEC:
        start_sec = time.perf_counter()
        call()
        secs.append(time.perf_counter() - start_sec)
    return statistics.median(secs)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return medians in milliseconds; ratios are medians of those of each round."""
    lines = []
    for row in rows:
        secs = row["secs"]
        medians = {name: statistics.median(values) * 1e3 for name, values in secs.items()}

        def ratio(name: str, over: str, secs: Mapping[str, list[float]] = secs) -> str:
            pairs = zip(secs[name], secs[over], strict=True)
            return f"{statistics.median(a / b for a, b in pairs):.2f}"

        lines.append(
            [
                *(row["model"], f"{medians['library']:.2f}", f"{medians['torch.compile']:.2f}"),
                *(ratio("torch.compile", "library"), f"{medians['PyTorch']:.2f}"),
                *(ratio("PyTorch", "torch.compile"), f"{row['largest_difference']:.0e}"),
            ]
        )
    head = ["model", "library, ms", "torch.compile, ms", "over library", "PyTorch eager, ms"]
    return markdown([*head, "speed-up", "largest difference, of the largest value"], lines)


if __name__ == "__main__":
    sys.exit(main())
