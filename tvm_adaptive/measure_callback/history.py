"""What earlier sittings of a run did, read from its journal: where a resumed run goes on.

A *sitting* is the time from a start to an end, an interrupt or a crash.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.workers.environment import UNKNOWN, Environment


@dataclasses.dataclass
class TaskHistory:
    """What became of one task so far."""

    # one per trial in the order measured; ``nan`` for a failure
    latencies_ms: list[float] = dataclasses.field(default_factory=list)
    n_slots: int = 0  # of our task schedulers; 0 under another one
    spent_sec: float = 0.0  # seconds of these slots

    @property
    def best_sec(self) -> float:
        """Seconds of the fastest; infinite before the first success."""
        valid = [value for value in self.latencies_ms if math.isfinite(value)]
        return min(valid, default=math.inf) / 1e3

    @property
    def n_errors(self) -> int:
        """Failed trials."""
        return sum(not math.isfinite(value) for value in self.latencies_ms)


@dataclasses.dataclass
class History:
    """All sittings of a run."""

    n_sittings: int = 0
    # wall-clock seconds of all of them; what a killed one did after its last event is not known
    spent_sec: float = 0.0
    # options of the last sitting, as its journal has them
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    run_ids: set[str] = dataclasses.field(default_factory=set)  # of all sittings, wherever they ran
    # where the last sitting took its times. What was timed elsewhere before is in none of the
    # fields below, and its seconds do not count
    environment: Environment = UNKNOWN
    # where the model comes from, as the last sitting's journal has it
    model: dict[str, Any] | None = None
    tasks: dict[str, TaskHistory] = dataclasses.field(default_factory=dict)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)  # messages of failed trials
    report: dict[str, Any] | None = None  # what the last sitting ended with, if it came to its end
    before_sec: float = 0.0  # seconds of all sittings but the last

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(len(task.latencies_ms) for task in self.tasks.values())

    def task(self, name: str) -> TaskHistory:
        """Return what is known of a task, to be added to."""
        return self.tasks.setdefault(name, TaskHistory())

    def forget_times(self) -> None:
        """Forget all that was timed and spent: from here on it is another machine's."""
        self.tasks.clear()
        self.errors.clear()
        self.report = None
        self.spent_sec = self.before_sec = 0.0

    def progress(self, tasks: list[tuple[str, float]]) -> RunProgress:
        """Return where a run stands."""
        found = []
        for name, weight in tasks:
            known = self.tasks.get(name, TaskHistory())
            found.append(
                TaskProgress(name, weight, len(known.latencies_ms), known.n_errors, known.best_sec)
            )
        return RunProgress(found, Counter(self.errors))


def differences(before: Environment, now: Environment) -> list[str]:
    """Return in words what differs of two environments, as far as both are known."""
    pairs = {
        "device": (before.device, now.device),
        "TVM": (before.tvm, now.tvm),
        "tvm-ffi": (before.tvm_ffi, now.tvm_ffi),
    }
    return [
        f"{name} {was}, here {is_now}"
        for name, (was, is_now) in pairs.items()
        if was and is_now and was != is_now
    ]


def read_history(path: Path) -> History:
    """Read what is in a run's journal; without one there is nothing in it."""
    history = History()
    if not path.is_file():
        return history
    follow(path, functools.partial(_take, history))
    return history


def _take(history: History, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "journal":
        history.before_sec = history.spent_sec
    at_sec = history.before_sec + float(event.get("time_sec") or 0.0)
    history.spent_sec = max(history.spent_sec, at_sec)
    take = _TAKE.get(kind)
    if take is not None:
        take(history, event)


def _take_journal(history: History, _event: dict[str, Any]) -> None:
    history.n_sittings += 1
    history.report = None


def _take_run(history: History, event: dict[str, Any]) -> None:
    history.run = event
    history.run_ids.add(str(event.get("run_id", "")))
    environment = Environment.from_fields(event)
    if differences(history.environment, environment):
        history.forget_times()
    history.environment = environment


def _take_model(history: History, event: dict[str, Any]) -> None:
    history.model = event


def _take_measured(history: History, event: dict[str, Any]) -> None:
    task = history.task(event["task"])
    task.latencies_ms += [
        math.nan if value is None else float(value) for value in event["latencies_ms"]
    ]
    history.errors.update(event.get("errors") or {})


def _take_slot(history: History, event: dict[str, Any]) -> None:
    task = history.task(event["task"])
    task.n_slots += 1
    task.spent_sec += float(event["seconds"] or 0.0)


def _take_report(history: History, event: dict[str, Any]) -> None:
    history.report = None if event.get("interrupted") else event


_TAKE = {
    "journal": _take_journal,
    "run": _take_run,
    "model": _take_model,
    "measured": _take_measured,
    "slot-end": _take_slot,
    "report": _take_report,
}
