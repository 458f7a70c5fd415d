"""What was measured, by task, in units that tasks share.

==========  ==================================================  ==============
symbol      meaning                                             unit
==========  ==================================================  ==============
seconds     time of one run; NaN for a candidate that failed    s, lower is better
best_sec    smallest of the task's seconds                      s
y           target: log(best_sec / seconds), or the ratio       1, higher is better
==========  ==================================================  ==============

Seconds of different tasks differ by orders of magnitude; divided by the best of their
own task they say the same thing everywhere, so one forest can learn from all tasks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np

from tvm_adaptive.cost_model.features import Rows
from tvm_adaptive.records import FloatArray

TargetKind = Literal["log", "throughput"]
TARGETS: tuple[str, ...] = get_args(TargetKind)


@dataclasses.dataclass(frozen=True)
class TaskSamples:
    """All samples of one task, in the order they were measured.

    Attributes
    ----------
    rows : ndarray of shape (n, d)
    seconds : ndarray of shape (n,), NaN where the candidate failed, lower is better
    errors : ndarray of shape (n,)
        Relative standard errors of ``seconds``; 0 where none is known.
    """

    rows: Rows
    seconds: FloatArray
    errors: FloatArray

    @property
    def succeeded(self) -> np.ndarray:
        """Boolean ndarray of shape (n,)."""
        return np.isfinite(self.seconds)

    @property
    def best_sec(self) -> float:
        """Seconds of the fastest sample; NaN before the first success."""
        return (
            float(np.min(self.seconds[self.succeeded], initial=math.inf))
            if (self.succeeded.any())
            else math.nan
        )


class Dataset:
    """Samples grouped by task."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskSamples] = {}

    def __len__(self) -> int:
        return sum(len(task.seconds) for task in self._tasks.values())

    def __iter__(self) -> Iterator[tuple[str, TaskSamples]]:
        return iter(self._tasks.items())

    @property
    def n_tasks(self) -> int:
        """Tasks with at least one sample."""
        return len(self._tasks)

    @property
    def n_failures(self) -> int:
        """Samples without a time, over all tasks."""
        return sum(int((~task.succeeded).sum()) for task in self._tasks.values())

    @property
    def width(self) -> int | None:
        """Features of a row; None while empty."""
        return next((task.rows.shape[1] for task in self._tasks.values()), None)

    def add(
        self, key: str, rows: Rows, seconds: FloatArray, errors: FloatArray | None = None
    ) -> None:
        """Append samples of one task.

        Parameters
        ----------
        key : str
            Names the task.
        rows : ndarray of shape (n, d)
        seconds : ndarray of shape (n,)
            Anything but a positive finite number is a failure.
        errors : ndarray of shape (n,) or None, default None
            Relative standard errors of ``seconds``; NaN where unknown.

        Raises
        ------
        ValueError
            When the shapes do not fit together or to the samples that are there.
        """
        if rows.ndim != 2 or seconds.shape != (rows.shape[0],):
            raise ValueError(
                "Expected rows of shape (n, d) and seconds of shape (n,), but got "
                f"{rows.shape} and {seconds.shape}."
            )
        if self.width not in (None, rows.shape[1]):
            raise ValueError(
                f"Expected rows of {self.width} features as before, but got {rows.shape[1]}; "
                "start a new dataset for another kind of features."
            )
        if not len(seconds):
            return
        with np.errstate(invalid="ignore"):
            usable = np.isfinite(seconds) & (seconds > 0)
        clean = np.where(usable, seconds, np.nan)
        known = np.zeros(len(seconds)) if errors is None else np.nan_to_num(errors, nan=0.0)
        old = self._tasks.get(key)
        if old is not None:
            rows = np.concatenate([old.rows, rows])
            clean = np.concatenate([old.seconds, clean])
            known = np.concatenate([old.errors, known])
        self._tasks[key] = TaskSamples(np.asarray(rows, dtype=np.float32), clean, known)

    def of_width(self, width: int) -> Dataset:
        """Return the tasks whose rows have ``width`` features."""
        found = Dataset()
        found._tasks = {key: task for key, task in self if task.rows.shape[1] == width}
        return found

    def bests(self) -> Dataset:
        """Return the fastest sample of every task that has a success."""
        found = Dataset()
        for key, task in self:
            if task.succeeded.any():
                i = int(np.nanargmin(task.seconds))
                found.add(
                    key, task.rows[i : i + 1], task.seconds[i : i + 1], task.errors[i : i + 1]
                )
        return found

    def best_sec(self, key: str) -> float:
        """Return the seconds of a task's fastest sample; NaN if there is none."""
        task = self._tasks.get(key)
        return math.nan if task is None else task.best_sec

    def best_secs(self) -> dict[str, float]:
        """Return ``best_sec`` of every task that has a success."""
        bests = {key: task.best_sec for key, task in self}
        return {key: best for key, best in bests.items() if math.isfinite(best)}

    def training_set(self, target: TargetKind = "log") -> tuple[Rows, FloatArray]:
        """Return all samples that the forest learns from.

        Parameters
        ----------
        target : str
            ``"log"``: log(best_sec / seconds), at most 0; failures are left out, as
            there is no finite value that would be theirs. ``"throughput"``: the ratio
            itself, failures are 0 (AdaTune's choice). Default ``"log"``.

        Returns
        -------
        rows : ndarray of shape (n, d)
        y : ndarray of shape (n,), higher is better
            Tasks without any success have no best to compare with and are left out.
        """
        parts = [targets_of(task, target) for _, task in self if math.isfinite(task.best_sec)]
        if not parts:
            return np.zeros((0, self.width or 0), dtype=np.float32), np.zeros(0)
        rows, y = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(y)

    def training_weights(self, noise: float, target: TargetKind = "log") -> FloatArray:
        """Return how much each sample of :meth:`training_set` counts.

        A sample's target is off by what the model cannot express and by what the timer
        got wrong: its weight is the inverse of the sum of both variances, relative to
        that of a sample without error.

        Parameters
        ----------
        noise : float
            Standard deviation of what the model cannot express, unit of the target.
        target : str

        Returns
        -------
        ndarray of shape (n,), in (0, 1]
        """
        parts = [_errors(task, target) for _, task in self if math.isfinite(task.best_sec)]
        if not parts:
            return np.zeros(0)
        variance = noise**2
        return np.asarray(variance / (variance + np.concatenate(parts) ** 2))

    def validity_set(self) -> tuple[Rows, FloatArray]:
        """Return all samples with 1.0 for a success and 0.0 for a failure."""
        if not self._tasks:
            return np.zeros((0, 0), dtype=np.float32), np.zeros(0)
        tasks = list(self._tasks.values())
        labels = np.concatenate([task.succeeded for task in tasks]).astype(np.float64)
        return np.concatenate([task.rows for task in tasks]), labels


def targets_of(task: TaskSamples, target: TargetKind) -> tuple[Rows, FloatArray]:
    """Return what a model learns of one task; see :meth:`Dataset.training_set`."""
    if target == "throughput":
        return task.rows, np.nan_to_num(task.best_sec / task.seconds, nan=0.0)
    ok = task.succeeded
    return task.rows[ok], np.log(task.best_sec / task.seconds[ok])


def _errors(task: TaskSamples, target: TargetKind) -> FloatArray:
    """Return the standard errors of the targets; those of failures are 0."""
    if target == "throughput":
        return np.nan_to_num(task.errors * task.best_sec / task.seconds, nan=0.0)
    return np.asarray(task.errors[task.succeeded])
