"""What earlier attempts at a run did, read from its journal, for a resumed run.

An *attempt* lasts from a start to an end, an interrupt or a crash.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.values.forms import NO_FORM, FormKey
from tvm_adaptive.workers.environment import UNKNOWN, Environment

# Where an event of the shared record store happened.
SHARED_STORE = "store"
# Where an event happened that ends the use of other forms.
GAVE_UP_FORMS = "forms"


@dataclasses.dataclass
class TaskHistory(TaskProgress):
    """The trials of one task so far."""

    name: str = ""
    weight: float = 1.0
    # one per trial in the order measured; ``nan`` for a failure
    latencies_ms: list[float] = dataclasses.field(default_factory=list)
    n_slots: int = 0  # of our task schedulers; 0 under another one
    spent_sec: float = 0.0  # seconds of these slots
    flop: float | None = None
    n_prior: int = 0  # trials of other runs that the store had when this one began the task
    errors: Counter[str] = dataclasses.field(default_factory=Counter)  # messages of failed trials

    def add_latencies(self, latencies_ms: list[float]) -> None:
        """Add trials in the order measured; ``nan`` for a failure."""
        self.latencies_ms += latencies_ms
        self.add_trials([ms / 1e3 for ms in latencies_ms])

    def disqualify(self, secs: Sequence[float]) -> None:
        """Forget the times of trials; the journal tells trials apart by these alone."""
        lost_ms = [1e3 * sec for sec in secs]
        self.latencies_ms = [
            math.nan if any(math.isclose(ms, lost) for lost in lost_ms) else ms
            for ms in self.latencies_ms
        ]
        valid = [ms / 1e3 for ms in self.latencies_ms if math.isfinite(ms)]
        best_before = self.best_sec
        self.best_sec, self.second_sec, *_ = sorted([math.inf, math.inf, *valid])
        if self.best_sec != best_before:
            self.build_sec = math.nan

    @property
    def best_ms(self) -> float:
        """Milliseconds of the fastest trial; infinite before the first success."""
        return 1e3 * self.best_sec

    @property
    def share_ms(self) -> float:
        """Milliseconds of the network's latency; 0 before the first success."""
        return 1e3 * self.share_sec if math.isfinite(self.best_sec) else 0.0


