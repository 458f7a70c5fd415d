"""Memory as a run grows: what each part keeps, and the process as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.micro.growth import BATCH, Growth, product, resumed, table


@pytest.mark.slow
def test_rounds_real_and_made_up_tell_what_they_left(tmp_path: Path) -> None:
    mods = [product(16), product(32)]
    rounds = list(Growth(mods, tmp_path).rounds(6 * BATCH, are_made_up=True))
    assert [each["n_trials"] for each in rounds] == [BATCH * n for n in range(1, 7)]
    assert rounds[0]["propose_sec"] > 0.0
    assert rounds[-1]["propose_sec"] == 0.0
    assert "dataset, MB" in table(rounds, [6 * BATCH])
    after = resumed(mods, tmp_path)
    assert after["n_records"] == 7 * BATCH
    assert after["n_samples"] == 2 * BATCH  # what was made up is in no store


@pytest.mark.slow
def test_three_thousand_trials_of_two_tasks_need_little_memory(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    options = ["--made-up", "--tasks", "2", "--trials", "1000", "4000", "--arms", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.micro.growth", *options]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    rounds = json.loads(out.read_text())["rounds"]
    rss_mb = {each["n_trials"]: each["rss_mb"] for each in rounds}
    # Pools fill up in the first ten rounds of each task. Records alone would take 150 MB.
    assert rss_mb[4000] - rss_mb[992] < 60
