"""Tune operators in quiet, and beside a load that comes and goes, with and without duet timing.

    python -m benchmarks.faults.drift runs/drift --workloads te:GMM te:C2D te:SFM --seeds 0 1 2
    python -m benchmarks.faults.drift runs/drift --table

The load is a process on each core, for half of each period, which begins anew with each run. Then
the winners of a workload and seed are timed anew, in turns, in quiet. Killed, the same command
goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks.commands import has_ended, run
from benchmarks.entries import Entry
from benchmarks.machine import origin
from benchmarks.remeasure import time_anew
from benchmarks.rows import append_row, read_rows
from benchmarks.stats import geometric_mean
from benchmarks.tables import markdown
from tvm_adaptive.cli.arguments import parse_count, parse_duration
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.workers.cores import usable_physical_cores

ROWS_FILE = "drift.jsonl"
# Of a run, whatever the load does to it.
_LIMIT_SEC = 3600.0


@dataclasses.dataclass(frozen=True)
class Condition:
    """How a run is made."""

    is_loaded: bool
    duet: bool


# The first is what the others are compared with.
CONDITIONS: Mapping[str, Condition] = {
    "quiet": Condition(is_loaded=False, duet=True),
    "load": Condition(is_loaded=True, duet=True),
    "quiet, no duet": Condition(is_loaded=False, duet=False),
    "load, no duet": Condition(is_loaded=True, duet=False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.drift", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", nargs="+", default=["te:GMM", "te:C2D", "te:SFM"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--trials", type=parse_count, default=256)
    parser.add_argument("--period", type=parse_duration, default=60.0, metavar="TIME")
    parser.add_argument("--rounds", type=parse_count, default=21, help="of the final measurement")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args(arguments)
    rows = read_rows(options.out / ROWS_FILE, "workload", "seed", "trials")
    for workload in () if options.table else options.workloads:
        for seed in options.seeds:
            key = (workload, seed, options.trials)
            if key not in rows:
                rows[key] = row_of(workload, seed, options)
                append_row(options.out / ROWS_FILE, rows[key])
    print(table(list(rows.values())))
    return 0


def row_of(workload: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tune in each condition, time the winners anew, and return the row of the file."""
    slug = f"{workload.replace(':', '-')}-{seed}-{options.trials}"
    folders: dict[str, Path] = {}
    for number, (name, condition) in enumerate(CONDITIONS.items()):
        folders[name] = options.out / f"{slug}-{number}"
        if not has_ended(folders[name]):
            file = options.out / f"{number}.toml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"[measure]\nduet = {str(condition.duet).lower()}\n", encoding="utf-8")
            command = ["tune", workload, "--work-dir", str(folders[name]), "--seed", str(seed)]
            command += ["--trials", str(options.trials), "--store", "none", "--config", str(file)]
            if (folders[name] / JOURNAL_FILE).exists():
                command = ["tune", "--resume", str(folders[name])]
            with load(options.period) if condition.is_loaded else contextlib.nullcontext():
                run(command, _LIMIT_SEC)
    samples, errors = time_anew(
        options.out / f"{slug}-anew",
        workload,
        "cpu",
        [Entry(name, folder=str(folder)) for name, folder in folders.items()],
        rounds=options.rounds,
        n_threads=usable_physical_cores(),
    )
    return {
        "workload": workload,
        "seed": seed,
        "trials": options.trials,
        **origin(),
        "ms": samples,
        "errors": errors,
    }


@contextlib.contextmanager
def load(period_sec: float) -> Iterator[list[SpawnProcess]]:
    """Keep all cores busy for the second half of each period, by the processes that are yielded."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    processes = [context.Process(target=_spin, args=(core, period_sec)) for core in cores]
    for process in processes:
        process.daemon = True
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin(core: int, period_sec: float) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        time.sleep(period_sec / 2)
        end_sec = time.monotonic() + period_sec / 2
        while time.monotonic() < end_sec:
            pass


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown; above 1, what was deployed is slower than in quiet."""
    first, *others = CONDITIONS
    lines = []
    columns: dict[str, list[float]] = {name: [] for name in others}
    for row in rows:
        base = row["ms"].get(first, ())
        cells = [f"{statistics.median(base):.4g} ms" if base else row["errors"].get(first, "")]
        for name in others:
            ratios = [a / b for a, b in zip(row["ms"].get(name, ()), base, strict=False)]
            if not ratios:
                cells.append(row["errors"].get(name, ""))
                continue
            columns[name].append(statistics.median(ratios))
            cells.append(f"{columns[name][-1]:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        lines.append([f"{row['workload']}, {row['seed']}", *cells])
    means = [f"{geometric_mean(each):.3f}" if each else "" for each in columns.values()]
    lines.append(["*geometric mean*", "", *means])
    return markdown(["operator, seed", *CONDITIONS], lines)


if __name__ == "__main__":
    sys.exit(main())
