"""What parts of a run tell each other beside MetaSchedule."""

from __future__ import annotations

import math

import pytest

from tvm_adaptive.values.trial import Trial
from tvm_adaptive.values.trial_log import MAX_TRIALS, BatchFacts, TrialLog


def test_what_parts_note_of_a_trial_is_kept_together() -> None:
    log = TrialLog()
    assert log.get(5) == Trial()
    log.note(5, build_sec=0.5)
    log.note(5, relative_error=0.1)
    assert log.get(5) == Trial(build_sec=0.5, relative_error=0.1)


def test_the_incumbent_is_the_fastest_offered() -> None:
    facts = BatchFacts()
    assert facts.incumbent_sec is None
    for seconds, best in ((3.0, 3.0), (4.0, 3.0), (1.0, 1.0)):
        facts.offer(seconds)
        assert facts.incumbent_sec == best


def test_errors_are_relative_and_come_with_the_artifact() -> None:
    log = TrialLog()
    log.note_timing("one.so", 2e-3, 1e-4)
    log.note_timing("two.so", 7e-3, math.nan)
    for key, artifact in enumerate(("one.so", "two.so", "three.so")):
        log.identify(artifact, key)
    assert log.get(0).relative_error == pytest.approx(0.05)
    assert log.get(1).relative_error == log.noise.micro_batch_error
    assert math.isnan(log.get(2).relative_error)


def test_old_trials_are_dropped() -> None:
    log = TrialLog()
    for number in range(2 * MAX_TRIALS):
        log.note(number, build_sec=0.5)
        log.note_timing(str(number), 1.0, 0.5)
    known = [log.get(number).build_sec is not None for number in range(2 * MAX_TRIALS)]
    assert known == [False] * MAX_TRIALS + [True] * MAX_TRIALS
    for number in range(2 * MAX_TRIALS):
        log.identify(str(number), number)
    assert sum(log.get(number).relative_error == 0.5 for number in range(2 * MAX_TRIALS)) == (
        MAX_TRIALS
    )
