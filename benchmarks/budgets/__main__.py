"""Tune networks with short and long budgets, and time the libraries of each in turns.

    python -m benchmarks.budgets runs/budgets --budgets 30s 60s --reference 10m --seeds 0 1 2
    python -m benchmarks.budgets runs/budgets --table

Each run is a command of its own without a record store, and its budget includes everything. The
reference has the first seed only. Then all libraries of a network are loaded, each in a process
that has tuned nothing, and timed in turns. Killed, the same command goes on where it was. A
network that fails has no row, and the command ends with 1 after the others. ``--table`` prints the
table of what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import secs_in_turns, tuned_library
from benchmarks.machine import origin
from benchmarks.peers.models import MODELS, PeerModel, model_of_file
from benchmarks.rows import append_row, read_rows
from benchmarks.stats import Paired, geometric_mean, paired
from benchmarks.tables import markdown
from tvm_adaptive.cli.arguments import parse_count, parse_duration
from tvm_adaptive.errors import AdaptiveError

ROWS_FILE = "budgets.jsonl"
# An odd number, whose median is one of them.
_ROUNDS = 15


@dataclasses.dataclass(frozen=True)
class BudgetRun:
    """A run of one network."""

    budget_sec: float
    seed: int

    @property
    def name(self) -> str:
        """Name in folders and rows."""
        return f"{self.budget_sec:g}s-{self.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.budgets", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", metavar="MODEL", default=(), help="names or files")
    parser.add_argument("--budgets", nargs="+", type=parse_duration, default=[30.0, 60.0])
    parser.add_argument("--reference", type=parse_duration, default=600.0, metavar="TIME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=parse_count, default=_ROUNDS)
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args(arguments)
    rows = read_rows(options.out / ROWS_FILE, "model")
    failed: list[str] = []
    if not options.table:
        by_name = {each.name: each for each in MODELS}
        for name in options.models or by_name:
            model = by_name.get(name) or model_of_file(Path(name))
            if has_all(rows.get(model.name), options):
                continue
            try:
                row = row_of_model(model, options)
            except (subprocess.SubprocessError, OSError, ImportError, AdaptiveError) as error:
                failed.append(model.name)
                print(f"{model.name}: {error}", file=sys.stderr, flush=True)
                continue
            options.out.mkdir(parents=True, exist_ok=True)
            append_row(options.out / ROWS_FILE, row)
            rows[model.name] = row
            print(table([row]), flush=True)
    print(table(list(rows.values())))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def runs_of(options: argparse.Namespace) -> list[BudgetRun]:
    """Return the runs of each network, the reference last."""
    short = [
        BudgetRun(budget_sec, seed) for budget_sec in options.budgets for seed in options.seeds
    ]
    return [*short, BudgetRun(options.reference, options.seeds[0])]


def has_all(row: Mapping[str, Any] | None, options: argparse.Namespace) -> bool:
    """Say whether a network's row has all of the runs."""
    return (
        row is not None
        and row["reference"] == runs_of(options)[-1].name
        and {run.name for run in runs_of(options)} <= row["secs"].keys()
    )


def row_of_model(model: PeerModel, options: argparse.Namespace) -> dict[str, Any]:
    """Tune a network with each budget, time the libraries, and return the row of the file."""
    path = model.file(options.out / "models")
    libraries: dict[str, Path] = {}
    for run in runs_of(options):
        work_dir = options.out / f"{model.name}-{run.name}"
        settings = argparse.Namespace(seed=run.seed, budget=run.budget_sec)
        libraries[run.name] = tuned_library(model, path, work_dir, settings)
    return {
        "model": model.name,
        "reference": runs_of(options)[-1].name,
        **origin(),
        "secs": secs_in_turns(libraries, path, model.shapes, options.rounds),
    }


def ratios_of(row: Mapping[str, Any]) -> dict[str, Paired]:
    """Return how many times as long as the reference each run takes, paired by rounds."""
    rounds = {name: dict(enumerate(secs)) for name, secs in row["secs"].items()}
    reference = rounds[row["reference"]]
    ratios = {name: paired(each, reference) for name, each in rounds.items()}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown, with 95 % intervals; above 1, a run is slower."""
    names = list(dict.fromkeys(name for row in rows for name in row["secs"]))
    lines = []
    columns: dict[str, list[Paired]] = {name: [] for name in names}
    for row in rows:
        ratios = ratios_of(row)
        cells = []
        for name in names:
            if name == row["reference"]:
                cells.append(f"{1e3 * statistics.median(row['secs'][name]):.3g} ms")
            else:
                cells.append(_cell(ratios[name]) if name in ratios else "")
                columns[name] += [ratios[name]] if name in ratios else []
        lines.append([row["model"], *cells])
    for what, of in (("geometric mean", _mean), ("worst", _worst)):
        cells = [of(columns[name]) if columns[name] else "" for name in names]
        lines.append([f"*{what}*", *cells])
    return markdown(["network", *names], lines)


def _cell(ratio: Paired) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _mean(ratios: Sequence[Paired]) -> str:
    return f"{geometric_mean([ratio.value for ratio in ratios]):.2f}"


def _worst(ratios: Sequence[Paired]) -> str:
    return _cell(max(ratios, key=lambda ratio: ratio.value))


if __name__ == "__main__":
    sys.exit(main())
