import itertools
import math

import numpy as np
import pytest

from benchmarks.scheduler.metrics import mean_latency_ms
from benchmarks.scheduler.oracle import OraclePolicy, future, steepest_rate
from tvm_adaptive.task_scheduler.arms import Decision
from tvm_adaptive.task_scheduler.stages import WarmUp
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.testing.replay import replay
from tvm_adaptive.testing.synthetic import SyntheticArm, record_arms


def task(latencies, *, name="a", weight=1.0, size=2):
    n = len(latencies)
    return TaskRecording(
        name, weight, 1e9, np.array(latencies, dtype=float), np.full(n, 0.5),
        np.full(n // size, size), np.full(n // size, 1.0),
    )  # fmt: skip


def test_the_future_by_hand():
    seconds, gained = future(task([9, 8, 7, 6, math.nan, 2], weight=3.0), 2, 2)
    assert seconds == pytest.approx([2.0, 4.0])
    assert gained == pytest.approx([3 * 2.0, 3 * 6.0])
    assert [len(each) for each in future(task([9, 8]), 2, 2)] == [0, 0]


def test_the_rate_looks_over_a_plateau():
    assert steepest_rate(task([9, 9, 9, 9, 1, 1]), 2, 2) == pytest.approx(8.0 / 4.0)
    assert steepest_rate(task([9, 9, 5, 5, 1, 1]), 2, 2) == pytest.approx(4.0 / 2.0)
    assert steepest_rate(task([9, 9, 9, 9]), 2, 2) == 0.0
    assert steepest_rate(task([9, 9]), 2, 2) == 0.0


class Ordered:
    """Plays a given order of slots."""

    def __init__(self, order):
        self.order = list(order)

    def choose(self, arms, rng):
        return Decision(self.order.pop(0), "x") if self.order else Decision(None, "end")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_no_order_is_better_on_concave_curves(seed):
    # Each arm has a warm-up slot and three more: all 1,680 orders of these are tried.
    rng = np.random.default_rng(seed)
    arms = tuple(
        SyntheticArm(f"arm{k}", float(rng.uniform(4, 9)), 1.0, tau_trials=float(rng.uniform(4, 20)))
        for k in range(3)
    )
    recording = record_arms(arms, n_trials=16, batch=4)
    # One round per task, so that a draw leaves the order within a batch alone.
    policy = OraclePolicy(recording, seed, warm_up=WarmUp(n_trials=None))
    run = replay(recording, policy, seed)
    warm = list(run.choices[:3])
    assert sorted(warm) == [0, 1, 2]
    orders = set(itertools.permutations([0, 1, 2] * 3))
    assert len(orders) == 1680
    horizon = recording.total_sec
    best = min(
        mean_latency_ms(replay(recording, Ordered([*warm, *order]), seed), horizon)
        for order in orders
    )
    # Trials within two rounds are shuffled, which bends the curves a little.
    assert mean_latency_ms(run, horizon) == pytest.approx(best, rel=0.02)
    assert mean_latency_ms(run, horizon) >= best - 1e-9


def test_it_ends_when_nothing_better_comes():
    arms = (SyntheticArm("flat", 2.0, 2.0, 5.0), SyntheticArm("falling", 4.0, 1.0, 5.0))
    recording = record_arms(arms, n_trials=64, batch=8)
    run = replay(recording, OraclePolicy(recording, 0), 0)
    assert run.ended == "policy"
    assert run.latency_ms[-1] == pytest.approx(run.final_ms)
    assert run.choices.count(0) == 1


def test_a_task_that_never_succeeds_is_not_played():
    broken = Recording(
        "net", (task([math.nan] * 4), task([4.0, 3.0, 2.0, 1.0], name="b")), 2, "", "", 0
    )
    run = replay(broken, OraclePolicy(broken, 0), 0)
    assert set(run.choices) == {1}
    assert run.latency_ms[-1] == run.final_ms
