"""Robust location and standard error of micro-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tvm_adaptive.runner.summary import summarize, without_warmup

times = st.lists(st.floats(1e-8, 1.0), min_size=1, max_size=30).map(np.array)


def test_one_batch_has_no_error():
    summary = summarize(np.array([0.5]))
    assert (summary.mean_sec, summary.dof, summary.n_batches) == (0.5, 0.0, 1)
    assert math.isnan(summary.stderr_sec)


def test_two_batches_give_their_mean():
    summary = summarize(np.array([1.0, 3.0]))
    assert summary.mean_sec == 2.0
    assert summary.stderr_sec == pytest.approx(1.0)  # sd sqrt(2) over sqrt(2)
    assert summary.dof == 1.0


def test_three_batches_give_the_median_with_a_widened_error():
    summary = summarize(np.array([1.0, 2.0, 9.0]))
    assert summary.mean_sec == 2.0
    sd = math.sqrt(((1 - 4) ** 2 + (2 - 4) ** 2 + (9 - 4) ** 2) / 2)
    assert summary.stderr_sec == pytest.approx(math.sqrt(math.pi / 2) * sd / math.sqrt(3))


def test_trimmed_mean_agrees_with_scipy():
    batches = np.sort(np.random.default_rng(0).lognormal(sigma=0.5, size=25))[::-1].copy()
    batches[0], batches[12] = batches[12], batches[0]  # no outlier at the front
    summary = summarize(batches)
    assert (summary.n_batches, summary.dof) == (25, 14.0)
    assert summary.mean_sec == pytest.approx(stats.trim_mean(batches, 0.2))
    # scipy has Tukey and McLaughlin's s_w sqrt(n) / h; ours is Yuen's with the same s_w.
    s_w = float(stats.mstats.trimmed_stde(batches, limits=(0.2, 0.2))) * 15 / math.sqrt(25)
    assert summary.stderr_sec == pytest.approx(s_w * math.sqrt(24 / (15 * 14)))


def test_one_hiccup_in_ten_does_not_move_the_time():
    batches = np.full(10, 1e-3)
    batches[4] = 1.0
    summary = summarize(batches)
    assert summary.mean_sec == pytest.approx(1e-3)
    assert summary.stderr_sec == pytest.approx(0.0, abs=1e-15)


def test_a_slow_first_batch_is_dropped():
    clean = np.array([1.0, 1.01, 0.99, 1.0, 1.02])
    assert np.array_equal(without_warmup(np.array([1.5, *clean])), clean)
    assert summarize(np.array([1.5, *clean])).n_batches == 5


def test_a_slow_first_batch_stays_when_there_are_too_few_others():
    few = np.array([1.5, 1.0, 1.01, 0.99])
    assert np.array_equal(without_warmup(few), few)


def test_a_slow_later_batch_is_not_warmup():
    batches = np.array([1.0, 1.01, 1.5, 0.99, 1.02, 1.0])
    assert np.array_equal(without_warmup(batches), batches)


def test_no_batch_is_an_error():
    with pytest.raises(ValueError, match="at least one micro-batch"):
        summarize(np.array([]))


@given(times)
def test_the_location_lies_within_the_data(batches):
    summary = summarize(batches)
    slack = 1e-12 * batches.max()
    assert batches.min() - slack <= summary.mean_sec <= batches.max() + slack
    assert math.isnan(summary.stderr_sec) == (summary.n_batches == 1)
    assert not summary.stderr_sec < 0.0


@given(times, st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**10]))
def test_a_change_of_unit_changes_nothing_else(batches, factor):
    one, other = summarize(batches), summarize(batches * factor)
    assert other.mean_sec == pytest.approx(one.mean_sec * factor)
    assert other.stderr_sec == pytest.approx(one.stderr_sec * factor, nan_ok=True)
    assert (one.dof, one.n_batches) == (other.dof, other.n_batches)


@given(st.lists(st.floats(1e-8, 1.0), min_size=2, max_size=30), st.randoms())
def test_the_order_after_the_first_does_not_matter(batches, random):
    rest = batches[1:]
    random.shuffle(rest)
    one, other = summarize(np.array(batches)), summarize(np.array([batches[0], *rest]))
    assert other.mean_sec == pytest.approx(one.mean_sec)
    assert other.stderr_sec == pytest.approx(one.stderr_sec, nan_ok=True, abs=1e-12)


def test_the_interval_covers_the_truth_under_normal_noise():
    rng = np.random.default_rng(1)
    n_trials = 2000
    hits = 0
    for _ in range(n_trials):
        summary = summarize(rng.normal(1.0, 0.05, size=12))
        half = stats.t.ppf(0.975, summary.dof) * summary.stderr_sec
        hits += abs(summary.mean_sec - 1.0) <= half
    # Four standard deviations of a binomial share around 95 %, and the loss that
    # dropping a first batch by its own value may cost.
    assert hits / n_trials == pytest.approx(0.95, abs=0.025)
