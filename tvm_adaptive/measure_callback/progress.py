"""The progress of a run: its tasks, their trials and errors."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter


@dataclasses.dataclass
class TaskProgress:
    """Trials of one task."""

    name: str
    weight: float  # calls per inference
    n_trials: int = 0
    n_errors: int = 0  # failed trials
    best_sec: float = math.inf  # fastest recorded time, infinite before the first success
    second_sec: float = math.inf  # the second fastest
    build_sec: float = math.nan  # seconds that building the fastest took; NaN if not known


@dataclasses.dataclass
class RunProgress:
    """Trials of a run; updated in place after every round."""

    tasks: list[TaskProgress]
    # counts of the first lines of error messages
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    # candidates that failed for lack of processes, memory or disk space; they are no trials
    n_machine_failures: int = 0
    current: str = ""  # the task measured last

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(task.n_trials for task in self.tasks)

    @property
    def n_errors(self) -> int:
        """Failed trials of all tasks."""
        return sum(task.n_errors for task in self.tasks)

    @property
    def weighted_sec(self) -> float:
        """Sum over tasks of weight times best; infinite until each has a success."""
        return sum(task.weight * task.best_sec for task in self.tasks)
