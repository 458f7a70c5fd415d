"""How far a run has come: its tasks, their trials and errors."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter


@dataclasses.dataclass
class TaskProgress:
    """What is known of one task."""

    name: str
    weight: float  # calls per inference
    n_trials: int = 0  # trials so far, and those among them that failed
    n_errors: int = 0
    best_sec: float = math.inf  # fastest recorded time, infinite before the first success


@dataclasses.dataclass
class RunProgress:
    """What is known of a run; updated in place after every round."""

    tasks: list[TaskProgress]
    # first lines of error messages and how often each was met
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    # candidates that could not be built or run for want of processes, memory or disk space; they
    # are no trials
    n_machine_failures: int = 0
    current: str = ""  # the task that was measured last

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
