"""Facts about trials that parts of a run share beside MetaSchedule's interfaces."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from tvm_adaptive.values.noise import MachineNoise
from tvm_adaptive.values.trial import Trial

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# Unfinished batches have some hundred trials; features of so many take 16 MB.
MAX_TRIALS = 4096


@dataclasses.dataclass(frozen=True)
class EarlierKernel:
    """A kernel that an earlier attempt at the run has timed, built again."""

    artifact: str
    args_info: tuple[Any, ...]  # of its arguments, as JSON objects
    sec: float  # its recorded time, on the scale of its task


@dataclasses.dataclass
class BatchFacts:
    """What is known of the task that a batch belongs to."""

    incumbent_sec: float | None = None  # of the fastest known candidate
    floor_sec: float = 0.0  # no kernel of the task can be faster
    weights: tuple[int, ...] = ()  # indices of arguments that every inference shares
    task: str = ""  # its name; empty if the search does not tell it
    # The fastest of earlier attempts, which links the times of this one to theirs.
    earlier: EarlierKernel | None = None

    def offer(self, seconds: float) -> None:
        """Keep a measured time if it is the best."""
        known_sec = self.incumbent_sec
        self.incumbent_sec = seconds if known_sec is None else min(known_sec, seconds)


class TrialLog:
    """The latest trials of a run, by the structural hashes of their modules.

    Threads other than the run's may only call :meth:`note_timing`, and use :attr:`noise`.
    """

    def __init__(self) -> None:
        # The search sets it before each batch; the runner keeps a copy for the batch.
        self.batch_facts = BatchFacts()
        self.noise = MachineNoise()  # of the run's timings
        self.has_anchors = False  # whether the runner corrects times by anchors; it says so
        self._trials: dict[int, Trial] = {}
        # By the artifact's path: MetaSchedule shows a runner no more of a candidate.
        self._errors: dict[str, float] = {}

    def get(self, key: int) -> Trial:
        """Return what is known of a trial; an empty one if nothing is."""
        return self._trials.get(key, Trial())

    def note(self, key: int, **known: Any) -> None:
        """Set fields of a trial."""
        _keep(self._trials, key, dataclasses.replace(self.get(key), **known))

    def note_timing(self, artifact: str, seconds: float, stderr_sec: float) -> None:
        """Note the standard error of a time; NaN where one micro-batch gives none."""
        error = stderr_sec / seconds if math.isfinite(stderr_sec) else self.noise.micro_batch_error
        _keep(self._errors, artifact, error)

    def identify(self, artifact: str, key: int) -> None:
        """Move the timing error of an artifact to its trial."""
        error = self._errors.pop(artifact, None)
        if error is not None:
            self.note(key, relative_error=error)


def _keep(values: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Set the latest value of a dictionary and drop the oldest beyond the limit."""
    values.pop(key, None)
    values[key] = value
    if len(values) > MAX_TRIALS:
        values.pop(next(iter(values)), None)
