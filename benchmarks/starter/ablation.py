"""Tune networks with and without what their first trials begin with, and time the libraries.

    python -m benchmarks.starter.ablation runs/ablation --models resnet18 ppocr_det --budget 60s
    python -m benchmarks.starter.ablation runs/ablation --table

Each run is a command of its own without a record store. Then all libraries of a network are timed
in turns, each in a process that has tuned nothing. Killed, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.budgets.__main__ import read_rows, time_in_turns, tuned_library
from benchmarks.machine import describe_machine
from benchmarks.peers.models import MODELS, PeerModel
from tvm_adaptive.cli.arguments import parse_duration

ROWS_FILE = "ablation.jsonl"
_ROUNDS = 15
_ALL = "both"
# Of each variant: options of the command, and of its configuration.
VARIANTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    _ALL: ((), ""),
    "starter records only": ((), "[search]\nn_analytical = 0\n"),
    "analytical candidates only": (("--no-starter",), ""),
    "neither": (("--no-starter",), "[search]\nn_analytical = 0\n"),
    # Tasks with another epilogue are relatives, too.
    "nothing from relatives": ((), "[search]\nseeds = false\n"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.starter.ablation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    by_name = {each.name: each for each in MODELS}
    parser.add_argument("--models", nargs="+", choices=list(by_name), default=[])
    parser.add_argument("--budget", type=parse_duration, default=60.0, metavar="TIME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args(arguments)
    rows = read_rows(options.out / ROWS_FILE)
    for name in () if options.table else options.models:
        if name not in rows:
            rows[name] = row_of_model(by_name[name], options)
            with open(options.out / ROWS_FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[name]) + "\n")
    print(table(list(rows.values())))
    return 0


def row_of_model(model: PeerModel, options: argparse.Namespace) -> dict[str, Any]:
    """Tune a network in each variant, time the libraries, and return the row of the file."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = model.file(options.out / "models")
    libraries: dict[str, Path] = {}
    for number, (name, (flags, config)) in enumerate(VARIANTS.items()):
        file = options.out / f"{number}.toml"
        file.write_text(config, encoding="utf-8")
        extra = (*flags, "--config", str(file))
        work_dir = options.out / f"{model.name}-{number}"
        libraries[name] = tuned_library(model, path, work_dir, options, extra)
    return {
        "model": model.name,
        "budget_sec": options.budget,
        "seed": options.seed,
        "unix_sec": round(time.time()),
        "machine": describe_machine(),
        "secs": time_in_turns(libraries, path, model.shapes, _ROUNDS),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown; above 1, a variant is slower than with both."""
    others = [name for name in VARIANTS if name != _ALL]
    lines = [f"| network | {' | '.join([_ALL, *others])} |", "|---" * (len(others) + 2) + "|"]
    for row in rows:
        base = row["secs"][_ALL]
        cells = [f"{1e3 * statistics.median(base):.3g} ms"]
        for name in others:
            ratios = [a / b for a, b in zip(row["secs"][name], base, strict=True)]
            low, high = min(ratios), max(ratios)
            cells.append(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
