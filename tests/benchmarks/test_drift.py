from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import drift
from tvm_adaptive.tuning.config_file import read_config


def test_each_condition_is_tuned_once_and_loaded_where_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, busy = [], []

    @contextlib.contextmanager
    def load(period_sec: float) -> Iterator[None]:
        busy.append(period_sec)
        yield
        busy.clear()

    def run(command: list[str], _limit_sec: float) -> None:
        options = dict(zip(command[2::2], command[3::2], strict=True))
        runs.append((read_config(Path(options["--config"])).measure.duet, bool(busy)))
        folder = Path(options["--work-dir"])
        folder.mkdir()
        (folder / "journal.jsonl").write_text(json.dumps({"event": "end"}) + "\n")

    def time_anew(_folder: Any, _workload: Any, _target: Any, entries: Any, **_: Any) -> Any:
        return {each.name: [1.0 + 0.1 * n] * 3 for n, each in enumerate(entries)}, {}

    monkeypatch.setattr(drift, "run", run)
    monkeypatch.setattr(drift, "time_anew", time_anew)
    monkeypatch.setattr(drift, "load", load)
    for _ in range(2):
        drift.main([str(tmp_path / "out"), "--workloads", "te:GMM", "--seeds", "0"])
    assert runs == [(True, False), (True, True), (False, False), (False, True)]
    *_, row, mean = capsys.readouterr().out.splitlines()
    assert row.startswith("| te:GMM, 0 | 1 ms | 1.100 (1.100 to 1.100) | 1.200 ")
    assert mean == "| *geometric mean* |  | 1.100 | 1.200 | 1.300 |"


def test_the_load_is_over_when_the_run_is() -> None:
    with drift.load(0.2) as processes:
        assert len(processes) == len(os.sched_getaffinity(0))
        time.sleep(1.0)
        assert all(each.is_alive() for each in processes)
    assert not any(each.is_alive() for each in processes)


def test_a_condition_that_could_not_be_timed_says_why() -> None:
    row = {"workload": "te:GMM", "seed": 0, "ms": {"quiet": [2.0, 4.0]}, "errors": {"load": "no"}}
    _, _, line, mean = drift.table([row]).splitlines()
    assert line == "| te:GMM, 0 | 3 ms | no |  |  |"
    assert mean == "| *geometric mean* |  |  |  |  |"
    row = {"workload": "te:GMM", "seed": 0, "ms": {"load": [2.0]}, "errors": {"quiet": "no"}}
    assert drift.table([row]).splitlines()[2] == "| te:GMM, 0 | no |  |  |  |"
