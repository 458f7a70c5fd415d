"""Frozen values that stages exchange.

Throughout the package *throughput* is relative to the best measured for the same task: 1.0
is as fast as the incumbent, higher is better.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import is_untried

FloatArray = npt.NDArray[np.float64]

# MetaSchedule records it as the time of a failed trial; no real time exceeds a tenth.
RECORDED_FAILURE_SEC = 1e10
FAILED_SEC = RECORDED_FAILURE_SEC / 10
# A run first measures so many of a task's best prior trials again: the second in case the
# first was luck.
N_VERIFIED = 2


def median_sec(run_secs: Iterable[float] | None) -> float:
    """Return the median of a trial's runs; NaN if it cannot be a time."""
    seconds = [float(sec) for sec in run_secs or ()]
    middle = statistics.median(seconds) if seconds else math.nan
    return middle if 0 < middle < FAILED_SEC else math.nan


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate and the facts known of it so far."""

    run_secs: tuple[float, ...] = ()  # empty before it is measured and for a failure
    failure: str | None = None  # the error message of its build or its measurement
    build_sec: float | None = None  # its share of its batch's build time
    relative_error: float = math.nan  # standard error of its time over the time
    features: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, run: Any, built: Any = None) -> Trial:
        """Return the trial of MetaSchedule's results; one with a message has no times."""
        failure = (None if built is None else built.error_msg) or run.error_msg
        if failure is not None:
            return cls(failure=str(failure))
        return cls(tuple(float(sec) for sec in run.run_secs or ()))

    @property
    def seconds(self) -> float:
        """The median of its runs; NaN for a failure."""
        return median_sec(self.run_secs)

    @property
    def recorded_secs(self) -> list[float]:
        """The times for a database."""
        return list(self.run_secs) or [RECORDED_FAILURE_SEC]

    @property
    def is_untried(self) -> bool:
        """Whether its failure says nothing of the candidate: it does not count as a trial."""
        return is_untried(self.failure)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A cost model's posterior of n candidates."""

    mean: FloatArray
    std: FloatArray

    def __post_init__(self) -> None:
        if self.mean.shape != self.std.shape or self.mean.ndim != 1:
            raise ValueError(
                "Expected mean and std to be arrays of the same shape (n,), "
                f"but they had shapes {self.mean.shape} and {self.std.shape}."
            )

    def __len__(self) -> int:
        return int(self.mean.shape[0])


@dataclasses.dataclass(frozen=True)
class StopDecision:
    """A decision to stop or continue the measurement of a candidate, with its reason."""

    stop: bool
    reason: str  # one word for the journal (``"precise"``, ``"exhausted"``, ...); never empty

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("A StopDecision needs a reason; give one word for the journal.")


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measured candidate."""

    mean_sec: float  # robust location of the seconds of one run, lower is better
    stderr_sec: float  # standard error of ``mean_sec``; ``nan`` when only one micro-batch was run
    n_runs: int  # runs of the kernel that count (the warm-up is not among them)
    n_batches: int  # micro-batches; each gave one mean
    reason: str  # why measuring stopped, from the rule's :class:`StopDecision`
    elapsed_sec: float  # wall-clock seconds spent measuring, warm-up included


@dataclasses.dataclass(frozen=True)
class Exploration:
    """The share of random candidates in a batch, with its origin."""

    epsilon: float  # in [0, 1]
    # "posterior", "fixed", "untrained", "initial", "analytical", "recalled", "no-success-yet",
    # "nothing-random", "no-variance"
    reason: str
    # mean posterior standard deviation of the random plans, normalised throughput; NaN unless
    # the reason is "posterior"
    mean_std: float = float("nan")
    n_plans: int = 0  # random plans that the mean was taken over

    def __post_init__(self) -> None:
        if not 0.0 <= self.epsilon <= 1.0:
            raise ValueError(f"epsilon must be in [0, 1] but got {self.epsilon}.")


@dataclasses.dataclass(frozen=True)
class Promise:
    """A cost model's forecast for a task's next candidates."""

    # share of its latency that the best unmeasured candidate is expected to save, in [0, 1)
    expected_drop: float
    # rank correlation of the last forecasts of the task's family with measured times
    accuracy: float
