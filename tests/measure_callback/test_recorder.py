import math
from types import SimpleNamespace

import pytest

from tests.journals import MemoryJournal
from tvm_adaptive.errors import OUT_OF_TIME
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.measure_callback.recorder import (
    Recorder as TVMRecorder,
)

# C++ hands over lists of its own; the Python side takes any.
Recorder = TVMRecorder._cls


def built(error=None):
    return SimpleNamespace(error_msg=error)


def ran(*seconds, error=None):
    return SimpleNamespace(run_secs=list(seconds) or None, error_msg=error)


@pytest.fixture
def progress():
    return RunProgress([TaskProgress("a", 2.0), TaskProgress("b", 3.0)])


def test_trials_errors_and_bests_are_counted(progress):
    rounds = []
    recorder = Recorder(progress, rounds.append)
    recorder.apply(
        None,
        0,
        [None] * 3,
        [built(), built("no"), built()],
        [ran(3.0), ran(error="x"), ran(1, 2, 9)],
    )
    task = progress.tasks[0]
    assert (task.n_trials, task.n_errors, task.best_sec) == (3, 1, 2)
    assert progress.errors == {"no": 1}
    assert progress.weighted_sec == math.inf
    recorder.apply(None, 1, [None], [built()], [ran(0.5)])
    assert progress.weighted_sec == pytest.approx(2 * 2 + 3 * 0.5)
    assert (progress.n_trials, progress.n_errors, progress.current) == (4, 1, "b")
    assert rounds == [progress, progress]


def test_the_two_fastest_and_the_build_of_the_fastest_are_known(progress):
    recorder = Recorder(progress, build_sec_of=lambda candidate: candidate / 10)
    task = progress.tasks[0]
    known = []
    for candidates, secs in (([1, 2, 3], [3.0, 2.0, 4.0]), ([4, 5], [2.5, 9.0]), ([6], [1.0])):
        recorder.apply(None, 0, candidates, [built()] * len(secs), [ran(sec) for sec in secs])
        known.append((task.best_sec, task.second_sec, task.build_sec))
    assert known == [(2.0, 3.0, 0.2), (2.0, 2.5, 0.2), (1.0, 2.0, 0.6)]


def test_the_journal_gets_every_trial_in_order(progress):
    journal = MemoryJournal()
    scheduler = SimpleNamespace(tasks_=[SimpleNamespace(flop=1e9), SimpleNamespace(flop=5)])
    results = [ran(2e-3, 1e-3, 9e-3), ran(error="x"), ran(4e-3)]
    Recorder(progress, journal=journal).apply(scheduler, 1, [None] * 3, [built()] * 3, results)
    (fields,) = journal.events
    assert fields["event"] == "measured"
    assert fields["latencies_ms"] == pytest.approx([2.0, None, 4.0])
    assert (fields["task"], fields["weight"], fields["flop"]) == ("b", 3.0, 5.0)


def test_a_scheduler_that_tells_no_flop_is_no_error(progress):
    journal = MemoryJournal()
    Recorder(progress, journal=journal).apply(None, 0, [None], [built()], [ran(1.0)])
    assert journal.events[0]["flop"] is None


def test_an_empty_round_changes_nothing(progress):
    Recorder(progress).apply(None, 0, [], [], [])
    assert progress.n_trials == 0


def test_an_observer_that_raises_does_not_end_the_run(progress):
    def fail(_):
        raise RuntimeError("display broke")

    journal = MemoryJournal()
    Recorder(progress, fail, journal).apply(None, 0, [None], [built()], [ran(1.0)])
    assert journal.events[-1]["event"] == "error"
    assert "display broke" in journal.events[-1]["message"]


def test_what_was_not_tried_for_want_of_time_is_no_trial(progress):
    journal = MemoryJournal()
    late = f"AdaptiveRunner: Error: {OUT_OF_TIME}"
    results = [ran(3e-3), ran(error=late), ran(error="x")]
    Recorder(progress, journal=journal).apply(None, 0, [None] * 3, [built()] * 3, results)
    task = progress.tasks[0]
    assert (task.n_trials, task.n_errors) == (2, 1)
    assert journal.events[0]["latencies_ms"] == [pytest.approx(3.0), None]
    assert journal.events[0]["n_candidates"] == 2
    assert progress.errors == {"x": 1}
