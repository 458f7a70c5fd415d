"""Stopping rules: their statistics and their laws."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.runner.stopping import CVRule, PaperRule, PrecisionRule, looks, make_rule

NAMES = ["precision", "paper", "cv"]
rules = st.builds(
    lambda name, low, more: make_rule(name, min_batches=low, max_batches=low + more),
    st.sampled_from(NAMES),
    st.integers(2, 8),
    st.integers(0, 30),
)
times = st.lists(st.floats(1e-8, 1.0), min_size=1, max_size=45).map(np.array)


@given(rules, times)
def test_never_before_its_minimum_and_always_by_its_maximum(rule, batches):
    decision = rule.decide(batches)
    if len(batches) < rule.min_batches:
        assert not decision.stop
    if len(batches) >= rule.max_batches:
        assert decision.stop


@given(rules, times, st.sampled_from([2.0**-10, 8.0]))
def test_the_unit_of_time_does_not_matter(rule, batches, factor):
    assert rule.decide(batches * factor).stop == rule.decide(batches).stop


@given(rules)
def test_looks_go_from_the_minimum_to_the_maximum(rule):
    counts = looks(rule)
    assert counts[0] == rule.min_batches
    assert counts[-1] == rule.max_batches
    assert all(a < b for a, b in itertools.pairwise(counts))


@pytest.mark.parametrize("name", NAMES)
def test_equal_times_stop_at_the_minimum(name):
    rule = make_rule(name)
    decisions = [rule.decide(np.full(n, 1e-3)).stop for n in (1, 2, 3)]
    assert decisions == [False, False, True]


def test_paper_rule_looks_at_running_throughput():
    # Throughputs 1/1, 2/1.8, 3/2.6: mean 1.0883, population deviation 0.0639.
    batches = np.array([1.0, 0.8, 0.8])
    running = np.array([1.0, 2 / 1.8, 3 / 2.6])
    cv = running.std() / running.mean()
    assert cv == pytest.approx(0.0587, abs=1e-3)
    assert PaperRule(max_cv=cv * 1.01).decide(batches).stop
    assert not PaperRule(max_cv=cv * 0.99).decide(batches).stop


def test_cv_rule_looks_at_single_throughputs_and_trims_from_five_on():
    four = np.array([1.0, 1.0, 1.0, 2.0])
    assert not CVRule().decide(four).stop
    assert CVRule().decide(np.array([*four, 0.5])).stop  # 2.0 and 0.5 are left out


def test_precision_rule_needs_more_batches_for_more_noise():
    rng = np.random.default_rng(0)

    def batches_used(noise):
        used = []
        for _ in range(30):
            batches = 1.0 + noise * rng.standard_normal(48)
            used.append(next(n for n in looks(rule) if rule.decide(batches[:n]).stop))
        return np.mean(used)

    rule = PrecisionRule()
    assert batches_used(0.001) < batches_used(0.01) < batches_used(0.04)


def test_precision_rule_keeps_its_word_over_all_looks():
    rng = np.random.default_rng(1)
    rule = PrecisionRule(confidence=0.9)
    n_precise = n_wrong = 0
    for _ in range(600):
        batches = 1.0 + 0.03 * rng.standard_normal(48)
        n = next(n for n in looks(rule) if rule.decide(batches[:n]).stop)
        decision = rule.decide(batches[:n])
        if decision.reason == "precise":
            n_precise += 1
            n_wrong += abs(np.mean(batches[:n]) - 1.0) > rule.relative_half_width
    assert n_precise > 500
    assert n_wrong / n_precise < 0.1


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: np.array([1.0, 1.0]), "too-few"), (lambda: np.array([1.0, 2.0, 4.0]), "noisy")],
)
@pytest.mark.parametrize("name", NAMES)
def test_reasons_to_go_on(name, make, reason):
    decision = make_rule(name).decide(make())
    assert (decision.stop, decision.reason) == (False, reason)


def test_reason_of_the_maximum():
    rule = make_rule("precision", min_batches=2, max_batches=3)
    assert rule.decide(np.array([1.0, 2.0, 4.0])).reason == "exhausted"


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_travels(name):
    rule = make_rule(name, max_batches=7)
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidOptionError, match=r"'precision', 'paper', 'cv', but got 'median'"):
        make_rule("median")


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(InvalidOptionError, match=r"among max_cv, min_batches.*but got alpha"):
        make_rule("paper", alpha=0.1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("precision", {"relative_half_width": 0.0}, r"relative_half_width must be in \(0, 1\)"),
        ("precision", {"relative_half_width": float("nan")}, "relative_half_width"),
        ("precision", {"confidence": 1.0}, r"confidence must be in \(0, 1\) but got 1.0"),
        ("precision", {"min_batches": 1}, "min_batches must be at least 2 but got 1"),
        ("paper", {"max_batches": 2}, "max_batches must be at least 3 but got 2"),
        ("cv", {"max_cv": -1}, "max_cv must be above 0"),
        ("cv", {"runs_per_batch": 0}, "runs_per_batch must be at least 1 but got 0"),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(InvalidOptionError, match=message):
        make_rule(name, **options)
