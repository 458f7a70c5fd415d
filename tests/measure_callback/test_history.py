from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tvm_adaptive.errors import JournalError
from tvm_adaptive.measure_callback.history import TaskHistory, read_history
from tvm_adaptive.measure_callback.progress import GIVE_UP_TRIALS, RunProgress, TaskProgress


def write(path: Path, *events: dict[str, Any], tail: str = "") -> Path:
    with open(path, "a") as file:
        for event in events:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
        file.write(tail)
    return path


def attempt(run_id: str, start: int, latencies: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"event": "journal", "time_sec": 0.0, "version": 1},
        {"event": "run", "time_sec": 0.1, "run_id": run_id, "seed": start},
        {"event": "model", "time_sec": 0.1, "what": "net.onnx", "input_shapes": {}},
        {
            "event": "measured",
            "time_sec": 5.0,
            "task": "conv",
            "latencies_ms": latencies,
            "errors": {"boom": sum(value is None for value in latencies)},
        },
        {"event": "slot-end", "time_sec": 5.5, "task": "conv", "seconds": 4.5},
    ]


def test_attempts_add_up(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0, None]), tail='{"event":"mea')
    write(path, tail="\n")
    write(path, *attempt("b", 2, [1.0]), {"event": "measured", "time_sec": 7.0} | empty("dense"))
    history = read_history(path)
    assert (history.n_attempts, history.spent_sec, history.n_trials) == (2, 12.5, 3)
    assert history.run_ids == {"a", "b"}
    assert history.run["seed"] == 2
    conv = history.tasks["conv"]
    assert (conv.n_slots, conv.spent_sec, conv.n_errors, conv.best_sec) == (2, 9.0, 1, 1e-3)
    assert conv.latencies_ms[0] == 2.0
    assert math.isnan(conv.latencies_ms[1])
    assert history.errors["boom"] == 1
    assert history.model is not None
    assert history.report is None


def test_what_came_before_the_journal_counts(tmp_path: Path) -> None:
    """The program's start, and the reading of the model."""
    first, second = attempt("a", 1, [2.0]), attempt("b", 2, [1.0])
    first[1]["elapsed_sec"] = 20.1
    second[1]["elapsed_sec"] = 25.5 + 30.1
    assert read_history(write(tmp_path / "a.jsonl", *first)).spent_sec == 25.5
    history = read_history(write(tmp_path / "b.jsonl", *first, *second))
    assert (history.before_sec, history.spent_sec) == (55.5, 61.0)


def test_another_run_in_the_same_folder_is_none_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0, None]))
    second = attempt("b", 2, [3.0])
    second[1]["resumed"] = False
    third = attempt("c", 3, [4.0])
    third[1]["resumed"] = True
    write(path, *second, *third)
    history = read_history(path)
    assert (history.n_attempts, history.n_trials, history.spent_sec) == (2, 2, 11.0)
    assert history.run_ids == {"b", "c"}
    assert history.tasks["conv"].best_sec == 3e-3


def test_trials_of_another_workload_with_the_same_name_do_not_count(tmp_path: Path) -> None:
    """As after a package's update that fuses in another way."""
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]))
    for key, n_left in (("x", 1), ("x", 1), ("y", 0)):
        tasks = [{"name": "conv", "workload_key": key}, {"name": "dense"}]
        write(path, {"event": "tasks", "time_sec": 6.0, "tasks": tasks})
        history = read_history(path)
        assert history.n_trials == n_left
    history.keep_tasks({"conv": "y"})
    write(path, *attempt("b", 2, [3.0]))
    history = read_history(path)
    history.keep_tasks({"conv": "y"})
    assert history.n_trials == 1
    history.keep_tasks({"conv": "z"})
    assert history.n_trials == 0


def test_messages_of_forgotten_trials_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [None] * 12))
    dense = {"task": "dense", "latencies_ms": [None], "errors": {"boom": 1, "hang": 0}}
    tasks = [{"name": name, "workload_key": "x"} for name in ("conv", "dense")]
    write(path, {"event": "measured", "time_sec": 6.0, **dense})
    write(path, {"event": "tasks", "time_sec": 7.0, "tasks": tasks})
    history = read_history(path)
    assert history.errors == {"boom": 13}
    history.keep_tasks({"conv": "y", "dense": "x"})
    assert history.errors == {"boom": 1}
    progress = history.progress([("conv", 1.0), ("dense", 1.0)])
    assert (progress.n_errors, progress.errors) == (1, {"boom": 1})


