"""Recorded tunings: the latency and the cost of every trial of a network's tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.values.trial import FloatArray

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TaskRecording:
    """One task's tuning, trial by trial."""

    name: str
    weight: float  # how often the task occurs in the network
    flop: float  # of one run; at least 1
    # milliseconds of one run, in the order measured; ``nan`` for a failed trial
    latencies_ms: FloatArray
    # wall-clock seconds of each trial alone: build, measuring, its share of training
    trial_sec: FloatArray
    round_sizes: IntArray  # trials of each round of the search; they sum to n
    # seconds of each round whatever its size: the search for candidates
    overhead_sec: FloatArray

    def __post_init__(self) -> None:
        n, sizes = len(self.latencies_ms), self.round_sizes
        valid = self.latencies_ms[~np.isnan(self.latencies_ms)]
        seconds = np.concatenate([self.trial_sec, self.overhead_sec])
        problems = {
            "trial_sec and latencies_ms differ in length": self.trial_sec.shape != (n,),
            "overhead_sec and round_sizes differ in length": self.overhead_sec.shape != sizes.shape,
            "round_sizes do not sum to the trials": int(sizes.sum()) != n,
            "a round has no trials": (sizes <= 0).any(),
            "a latency is not > 0": not (valid > 0).all() or np.isinf(valid).any(),
            "seconds are negative or not finite": not (seconds >= 0).all()
            or np.isinf(seconds).any(),
            "weight must be > 0 and flop >= 1": not (self.weight > 0 and self.flop >= 1),
        }
        _refuse(self.name, problems)

    @property
    def n_trials(self) -> int:
        """Trials, failed ones included."""
        return len(self.latencies_ms)

    @property
    def is_valid(self) -> bool:
        """Whether any trial succeeded."""
        return bool(np.isfinite(self.latencies_ms).any())

    @property
    def final_ms(self) -> float:
        """Milliseconds of the fastest trial; ``nan`` where all failed."""
        return float(np.nanmin(self.latencies_ms)) if self.is_valid else math.nan

    @property
    def slowest_ms(self) -> float:
        """Milliseconds of the slowest trial; ``nan`` where all failed."""
        return float(np.nanmax(self.latencies_ms)) if self.is_valid else math.nan

    @property
    def total_sec(self) -> float:
        """Seconds of the whole tuning of this task."""
        return float(self.trial_sec.sum() + self.overhead_sec.sum())

    def slot_sec(self, start: int, stop: int) -> float:
        """Return the seconds of one search and the trials from ``start`` up to ``stop``."""
        if stop <= start:
            return 0.0
        place = np.searchsorted(np.cumsum(self.round_sizes), start, side="right")
        return float(self.overhead_sec[place] + self.trial_sec[start:stop].sum())


@dataclasses.dataclass(frozen=True)
class Recording:
    """The tuning of a network, every task well past its knee."""

    network: str
    tasks: tuple[TaskRecording, ...]  # in the scheduler's order
    batch: int  # trials that the search was asked for per round
    machine: str  # in words: without it, seconds and milliseconds mean nothing
    tvm: str  # version of TVM
    seed: int

    def __post_init__(self) -> None:
        problems = {
            "it has no tasks": not self.tasks,
            "two tasks have the same name": len({t.name for t in self.tasks}) < len(self.tasks),
            "batch must be at least 1": self.batch < 1,
        }
        _refuse(self.network, problems)

    @property
    def final_ms(self) -> float:
        """End-to-end milliseconds with each task at its fastest; failed tasks left out."""
        return math.fsum(task.weight * task.final_ms for task in self.tasks if task.is_valid)

    @property
    def total_sec(self) -> float:
        """Seconds to replay everything in the rounds that were recorded."""
        return math.fsum(task.total_sec for task in self.tasks)

    @property
    def n_trials(self) -> int:
        """Trials of all tasks."""
        return sum(task.n_trials for task in self.tasks)


def _refuse(name: str, problems: Mapping[str, object]) -> None:
    for problem, is_found in problems.items():
        if is_found:
            raise InvalidOptionError(f"The recording of {name} cannot be used: {problem}.")