@dataclasses.dataclass
class History:
    """All attempts at a run."""

    n_attempts: int = 0
    # wall-clock seconds of all attempts; those after the last event of a killed one are unknown
    spent_sec: float = 0.0
    # options of the last attempt, from its journal
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    run_ids: set[str] = dataclasses.field(default_factory=set)  # of all attempts, on any machine
    # of the last attempt; trials and seconds of earlier attempts in another one do not count
    environment: Environment = UNKNOWN
    # Whether a library with other forms of convolutions disagreed, so that all became direct.
    gave_up_forms: bool = False
    model: dict[str, Any] | None = None  # source of the model, from the last attempt's journal
    tasks: dict[str, TaskHistory] = dataclasses.field(default_factory=dict)
    # The last ones of a farm's devices by their addresses, relative to the first device.
    board_speeds: dict[str, float] = dataclasses.field(default_factory=dict)
    report: dict[str, Any] | None = None  # of the last attempt if it was not interrupted
    # of the attempt that compiled the library which is there; None if that was not compared
    library_report: dict[str, Any] | None = None
    runs_since: set[str] = dataclasses.field(default_factory=set)  # attempts after that one
    # At least so many trials were not in the shared store when an attempt was killed, and no line
    # has said so.
    n_waiting: int = 0
    before_sec: float = 0.0  # seconds of all attempts but the last
    # of each stage, in all attempts
    stage_secs: defaultdict[str, float] = dataclasses.field(
        default_factory=lambda: defaultdict(float)
    )
    open_search_sec: float = 0.0  # of the search that has not ended
    _search_start_sec: float | None = None  # when it began
    _keys: dict[str, str] = dataclasses.field(default_factory=dict)  # of tasks' workloads, by name
    # trials of other runs that the store had when the last attempt began, by the tasks' names
    _n_prior: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(task.n_trials for task in self.tasks.values())

    @property
    def errors(self) -> Counter[str]:
        """Messages of all tasks' failed trials, with their counts."""
        return sum((task.errors for task in self.tasks.values()), Counter[str]())

    @property
    def n_prior(self) -> dict[str, int]:
        """Trials of other runs that each task with trials began with, by its name."""
        return {name: task.n_prior for name, task in self.tasks.items() if task.n_trials}

    def forget_times(self) -> None:
        """Forget all trials and seconds: they are another environment's."""
        self.tasks.clear()
        self.board_speeds.clear()
        self.stage_secs.clear()
        self._search_start_sec, self.open_search_sec = None, 0.0
        self.report = self.library_report = None
        self.spent_sec = self.before_sec = 0.0
        self.n_waiting = 0

    def keep_tasks(self, keys: Mapping[str, str]) -> None:
        """Forget the trials of names that stand for another workload now, by the workloads' keys.

        Names of functions depend on how a network is prepared.
        """
        for name, key in keys.items():
            if self._keys.get(name, key) != key:
                self.tasks.pop(name, None)
        self._keys |= keys

    def disqualify(self, secs: Mapping[str, Sequence[float]]) -> None:
        """Forget the times of candidates that a play-off disqualified, by the workloads' keys."""
        for name, task in self.tasks.items():
            if lost := secs.get(self._keys.get(name, "")):
                task.disqualify(lost)

    def progress(
        self, tasks: list[tuple[str, float]], keys: Mapping[str, FormKey] | None = None
    ) -> RunProgress:
        """Return the progress of tasks, given by name and weight; ``keys`` has their forms."""
        found = []
        for name, weight in tasks:
            known = self.tasks.get(name, TaskHistory())
            key = (keys or {}).get(name, NO_FORM)
            secs = (known.best_sec, known.second_sec, known.build_sec)
            found.append(TaskProgress(name, weight, known.n_trials, known.n_errors, *secs, key))
        return RunProgress(found, self.errors)

    def add(self, event: dict[str, Any]) -> None:
        """Apply an event of the journal."""
        kind = event["event"]
        if kind == "journal":
            self._end_search()  # of a killed attempt
            self.before_sec = self.spent_sec
            self.n_attempts += 1
            self.report = None
            self._n_prior = {}
        at_sec = self.before_sec + float(event.get("time_sec") or 0.0)
        self.spent_sec = max(self.spent_sec, at_sec)
        if self._search_start_sec is not None:
            self.open_search_sec = max(0.0, at_sec - self._search_start_sec)
        own = {
            "run": self._begin_run,
            "recalled": self._take_prior,
            "measured": self._take_trials,
            "board": self._take_speed,
        }
        if kind in own:
            own[kind](event)
        elif kind == "model":
            self.model = event
        elif kind == "tasks":
            known = [each for each in event["tasks"] if "workload_key" in each]
            self.keep_tasks({str(each["name"]): str(each["workload_key"]) for each in known})
            self._search_start_sec = at_sec
        elif kind == "slot-end":
            task = self._task(event)
            # When a run ends, each task that is left has a slot without a batch.
            task.n_slots += event.get("n_rounds") != 0
            task.spent_sec += float(event.get("seconds") or 0.0)
        elif kind == "stage":
            # The search's own, or of what follows one that never began.
            self._search_start_sec, self.open_search_sec = None, 0.0
            self.stage_secs[str(event["stage"])] += float(event["seconds"])
        elif kind in ("error", "store-back", "undelivered"):
            self.gave_up_forms |= kind == "error" and event.get("where") == GAVE_UP_FORMS
            self._count_waiting(event)
        elif kind == "library":
            self.library_report = None
        elif kind == "report":
            self.report = None if event.get("interrupted") else event
            if event.get("comparison") is not None:
                self.library_report = event
                self.runs_since.clear()

    def _begin_run(self, event: dict[str, Any]) -> None:
        before, self.run = self.run, event
        if event.get("resumed") is False:  # another run in the same folder is none of it
            self.forget_times()
            self.run_ids.clear()
            self.runs_since.clear()
            self.model = None
            self.gave_up_forms = False
            self.n_attempts = 1
        self.run_ids.add(str(event.get("run_id", "")))
        self.runs_since.add(str(event.get("run_id", "")))
        if not has_same_times(before, event):
            self.forget_times()
        self.environment = Environment.from_fields(event)
        # The program's start and the model's reading come before the journal.
        lead_sec = float(event.get("elapsed_sec") or 0.0) - float(event.get("time_sec") or 0.0)
        self.before_sec = max(self.before_sec, lead_sec)

    def _take_prior(self, event: dict[str, Any]) -> None:
        n_trials = event.get("n_trials") or {}
        self._n_prior = {str(name): int(n) for name, n in n_trials.items()}

    def _take_trials(self, event: dict[str, Any]) -> None:
        latencies_ms = [
            math.nan if value is None else float(value) for value in event["latencies_ms"]
        ]
        task = self._task(event)
        if not task.n_trials:  # a later attempt goes on, and measures none of the store again
            task.n_prior = self._n_prior.get(task.name, 0)
        task.add_latencies(latencies_ms)
        task.weight = float(event.get("weight") or 1.0)
        task.flop = event.get("flop")
        task.build_sec = math.nan if (sec := event.get("build_sec")) is None else float(sec)
        task.errors.update(event.get("errors") or {})

    def _take_speed(self, event: dict[str, Any]) -> None:
        if event.get("state") == "calibrated":
            self.board_speeds[str(event["address"])] = float(event["speed"])

    def _count_waiting(self, event: dict[str, Any]) -> None:
        """Count the trials that wait for the shared store; the run's own has such events, too."""
        if event["event"] == "undelivered":  # a line has said so
            self.n_waiting = 0
        elif event.get("where", SHARED_STORE) == SHARED_STORE and "n_waiting" in event:
            n_waiting = int(event["n_waiting"]) if event["event"] == "error" else 0
            self.n_waiting = n_waiting + int(event.get("n_dropped") or 0)

    def _end_search(self) -> None:
        """Count the seconds of a killed search, which has written no stage."""
        if self.open_search_sec > 0:
            self.stage_secs["search"] += self.open_search_sec
        self._search_start_sec, self.open_search_sec = None, 0.0

    def _task(self, event: dict[str, Any]) -> TaskHistory:
        name = str(event["task"])
        return self.tasks.setdefault(name, TaskHistory(name=name))


def has_same_times(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Say whether times of two attempts compare, as far as their events ``run`` tell."""
    environments = (Environment.from_fields(each) for each in (before, now))
    targets = [each.get("target") for each in (before, now)]
    return not differences(*environments) and (None in targets or targets[0] == targets[1])


def differences(before: Environment, now: Environment) -> list[str]:
    """Describe the known differences of two environments."""
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
    """Read a run's journal; the history is empty without one."""
    history = History()
    if path.is_file():
        follow(path, history.add)
    return history
