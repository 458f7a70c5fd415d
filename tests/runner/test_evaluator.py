"""Measuring one candidate with a scripted timer and clock."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import AdaptiveError
from tvm_adaptive.runner.evaluator import FIXED_MAX_SEC, PRECISION_MAX_SEC, SLOW_RUN_SEC, evaluate
from tvm_adaptive.runner.stopping import looks, make_rule
from tvm_adaptive.values.trial import StopDecision


class Kernel:
    """A kernel with noise, its timer (one warm-up run per call) and the clock on the wall."""

    def __init__(self, run_sec, noise=0.0, seed=0, first_sec=None):
        self.run_sec, self.noise = run_sec, noise
        self.rng = np.random.default_rng(seed)
        self.first_sec = first_sec
        self.now_sec = 0.0
        self.calls = []

    def timer(self, number, repeat):
        self.calls.append((number, repeat))
        means = self.run_sec * np.exp(self.noise * self.rng.standard_normal(repeat))
        if self.first_sec is not None and len(self.calls) == 1:
            means[0] = self.first_sec
        self.now_sec += self.run_sec + number * means.sum()
        return list(means)

    def measure(self, name="precision", rule_options=None, **options):
        rule = make_rule(name, **(rule_options or {}))
        return evaluate(self.timer, rule, clock=lambda: self.now_sec, **options)


def test_a_quiet_kernel_takes_a_first_run_and_one_call():
    kernel = Kernel(1e-4)
    timing = kernel.measure()
    # 5 ms of warm-up; 20 runs of 0.1 ms fill 2 ms.
    assert kernel.calls == [(1, 1), (50, 1), (20, 3)]
    assert timing.mean_sec == pytest.approx(1e-4)
    assert (timing.n_runs, timing.n_batches, timing.reason) == (60, 3, "precise")
    assert timing.elapsed_sec == pytest.approx(kernel.now_sec)


def test_the_first_run_counts_when_micro_batches_are_single_runs():
    kernel = Kernel(20e-3)
    timing = kernel.measure()
    assert kernel.calls == [(1, 1), (1, 2)]
    assert timing.n_runs == 3


def test_a_rule_may_want_a_single_micro_batch():
    class Once:
        min_batches = max_batches = runs_per_batch = 1

        def decide(self, batch_means_sec):
            return StopDecision(stop=True, reason="once")

    kernel = Kernel(20e-3)
    timing = evaluate(kernel.timer, Once(), clock=lambda: kernel.now_sec)
    assert kernel.calls == [(1, 1), (1, 1)]
    assert (timing.n_runs, timing.n_batches) == (1, 1)


def test_the_number_of_runs_is_chosen_once():
    kernel = Kernel(3e-5, noise=0.2)
    kernel.measure()
    assert len({number for number, _ in kernel.calls[2:]}) == 1


def test_an_interrupted_first_run_is_mended_once():
    kernel = Kernel(1e-5, first_sec=4e-3)
    timing = kernel.measure()
    assert kernel.calls == [(1, 1), (1, 1), (200, 3)]
    assert (timing.n_runs, timing.n_batches) == (600, 3)


@pytest.mark.parametrize("name", ["precision", "paper", "cv"])
def test_a_slow_kernel_runs_twice(name):
    kernel = Kernel(SLOW_RUN_SEC)
    timing = kernel.measure(name)
    assert kernel.calls == [(1, 1)]
    assert (timing.reason, timing.n_runs, timing.n_batches) == ("slow", 1, 1)
    assert math.isnan(timing.stderr_sec)


def test_a_kernel_whose_minimum_does_not_fit_is_slow():
    timing = Kernel(PRECISION_MAX_SEC / 3).measure()
    assert timing.reason == "slow"


@given(st.floats(1e-7, 0.09), st.floats(0.0, 0.5), st.integers(0, 5))
def test_the_cap_on_seconds_holds_past_the_minimum(run_sec, noise, seed):
    kernel = Kernel(run_sec, noise, seed)
    timing = kernel.measure()
    if timing.reason == "slow":  # however long that run took, there is no second call
        assert kernel.calls == [(1, 1)]
        return
    # Past the minimum, one micro-batch of misjudged noise may go over.
    minimum = (sum(number * repeat for number, repeat in kernel.calls[:3]) + 4) * run_sec
    assert timing.elapsed_sec <= 3 * max(PRECISION_MAX_SEC, minimum)
    assert timing.reason in {"precise", "exhausted", "out-of-time"}
    assert timing.n_batches >= 2


def test_a_noisy_kernel_runs_out_of_time():
    timing = Kernel(1e-2, noise=0.3).measure()
    assert timing.reason == "out-of-time"
    assert timing.elapsed_sec <= PRECISION_MAX_SEC * 1.5


def test_paper_rule_is_asked_after_every_micro_batch_of_fifty():
    kernel = Kernel(1e-5, noise=1.0)
    timing = kernel.measure("paper", {"max_cv": 1e-6})
    assert kernel.calls == [(1, 1), (50, 3)] + 7 * [(50, 1)]
    assert timing.reason == "exhausted"


def test_paper_rule_lowers_its_runs_to_fit_the_cap():
    run_sec = 0.08
    kernel = Kernel(run_sec)
    kernel.measure("paper")
    assert kernel.calls[1] == (int(FIXED_MAX_SEC / (3 * run_sec)), 3)


def test_min_repeat_ms_is_shared_among_all_micro_batches():
    kernel = Kernel(1e-5)
    kernel.measure("paper", min_repeat_ms=100)
    assert kernel.calls[1] == (1000, 3)  # 100 ms over ten batches


def test_single_runs_hold_for_every_micro_batch():
    kernel = Kernel(1e-5, noise=0.1)
    kernel.measure(single_runs=True)
    assert {number for number, _ in kernel.calls} == {1}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1e-3])
@pytest.mark.parametrize("after", [0, 1])
def test_an_impossible_time_is_an_error(bad, after):
    calls = []

    def timer(number, repeat):
        calls.append(number)
        return [bad if len(calls) > after else 1e-3] * repeat

    with pytest.raises(AdaptiveError, match=r"returned .* s for a run, but a time is finite"):
        evaluate(timer, make_rule("precision"))


def test_a_wrong_number_of_times_is_an_error():
    with pytest.raises(AdaptiveError, match="asked for 1 micro-batches and returned 2"):
        evaluate(lambda number, repeat: [1e-3] * (repeat + 1), make_rule("precision"))


def test_the_times_are_right_within_three_percent_under_noise():
    errors = [
        abs(Kernel(1e-4, noise=0.03, seed=seed).measure().mean_sec / 1e-4 - 1) for seed in range(50)
    ]
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.9) < 0.03


def test_looks_are_asked_at_the_announced_counts():
    kernel = Kernel(1e-5, noise=0.5)
    rule = make_rule("precision")
    kernel.measure(max_sec=10.0)
    counts = np.cumsum([repeat for _, repeat in kernel.calls[2:]])
    assert counts.tolist() == looks(rule)
