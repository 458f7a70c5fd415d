from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tvm_adaptive.errors import InvalidOptionError, JournalError
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.report import read_run, read_runs
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.values.roofline import Roofline

WriteRun = Callable[..., Path]


def test_a_finished_run(write_run: WriteRun) -> None:
    history = read_run(write_run(n_slots=8))
    assert (history.state, history.n_trials, len(history.slots)) == ("finished", 128, 8)
    assert [slot.reason for slot in history.slots] == ["warm-up"] + ["index"] * 7
    assert history.slots[1].gain == 0.1
    assert len(history.curve) == 7
    assert history.curve[-1][1] == 0.5
    assert sum(history.errors.values()) == 8
    assert history.stage_secs == {"search": 20.0, "compile": 2.0}
    assert history.heaviest[0].share_ms == max(task.share_ms for task in history.tasks.values())
    assert history.comparison is not None


def test_a_run_that_goes_on_has_a_torn_line(write_run: WriteRun) -> None:
    folder = write_run(n_slots=2, ended=False)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"event":"meas')
    history = read_run(folder)
    assert (history.state, history.n_trials) == ("running or killed", 32)
    assert history.comparison is None


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.jsonl").close()
    history = read_run(tmp_path)
    assert (history.n_trials, history.curve, history.heaviest) == (0, [], [])


def test_attempts_follow_one_another(write_run: WriteRun) -> None:
    folder = write_run(n_slots=3, ended=False)
    first = read_run(folder)
    journal = Journal(folder / "journal.jsonl")
    journal.write("slot-end", task="t", seconds=1.0, n_trials=0, best_ms=None)
    journal.close()
    history = read_run(folder)
    assert history.spent_sec >= first.spent_sec
    assert history.slots[-1].reason == ""
    assert math.isinf(history.slots[-1].best_ms)
    assert history.slots[-1].start_sec >= 0.0


def test_the_folder_that_one_is_in_has_a_name(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run("mine", 1))
    assert read_run(Path()).name.endswith(" (mine)")


def test_runs_side_by_side_have_names_of_their_own(write_run: WriteRun, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run("run", 1).rename(tmp_path / name / "run")
    histories = read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [history.name[-7:] for history in histories] == ["(a/run)", "(b/run)"]


def test_slots_that_overlap_keep_their_reasons(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("slot", task="a", reason="index")
    journal.write("slot", task="b", reason="starved")
    journal.write("slot-end", task="a", seconds=1.0, n_trials=16)
    journal.write("slot", task=None, reason="done")
    journal.close()
    history = read_run(tmp_path)
    assert [(slot.task, slot.reason) for slot in history.slots] == [("a", "index")]
    assert history.now is not None
    assert history.now["task"] == "b"


def test_another_run_in_the_same_folder_has_nothing_of_the_first(write_run: WriteRun) -> None:
    folder = write_run(n_slots=8)
    with contextlib.closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("run", what="other", resumed=False)
        journal.write("measured", task="b", latencies_ms=[3.0], weighted_ms=3.0)
    history = read_run(folder)
    assert history.name.startswith("other")
    assert (history.state, history.n_trials, history.n_attempts) == ("running or killed", 1, 1)
    assert [ms for _, ms in history.curve] == [3.0]
    assert history.curve[0][0] < 1.0
    assert not history.slots
    assert not history.rounds
    assert not history.stage_secs
    assert history.comparison is history.last_report is None


def test_what_another_machine_measured_is_forgotten(write_run: WriteRun) -> None:
    folder = write_run()
    here = {"device": "a processor, 2 cores", "tvm": "0.27.0"}
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("run", what="net", **here)
        journal.write("roofline", **dict.fromkeys(Roofline._fields, 1e9))
        found = Comparison(0.5, 0.004, 0.0, 0.0, agree=True)
        journal.write("comparison", **dataclasses.asdict(found))
    history = read_run(folder)
    assert history.comparison == found
    assert history.roofline is not None
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("run", what="net", resumed=True, **(here | {"device": "another"}))
    history = read_run(folder)
    assert (history.comparison, history.roofline, history.last_report) == (None, None, None)
    assert history.peers == ()


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="is no run's directory"):
        read_run(tmp_path)
    (tmp_path / "journal.jsonl").write_text('{"event":"journal"}\nnonsense\n{"event":"run"}\n')
    with pytest.raises(JournalError, match="line 2"):
        read_run(tmp_path)
