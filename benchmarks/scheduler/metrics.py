"""The quality of a schedule: area under the latency curve, and time to a quality."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError, check_positive
from tvm_adaptive.testing.replay import ReplayRun


@dataclasses.dataclass(frozen=True)
class TimeToQuality:
    """Seconds until a latency was reached."""

    sec: float  # lower is better; where ``censored``, the seconds after which it was given up
    censored: bool  # whether the latency was not reached: the truth is above ``sec``


def latency_at(run: ReplayRun, time_sec: float) -> float:
    """Return the end-to-end milliseconds at a time; what a slot brings counts from its end."""
    if time_sec < 0:
        raise InvalidOptionError(f"time_sec must not be negative but got {time_sec}.")
    return float(run.latency_ms[np.searchsorted(run.times_sec, time_sec, side="right") - 1])


def mean_latency_ms(run: ReplayRun, horizon_sec: float) -> float:
    """Return the area under the latency curve over the seconds it covers; lower is better."""
    check_positive("horizon_sec", horizon_sec)
    edges = np.append(np.minimum(run.times_sec, horizon_sec), horizon_sec)
    return float(np.sum(run.latency_ms * np.diff(edges)) / horizon_sec)


def time_to_within(run: ReplayRun, share: float, horizon_sec: float) -> TimeToQuality:
    """Return the seconds until the latency is within ``share`` of the final one."""
    reached = np.flatnonzero(run.latency_ms <= (1.0 + share) * run.final_ms)
    if len(reached) == 0 or run.times_sec[reached[0]] > horizon_sec:
        return TimeToQuality(horizon_sec, censored=True)
    return TimeToQuality(float(run.times_sec[reached[0]]), censored=False)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values, the right one for ratios."""
    if len(values) == 0 or not all(value > 0 for value in values):
        raise InvalidOptionError("A geometric mean needs values above 0, and at least one.")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
