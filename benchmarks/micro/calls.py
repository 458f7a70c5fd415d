"""Measure the price of a call: graphs of 0, 1, 10 and 100 tiny functions, beside other frameworks.

    python -m benchmarks.micro.calls runs/calls --budget 20s
    python -m benchmarks.micro.calls runs/calls --table

``products``: matrix-vector products of 64 numbers, which nothing can fuse. ``chain``: additions and
maxima of 64 numbers, which can be one function. Each graph is tuned by a command of its own, which
times it in turns with ONNX Runtime and OpenVINO, called from Python with values of their own. Ours
is called by TVM's evaluator there, as a program in C would, and afterwards from Python with a numpy
array, which is checked and shared in each call. The last line is what one function more takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.commands import library_of, tune
from benchmarks.machine import origin
from benchmarks.peers.models import model_of_file
from benchmarks.rows import append_row, read_rows
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.models.inference import CompiledModel
from tvm_adaptive.tuning.inspect import shown_comparison
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.target import n_threads_of, resolve_target
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

ROWS_FILE = "from_python.jsonl"
KINDS = ("products", "chain")
COUNTS = (0, 1, 10, 100)
# Some 4,000 multiply-adds: less than a microsecond.
_WIDTH = 64
# Of the newest that all frameworks read.
_OPSET = 17
_OURS, _FROM_PYTHON = "ours", "ours, from Python"
# An odd number, whose median is one of them.
_REPEATS = 15
# Starting a process, loading a library of some kilobytes, and some repeats of 0.2 s.
_TIMEOUT_SEC = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.calls", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--budget", type=parse_duration, default=20.0, metavar="TIME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args(arguments)
    rows_file = options.out / ROWS_FILE
    rows = read_rows(rows_file, "graph")
    for kind in options.kinds:
        found = {}
        for count in options.counts:
            run = options.out / f"{kind}-{count}"
            if not options.table and comparison_of(run) is None:
                options.out.mkdir(parents=True, exist_ok=True)
                path = run.with_suffix(".onnx")
                onnx.save(graph(kind, count), path)
                tune(model_of_file(path), path, run, options)
            if not options.table and run.name not in rows:
                rows[run.name] = {"graph": run.name, **origin(), "secs": secs_from_python(run)}
                append_row(rows_file, rows[run.name])
            comparison = comparison_of(run)
            if comparison is not None:
                found[count] = micros(comparison, rows.get(run.name, {}).get("secs", ()))
        print(table(kind, found))
    return 0


def graph(kind: str, count: int) -> onnx.ModelProto:
    """Return a graph of so many tiny operators, one after the other; of none, what it is given."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for place in range(count):
        given = "x" if place == 0 else f"v{place}"
        result = "y" if place == count - 1 else f"v{place + 1}"
        shape = (_WIDTH, _WIDTH) if kind == "products" else (1, _WIDTH)
        # Products keep the size of the numbers.
        values = rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(_WIDTH))
        weights.append(numpy_helper.from_array(values, f"w{place}"))
        operator = "MatMul" if kind == "products" else ("Add", "Max")[place % 2]
        nodes.append(helper.make_node(operator, [given, f"w{place}"], [result]))
    if not nodes:
        nodes.append(helper.make_node("Identity", ["x"], ["y"]))
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, _WIDTH)) for name in "xy"
    )
    made = helper.make_graph(nodes, f"{kind}{count}", [x], [y], weights)
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(made, opset_imports=[opset], ir_version=9)


def comparison_of(run: Path) -> Comparison | None:
    """Return how a finished run compares with its peers; None if it has not."""
    return shown_comparison(run) if (run / JOURNAL_FILE).exists() else None


def secs_from_python(run: Path) -> list[float]:
    """Return the seconds of a call of a run's library in each repeat, in a process of its own."""
    n_threads = n_threads_of(resolve_target("cpu"))
    pool = WorkerPool(1, env=thread_env(n_threads))
    try:
        (outcome,) = pool.map(_time_calls, [(library_of(run), n_threads)], _TIMEOUT_SEC)
    finally:
        pool.close()
    if outcome.error is not None:
        raise outcome.error
    secs: list[float] = outcome.value
    return secs


def _time_calls(library: Path, n_threads: int) -> list[float]:
    shape = (1, _WIDTH)
    model = CompiledModel(library, {"x": shape}, {"x": "float32"}, n_threads=n_threads)
    x = np.ones(shape, np.float32)
    timer = timeit.Timer(lambda: model(x))
    n_runs, _ = timer.autorange()
    return [each / n_runs for each in timer.repeat(_REPEATS, n_runs)]


def micros(comparison: Comparison, secs_from_python: Sequence[float]) -> dict[str, float]:
    """Return the median microseconds of an inference, ours and of each framework."""
    found = {_OURS: 1e6 * comparison.after_sec}
    if secs_from_python:
        found[_FROM_PYTHON] = 1e6 * statistics.median(secs_from_python)
    return found | {each.framework: 1e6 * statistics.median(each.secs) for each in comparison.peers}


def table(kind: str, found: dict[int, dict[str, float]]) -> str:
    """Return the table in Markdown; the last row is the difference of the largest two per call."""
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    lines = [f"| {kind}, µs | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for count, each in found.items():
        cells = [f"{each[name]:.2f}" if name in each else "" for name in names]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    if len(found) > 1:
        (few, before), (many, after) = sorted(found.items())[-2:]
        cells = [
            f"{(after[name] - before[name]) / (many - few):.2f}"
            if name in before and name in after
            else ""
            for name in names
        ]
        lines.append(f"| *one more* | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
