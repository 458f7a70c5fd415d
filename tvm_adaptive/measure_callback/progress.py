"""The progress of a run: its tasks, their trials and errors."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from tvm_adaptive.values.forms import DIRECT, NO_FORM, FormKey, in_use

# Failures without a success after which a task is not expected to have one.
GIVE_UP_TRIALS = 64


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
    key: FormKey = NO_FORM  # the part of the network, and how it is computed there
    is_ended: bool = False  # it gets no more trials, whatever the run has left

    def add_trials(self, secs: Sequence[float]) -> None:
        """Add trials; NaN for a failure."""
        valid = [sec for sec in secs if math.isfinite(sec)]
        self.n_trials += len(secs)
        self.n_errors += len(secs) - len(valid)
        self.best_sec, self.second_sec, *_ = sorted([self.best_sec, self.second_sec, *valid])

    @property
    def share_sec(self) -> float:
        """Seconds of an inference; infinite before the first success."""
        return self.weight * self.best_sec

    @property
    def is_given_up(self) -> bool:
        """Whether no trial has succeeded, and none will or is expected to."""
        return math.isinf(self.best_sec) and (self.is_ended or self.n_trials >= GIVE_UP_TRIALS)


@dataclasses.dataclass
class RunProgress:
    """Trials of a run; updated in place after every round."""

    tasks: list[TaskProgress]
    # counts of the first lines of error messages
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
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
    def used_tasks(self) -> list[TaskProgress]:
        """The tasks that the network would consist of now: of the fastest forms."""
        keys, costs = [task.key for task in self.tasks], [task.share_sec for task in self.tasks]
        used = in_use(keys, costs)
        return [task for task, is_used in zip(self.tasks, used, strict=True) if is_used]

    @property
    def weighted_sec(self) -> float:
        """Sum over these tasks of weight times best; infinite until each has a success."""
        return math.fsum(task.share_sec for task in self.used_tasks)

    @property
    def promising_sec(self) -> float:
        """The sum of those that are not given up, which stay untuned; infinite without any."""
        secs = [task.share_sec for task in self.used_tasks if not task.is_given_up]
        return math.fsum(secs) if secs else math.inf

    def forbid_forms(self) -> None:
        """Use the direct forms from now on, whatever the others take."""
        for task in self.tasks:
            if task.key.form != DIRECT:
                task.best_sec = math.inf
