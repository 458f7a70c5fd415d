"""Compilers and devices that fail for a share of the candidates, and runs that go on."""

from __future__ import annotations

import collections
import math
from pathlib import Path

import pytest

from benchmarks.faults.injection import Faults, injected
from tvm_adaptive import TuneConfig, tune
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import FinishConfig, MeasureConfig, SearchConfig

QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=8, population_size=64, genetic_num_iters=1),
    measure=MeasureConfig(timeout_sec=2.0, build_timeout_sec=10.0),
    finish=FinishConfig(top_k=2, max_task_sec=0.5),
    store="none",
)
SHARE = 0.3


def test_each_fault_has_its_share() -> None:
    faults = Faults(abort=0.1, nan=0.2, wrong=0.05, seed=3)
    counts = collections.Counter(faults.of(number) for number in range(20_000))
    shares = {name: n / 20_000 for name, n in counts.items()}
    assert shares == pytest.approx({"": 0.65, "abort": 0.1, "nan": 0.2, "wrong": 0.05}, abs=0.01)


def test_a_candidate_always_does_the_same_and_the_seed_decides() -> None:
    first, other = Faults(nan=0.5, seed=1), Faults(nan=0.5, seed=2)
    deeds = [first.of(number) for number in range(50)]
    assert deeds == [first.of(number) for number in range(50)]
    assert deeds != [other.of(number) for number in range(50)]


@pytest.mark.parametrize("shares", [{"nan": -0.1}, {"nan": 0.6, "abort": 0.6}])
def test_shares_are_checked(shares: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError, match="at least 0, and 1 in all"):
        Faults(**shares)


def test_the_names_mean_what_they_meant_after_it() -> None:
    before = {part: dict(each.constructors) for part, each in registry.PARTS.items()}
    with pytest.raises(KeyError), injected(Faults(nan=1.0)):
        raise KeyError
    assert {part: dict(each.constructors) for part, each in registry.PARTS.items()} == before


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("abort", "SIGABRT"),
        ("segfault", "SIGSEGV"),
        ("exit", "exit code 0"),
        ("hang", "killed after 2 s of running"),
        ("nan", "which is no time"),
        ("negative", "which is no time"),
        ("zero", "which is no time"),
        ("compile_crash", "SIGABRT"),
        ("compile_hang", "timeout"),
    ],
)
@pytest.mark.slow
def test_a_run_outlives_it(fault: str, text: str, tmp_path: Path) -> None:
    with injected(Faults(**{fault: SHARE})):
        report = tune("te:GMM", work_dir=tmp_path, trials=24, seed=3, config=QUICK)
    assert report.n_trials == 24
    assert 0 < report.n_errors < 24
    assert any(text in message for message in report.errors)
    assert report.comparison is not None
    assert report.comparison.agree
    assert math.isfinite(report.weighted_sec)


def test_a_run_outlives_crashes_and_hangs(tmp_path: Path) -> None:
    # Which candidates fail depends on the code that the compiler makes for this processor; that
    # none of 12 hangs, or none crashes, has a chance of 0.6 %.
    with injected(Faults(abort=0.35, hang=0.35)):
        report = tune("te:GMM", work_dir=tmp_path, trials=12, seed=3, config=QUICK)
    assert report.n_trials == 12
    assert any("SIGABRT" in message for message in report.errors)
    assert any("killed after 2 s of running" in message for message in report.errors)
    assert 0 < report.n_errors < 12
    assert report.comparison is not None
    assert report.comparison.agree


@pytest.mark.parametrize("fault", ["wrong", "swapped", "lie", "leak"])
@pytest.mark.slow
def test_what_is_no_error_does_not_win_either(fault: str, tmp_path: Path) -> None:
    with injected(Faults(**{fault: SHARE})):
        report = tune("te:GMM", work_dir=tmp_path, trials=24, seed=3, config=QUICK)
    assert report.n_trials == 24
    assert report.comparison is not None
    assert report.comparison.agree
    # The time reported for the winner is what it takes: a lie is off by a hundred, load by less.
    assert 0.1 < report.comparison.after_sec / report.tasks[0].best_sec < 10.0
    if fault == "wrong":
        assert any("the kernel does not do them" in message for message in report.errors)
