import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Decision
from tvm_adaptive.task_scheduler.baselines import at_random, round_robin
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.testing.replay import replay


class Scripted:
    """Decides as the list says."""

    def __init__(self, *decisions):
        self.decisions = list(decisions)
        self.seen = []

    def choose(self, arms, rng):
        self.seen.append(arms)
        return self.decisions.pop(0) if self.decisions else Decision(None, "end")


def task(name, latencies, *, sec=1.0, overhead=10.0, weight=1.0, size=4):
    # One round: a draw then shuffles everything, unless all trials are alike.
    n = len(latencies)
    sizes = np.array([size] * (n // size) + [n % size] * (n % size > 0))
    return TaskRecording(
        name, weight, 1e9, np.array(latencies, dtype=float), np.full(n, sec), sizes,
        np.full(len(sizes), overhead),
    )  # fmt: skip


def recording(*tasks, batch=4):
    return Recording("net", tasks, batch, "none", "none", 0)


TWO = recording(task("a", [3.0] * 10, weight=2.0), task("b", [5.0] * 4, sec=2.0))


def test_a_slot_costs_its_search_and_its_trials():
    policy = Scripted(Decision(0, "x"), Decision(1, "y", n_trials=1), Decision(0, "z", n_trials=6))
    run = replay(TWO, policy, 0)
    # Six trials are asked for: one batch of four, and one of the two that are left.
    assert run.times_sec == pytest.approx([0.0, 14.0, 26.0, 26.0 + 14.0 + 12.0])
    assert run.choices == (0, 1, 0)
    assert run.reasons == ("x", "y", "z")
    assert run.n_trials == (4, 1, 6)
    assert run.ended == "policy"
    assert len(run.decide_sec) == 4
    last = policy.seen[-1]
    assert [arm.n_slots for arm in last] == [2, 1]
    assert [arm.spent_sec for arm in last] == pytest.approx([40.0, 12.0])
    assert [arm.n_trials for arm in last] == [10, 1]


def test_a_task_ends_with_its_recording():
    policy = Scripted(Decision(1, "all"), Decision(0, "x"), Decision(0, "x"), Decision(0, "x"))
    run = replay(TWO, policy, 0)
    assert [arms[1].finished for arms in policy.seen] == [False, True, True, True]
    assert run.n_trials == (4, 4, 4, 2)
    assert run.ended == "exhausted"


def test_a_finished_arm_cannot_be_chosen():
    policy = Scripted(Decision(1, "x"), Decision(1, "x"))
    with pytest.raises(InvalidOptionError, match=r"arm 1 \(b\), which is finished"):
        replay(TWO, policy, 0)


def test_a_retired_arm_is_finished():
    policy = Scripted(Decision(0, "x", retired=(1,)))
    replay(TWO, policy, 0)
    assert policy.seen[1][1].finished


def test_latency_before_a_result_is_the_slowest_recorded():
    mixed = recording(task("a", [math.nan] * 4 + [6.0, 2.0], size=4, weight=2.0), task("b", [5.0]))
    failing = task("never", [math.nan] * 3)
    run = replay(recording(*mixed.tasks, failing), round_robin(), 3)
    assert run.latency_ms[0] == pytest.approx(2.0 * 6.0 + 5.0)
    assert run.latency_ms[-1] == run.final_ms == pytest.approx(2.0 * 2.0 + 5.0)
    assert (np.diff(run.latency_ms) <= 0).all()


def test_a_budget_ends_the_run_after_the_slot():
    run = replay(TWO, round_robin(), 0, budget_sec=20.0)
    assert run.ended == "budget"
    assert run.times_sec == pytest.approx([0.0, 14.0, 14.0 + 18.0])


def test_another_batch_size():
    assert replay(TWO, Scripted(Decision(0, "x")), 0, batch=3).n_trials == (3,)


def test_same_seed_same_run():
    long = recording(task("a", [3.0] * 80), task("b", [5.0] * 80, sec=2.0))
    runs = [replay(long, at_random(), seed) for seed in (4, 4, 5)]
    assert runs[0].choices == runs[1].choices
    np.testing.assert_array_equal(runs[0].times_sec, runs[1].times_sec)
    assert runs[0].choices != runs[2].choices


@pytest.mark.parametrize("name", ["budget_sec", "batch"])
def test_bad_options_are_refused(name):
    with pytest.raises(InvalidOptionError, match=f"{name} must be above 0 but got 0"):
        replay(TWO, round_robin(), 0, **{name: 0})