def test_a_new_run_that_was_killed_at_once_has_no_model(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]))
    header, run, *_ = attempt("b", 2, [])
    write(path, header, run | {"resumed": False})
    assert read_history(path).model is None


def empty(task: str) -> dict[str, Any]:
    return {"task": task, "latencies_ms": []}


def test_where_a_run_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0, None]))
    progress = read_history(path).progress([("conv", 3.0), ("dense", 1.0)])
    assert [task.n_trials for task in progress.tasks] == [2, 0]
    assert progress.n_errors == 1
    assert progress.tasks[0].best_sec == pytest.approx(2e-3)
    assert math.isinf(progress.weighted_sec)
    assert progress.errors == {"boom": 1}


def test_slots_without_a_batch_do_not_count(tmp_path: Path) -> None:
    """When a run ends, each task that is left has one."""
    ends = [{"event": "slot-end", "time_sec": 6.0, "task": "conv", "n_rounds": n} for n in (0, 2)]
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]))
    n_before = read_history(path).tasks["conv"].n_slots
    write(path, *ends)
    assert read_history(path).tasks["conv"].n_slots == n_before + 1


def test_tasks_that_are_given_up_do_not_hide_a_plateau() -> None:
    hopeless, known = TaskProgress("a", 2.0, GIVE_UP_TRIALS), TaskProgress("b", 3.0, 8, 0, 1e-3)
    progress = RunProgress([hopeless, known])
    assert progress.promising_sec == pytest.approx(3e-3)
    assert math.isinf(progress.weighted_sec)
    assert math.isinf(RunProgress([hopeless]).promising_sec)
    hopeless.n_trials -= 1
    assert math.isinf(progress.promising_sec)
    hopeless.is_ended = known.is_ended = True
    assert progress.promising_sec == pytest.approx(3e-3)
    assert (hopeless.is_given_up, known.is_given_up) == (True, False)


def test_times_of_disqualified_candidates_are_forgotten(tmp_path: Path) -> None:
    tasks = [{"name": "conv", "workload_key": "x"}]
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0, None, 0.1, 1.0]))
    write(path, {"event": "tasks", "time_sec": 6.0, "tasks": tasks})
    history = read_history(path)
    conv = history.tasks["conv"]
    conv.build_sec = 3.0
    history.disqualify({"x": [2e-3], "y": [1e-3]})
    assert (conv.best_sec, conv.second_sec, conv.build_sec) == (1e-4, 1e-3, 3.0)
    history.disqualify({"x": [1e-4, math.nan]})
    assert (conv.best_sec, conv.second_sec) == (1e-3, math.inf)
    assert math.isnan(conv.build_sec), "the build's seconds were those of the best"
    assert (conv.n_trials, conv.n_errors) == (4, 1)
    assert conv.latencies_ms == pytest.approx([math.nan] * 3 + [1.0], nan_ok=True)


def test_only_a_whole_last_attempt_has_a_report(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]))
    write(path, {"event": "report", "time_sec": 9.0, "interrupted": False, "what": "net"})
    assert (read_history(path).report or {})["what"] == "net"
    write(path, {"event": "journal", "time_sec": 0.0, "version": 1})
    assert read_history(path).report is None
    write(path, {"event": "report", "time_sec": 9.0, "interrupted": True})
    assert read_history(path).report is None


def test_where_there_is_no_run_there_is_no_history(tmp_path: Path) -> None:
    history = read_history(tmp_path / "journal.jsonl")
    assert (history.n_attempts, history.n_trials, history.run) == (0, 0, {})
    assert TaskHistory().best_sec == math.inf


def test_a_damaged_journal_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]), tail="{nonsense}\n")
    write(path, {"event": "stage", "time_sec": 6.0})
    with pytest.raises(JournalError, match="line 6"):
        read_history(path)


GOOD = {"event": "report", "comparison": {"agree": True}, "coverage": "all", "interrupted": False}
SHORT = {"event": "report", "comparison": None, "coverage": "", "interrupted": False}
STOPPED = {**SHORT, "interrupted": True}
LIBRARY = {"event": "library", "tuned": True}


