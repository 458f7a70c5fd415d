"""A run as its journal tells it: what happened when, ready to be drawn.

Every reader of an event takes what is there: a run that goes on, was killed, or used
stock parts has told less.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.measure_callback.history import differences
from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.tuning.session import journal_of
from tvm_adaptive.workers.environment import Environment

Event = dict[str, Any]

# Of a path, to tell runs apart; two that are one directory stay alike.
_MAX_PARTS = 20
# The events that tell of seconds, and in which fields.
_PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "round": ("propose", ("sample_sec", "posterior_sec", "evolve_sec")),
    "build": ("build", ("seconds",)),
    "timing": ("measure", ("elapsed_sec",)),
}


@dataclasses.dataclass(frozen=True)
class SlotStory:
    """A share of tuning time that a task was given."""

    task: str  # who got it, and why
    reason: str
    start_sec: float
    seconds: float
    # what it was expected to bring, in ``unit``; None where nothing was compared
    gain: float | None
    unit: str
    n_trials: int
    best_ms: float  # of the task, after it; infinite without a success


@dataclasses.dataclass
class TaskStory:
    """One task's trials."""

    name: str
    weight: float = 1.0  # calls per inference
    flop: float | None = None
    # in the order measured; ``nan`` for a failure
    latencies_ms: list[float] = dataclasses.field(default_factory=list)

    @property
    def best_ms(self) -> float:
        """Of the fastest; infinite without a success."""
        return min((ms for ms in self.latencies_ms if math.isfinite(ms)), default=math.inf)

    @property
    def n_failed(self) -> int:
        """Trials without a time."""
        return sum(not math.isfinite(ms) for ms in self.latencies_ms)

    @property
    def share_ms(self) -> float:
        """Of the network's latency, milliseconds; 0 as long as it is not known."""
        return self.weight * self.best_ms if math.isfinite(self.best_ms) else 0.0


@dataclasses.dataclass
class Story:
    """What a journal tells; times are seconds since the run's beginning, all sittings."""

    name: str  # for legends: what was tuned, and where
    run: Event = dataclasses.field(default_factory=dict)  # options of the last sitting
    # seconds, and milliseconds that the best of all tasks add up to
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    slots: list[SlotStory] = dataclasses.field(default_factory=list)
    slot_sec: float = 0.0  # seconds of all of them
    tasks: dict[str, TaskStory] = dataclasses.field(default_factory=dict)
    # events of the search, the model, the runner, the builder and of devices elsewhere, with
    # ``time_sec`` from the run's beginning
    rounds: list[Event] = dataclasses.field(default_factory=list)
    forecasts: list[Event] = dataclasses.field(default_factory=list)
    timings: list[Event] = dataclasses.field(default_factory=list)
    builds: list[Event] = dataclasses.field(default_factory=list)
    boards: list[Event] = dataclasses.field(default_factory=list)
    part_secs: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"propose": 0.0, "build": 0.0, "measure": 0.0}
    )  # seconds of ``"propose"``, ``"build"`` and ``"measure"``
    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    stage_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    now: Event | None = None  # the slot that is being played
    n_tasks: int = 0  # of the run; 0 until its search begins
    untuned_sec: float | None = None  # latency without tuning
    comparison: Event | None = None
    report: Event | None = None
    # ``"finished"``, ``"interrupted"``, or ``"running or killed"``
    state: str = "running or killed"
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
    """Read a run's journal, also of a run that goes on or was killed.

    Parameters
    ----------
    work_dir : Path

    Raises
    ------
    InvalidOptionError
        When it is no run's directory.
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
    """Adds event after event to a story."""

    def __init__(self, name: str = "", *, keeps_all: bool = True) -> None:
        self.story = Story(name=name)
        self._keeps_all = keeps_all
        self._before_sec = 0.0
        self._open: dict[str, Event] = {}  # slots by task

    def take(self, event: Event) -> None:
        """Add one event; what this version does not know is left out."""
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
            "build": story.builds,
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
            # Another machine's times are no beginning of this one's curve.
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
        if event.get("task") is not None:  # None is the scheduler's last word
            self.story.now = self._open[str(event["task"])] = event

    def _take_slot_end(self, event: Event) -> None:
        # While its last batch is measured, another task's slot may have begun.
        opened = self._open.pop(str(event["task"]), {})
        if self.story.now is opened:
            self.story.now = None
        seconds = float(event.get("seconds") or 0.0)
        self.story.slot_sec += seconds
        if not self._keeps_all:
            return
        self.story.slots.append(
            SlotStory(
                task=str(event["task"]),
                reason=str(opened.get("reason", "")),
                start_sec=max(0.0, event["time_sec"] - seconds),
                seconds=seconds,
                gain=opened.get("gain"),
                unit=str(opened.get("unit") or ""),
                n_trials=int(event.get("n_trials") or 0),
                best_ms=_or_inf(event.get("best_ms")),
            )
        )

    def _take_measured(self, event: Event) -> None:
        story, name = self.story, str(event["task"])
        task = story.tasks.setdefault(name, TaskStory(name))
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


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else float(value)
