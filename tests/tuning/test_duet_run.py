"""A whole run whose candidates are timed beside an anchor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_adaptive import tune_tir
from tvm_adaptive._tvm import te_workload
from tvm_adaptive.measure_callback.journal import read_journal
from tvm_adaptive.report import read_run
from tvm_adaptive.runner.duet import MAX_SHARE
from tvm_adaptive.tuning.config import DEFAULT, SearchConfig


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lanes", [1, 2])
def test_times_are_corrected_by_an_anchor(tmp_path: Path, lanes: int) -> None:
    config = DEFAULT.replace(search=SearchConfig(n_trials_per_round=8, lanes=lanes), store="none")
    report = tune_tir(te_workload("GMM"), work_dir=tmp_path, trials=64, seed=0, config=config)
    assert report.n_trials == 64
    events = read_journal(tmp_path / "journal.jsonl")
    duets = [event for event in events if event["event"] == "duet"]
    measured = [event for event in events if event["event"] == "measured"]
    assert [each["corrected_sec"] for each in duets] == [
        pytest.approx([ms / 1e3 for ms in each["latencies_ms"] if ms]) for each in measured
    ]
    repeated = [each for each in duets if each["repeats_sec"]]
    assert repeated
    assert all(min(each["repeats_sec"]) > 0 for each in repeated)
    # What a repeat takes longer than it was expected to is paid back later.
    spent_sec = sum(each["elapsed_sec"] for each in duets)
    searched_sec = duets[-1]["time_sec"] - duets[0]["time_sec"]
    assert spent_sec < 2 * MAX_SHARE * searched_sec
    trials = read_run(tmp_path).trials
    assert all(trial.reason for trial in trials if trial.ms == trial.ms)
