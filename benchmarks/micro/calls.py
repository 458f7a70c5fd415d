"""Measure the price of a call: graphs of 0, 1, 10 and 100 tiny functions, beside other frameworks.

    python -m benchmarks.micro.calls runs/calls --budget 20s
    python -m benchmarks.micro.calls runs/calls --table

``products``: matrix-vector products of 64 numbers, which nothing can fuse. ``chain``: additions and
maxima of 64 numbers, which can be one function. Each graph is tuned by a command of its own, which
times it in turns with ONNX Runtime and OpenVINO. The last line is what one function more takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.peers.__main__ import tune
from benchmarks.peers.models import model_of_file
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.tuning.inspect import shown_comparison
from tvm_adaptive.tuning.outcome import Comparison

KINDS = ("products", "chain")
COUNTS = (0, 1, 10, 100)
# Some 4,000 multiply-adds: less than a microsecond.
_WIDTH = 64
# Of the newest that all frameworks read.
_OPSET = 17
_OURS = "ours"


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
    for kind in options.kinds:
        for count in options.counts:
            run = options.out / f"{kind}-{count}"
            if not options.table and comparison_of(run) is None:
                options.out.mkdir(parents=True, exist_ok=True)
                path = run.with_suffix(".onnx")
                onnx.save(graph(kind, count), path)
                tune(model_of_file(path), path, run, options)
        found = {count: comparison_of(options.out / f"{kind}-{count}") for count in options.counts}
        print(table(kind, {count: micros(each) for count, each in found.items() if each}))
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


def micros(comparison: Comparison) -> dict[str, float]:
    """Return the median microseconds of an inference, ours and of each framework."""
    found = {_OURS: 1e6 * comparison.after_sec}
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
