from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_adaptive.errors import InvalidOptionError, JournalError
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.report import read_stories, read_story

WriteRun = Callable[..., Path]


def test_a_finished_run(write_run: WriteRun) -> None:
    story = read_story(write_run(n_slots=8))
    assert (story.state, story.n_trials, len(story.slots)) == ("finished", 128, 8)
    assert [slot.reason for slot in story.slots] == ["warm-up"] + ["index"] * 7
    assert story.slots[1].gain == 0.1
    assert len(story.curve) == 7
    assert story.curve[-1][1] == 0.5
    assert sum(story.failures.values()) == 8
    assert story.stage_secs == {"search": 20.0, "compile": 2.0}
    assert story.heaviest[0].share_ms == max(task.share_ms for task in story.tasks.values())
    assert story.comparison is not None


def test_a_run_that_goes_on_has_a_torn_line(write_run: WriteRun) -> None:
    folder = write_run(n_slots=2, ended=False)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"event":"meas')
    story = read_story(folder)
    assert (story.state, story.n_trials) == ("running or killed", 32)
    assert story.comparison is None


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.jsonl").close()
    story = read_story(tmp_path)
    assert (story.n_trials, story.curve, story.heaviest) == (0, [], [])


def test_sittings_follow_one_another(write_run: WriteRun) -> None:
    folder = write_run(n_slots=3, ended=False)
    first = read_story(folder)
    journal = Journal(folder / "journal.jsonl")
    journal.write("slot-end", task="t", seconds=1.0, n_trials=0, best_ms=None)
    journal.close()
    story = read_story(folder)
    assert story.elapsed_sec >= first.elapsed_sec
    assert story.slots[-1].reason == ""
    assert math.isinf(story.slots[-1].best_ms)
    assert story.slots[-1].start_sec >= 0.0


def test_runs_side_by_side_have_names_of_their_own(write_run: WriteRun, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run("run", 1).rename(tmp_path / name / "run")
    stories = read_stories([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [story.name[-7:] for story in stories] == ["(a/run)", "(b/run)"]


def test_slots_that_overlap_keep_their_reasons(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("slot", task="a", reason="index")
    journal.write("slot", task="b", reason="starved")
    journal.write("slot-end", task="a", seconds=1.0, n_trials=16)
    journal.write("slot", task=None, reason="done")
    journal.close()
    story = read_story(tmp_path)
    assert [(slot.task, slot.reason) for slot in story.slots] == [("a", "index")]
    assert story.now is not None
    assert story.now["task"] == "b"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="is no run's directory"):
        read_story(tmp_path)
    (tmp_path / "journal.jsonl").write_text('{"event":"journal"}\nnonsense\n{"event":"run"}\n')
    with pytest.raises(JournalError, match="line 2"):
        read_story(tmp_path)