@pytest.mark.parametrize(
    ("later", "stays"),
    [
        ([], True),
        ([[SHORT]], True),
        ([[SHORT], [SHORT]], True),
        ([[STOPPED], [SHORT]], True),
        ([[], [SHORT]], True),  # killed
        ([[LIBRARY]], False),  # killed between its compilation and its comparison
        ([[LIBRARY, SHORT]], False),
        ([[LIBRARY, GOOD]], True),
        ([[LIBRARY, {**GOOD, "interrupted": True}]], True),
    ],
)
def test_a_library_is_known_until_another_takes_its_place(
    tmp_path: Path, later: list[list[dict[str, Any]]], stays: bool
) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]), LIBRARY, GOOD)
    for place, events in enumerate(later):
        write(path, *attempt(f"later{place}", 1, []), *events)
    history = read_history(path)
    assert (history.library_report is not None) == stays
    is_replaced = LIBRARY in [event for events in later for event in events]
    if stays and not is_replaced:
        assert history.runs_since == {f"later{place}" for place in range(len(later))}


def test_the_seconds_of_a_killed_search_count(tmp_path: Path) -> None:
    def begun(run_id: str) -> list[dict[str, Any]]:
        tasks = {"event": "tasks", "time_sec": 1.0, "tasks": []}
        first, *others = attempt(run_id, 1, [2.0])
        return [first, tasks, *others]

    path = write(tmp_path / "journal.jsonl", *begun("a"))  # killed 4.5 s after its search began
    history = read_history(path)
    assert (history.open_search_sec, dict(history.stage_secs)) == (4.5, {})
    write(path, *begun("b"), {"event": "stage", "time_sec": 7.5, "stage": "search", "seconds": 6.5})
    history = read_history(path)
    assert (history.open_search_sec, dict(history.stage_secs)) == (0.0, {"search": 11.0})
    # Where the search had no time to begin, what follows is none of it.
    tasks = {"event": "tasks", "time_sec": 1.0, "tasks": []}
    write(path, {"event": "journal", "time_sec": 0.0}, tasks)
    write(path, {"event": "stage", "time_sec": 5.0, "stage": "compile", "seconds": 3.0})
    history = read_history(path)
    assert dict(history.stage_secs) == {"search": 11.0, "compile": 3.0}


STORE_EVENTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"event": "error", "where": "store", "message": "gone", "n_waiting": 4}),
    (4, {"event": "error", "where": "store", "message": "a verdict was not taken"}),
    (4, {"event": "error", "where": "own store", "message": "full", "n_waiting": 8}),
    (4, {"event": "store-back", "where": "own store", "n_waiting": 8}),
    (12, {"event": "error", "where": "store", "message": "gone", "n_waiting": 12}),
    (0, {"event": "store-back", "where": "store", "n_waiting": 16}),
    (3, {"event": "error", "where": "store", "message": "gone", "n_waiting": 3}),
    (0, {"event": "store-back", "n_waiting": 3}),  # an earlier version's
    (5, {"event": "error", "where": "store", "message": "gone", "n_waiting": 5}),
    (5, {"event": "journal", "version": 1}),  # resumed without the store
    (0, {"event": "undelivered", "store": "records.db", "n_trials": 5}),
    (6, {"event": "error", "where": "store", "message": "gone", "n_waiting": 6}),
    (0, {"event": "run", "run_id": "b", "resumed": False}),
]


def test_what_waits_for_the_shared_store_is_known_after_a_kill(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]))
    for n_waiting, event in STORE_EVENTS:
        assert read_history(write(path, {"time_sec": 6.0, **event})).n_waiting == n_waiting


def test_a_farms_speeds_are_those_of_the_last_calibrations(tmp_path: Path) -> None:
    speeds = [("a:1", 1.0), ("b:1", 0.5), ("b:1", 0.6)]
    boards = [
        {"event": "board", "address": address, "state": "calibrated", "speed": speed}
        for address, speed in speeds
    ]
    fault = {"event": "board", "address": "c:1", "state": "fault", "n_faults": 1, "reason": "?"}
    path = write(tmp_path / "journal.jsonl", *attempt("a", 1, [2.0]), *boards, fault)
    history = read_history(path)
    assert history.board_speeds == {"a:1": 1.0, "b:1": 0.6}
    history.forget_times()
    assert history.board_speeds == {}
