"""Record a network's tuning, so that schedulers can be replayed on it without hardware.

    python benchmarks/scheduler/record.py resnet18 --budget 14m --out benchmarks/data/resnet18-0.npz

Tasks take turns; one that has not improved for ``--patience`` trials is past its
knee and leaves the rest to the others. Batches are twice the default's, as more trials in
the same time matter more here than one more update of the model; a replay charges the
search for each batch of its own. Keep the machine quiet meanwhile. ``--journal`` takes a
run that was made already.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import numpy as np

import tvm_adaptive
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.task_scheduler.retire import STUCK_TRIALS
from tvm_adaptive.testing.record import record_from_journal
from tvm_adaptive.testing.recording import Recording, save_recording
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", help="a built-in network")
    parser.add_argument("--budget", type=parse_duration, default="14m", help="e.g. 14m")
    parser.add_argument("--patience", type=int, default=STUCK_TRIALS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, help="of a run that was made already")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.journal is not None:
        keep(record_from_journal(options.journal), options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        tvm_adaptive.tune(
            options.network,
            work_dir=folder,
            budget_sec=options.budget,
            seed=options.seed,
            config=config_of(options.patience, options.batch),
        )
        recording = record_from_journal(Path(folder) / "journal.jsonl")
        # Replays ask for batches as runs do.
        batch = DEFAULT.search.n_trials_per_round
        keep(dataclasses.replace(recording, batch=batch), options.out)


def config_of(patience: int, batch: int) -> TuneConfig:
    return DEFAULT.replace(
        task_scheduler="adaptive-round-robin",
        search=dataclasses.replace(DEFAULT.search, n_trials_per_round=batch),
        scheduler=dataclasses.replace(DEFAULT.scheduler, patience_trials=patience),
        # The play-off's winner is of no interest here.
        finish=dataclasses.replace(DEFAULT.finish, top_k=1),
    )


def keep(recording: Recording, out: Path) -> None:
    save_recording(recording, out)
    print(f"{out}: {recording.n_trials} trials, {recording.total_sec:.0f} s")
    for task in sorted(recording.tasks, key=lambda task: -task.weight * task.final_ms):
        share = task.weight * task.final_ms / recording.final_ms
        lull = task.n_trials - 1 - int(np.nanargmin(task.latencies_ms)) if task.is_valid else 0
        print(
            f"{share:6.1%} {task.n_trials:4d} trials, {lull:4d} since the best, "
            f"{task.final_ms:8.4f} ms  {task.name}"
        )


if __name__ == "__main__":
    main()
