"""Measure what a model costs before its first trial: processor seconds of each step.

    python -m benchmarks.micro.preparation densenet121.onnx mobilenet_v2 --out preparation.json

Each model is read, prepared, its tasks are extracted and set up for the search, and it is
compiled without tuning, in a process of its own. Seconds are those of the processor, children
included, because other programs do not change them by much; the seconds of the clock stand
beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import write_figure
from benchmarks.tables import markdown
from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive._tvm import ExtractedTask, contexts_of, memory_database
from tvm_adaptive.models import Network, compile_network, export, extract, prepare
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.workers.pool import WorkerPool

STAGES = ("read", "prepare", "extract", "set up", "compile", "export")
TIMEOUT_SEC = 1800.0
_T = TypeVar("_T")


class Stopwatch:
    """Seconds of the processor and of the clock, by stage."""

    def __init__(self) -> None:
        self.cpu_sec: dict[str, float] = {}
        self.clock_sec: dict[str, float] = {}

    def time(self, stage: str, work: Callable[[], _T]) -> _T:
        """Return what the work of a stage returns."""
        before = (processor_sec(), time.perf_counter())
        result = work()
        self.cpu_sec[stage] = processor_sec() - before[0]
        self.clock_sec[stage] = time.perf_counter() - before[1]
        return result


def processor_sec() -> float:
    """Return the processor seconds of this process and its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(what: str) -> dict[str, Any]:
    """Return one row: a model's tasks, and the seconds of each stage."""
    watch, target = Stopwatch(), resolve_target("cpu")

    def read() -> Network:
        network = load(what)
        if not isinstance(network, Network):
            raise ValueError(f"{what} is an operator, not a network.")
        if network.original is not None:
            network.original.close()  # its reader is counted once it has ended
        return network

    network = watch.time("read", read)
    prepared = watch.time("prepare", lambda: prepare(network, target, prepack=None))
    tasks = watch.time("extract", lambda: extract(prepared, target))
    watch.time("set up", lambda: set_up(tasks))
    compiled = watch.time("compile", lambda: compile_network(prepared, None, target))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "untuned.so"
        watch.time("export", lambda: export(compiled, library))
        n_bytes = library.stat().st_size
    return {
        "model": what,
        "tasks": len(tasks),
        "calls": sum(int(task.weight) for task in tasks),
        "library_bytes": n_bytes,
        "cpu_sec": watch.cpu_sec,
        "clock_sec": watch.clock_sec,
    }


def set_up(tasks: Sequence[ExtractedTask]) -> None:
    """Make the design spaces of tasks, and start their searches."""
    model, database = RFEICostModel(seed=0), memory_database()
    with tempfile.TemporaryDirectory() as folder:
        for context in contexts_of(tasks, folder, AdaptiveSearch(), seed=0):
            spaces = context.generate_design_space()
            context.pre_tuning(1, 1, spaces, database, model)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return processor seconds as Markdown, with those of the clock in brackets."""
    lines = []
    for row in rows:
        cpu_sec, clock_sec = row["cpu_sec"], row["clock_sec"]
        stages = [f"{cpu_sec[stage]:.1f}" for stage in STAGES]
        total = f"{sum(cpu_sec.values()):.1f} ({sum(clock_sec.values()):.1f})"
        counts = str(row["tasks"]), str(row["calls"])
        lines.append([Path(row["model"]).name, *counts, *stages, total])
    return markdown(["model", "tasks", "calls", *STAGES, "all"], lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="seconds before the first trial")
    parser.add_argument("models", nargs="+", help="files, factories or built-in networks")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    rows = []
    for what in options.models:
        with contextlib.closing(WorkerPool(1)) as pool:
            (outcome,) = pool.map(measure, [(what,)], TIMEOUT_SEC)
        if outcome.error is not None:
            print(f"{what} is left out: {outcome.error}", file=sys.stderr)
            continue
        rows.append(outcome.value)
    print(table(rows))
    if options.out:
        write_figure(options.out, {"rows": rows})
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
