"""A run as its journal describes it, ready to be drawn.

Any field of an event may be missing: the run may be in progress, killed, or use stock parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.measure_callback.history import TaskHistory, differences
from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.tuning.session import journal_of
from tvm_adaptive.workers.environment import Environment

Event = dict[str, Any]

# Parts of a path that tell runs apart; two runs of one directory keep equal names.
_MAX_PARTS = 20
# The events with seconds of a part of the search, and their fields.
_PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "round": ("propose", ("sample_sec", "posterior_sec", "evolve_sec")),
    "build": ("build", ("seconds",)),
    "timing": ("measure", ("elapsed_sec",)),
}


@dataclasses.dataclass(frozen=True)
class SlotStory:
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
class TaskStory(TaskHistory):
    """One task's trials, its weight in the network and its work."""

    name: str = ""
    weight: float = 1.0  # calls per inference
    flop: float | None = None

    @property
    def best_ms(self) -> float:
        """Milliseconds of the fastest trial; infinite without a success."""
        return min((ms for ms in self.latencies_ms if math.isfinite(ms)), default=math.inf)

    @property
    def share_ms(self) -> float:
        """Milliseconds of the network's latency; 0 without a success."""
        return self.weight * self.best_ms if math.isfinite(self.best_ms) else 0.0


@dataclasses.dataclass
class Story:
    """The content of a journal; times are seconds since the start of the run's first attempt."""

    name: str  # for legends: the model and the directory
    run: Event = dataclasses.field(default_factory=dict)  # options of the last attempt
    # (seconds, milliseconds): the sum of the tasks' best latencies
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    slots: list[SlotStory] = dataclasses.field(default_factory=list)
    slot_sec: float = 0.0  # seconds of all slots
    tasks: dict[str, TaskStory] = dataclasses.field(default_factory=dict)
    # Events of the search, the model, the runner and of remote devices, their ``time_sec``
    # since the start of the first attempt.
    rounds: list[Event] = dataclasses.field(default_factory=list)
    forecasts: list[Event] = dataclasses.field(default_factory=list)
    timings: list[Event] = dataclasses.field(default_factory=list)
    boards: list[Event] = dataclasses.field(default_factory=list)
    part_secs: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"propose": 0.0, "build": 0.0, "measure": 0.0}
    )
    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    stage_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    now: Event | None = None  # the current slot
    n_tasks: int = 0  # 0 until the search begins
    untuned_sec: float | None = None  # latency without tuning
    comparison: Event | None = None
    report: Event | None = None
    state: str = "running or killed"  # or ``"finished"``, or ``"interrupted"``
    elapsed_sec: float = 0.0

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(len(task.latencies_ms) for task in self.tasks.values())

    def search_secs(self) -> dict[str, float]:
        """Return the seconds of proposing, building and measuring, and of the rest."""
        search_sec = self.stage_secs.get("search", self.slot_sec)
        rest_sec = max(0.0, search_sec - sum(self.part_secs.values()))
        return {**self.part_secs, "rest of the search": rest_sec}

    @property
    def heaviest(self) -> list[TaskStory]:
        """Tasks by their share of the network's latency, largest first."""
        return sorted(self.tasks.values(), key=lambda task: -task.share_ms)


def read_stories(work_dirs: Sequence[Path]) -> list[Story]:
    """Read several runs' journals; see :func:`read_story`. No two have the same name."""
    stories = [read_story(work_dir) for work_dir in work_dirs]
    n_parts = 1
    while len({story.name for story in stories}) < len(stories) and n_parts < _MAX_PARTS:
        n_parts += 1
        for story, work_dir in zip(stories, work_dirs, strict=True):
            folder = Path(*work_dir.resolve().parts[-n_parts:])
            story.name = f"{story.run.get('what', 'run')} ({folder})"
    return stories


