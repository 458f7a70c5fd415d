"""Tell whether the task scheduler forecasts better for what earlier runs tuned.

    python -m benchmarks.micro.remembered ~/.local/share/tvm_adaptive/records.db --out kept.json
    python -m benchmarks.micro.remembered kept.json

Of the first two runs that a store has of each task: what the second one's next batch would
save is forecast from its own trials alone and with the first one's before them, and compared
with what the batch saved.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.task_scheduler.arms import Arm, PriorTrials
from tvm_adaptive.task_scheduler.forecast.belief import forecast
from tvm_adaptive.values.trial import N_VERIFIED

# A batch of the default search.
HORIZON_TRIALS = 16
# The lines of the table: batches by how many of their task came before.
STAGES = {"first": range(1), "second and third": range(1, 3), "later": range(3, sys.maxsize)}


class Batch(NamedTuple):
    """What one batch saved of its task's latency, and what was forecast."""

    n_before: int
    saved: float
    alone: float
    remembering: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="forecasts of tasks that were tuned before")
    parser.add_argument("runs", type=Path, help="a record store, or what --out wrote (.json[.xz])")
    parser.add_argument("--out", type=Path, help="write the trials' milliseconds to this file")
    options = parser.parse_args(arguments)
    tasks = read_tasks(options.runs)
    if options.out is not None:
        options.out.write_text(json.dumps({"tasks": tasks}))
    rng = np.random.default_rng(0)
    batches = [batch for task in tasks for batch in batches_of(task, rng)]
    if not batches:
        raise SystemExit(f"No task in {options.runs} has two runs and a whole batch in the second.")
    print(table(batches))
    return 0


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """Return name and both runs' milliseconds of each task that has two; None for a failure."""
    if path.suffix in (".json", ".xz"):
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return list(json.loads(raw)["tasks"])
    if not path.is_file():
        raise SystemExit(f"{path} is no file.")
    found = []
    with RecordStore(path) as store:
        for task in store.tasks():
            runs: dict[str, list[float | None]] = {}
            for trial in store.latest(task):
                ms = None if trial.seconds is None else trial.seconds * 1e3
                runs.setdefault(trial.run, []).append(ms)
            if len(runs) > 1:
                first, second = list(runs.values())[:2]
                found.append({"name": task.name, "first_ms": first, "second_ms": second})
    return found


def batches_of(task: dict[str, Any], rng: np.random.Generator) -> list[Batch]:
    """Forecast the batches of a task's second run, after what was verified first."""
    first, second = (np.array(task[key], dtype=float) for key in ("first_ms", "second_ms"))
    found = []
    for n_before, start in enumerate(range(N_VERIFIED, len(second), HORIZON_TRIALS)):
        own, after = second[:start], second[: start + HORIZON_TRIALS]
        if len(after) < start + HORIZON_TRIALS or not np.isfinite(own).any():
            continue
        drops = []
        for earlier in ((), tuple(first)):
            # Neither weight, nor flop, nor seconds have a part in it.
            arm = Arm(task["name"], 1.0, 1.0, own, 1, 1.0, prior=PriorTrials(earlier))
            history = arm.throughput_history()
            drops.append(forecast(history, HORIZON_TRIALS, rng=rng).expected_drop)
        found.append(Batch(n_before, 1.0 - float(np.nanmin(after) / np.nanmin(own)), *drops))
    return found


def table(batches: Sequence[Batch]) -> str:
    """Return means by how many batches came before, as Markdown."""
    lines = ["| batches of a task | number | saved | forecast alone | remembering |"]
    lines.append("|---|---|---|---|---|")
    for label, stage in {**STAGES, "all": range(sys.maxsize)}.items():
        chosen = [batch for batch in batches if batch.n_before in stage]
        if chosen:
            means = np.mean([batch[1:] for batch in chosen], axis=0)
            cells = [f"{mean:.2%}" for mean in means]
            lines.append(f"| {' | '.join([label, str(len(chosen)), *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
