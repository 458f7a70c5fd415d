"""The samples that a forest learns from, by task, in units that tasks share.

Seconds (of one run; NaN for a candidate that failed) of different tasks differ by orders of
magnitude. Targets are relative to the best of the task, or to its ceiling
(:mod:`tvm_adaptive.cost_model.ceilings`), so one forest can learn from all tasks. Higher is
better.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.cost_model.ceilings import ceilings_of
from tvm_adaptive.cost_model.features import log_work_of
from tvm_adaptive.cost_model.targets import TargetKind, error_of, learns_failures, target_of
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.trial import FloatArray

# Samples of all tasks together, 4 kB each: a forest of so many is grown in 3 s of CPU time,
# and needs some 200 MB while it is. Fewer would do: on the recorded pools of GMM, C2D and
# softmax a forest of half of the samples, half of them the fastest, ranks the faster half of
# unseen candidates better than one of all (0.57 on average against 0.51), and all of them
# hardly worse (0.77 against 0.79).
CAPACITY = 8192
# Samples beyond the capacity are dropped together: to choose them costs a copy of all.
_SLACK = 1 / 8
# Of a task's samples that stay, the share that are its fastest.
_FASTEST_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class TaskSamples:
    """The samples of one task, in the order they were measured."""

    rows: Rows
    seconds: FloatArray
    errors: FloatArray  # relative standard errors of ``seconds``; 0 where none is known
    # Random numbers in [0, 1): of samples that are not among the fastest, the lowest stay, so
    # that they are uniform over all that was ever measured, however often they are thinned.
    lots: FloatArray

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The fields, in their order."""
        return self.rows, self.seconds, self.errors, self.lots

    @property
    def succeeded(self) -> np.ndarray:
        """Whether each sample has a time."""
        return np.isfinite(self.seconds)

    @property
    def best_sec(self) -> float:
        """Seconds of the fastest sample; NaN before the first success."""
        return float(np.nanmin(self.seconds)) if self.succeeded.any() else math.nan

    def thinned(self, n: int) -> TaskSamples:
        """Return ``n`` of the samples: the fastest, and a uniform sample of all others."""
        n_fast = min(math.ceil(_FASTEST_SHARE * n), int(self.succeeded.sum()))
        by_speed = np.argsort(self.seconds, kind="stable")  # NaN is last
        others = by_speed[n_fast:]
        drawn = others[np.argsort(self.lots[others], kind="stable")[: n - n_fast]]
        kept = np.sort(np.concatenate([by_speed[:n_fast], drawn]))
        return TaskSamples(*(array[kept] for array in self.arrays))


