"""Tell how far what runs deploy is from the best that they recorded.

    python -m benchmarks.regret runs/operators
    python -m benchmarks.regret runs/operators --quick

The winner and the fastest recorded of each run are built and timed at length, as incumbents are
(``benchmarks/remeasure.py``): journaled, resumable, interleaved, several processes. Every other
round says which is the best, and the rest how fast it is; then the other way round. So luck does
not choose it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.entries import Entry
from benchmarks.journals import (
    FINAL,
    REGRET_JOURNALS,
    Rounds,
    Run,
    load_bench,
    median_of,
    read_rounds,
)
from benchmarks.plan import runs_folder
from benchmarks.remeasure import QUICK, Effort, remeasure
from benchmarks.stats import Paired, paired
from benchmarks.tables import NOTHING, markdown
from benchmarks.workloads import WORKLOADS

_TOP = 30
_QUICK_TOP = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="winners against the best of the recorded")
    parser.add_argument("folder", type=Path, help="of benchmarks.run; with --table also packed")
    parser.add_argument("--method", default="default", help="whose runs (default: default)")
    parser.add_argument("--top", type=int, default=_TOP, help="records of each run")
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--processes", type=int, default=Effort.n_processes, metavar="N")
    parser.add_argument("--quick", action="store_true", help="shows that it works, no more")
    parser.add_argument("--table", action="store_true", help="of what is there, time nothing")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else Effort(options.rounds, options.processes)
    top = _QUICK_TOP if options.quick else options.top
    bench = load_bench(options.folder)
    rows = []
    for workload in bench.workloads:
        runs = bench.of(workload, options.method)
        name = REGRET_JOURNALS.replace("*", options.method)
        path = options.folder / runs_folder(workload) / name
        if not runs or WORKLOADS[workload].is_network:
            continue
        if not options.table:
            entries = entries_of_regret(options.folder, runs, top)
            remeasure(path, runs[0].spec, entries, effort)
        timed, errors = read_rounds(path)
        for run in runs:
            recorded_ms = run.incumbents[-1].recorded_ms if run.incumbents else float("nan")
            n_errors = sum(name.startswith(f"{run.key}/") for name in errors)
            rows.append(row_of(workload, run.key, recorded_ms, timed, n_errors))
    head = ["workload", "run", "records", "deployed over the best", "interval"]
    head += ["recorded minimum too low by", "errors"]
    print(markdown(head, rows) if rows else f"No run of {options.method} is in {options.folder}.")
    return 0


def entries_of_regret(out: Path, runs: Sequence[Run], top: int) -> list[Entry]:
    """Return the winner and the fastest recorded of each run, by the runs' keys."""
    entries = []
    for run in runs:
        method, folder = run.spec.method, str(out / run.spec.folder)
        entries.append(Entry(f"{run.key}/{FINAL}", method, folder))
        entries += [
            Entry(f"{run.key}/top-{rank}", method, folder, sys.maxsize, rank, run.refuted_ms)
            for rank in range(1, top + 1)
        ]
    return entries


def regret_of(key: str, timed: Mapping[str, Rounds]) -> Paired | None:
    """Return a winner's time over that of the best recorded, in rounds that did not choose it."""
    final = timed.get(f"{key}/{FINAL}")
    others = {name: each for name, each in timed.items() if name.startswith(f"{key}/")}
    if not final or len(others) < 2:
        return None
    # By their order: numbers change when runs are packed together.
    numbers = sorted(set().union(*others.values()))
    if len(numbers) < 2:
        return None
    halves = set(numbers[::2]), set(numbers[1::2])
    best_ms: Rounds = {}
    for chosen_by, judged_by in (halves, halves[::-1]):
        best_ms |= _of(_fastest(others.values(), chosen_by), judged_by)
    return paired(final, best_ms)


def row_of(
    workload: str, key: str, recorded_ms: float, timed: Mapping[str, Rounds], n_errors: int
) -> list[str]:
    """Return a run as a row of the table."""
    regret = regret_of(key, timed)
    n_records = sum(name.startswith(f"{key}/top-") for name in timed)
    lucky = median_of(timed.get(f"{key}/top-1", {}).values()) / recorded_ms
    found, interval = NOTHING, NOTHING
    too_low = f"{lucky:.2f} x" if math.isfinite(lucky) else NOTHING
    if regret is not None:
        found, interval = f"{regret.value:.3f}", f"{regret.low:.3f} to {regret.high:.3f}"
    return [workload, key, str(n_records), found, interval, too_low, str(n_errors)]


def _fastest(candidates: Iterable[Rounds], numbers: Collection[int]) -> Rounds:
    return min(candidates, key=lambda rounds: median_of(_of(rounds, numbers).values()))


def _of(rounds: Rounds, numbers: Collection[int]) -> Rounds:
    return {number: ms for number, ms in rounds.items() if number in numbers}


if __name__ == "__main__":
    sys.exit(main())
