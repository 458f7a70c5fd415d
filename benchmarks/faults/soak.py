"""A long run in which candidates crash, hang and lie, against one without.

    python -m benchmarks.faults.soak --trials 1000 --out soak.json

The two runs have the same seed. The output says how each ended, how its trials ended,
whether anything was left behind (processes, temporary folders), how much memory this
process gained, and the winners' times from one interleaved measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.entries import Entry
from benchmarks.faults.injection import Faults, injected
from benchmarks.machine import write_figure
from benchmarks.remeasure import time_anew
from tvm_adaptive import tune
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.workers.cores import usable_physical_cores

FAULTS = {"abort": 0.03, "segfault": 0.02, "hang": 0.02, "nan": 0.02, "wrong": 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description="a long run with faults")
    parser.add_argument("--workload", default="te:GMM")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15, help="of the final measurement")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {"workload": options.workload, "faults": FAULTS}
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for name, faults in (("sound", Faults()), ("faulty", Faults(**FAULTS))):
            work_dir = Path(folder) / name
            found[name] = one_run(options, work_dir, faults)
            print(name, json.dumps(found[name], indent=1), flush=True)
        entries = [Entry(name, folder=str(Path(folder) / name)) for name in ("sound", "faulty")]
        samples, errors = time_anew(
            Path(folder) / "anew",
            options.workload,
            "cpu",
            entries,
            rounds=options.rounds,
            n_threads=usable_physical_cores(),
        )
        found["anew_ms"] = {name: sorted(each) for name, each in samples.items()}
        found["anew_errors"] = errors
        for name, each in found["anew_ms"].items():
            print(f"{name}: {statistics.median(each):.4f} ms, {each[0]:.4f} to {each[-1]:.4f}")
    write_figure(options.out, found)


def one_run(options: argparse.Namespace, work_dir: Path, faults: Faults) -> dict[str, Any]:
    """Tune with some candidates failing; return what came of it and what is left behind."""
    before = leftovers()
    memory_mb: list[float] = []
    start_sec = time.perf_counter()
    with injected(faults):
        report = tune(
            options.workload,
            work_dir=work_dir,
            trials=options.trials,
            seed=options.seed,
            config=DEFAULT.replace(store="none"),
            observer=MemoryWatch(memory_mb),
        )
    after = leftovers()
    events = read_journal(work_dir / "journal.jsonl")
    playoffs = [event for event in events if event["event"] == "playoff"]
    return {
        "seconds": time.perf_counter() - start_sec,
        "n_trials": report.n_trials,
        "n_errors": report.n_errors,
        "errors": {text[:80]: n for text, n in report.errors.items()},
        "best_us": [1e6 * task.best_sec for task in report.tasks],
        "after_us": None if report.comparison is None else 1e6 * report.comparison.after_sec,
        "agree": report.comparison is not None and report.comparison.agree,
        "n_disqualified": sum(task.n_disqualified for task in report.tasks),
        "n_playoffs": len(playoffs),
        "new_processes": sorted(after["processes"] - before["processes"]),
        "new_temporary": sorted(after["temporary"] - before["temporary"]),
        "artifacts": [str(path) for path in (work_dir / "artifacts").rglob("*") if path.is_file()],
        "memory_mb": [memory_mb[0], statistics.median(memory_mb), memory_mb[-1]],
    }


class MemoryWatch:
    """Notes the memory of this process after each round."""

    def __init__(self, memory_mb: list[float]) -> None:
        self._memory_mb = memory_mb
        self._process = psutil.Process()

    def stage(self, name: str) -> None:
        """Do nothing."""

    def round(self, progress: Any, budget: Any) -> None:
        """Note the memory."""
        del progress, budget
        self._memory_mb.append(self._process.memory_full_info().uss / 2**20)

    def note(self, text: str) -> None:
        """Do nothing."""


def leftovers() -> dict[str, set[str]]:
    """Return the children of this process, and what lies in the temporary folder."""
    children = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            children.add(f"{child.pid} {' '.join(child.cmdline())[:60]}")
    return {"processes": children, "temporary": set(os.listdir(tempfile.gettempdir()))}


if __name__ == "__main__":
    main()
