"""Record a network's tuning, so that schedulers can be replayed on it without hardware.

    python -m benchmarks.scheduler.record resnet18 --budget 14m --out benchmarks/data/resnet18-0.npz

Tasks take turns; one that has not improved for ``--patience`` trials is past its
knee and leaves the rest to the others. Batches are twice the default's, as more trials in
the same time matter more here than one more update of the model; a replay charges the
search for each batch of its own. Keep the machine quiet meanwhile. ``--journal`` takes a
run that was made already.

A round lasts from when its search began until the next round's began, whatever task that
was for; so builds, measuring, learning and deciding are all in it. Its own search, whose
cost does not depend on the number of candidates, becomes the round's overhead; the rest
is shared equally among its trials.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvm_adaptive
from benchmarks.scheduler.recordings import save_recording
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.task_scheduler.stages import STUCK_TRIALS
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig

BATCH = 32
_SEARCH_SECONDS = ("sample_sec", "posterior_sec", "evolve_sec")
# What ends the last round when nothing follows it.
_AFTER_SEARCH = ("stage", "playoff", "end", "stop")

Event = Mapping[str, Any]


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
    options.out.parent.mkdir(parents=True, exist_ok=True)
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
        use_all=True,
        store="none",  # what earlier runs have found would not be in the recording
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


@dataclasses.dataclass
class _Round:
    task: str
    n_trials: int
    start_sec: float
    search_sec: float
    stop_sec: float = math.nan


def record_from_journal(
    path: Path, *, network: str | None = None, machine: str | None = None
) -> Recording:
    """Read a recording off the journal of a run with ``strategy="adaptive"``.

    Each task should have gone well past its knee; a round-robin run with many trials
    gives that.
    """
    events = read_journal(path)
    about = next((event for event in events if event["event"] == "run"), {})
    measured = [event for event in events if event["event"] == "measured"]
    rounds = _rounds(events)
    if not measured or not rounds:
        raise InvalidOptionError(
            f"{path} has {len(rounds)} rounds of search and {len(measured)} of measuring; a "
            'recording needs both. Record a run with strategy="adaptive".'
        )
    if any("latencies_ms" not in event for event in measured):
        raise InvalidOptionError(
            f"{path} was written before journals kept every trial's milliseconds; run again."
        )
    # Results come in after their round, but for each task in the order of its rounds.
    tasks = [
        _task(
            name,
            [event for event in measured if event["task"] == name],
            [each for each in rounds if each.task == name],
        )
        # A task that the budget did not reach has an event without candidates.
        for name in dict.fromkeys(event["task"] for event in measured if event["latencies_ms"])
    ]
    options = about.get("config", {}).get("search", {})
    return Recording(
        network=network or str(about.get("what", path.stem)),
        tasks=tuple(tasks),
        batch=int(options.get("n_trials_per_round", max(each.n_trials for each in rounds))),
        machine=machine or machine_in_words(about),
        tvm=str(about.get("tvm", "unknown")),
        seed=int(about.get("seed", 0)),
    )


def machine_in_words(about: Event) -> str:
    """Return this machine and the run's target in words."""
    target = about.get("target", {})
    parts = [
        platform.platform(),
        f"mcpu {target['mcpu']}" if target.get("mcpu") else "",
        f"{target['num-cores']} cores" if target.get("num-cores") else "",
    ]
    return ", ".join(part for part in parts if part)


def _rounds(events: Sequence[Event]) -> list[_Round]:
    rounds: list[_Round] = []
    for event in events:
        if event["event"] == "round":
            search_sec = math.fsum(float(event.get(name) or 0.0) for name in _SEARCH_SECONDS)
            start_sec = float(event["time_sec"]) - search_sec
            _close(rounds, start_sec)
            rounds.append(_Round(event["task"], int(event["n_candidates"]), start_sec, search_sec))
        elif event["event"] in _AFTER_SEARCH and rounds:
            # A stage's own event is written when it ends, after its last results.
            _close(rounds, float(event["time_sec"]))
    if rounds and math.isnan(rounds[-1].stop_sec):
        _close(rounds, float(events[-1]["time_sec"]))
    return [each for each in rounds if each.n_trials > 0]


def _close(rounds: Sequence[_Round], time_sec: float) -> None:
    if rounds and math.isnan(rounds[-1].stop_sec):
        rounds[-1].stop_sec = max(time_sec, rounds[-1].start_sec + rounds[-1].search_sec)


def _task(name: str, measured: Sequence[Event], rounds: Sequence[_Round]) -> TaskRecording:
    measured = [event for event in measured if event["n_candidates"] > 0]
    # A killed run may have searched for a round whose results never came.
    pairs = list(zip(measured, rounds, strict=False))
    for event, each in pairs:
        # Fewer where the budget ended within the round: who was not tried has no result.
        if len(event["latencies_ms"]) > each.n_trials:
            raise InvalidOptionError(
                f"{name}: a round of {each.n_trials} candidates brought "
                f"{len(event['latencies_ms'])} results; the journal cannot be matched."
            )
    pairs = [(event, each) for event, each in pairs if event["latencies_ms"]]
    sizes = np.array([len(event["latencies_ms"]) for event, _ in pairs], dtype=np.int64)
    rest_sec = [each.stop_sec - each.start_sec - each.search_sec for _, each in pairs]
    latencies = [ms for event, _ in pairs for ms in event["latencies_ms"]]
    first = measured[0]
    return TaskRecording(
        name=name,
        weight=float(first["weight"]),
        flop=max(1.0, float(first.get("flop") or 1.0)),
        latencies_ms=np.array([math.nan if ms is None else ms for ms in latencies]),
        trial_sec=np.repeat(np.maximum(rest_sec, 0.0) / sizes, sizes),
        round_sizes=sizes,
        overhead_sec=np.array([each.search_sec for _, each in pairs]),
    )


if __name__ == "__main__":
    main()