class Dataset:
    """Samples grouped by task; where there are more than fit, tasks with many lose some."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.n_added = 0
        self._tasks: dict[str, TaskSamples] = {}
        # Fixed: which samples stay must not depend on anything but what was measured.
        self._rng = np.random.default_rng(0)

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
        """Append samples of one task."""
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
        lots = self._rng.random(len(seconds))
        self.n_added += len(seconds)
        samples = TaskSamples(np.asarray(rows, dtype=np.float32), clean, known, lots)
        if key in self._tasks:
            pairs = zip(self._tasks[key].arrays, samples.arrays, strict=True)
            samples = TaskSamples(*(np.concatenate(pair) for pair in pairs))
        self._tasks[key] = samples
        if len(self) > (1 + _SLACK) * self.capacity:
            self._thin()

    def share(self, other: Dataset, key: str, n_added: int) -> None:
        """Add a task whose samples are another dataset's, without a copy of them."""
        self._tasks[key] = other._tasks[key]
        self.n_added += n_added

    def follow(self, other: Dataset) -> None:
        """Update all tasks, which must be shared, to the other dataset's samples."""
        self._tasks = {key: other._tasks[key] for key in self._tasks}

    def _thin(self) -> None:
        most = largest_share([len(task.seconds) for _, task in self], self.capacity)
        for key, task in self:
            if len(task.seconds) > most:
                self._tasks[key] = task.thinned(most)

    def with_share(self, share: float, is_shared: Callable[[str], bool]) -> Dataset:
        """Return the samples with a random share of those of some tasks.

        A smaller share is a part of a larger one. The best sample of a task stays with any
        other, as all targets are relative to it.
        """
        found = Dataset(self.capacity)
        for key, task in self:
            kept = task.lots < (share if is_shared(key) else 1.0)
            if kept.any():
                kept |= task.seconds == task.best_sec
                found._tasks[key] = TaskSamples(*(array[kept] for array in task.arrays))
        return found

    def bests(self) -> Dataset:
        """Return the fastest sample of every task that has a success."""
        found = Dataset()
        for key, task in self:
            if task.succeeded.any():
                best = [int(np.nanargmin(task.seconds))]
                found.add(key, task.rows[best], task.seconds[best], task.errors[best])
        return found

    def best_sec(self, key: str) -> float:
        """Return the seconds of a task's fastest sample; NaN if there is none."""
        task = self._tasks.get(key)
        return math.nan if task is None else task.best_sec

    def best_secs(self) -> dict[str, float]:
        """Return ``best_sec`` of every task that has a success."""
        bests = {key: task.best_sec for key, task in self}
        return {key: best for key, best in bests.items() if math.isfinite(best)}

    def ceilings(self, clock_of: Callable[[str], object] = lambda _: None) -> dict[str, float]:
        """Return the seconds that targets of each task with a success are relative to.

        Seconds are compared only with those of tasks of the same clock, by their keys.
        """
        return ceilings_of(
            {
                key: (
                    task.best_sec,
                    int(task.succeeded.sum()),
                    float(log_work_of(task.rows[:1])[0]),
                )
                for key, task in self
                if task.succeeded.any()
            },
            clock_of,
        )

    def training_set(
        self,
        target: TargetKind = "log",
        ceilings: Mapping[str, float] | None = None,
        drift: float = 0.0,
    ) -> tuple[Rows, FloatArray, FloatArray]:
        """Return rows, targets and their standard errors of all samples that the forest learns.

        ``ceilings`` are the seconds that targets are relative to, the bests without; ``drift`` is
        a relative error of every time beside its own.
        """
        known = self.best_secs() if ceilings is None else ceilings
        parts = [_learned_of(task, target, known[key], drift) for key, task in self if key in known]
        if not parts:
            return np.zeros((0, self.width or 0), dtype=np.float32), np.zeros(0), np.zeros(0)
        rows, y, errors = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(y), np.concatenate(errors)

    def n_learned(self, target: TargetKind) -> int:
        """Return the number of samples of :meth:`training_set`."""
        sizes = ((len(task.seconds), int(task.succeeded.sum())) for _, task in self)
        # Before its first success, a task has no target.
        return sum(n if learns_failures(target) else n_ok for n, n_ok in sizes if n_ok)

    def validity_set(self) -> tuple[Rows, FloatArray]:
        """Return all samples with 1.0 for a success and 0.0 for a failure."""
        if not self._tasks:
            return np.zeros((0, 0), dtype=np.float32), np.zeros(0)
        tasks = list(self._tasks.values())
        labels = np.concatenate([task.succeeded for task in tasks]).astype(np.float64)
        return np.concatenate([task.rows for task in tasks]), labels


def largest_share(sizes: Sequence[int], capacity: int) -> int:
    """Return the most samples that each task may keep for all to fit into the capacity."""
    left = capacity
    ascending = sorted(sizes)
    for place, size in enumerate(ascending):
        share = left // (len(ascending) - place)
        if size > share:
            return max(1, share)
        left -= size
    return ascending[-1] if ascending else 0


def _learned_of(
    task: TaskSamples, target: TargetKind, ceiling_sec: float, drift: float
) -> tuple[Rows, FloatArray, FloatArray]:
    """Return what a model learns of one task; see :meth:`Dataset.training_set`."""
    ratio = ceiling_sec / task.seconds
    if learns_failures(target):  # AdaTune's forest takes all times alike
        return task.rows, np.nan_to_num(target_of(ratio, target), nan=0.0), np.zeros(len(ratio))
    ok = task.succeeded
    errors = error_of(ratio[ok], np.hypot(task.errors[ok], drift), target)
    return task.rows[ok], target_of(ratio[ok], target), errors
