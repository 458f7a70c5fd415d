"""The order of the policies on networks for which it is known."""

import dataclasses

import numpy as np
import pytest

from benchmarks.scheduler.metrics import mean_latency_ms, time_to_within
from benchmarks.scheduler.oracle import OraclePolicy
from benchmarks.scheduler.varied import varied_arms
from benchmarks.stats import geometric_mean
from tvm_adaptive.task_scheduler.baselines import (
    GradientPolicy,
    at_random,
    linear,
    round_robin,
)
from tvm_adaptive.task_scheduler.policy import DEFAULT, DynaTunePolicy
from tvm_adaptive.testing.replay import replay
from tvm_adaptive.testing.synthetic import SyntheticArm, record_arms

# One arm has everything to gain, one is dear and flat, one is cheap: the order is known.
KNOWN = (
    SyntheticArm("flat", 20.0, 19.9, 10.0, flop=8e9, spread=0.01, overhead_sec=2.0),
    SyntheticArm("rich", 30.0, 3.0, 40.0, flop=4e9, spread=0.05, overhead_sec=2.0),
    SyntheticArm("cheap", 0.002, 0.001, 10.0, flop=1e6, spread=0.05, overhead_sec=2.0),
    SyntheticArm("some", 8.0, 4.0, 20.0, flop=1e9, spread=0.05, overhead_sec=2.0),
)


def test_greedy_by_gain_plays_the_rich_arm_first():
    recording = record_arms(KNOWN, n_trials=256, seed=1)
    run = replay(recording, DynaTunePolicy(), 1, budget_sec=0.4 * recording.total_sec)
    after_warm_up = [
        k for k, reason in zip(run.choices, run.reasons, strict=True) if reason == "index"
    ]
    # Of the others, too, little is known at first.
    assert after_warm_up[0] == 1
    assert after_warm_up[:6].count(1) >= 3
    counts = np.bincount(run.choices, weights=run.n_trials, minlength=4)
    assert np.argmax(counts) == 1
    assert counts[2] == np.min(counts)
    # A task that can give back 0.002 ms of 30 gets a warm-up, and hardly more.
    assert counts[2] <= 16


def test_the_order_of_policies_on_known_arms():
    recording = record_arms(KNOWN, n_trials=256, seed=1)
    horizon = recording.total_sec
    policies = {
        "oracle": lambda seed: OraclePolicy(recording, seed),
        "default": lambda _: DynaTunePolicy(),
        "round-robin": lambda _: round_robin(),
        "linear": lambda _: linear(),
    }
    area = {
        name: np.mean(
            [mean_latency_ms(replay(recording, make(seed), seed), horizon) for seed in range(3)]
        )
        for name, make in policies.items()
    }
    assert area["oracle"] <= area["default"] < area["round-robin"]
    assert area["default"] < area["linear"]


@pytest.mark.slow
def test_regret_on_varied_networks():
    """Over networks drawn at random the order of policies is what it must be."""
    policies = {
        "oracle": OraclePolicy,
        "default": lambda _recording, _seed: DynaTunePolicy(),
        "records": lambda _recording, _seed: DynaTunePolicy(
            dataclasses.replace(DEFAULT, method="records")
        ),
        "gradient": lambda _recording, _seed: GradientPolicy(),
        "round-robin": lambda _recording, _seed: round_robin(),
        "random": lambda _recording, _seed: at_random(),
    }
    regret = {name: [] for name in policies}
    to_5 = {name: [] for name in policies}
    for seed in range(8):
        recording = record_arms(varied_arms(12, seed), n_trials=256, seed=seed)
        horizon = recording.total_sec
        for name, make in policies.items():
            run = replay(recording, make(recording, seed), seed)
            regret[name].append(mean_latency_ms(run, horizon) / recording.final_ms)
            to_5[name].append(time_to_within(run, 0.05, horizon).low)
    mean = {name: geometric_mean(values) for name, values in regret.items()}
    assert mean["oracle"] < mean["default"] < mean["gradient"] < mean["round-robin"]
    assert mean["oracle"] < mean["records"] < mean["round-robin"]
    assert mean["oracle"] < mean["random"]
    speed = [slow / fast for slow, fast in zip(to_5["round-robin"], to_5["default"], strict=True)]
    assert geometric_mean(speed) > 1.3
