"""The quality of a schedule: area under the latency curve, and time to a quality."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.stats import Interval, exactly
from tvm_adaptive.errors import InvalidOptionError, check_positive
from tvm_adaptive.testing.replay import ReplayRun


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


def time_to_within(run: ReplayRun, share: float, horizon_sec: float) -> Interval:
    """Return the seconds until the latency is within ``share`` of the final one.

    Where that was not reached, the horizon is a lower bound.
    """
    reached = np.flatnonzero(run.latency_ms <= (1.0 + share) * run.final_ms)
    if len(reached) == 0 or run.times_sec[reached[0]] > horizon_sec:
        return Interval(horizon_sec, math.inf)
    return exactly(float(run.times_sec[reached[0]]))
