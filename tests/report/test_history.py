from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive.errors import InvalidOptionError, JournalError
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.report import read_run, read_runs
from tvm_adaptive.report.demo import read_demo
from tvm_adaptive.tuning.inspect import shown_comparison, shown_tasks
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.values.roofline import Roofline

WriteRun = Callable[..., Path]


def test_trials_of_another_workload_are_not_listed(tmp_path: Path) -> None:
    for key, latencies_ms in (("x", [1.0]), ("y", [3.0, 2.0])):
        with closing(Journal(tmp_path / "journal.jsonl")) as journal:
            journal.write("tasks", tasks=[{"name": "conv", "workload_key": key}])
            journal.write("measured", task="conv", latencies_ms=latencies_ms)
    history = read_run(tmp_path)
    assert [trial.ms for trial in history.trials if trial.improves] == [3.0, 2.0]
    assert len(history.trials) == history.n_trials == 2


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
        journal.write("report", interrupted=False, comparison=dataclasses.asdict(found))
    history = read_run(folder)
    assert history.comparison == found
    assert history.roofline is not None
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("run", what="net", resumed=True, **(here | {"device": "another"}))
    history = read_run(folder)
    assert (history.comparison, history.roofline, history.last_report) == (None, None, None)
    assert history.current_report == {}
    assert history.peers == ()


def test_a_library_that_was_not_compared_has_no_ratio(tmp_path: Path) -> None:
    found = dataclasses.asdict(Comparison(0.5, 0.01, 0.0, 0.0, agree=True))
    for run_id, is_compared in (("first", True), ("resumed", False)):
        with closing(Journal(tmp_path / "journal.jsonl")) as journal:
            journal.write("run", what="net", resumed=run_id != "first", run_id=run_id)
            journal.write("library", tuned=True)
            if is_compared:
                journal.write("comparison", **found)
            journal.write("report", interrupted=False, comparison=found if is_compared else None)
        comparisons = read_run(tmp_path).comparison, shown_comparison(tmp_path)
        assert [each is not None for each in comparisons] == [is_compared] * 2
        assert shown_tasks(tmp_path) == []  # it had no search


def test_tasks_that_the_network_uses_come_first() -> None:
    history = read_demo()
    used = history.network_tasks()
    assert {task.name for task in history.heaviest[:8]} <= used
    places = [task.name in used for task in history.deployed_tasks()]
    assert places == sorted(places, reverse=True)
    assert 8 < sum(places) < len(places)


def test_the_report_is_that_of_the_library_which_is_there(tmp_path: Path) -> None:
    compared = dataclasses.asdict(Comparison(0.5, 0.01, 0.0, 0.0, agree=True))
    first = {"interrupted": False, "coverage": "all", "comparison": compared}
    attempts: list[tuple[str, dict[str, Any], str]] = [
        ("report", first, "all"),
        ("stage", {"stage": "search", "seconds": 1.0}, "all"),  # goes on, or was killed
        ("report", {"interrupted": True, "coverage": "none", "comparison": None}, "all"),
        ("report", {"interrupted": False, "coverage": "half", "comparison": None}, "half"),
        ("library", {"tuned": True}, ""),  # and killed before its comparison
        ("report", {"interrupted": True, "coverage": "none", "comparison": None}, "none"),
    ]
    for kind, fields, coverage in attempts:
        with closing(Journal(tmp_path / "journal.jsonl")) as journal:
            journal.write(kind, **fields)
        assert read_run(tmp_path).current_report.get("coverage", "") == coverage


def test_the_rest_of_a_search_counts_all_attempts(tmp_path: Path) -> None:
    def attempt(*events: dict[str, Any]) -> list[dict[str, Any]]:
        beginning = [
            {"event": "journal", "time_sec": 0.0},
            {"event": "run", "time_sec": 0.0, "what": "net", "resumed": True},
            {"event": "tasks", "time_sec": 1.0, "tasks": []},
        ]
        return [*beginning, *events]

    killed = attempt(
        {"event": "round", "time_sec": 61.0, "task": "t", "evolve_sec": 60.0},
        {"event": "build", "time_sec": 91.0, "seconds": 30.0},
        {"event": "slot-end", "time_sec": 101.0, "task": "t", "seconds": 100.0},
    )
    running = attempt({"event": "build", "time_sec": 11.0, "seconds": 5.0})
    lines = "\n".join(map(json.dumps, [*killed, *running]))
    (tmp_path / "journal.jsonl").write_text(f"{lines}\n")
    # 100 s and 10 s of searches, of which 95 s have a name.
    assert read_run(tmp_path).search_secs()["rest of the search"] == pytest.approx(15.0)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="is no run's directory"):
        read_run(tmp_path)
    (tmp_path / "journal.jsonl").write_text('{"event":"journal"}\nnonsense\n{"event":"run"}\n')
    with pytest.raises(JournalError, match="line 2"):
        read_run(tmp_path)
