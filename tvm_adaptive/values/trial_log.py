"""What parts of a run tell each other that MetaSchedule's interfaces have no field for.

Each is optional: a part that is given none works without, as beside stock parts. One is
shared by the parts of one run and used from one thread.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

_Key = TypeVar("_Key", int, float)

# Single micro-batches of one kernel differ so much on a virtual machine.
ONE_LOOK_ERROR = 0.1
# Notes that are kept for somebody who may not take them: those of the batches under way,
# which are some hundred, must be among them.
_MAX_NOTES = 4096


class _Notes(Generic[_Key]):
    """Numbers that one part leaves for another, by key; the oldest are dropped."""

    def __init__(self) -> None:
        self._values: dict[_Key, float] = {}

    def __len__(self) -> int:
        return len(self._values)

    def note(self, key: _Key, value: float) -> None:
        """Remember a number, the latest of a key."""
        self._values.pop(key, None)
        self._values[key] = value
        if len(self._values) > _MAX_NOTES:
            del self._values[next(iter(self._values))]

    def take(self, key: _Key) -> float | None:
        """Return and forget what was noted; None if nothing was."""
        return self._values.pop(key, None)


class BuildTimes:
    """How long candidates took to build, by module: a builder writes, a search reads."""

    def __init__(self) -> None:
        self._seconds: _Notes[int] = _Notes()

    def note(self, key: int, seconds: float) -> None:
        """Remember a build's share of its batch's seconds."""
        self._seconds.note(key, seconds)

    def take(self, key: int) -> float | None:
        """Return and forget what was noted; None if nothing was."""
        return self._seconds.take(key)


class Incumbent:
    """The fastest known of the task whose batch is under way.

    A search says at each batch whose turn it is, and a runner races candidates against
    it, or against the best of the batch so far.
    """

    def __init__(self, seconds: float | None = None, floor_sec: float = 0.0) -> None:
        self.seconds = seconds
        self.floor_sec = floor_sec

    def offer(self, seconds: float) -> None:
        """Take a time that was measured if it is the best."""
        self.seconds = seconds if self.seconds is None else min(self.seconds, seconds)


class TimingErrors:
    """How far off measured times may be: a runner writes, a cost model reads.

    Times pass through MetaSchedule unchanged to the last bit, so they are their own keys.
    """

    def __init__(self) -> None:
        self._relative: _Notes[float] = _Notes()

    def note(self, seconds: float, stderr_sec: float) -> None:
        """Remember the standard error of a time; NaN where a single look gives none."""
        known = math.isfinite(stderr_sec)
        self._relative.note(seconds, stderr_sec / seconds if known else ONE_LOOK_ERROR)

    def take(self, seconds: float) -> float:
        """Return and forget the relative standard error of a time; NaN if not known."""
        relative = self._relative.take(seconds)
        return math.nan if relative is None else relative


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """What a cost model was taught by one batch."""

    rows: npt.NDArray[np.float32]  # features, in the order of the batch
    # relative standard errors of the times; NaN where unknown
    errors: npt.NDArray[np.float64] | None


class LastTrainingBatch:
    """The last batch that a cost model learned, for whoever keeps records of it."""

    def __init__(self) -> None:
        self.lesson: TrainingBatch | None = None

    def take(self, n: int) -> TrainingBatch | None:
        """Return and forget the lesson if it is one of ``n`` candidates; else None."""
        lesson, self.lesson = self.lesson, None
        return lesson if lesson is not None and len(lesson.rows) == n else None
