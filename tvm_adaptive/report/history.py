"""A run as its journal describes it, ready to be drawn.

Any field of an event may be missing: the run may be in progress, killed, or use stock parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.measure_callback.history import History, TaskHistory
from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.measure_callback.progress import TaskProgress
from tvm_adaptive.report.trials import TrialJoiner, TrialRow
from tvm_adaptive.runner.playoff.finalist import refuted_ms
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming
from tvm_adaptive.tuning.session import journal_of
from tvm_adaptive.values.forms import DIRECT, NO_FORM, FormKey
from tvm_adaptive.values.roofline import Roofline

Event = dict[str, Any]

# Parts of a path that tell runs apart; two runs of one directory keep equal names.
_MAX_PARTS = 20
# The events with seconds of a part of the search, and their fields.
_PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "round": ("propose", ("sample_sec", "posterior_sec", "evolve_sec")),
    "build": ("build", ("seconds",)),
    "timing": ("measure", ("elapsed_sec",)),
    "duet": ("measure", ("elapsed_sec",)),
}
_RUNNING = "running or killed"


@dataclasses.dataclass(frozen=True)
class PlayedSlot:
    """A share of tuning time that a task was given."""

    task: str
    reason: str  # why the scheduler chose the task
    start_sec: float
    seconds: float
    gain: float | None  # expected, in ``unit``; None where nothing was compared
    unit: str
    n_trials: int
    best_ms: float  # of the task, after the slot; infinite without a success


@dataclasses.dataclass
class RunHistory(History):
    """A run's history with what is drawn of it; times count from the first attempt's start."""

    name: str = ""  # for legends: the model and the directory
    keeps_all: bool = True  # False: only what a screen shows
    # (seconds, milliseconds): the sum of the tasks' best latencies
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    weighted_ms: float | None = None  # that sum now; None until every task has a time
    slots: list[PlayedSlot] = dataclasses.field(default_factory=list)
    # Events of the search, the model, the runner and of remote devices.
    rounds: list[Event] = dataclasses.field(default_factory=list)
    forecasts: list[Event] = dataclasses.field(default_factory=list)
    timings: list[Event] = dataclasses.field(default_factory=list)
    boards: list[Event] = dataclasses.field(default_factory=list)
    trials: list[TrialRow] = dataclasses.field(default_factory=list)
    part_secs: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"propose": 0.0, "build": 0.0, "measure": 0.0}
    )
    now: Event | None = None  # the current slot
    # Calls and form of each task, by its name; empty until the search begins.
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    forms: dict[str, FormKey] = dataclasses.field(default_factory=dict)
    # Bytes of each task's arguments, by its name; and what the processor reaches.
    n_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    roofline: Roofline | None = None
    untuned_sec: float | None = None  # latency without tuning
    comparison: Comparison | None = None
    compared_sec: float = 0.0  # when that was made
    last_report: Event | None = None  # also of an earlier or interrupted attempt
    state: str = _RUNNING  # or ``"finished"``, or ``"interrupted"``
    _gone: set[str] = dataclasses.field(default_factory=set)  # tasks of earlier attempts only
    _joiner: TrialJoiner = dataclasses.field(default_factory=TrialJoiner)
    _open: dict[str, Event] = dataclasses.field(default_factory=dict)  # slots by task

    def search_secs(self) -> dict[str, float]:
        """Return the seconds of proposing, building and measuring, and of the rest."""
        search_sec = self.stage_secs.get("search", 0.0) + self.open_search_sec
        rest_sec = max(0.0, search_sec - sum(self.part_secs.values()))
        return {**self.part_secs, "rest of the search": rest_sec}

    @property
    def used_tasks(self) -> list[TaskProgress]:
        """The tasks that the network would consist of now; empty until the search begins."""
        return self.progress(list(self.weights.items()), self.forms).used_tasks

    def network_tasks(self) -> set[str]:
        """Return the tasks that the network would consist of now: not those of other forms."""
        used = {task.name for task in self.used_tasks}
        # A run's end may have chosen other forms than the times of trials suggest.
        reported = {str(each["name"]): each.get("is_used", True) for each in self.reported_tasks}
        names = (self.tasks.keys() | self.weights.keys() | reported.keys()) - self._gone
        return {
            name for name in names if reported.get(name, name not in self.weights or name in used)
        }

    @property
    def reported_tasks(self) -> Sequence[Event]:
        """What the report says of each task; nothing while another attempt goes on."""
        return () if self.state == _RUNNING else (self.last_report or {}).get("tasks") or ()

    @property
    def current_report(self) -> Event:
        """The report on the library that is there; empty if there is none."""
        # An attempt that goes on, or was interrupted, may have left an earlier library.
        ended = None if self.state == _RUNNING else self.last_report
        return self.report or self.library_report or ended or {}

    @property
    def sum_ms(self) -> float | None:
        """Milliseconds of all tasks: now, or after the end of what is deployed; None if unknown."""
        ended: Event = {} if self.state == _RUNNING else self.last_report or {}
        if "weighted_sec" not in ended:
            return self.weighted_ms
        weighted_sec = ended["weighted_sec"]
        return None if weighted_sec is None else 1e3 * float(weighted_sec)

    def limit_ms(self, task: TaskHistory) -> float:
        """Return the least milliseconds of a task by the roofline; NaN if that is not known."""
        if self.roofline is None or task.flop is None:
            return math.nan
        return self.roofline.limit_ms(task.flop, self.n_bytes.get(task.name, 0.0))

    @property
    def peers(self) -> tuple[PeerTiming, ...]:
        """The frameworks that the tuned network was timed with."""
        return () if self.comparison is None else self.comparison.peers

    def deployed_tasks(self) -> list[TaskHistory]:
        """Return the tasks that the network would use, or that had a trial, by their share.

        Of a run that has ended, a used task has the time that the report gives, or none: a faster
        trial may have computed something else.
        """
        used = self.network_tasks()
        reported = {str(each["name"]): each for each in self.reported_tasks}
        tasks = {name: task for name, task in self.tasks.items() if task.n_trials or name in used}
        for name in (*self.weights, *reported):  # also those that no trial has reached
            if name in used and name not in tasks:
                weight = self.weights.get(name) or float(reported[name].get("weight") or 1.0)
                tasks[name] = TaskHistory(name=name, weight=weight)
        for name, each in reported.items():
            # Of other forms, nothing was checked in the end.
            if name in tasks and each.get("is_used", True) and "best_sec" in each:
                best_sec = math.inf if each["best_sec"] is None else float(each["best_sec"])
                tasks[name] = dataclasses.replace(tasks[name], best_sec=best_sec)
        return self._by_share(tasks.values())

    @property
    def heaviest(self) -> list[TaskHistory]:
        """Tasks by their share of the network's latency, largest first; then those without one."""
        return self._by_share(self.tasks.values())

    def _by_share(self, tasks: Iterable[TaskHistory]) -> list[TaskHistory]:
        used = self.network_tasks()
        return sorted(tasks, key=lambda task: (task.name not in used, -task.share_ms))

    def _task(self, event: Event) -> TaskHistory:
        task = super()._task(event)
        task.weight = self.weights.get(task.name, task.weight)
        return task

    def keep_tasks(self, keys: Mapping[str, str]) -> None:
        """Forget the trials of names that stand for another workload now."""
        before = set(self.tasks)
        super().keep_tasks(keys)
        lost = before - self.tasks.keys()
        self.trials = [trial for trial in self.trials if trial.task not in lost]
        self._joiner.forget(lost)

    def forget_times(self) -> None:
        """Forget what another machine measured; it took its seconds nevertheless."""
        self.tasks.clear()
        self.curve.clear()
        self.trials.clear()
        self._joiner = TrialJoiner()
        self.report = self.library_report = self.last_report = None
        self.untuned_sec = self.weighted_ms = self.comparison = self.roofline = None

    def _forget_run(self) -> None:
        """Forget everything: another run in the same folder is none of it."""
        fresh = RunHistory(name=self.name, keeps_all=self.keeps_all)
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(fresh, field.name))

    def add(self, event: Event) -> None:
        """Apply an event of the journal; kinds that this version does not know are left out."""
        if event["event"] == "run" and event.get("resumed") is False:
            self._forget_run()
        super().add(event)
        kind = event["event"]
        event = {**event, "time_sec": self.before_sec + float(event.get("time_sec") or 0.0)}
        if kind in _PARTS:
            part, fields = _PARTS[kind]
            self.part_secs[part] += sum(float(event.get(field) or 0.0) for field in fields)
        kept = {
            "round": self.rounds,
            "forecast": self.forecasts,
            "timing": self.timings,
            "board": self.boards,
        }
        if kind in kept:
            if self.keeps_all:
                kept[kind].append(event)
                if kind == "round":
                    self._joiner.add_round(event)
                elif kind == "timing":
                    self._joiner.add_timing(event)
        elif kind == "duet":
            if self.keeps_all:
                self._joiner.add_duet(event)
        elif apply := getattr(self, f"_add_{kind.replace('-', '_')}", None):
            apply(event)

    def _add_journal(self, _event: Event) -> None:
        self.state, self.now = _RUNNING, None
        self._open.clear()
        self._joiner.begin_attempt()

    def _add_tasks(self, event: Event) -> None:
        former = set(self.weights)
        self.weights.clear()
        for number, task in enumerate(event["tasks"]):
            name = str(task.get("name", number))
            self.weights[name] = float(task.get("weight") or 1.0)
            self.forms[name] = FormKey(str(task.get("group", "")), str(task.get("form", DIRECT)))
            self.n_bytes[name] = float(task.get("bytes") or 0.0)
        self._gone = (self._gone | former) - self.weights.keys()
        # The last sum may be of tasks that are gone; results will bring the next one.
        self._update_sum()

    def _update_sum(self) -> None:
        """Sum the tasks' best times; the sum is None until every task has one."""
        sum_ms = 1e3 * self.progress(list(self.weights.items()), self.forms).weighted_sec
        self.weighted_ms = sum_ms if self.weights and math.isfinite(sum_ms) else None

    def _add_untuned(self, event: Event) -> None:
        if event.get("seconds") is not None:
            self.untuned_sec = float(event["seconds"])

    def _add_slot(self, event: Event) -> None:
        if event.get("task") is not None:  # None: the scheduler has ended
            self.now = self._open[str(event["task"])] = event

    def _add_slot_end(self, event: Event) -> None:
        # Another task's slot may have begun while the last batch was measured.
        opened = self._open.pop(str(event["task"]), {})
        if self.now is opened:
            self.now = None
        if not self.keeps_all:
            return
        seconds = float(event.get("seconds") or 0.0)
        best_ms = event.get("best_ms")
        self.slots.append(
            PlayedSlot(
                task=str(event["task"]),
                reason=str(opened.get("reason", "")),
                start_sec=max(0.0, event["time_sec"] - seconds),
                seconds=seconds,
                gain=opened.get("gain"),
                unit=str(opened.get("unit") or ""),
                n_trials=int(event.get("n_trials") or 0),
                best_ms=math.inf if best_ms is None else best_ms,
            )
        )

    def _add_measured(self, event: Event) -> None:
        if self.keeps_all:
            form = self.forms.get(str(event["task"]), NO_FORM).form
            self.trials += self._joiner.add_measured(event, form)
        if "best_ms" in event:  # the run knows what its play-offs have disqualified
            task, best_ms = self._task(event), event["best_ms"]
            best_sec = math.inf if best_ms is None else float(best_ms) / 1e3
            task.best_sec = max(task.best_sec, best_sec)
        sum_ms = event.get("weighted_ms")
        self.weighted_ms = None if sum_ms is None else float(sum_ms)
        if self.weighted_ms is not None:
            if not self.keeps_all:
                self.curve.clear()
            self.curve.append((event["time_sec"], self.weighted_ms))

    def _add_playoff(self, event: Event) -> None:
        lost_ms = refuted_ms(event)
        if not lost_ms:
            return
        name = str(event["task"])
        if task := self.tasks.get(name):
            best_sec = task.best_sec
            task.disqualify([ms / 1e3 for ms in lost_ms])
            # What the run knew to be lost before may have no event.
            task.best_sec = max(best_sec, task.best_sec)
            self._update_sum()
        if self.keeps_all:
            self.trials = self._joiner.disqualify(self.trials, name, lost_ms)

    def _add_library(self, _event: Event) -> None:
        self.comparison = None  # of the library before it

    def _add_comparison(self, event: Event) -> None:
        self.comparison = Comparison.from_fields(event)
        self.compared_sec = event["time_sec"]

    def _add_roofline(self, event: Event) -> None:
        rates = [float(event[name] or 0.0) for name in Roofline._fields]
        self.roofline = Roofline(*rates) if min(rates) > 0 else None

    def _add_report(self, event: Event) -> None:
        self.last_report = event
        self.state = "interrupted" if event.get("interrupted") else "finished"


def read_runs(work_dirs: Sequence[Path]) -> list[RunHistory]:
    """Read several runs' journals; see :func:`read_run`. No two have the same name."""
    histories = [read_run(work_dir) for work_dir in work_dirs]
    n_parts = 1
    while len({each.name for each in histories}) < len(histories) and n_parts < _MAX_PARTS:
        n_parts += 1
        for history, work_dir in zip(histories, work_dirs, strict=True):
            folder = Path(*work_dir.resolve().parts[-n_parts:])
            history.name = f"{history.run.get('what', 'run')} ({folder})"
    return histories


def read_run(work_dir: Path) -> RunHistory:
    """Read a run's journal, also of a run that is in progress or was killed.

    Raises
    ------
    InvalidOptionError
        When it is not a run's directory.
    JournalError
        When its journal is damaged.
    """
    history = RunHistory(name=work_dir.resolve().name)
    follow(journal_of(work_dir), history.add)
    what = history.run.get("what")
    if what:
        history.name = f"{what} ({history.name})"
    return history
