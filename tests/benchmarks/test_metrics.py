import math

import numpy as np
import pytest

from benchmarks.scheduler.metrics import latency_at, mean_latency_ms, time_to_within
from benchmarks.stats import Interval, exactly
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.testing.replay import ReplayRun


@pytest.fixture
def run():
    return ReplayRun(
        times_sec=np.array([0.0, 10.0, 30.0]),
        latency_ms=np.array([8.0, 4.0, 2.0]),
        choices=(0, 0),
        reasons=("x", "x"),
        n_trials=(1, 1),
        decide_sec=np.zeros(2),
        final_ms=1.95,
        ended="exhausted",
    )


@pytest.mark.parametrize(
    ("time_sec", "latency"), [(0.0, 8.0), (9.9, 8.0), (10.0, 4.0), (30.0, 2.0), (1e9, 2.0)]
)
def test_a_slot_counts_from_its_end(run, time_sec, latency):
    assert latency_at(run, time_sec) == latency


@pytest.mark.parametrize(
    ("horizon", "mean"), [(5.0, 8.0), (20.0, (80 + 40) / 20), (40.0, (80 + 80 + 20) / 40)]
)
def test_area_by_hand(run, horizon, mean):
    assert mean_latency_ms(run, horizon) == pytest.approx(mean)


def test_time_to_quality(run):
    assert time_to_within(run, 0.05, 100.0) == exactly(30.0)
    assert time_to_within(run, 1.10, 100.0) == exactly(10.0)
    assert time_to_within(run, 0.01, 100.0) == Interval(100.0, math.inf)
    assert time_to_within(run, 0.05, 20.0) == Interval(20.0, math.inf)


def test_bad_times_are_refused(run):
    with pytest.raises(InvalidOptionError, match="time_sec must not be negative"):
        latency_at(run, -1.0)
    with pytest.raises(InvalidOptionError, match="horizon_sec must be above 0"):
        mean_latency_ms(run, 0.0)