def read_story(work_dir: Path) -> Story:
    """Read a run's journal, also of a run that is in progress or was killed.

    Parameters
    ----------
    work_dir : Path

    Raises
    ------
    InvalidOptionError
        When it is not a run's directory.
    JournalError
        When its journal is damaged.
    """
    reader = StoryReader(work_dir.name)
    follow(journal_of(work_dir), reader.take)
    story = reader.story
    what = story.run.get("what")
    if what:
        story.name = f"{what} ({work_dir.name})"
    return story


class StoryReader:
    """Adds event after event to a story; without ``keeps_all`` only what a screen shows."""

    def __init__(self, name: str = "", *, keeps_all: bool = True) -> None:
        self.story = Story(name=name)
        self._keeps_all = keeps_all
        self._before_sec = 0.0
        self._open: dict[str, Event] = {}  # slots by task

    def take(self, event: Event) -> None:
        """Add one event; kinds that this version does not know are left out."""
        story = self.story
        kind = str(event.get("event"))
        if kind == "journal":
            self._before_sec = story.elapsed_sec
            story.state, story.now = "running or killed", None
            self._open.clear()
        at_sec = self._before_sec + float(event.get("time_sec") or 0.0)
        story.elapsed_sec = max(story.elapsed_sec, at_sec)
        event = {**event, "time_sec": at_sec}
        lists = {
            "round": story.rounds,
            "forecast": story.forecasts,
            "timing": story.timings,
            "board": story.boards,
        }
        if kind in _PARTS:
            part, fields = _PARTS[kind]
            story.part_secs[part] += sum(float(event.get(field) or 0.0) for field in fields)
        if kind in lists:
            if self._keeps_all:
                lists[kind].append(event)
        else:
            take = getattr(self, f"_take_{kind.replace('-', '_')}", None)
            if take is not None:
                take(event)

    def _take_run(self, event: Event) -> None:
        story = self.story
        if differences(Environment.from_fields(story.run), Environment.from_fields(event)):
            # Another machine's times do not belong to this one's curve.
            story.tasks.clear()
            story.curve.clear()
            story.failures.clear()
            story.untuned_sec = None
        story.run = event

    def _take_stage(self, event: Event) -> None:
        secs, name = self.story.stage_secs, str(event["stage"])
        secs[name] = secs.get(name, 0.0) + float(event["seconds"])

    def _take_tasks(self, event: Event) -> None:
        self.story.n_tasks = len(event["tasks"])

    def _take_untuned(self, event: Event) -> None:
        if event.get("seconds") is not None:
            self.story.untuned_sec = float(event["seconds"])

    def _take_slot(self, event: Event) -> None:
        if event.get("task") is not None:  # None: the scheduler has ended
            self.story.now = self._open[str(event["task"])] = event

    def _take_slot_end(self, event: Event) -> None:
        # Another task's slot may have begun while the last batch was measured.
        opened = self._open.pop(str(event["task"]), {})
        if self.story.now is opened:
            self.story.now = None
        seconds = float(event.get("seconds") or 0.0)
        self.story.slot_sec += seconds
        if not self._keeps_all:
            return
        best_ms = event.get("best_ms")
        self.story.slots.append(
            SlotStory(
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

    def _take_measured(self, event: Event) -> None:
        story, name = self.story, str(event["task"])
        task = story.tasks.setdefault(name, TaskStory(name=name))
        task.weight = float(event.get("weight") or 1.0)
        task.flop = event.get("flop")
        task.latencies_ms += [
            math.nan if each is None else float(each) for each in event["latencies_ms"]
        ]
        story.failures.update(event.get("errors") or {})
        weighted_ms = event.get("weighted_ms")
        if weighted_ms is not None:
            if not self._keeps_all:
                story.curve.clear()
            story.curve.append((event["time_sec"], float(weighted_ms)))

    def _take_comparison(self, event: Event) -> None:
        self.story.comparison = event

    def _take_report(self, event: Event) -> None:
        self.story.report = event
        self.story.state = "interrupted" if event.get("interrupted") else "finished"
