"""What parts of a run tell each other beside MetaSchedule."""

from __future__ import annotations

import math

import pytest

from tvm_adaptive.values.trial_log import ONE_LOOK_ERROR, BuildTimes, Incumbent, TimingErrors


def test_a_build_time_is_taken_once() -> None:
    times = BuildTimes()
    times.note(5, 0.5)
    assert times.take(5) == 0.5
    assert times.take(5) is None


def test_the_incumbent_is_the_fastest_offered() -> None:
    incumbent = Incumbent()
    assert incumbent.seconds is None
    for seconds, best in ((3.0, 3.0), (4.0, 3.0), (1.0, 1.0)):
        incumbent.offer(seconds)
        assert incumbent.seconds == best


def test_errors_are_relative_and_taken_once() -> None:
    errors = TimingErrors()
    errors.note(2e-3, 1e-4)
    errors.note(7e-3, math.nan)
    assert errors.take(2e-3) == pytest.approx(0.05)
    assert errors.take(7e-3) == ONE_LOOK_ERROR
    assert math.isnan(errors.take(2e-3))
    assert math.isnan(errors.take(1.0))


def test_notes_that_nobody_takes_are_dropped() -> None:
    times, errors = BuildTimes(), TimingErrors()
    for number in range(1, 10_001):
        times.note(number, 0.5)
        errors.note(1e-3 * number, 1e-5)
    assert len(times._seconds) == len(errors._relative) == 4096
    assert times.take(1) is None
    assert math.isnan(errors.take(1e-3 * 1))
    assert times.take(10_000) == 0.5
    assert errors.take(1e-3 * 10_000) == pytest.approx(1e-6)
