from __future__ import annotations

import builtins
import contextlib
import dataclasses
import io
import math
import os
import pickle
import pty
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tvm_adaptive.cli.display import Display, describe
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.report.history import RunHistory, read_run
from tvm_adaptive.report.live import MAX_ROWS, failure_lines, latency_line, screen, status_lines
from tvm_adaptive.report.notebook import NotebookView
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming
from tvm_adaptive.values.forms import FormKey


def history_of(n_tasks: int = 2) -> RunHistory:
    """Return a run after a few slots."""
    history = RunHistory(name="net")
    history.add({"event": "journal", "time_sec": 0.0})
    history.add({"event": "untuned", "time_sec": 1.0, "seconds": 0.1})
    names = [{"name": f"[red]task {number}[/red]"} for number in range(n_tasks)]
    history.add({"event": "tasks", "time_sec": 1.0, "tasks": names})
    for number in range(n_tasks):
        task = f"[red]task {number}[/red]"
        history.add({"event": "build", "time_sec": 2.0, "seconds": 3.0})
        history.add({"event": "timing", "time_sec": 2.0, "elapsed_sec": 1.0})
        measured: dict[str, Any] = {"event": "measured", "time_sec": 3.0, "task": task}
        measured |= {"weight": 1.0, "latencies_ms": [2.0, None, 1.0], "errors": {"boom": 1}}
        measured["weighted_ms"] = float(n_tasks) if number == n_tasks - 1 else None
        history.add(measured)
    gain = {"reason": "index", "gain": 0.25, "unit": "ms/s"}
    history.add({"event": "slot", "time_sec": 4.0, "task": "[red]task 1[/red]", **gain})
    return history


def drawn(history: RunHistory, budget: Budget | None, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(history, budget, "search"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_says_what_was_asked_for() -> None:
    clock = iter([0.0] + [42.0] * 20)
    text = drawn(history_of(), Budget(600.0, lambda: next(clock)))
    assert "search" in text
    assert "0:42 gone, 9:18 left" in text
    assert "sum of tasks 2 ms, untuned 100 ms: 50.0 x faster; 6 trials" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("[red]task")]
    assert rows[0][2:] == ["1", "3", "1", "1", "50%"]
    assert "now      [red]task 1[/red]: index, expected gain 0.25 ms/s" in text
    assert re.search(r"seconds  propose 0%, build \d+%, measure \d+%", text)
    assert "failed   2, mostly (2): boom" in text


def test_shares_are_of_what_the_network_would_consist_of() -> None:
    history = RunHistory(name="net")
    forms = [("direct", 10.0), ("winograd-2x2", 12.0)]
    tasks = [{"name": form, "group": "conv", "form": form} for form, _ in forms]
    history.add({"event": "tasks", "tasks": [*tasks, {"name": "dense"}]})
    for name, ms in [*forms, ("dense", 10.0)]:
        measured = {"event": "measured", "task": name, "weight": 1.0, "latencies_ms": [ms]}
        history.add({**measured, "weighted_ms": 20.0})
    lines = [line.split() for line in drawn(history, None).splitlines()]
    rows = {words[0]: words[-1] for words in lines if words and words[0] in history.weights}
    assert rows == {"direct": "50%", "winograd-2x2": "-", "dense": "50%"}


def test_slow_tasks_of_other_forms_do_not_hide_one_that_is_used() -> None:
    history = RunHistory(keeps_all=False)
    slow = [f"direct{number}" for number in range(MAX_ROWS)]
    used = {"name": "used", "group": "conv", "form": "winograd-2x2"}
    tasks = [*({"name": name, "group": "conv"} for name in slow), used]
    history.add({"event": "tasks", "tasks": tasks})
    for name in (*slow, "used"):
        latencies_ms = [1.0 if name == "used" else 10.0]
        history.add({"event": "measured", "task": name, "latencies_ms": latencies_ms})
    shares = shares_of(history)
    assert shares["used"] == "100%"
    assert len(shares) == MAX_ROWS


def test_what_became_slower_is_called_slower() -> None:
    history = history_of()
    history.untuned_sec = 1e-3
    assert "untuned 1 ms: 2.0 x slower" in latency_line(history)


def test_many_tasks_are_cut_and_long_names_do_not_wrap() -> None:
    history = history_of(n_tasks=MAX_ROWS + 5)
    text = drawn(history, None, width=60)
    assert "and 5 more" in text
    assert max(len(line) for line in text.splitlines()) <= 60


def test_before_every_task_has_a_time_there_is_no_sum() -> None:
    history = RunHistory()
    history.add({"event": "tasks", "tasks": [{"name": "a"}, {"name": "b"}]})
    history.add({"event": "measured", "task": "a", "latencies_ms": [1.0], "weighted_ms": None})
    assert latency_line(history) == "1 of 2 tasks timed, 1 trials"
    assert status_lines(history) == []
    assert failure_lines(Counter()) == []


def test_a_sum_of_tasks_that_are_gone_is_not_shown() -> None:
    history = RunHistory(keeps_all=False)
    first = {"name": "a", "workload_key": "x"}
    history.add({"event": "tasks", "tasks": [first]})
    history.add({"event": "measured", "task": "a", "latencies_ms": [2.0], "weighted_ms": 2.0})
    for tasks, text in (
        ([first], "sum of tasks 2 ms; 1 trials"),
        ([{**first, "workload_key": "y"}, {"name": "b"}], "0 of 2 tasks timed, 0 trials"),
    ):
        for event in ({"event": "journal"}, {"event": "run", "resumed": True}):
            history.add(event)
        history.add({"event": "tasks", "tasks": tasks})
        assert latency_line(history) == text
    history.add({"event": "measured", "task": "b", "latencies_ms": [1.0], "weighted_ms": None})
    assert latency_line(history) == "1 of 2 tasks timed, 1 trials"
    history.add({"event": "measured", "task": "a", "latencies_ms": [3.0], "weighted_ms": 4.0})
    assert latency_line(history) == "sum of tasks 4 ms; 2 trials"


def test_an_infinite_sum_is_none_for_a_screen_too(tmp_path: Path) -> None:
    history = RunHistory(keeps_all=False)
    journal = Journal(tmp_path / "journal.jsonl", history.add)
    assert latency_line(history) == ""
    journal.write("tasks", tasks=[{"name": "a"}, {"name": "b"}])
    journal.write("measured", task="a", latencies_ms=[1.0, math.nan], weighted_ms=math.inf)
    journal.close()
    assert latency_line(history) == "1 of 2 tasks timed, 2 trials"
    assert read_run(tmp_path).tasks["a"].n_errors == history.tasks["a"].n_errors == 1


def test_tasks_of_one_form_are_counted_as_in_plain_lines() -> None:
    keys = {"a": ("", ""), "b": ("g", ""), "c": ("g", "winograd"), "d": ("g", "winograd")}
    named = [{"name": name, "group": key[0], "form": key[1]} for name, key in keys.items()]
    history = RunHistory()
    history.add({"event": "tasks", "tasks": named})
    for task in ("b", "c"):
        history.add({"event": "measured", "task": task, "latencies_ms": [1.0]})
    assert latency_line(history) == "1 of 2 tasks timed, 2 trials"
    forms = {name: FormKey(*key) for name, key in keys.items()}
    progress = history.progress([(name, 1.0) for name in keys], forms)
    assert "1 of 2 tasks timed" in describe(progress)


def compared(*peers: tuple[str, float]) -> dict[str, Any]:
    """Return the event of a comparison with frameworks of such seconds; ours takes 10 ms."""
    timings = [PeerTiming(name, name, 2, (sec,), (0.01,), 0.0, 0.0, True) for name, sec in peers]
    comparison = Comparison(0.02, 0.01, 0.0, 0.0, True, "ORT", tuple(timings))
    return {"event": "comparison", "time_sec": 50.0, **dataclasses.asdict(comparison)}


def test_frameworks_ratios_are_shown_as_soon_as_they_are_known() -> None:
    history = history_of()
    assert "ORT" not in drawn(history, None)
    history.add(compared(("ORT", 0.02), ("OpenVINO", 0.008)))
    text = drawn(history, None, width=160)
    assert "result   2.00 x faster than ORT (2 threads): 10.0 ms, was 20.0 ms" in text
    assert "result   1.25 x slower than OpenVINO" in text


@pytest.mark.parametrize("kind", ["terminal", "notebook"])
def test_the_comparison_is_drawn_at_once(kind: str) -> None:
    out, cells = io.StringIO(), [Cell("")]
    view: Any
    if kind == "terminal":
        view = Display(Console(file=out, force_terminal=True, width=160))
    else:
        view = NotebookView(show=lambda _: cells[0])
    with contextlib.ExitStack() as stack:
        if kind == "terminal":
            stack.enter_context(view)
        view.stage("compare")
        view.event({"event": "journal"})
        view.event(compared(("ORT", 0.02)))
        shown = out.getvalue() + cells[0].shown[-1]
    assert "2.00 x faster than ORT" in shown


def test_plain_lines_tell_the_commonest_failure() -> None:
    out = io.StringIO()
    progress = RunProgress([TaskProgress("a", 1.0, 4, 3, 0.001)], Counter({"boom": 2, "hang": 1}))
    with Display(Console(file=out, width=200)) as display:
        display.event({"event": "journal"})
        display.round(progress, Budget(10.0))
    assert "4 trials, 3 errors" in out.getvalue()
    assert "failed   3, mostly (2): boom" in out.getvalue()


def test_a_listener_that_fails_costs_no_event(tmp_path: Path) -> None:
    def listener(event: dict[str, Any]) -> None:
        raise RuntimeError("screen is gone")

    journal = Journal(tmp_path / "journal.jsonl", listener)
    journal.write("stage", stage="search", seconds=1.0)
    journal.close()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2


class Cell:
    def __init__(self, html: str) -> None:
        self.shown = [html]

    def update(self, html: str) -> None:
        self.shown.append(html)


def test_a_notebook_keeps_one_cell_up_to_date() -> None:
    cells: list[Cell] = []

    def show(html: str) -> Cell:
        cells.append(Cell(html))
        return cells[-1]

    view = NotebookView(show)
    view.stage("search")
    for event in ({"event": "tasks", "tasks": [{}]}, {"event": "untuned", "seconds": 0.5}):
        view.event(event)
    view.note("<b>a note</b>")
    view.round(RunProgress([TaskProgress("a", 1.0)]), Budget(10.0))
    (cell,) = cells
    assert len(cell.shown) == 2  # rounds that follow at once are not drawn
    assert "0 of 1 tasks timed" in cell.shown[-1]
    assert "&lt;b&gt;a note" in cell.shown[-1]
    assert "<b>a note" not in cell.shown[-1]


def test_in_ipython_the_cell_is_an_output() -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    with capture_output() as captured:
        view = NotebookView()
        view.stage("search")
        view.note("done")
    assert len(captured.outputs) >= 1
    assert "search" in captured.outputs[0].data["text/html"]
    InteractiveShell.clear_instance()


class ZMQInteractiveShell:
    """Named as Jupyter's own, by which rich knows a notebook."""


def test_in_jupyter_only_the_cell_is_displayed(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[object] = []
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr("rich.jupyter.display", lambda *arguments: displayed.append(arguments))
    view = NotebookView(show=lambda _: None)
    view.stage("search")
    assert "search" in view.html()
    assert displayed == []


def test_a_screen_without_a_search_has_its_stage_alone() -> None:
    assert drawn(RunHistory(keeps_all=False), None).splitlines() == ["search"]


def under_a_terminal(command: list[str], columns: int = 100) -> str:
    """Run a command under a pseudo-terminal and return all that it drew."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdout=child, stderr=child, env=environment)
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait() == 0
    return b"".join(chunks).decode(errors="replace")


@pytest.mark.slow
def test_under_a_terminal_the_screen_is_live(tmp_path: Path) -> None:
    config = tmp_path / "quick.toml"
    config.write_text(
        "[search]\nn_trials_per_round = 4\npopulation_size = 64\n"
        "[finish]\ntop_k = 1\nmax_task_sec = 0.5\n"
    )
    command = [sys.executable, "-m", "tvm_adaptive", "tune", "te:GMM", "--trials", "8"]
    command += ["--config", str(config)]
    text = under_a_terminal([*command, "--work-dir", str(tmp_path / "run")])
    assert "\x1b[" in text  # it moves the cursor to draw over itself
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for part in ("gone", "x faster;", "trials", "now      main:", "seconds  propose", "share"):
        assert part in plain
    # The result stands below, and the cursor is back.
    assert plain.rstrip().splitlines()[-1].startswith("database")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.slow
def test_quiet_under_a_terminal_prints_the_result_only(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tvm_adaptive", "tune", "te:GMM", "--trials", "4", "-q"]
    text = under_a_terminal([*command, "--work-dir", str(tmp_path / "run")])
    assert "gone" not in text
    assert "latency" in text


def rounds_of_a_run(n: int) -> list[dict[str, Any]]:
    """Return the events of so many rounds, the second half after a resumption."""
    events: list[dict[str, Any]] = [{"event": "journal", "time_sec": 0.0}]
    for number in range(n):
        if number == n // 2:
            events.append({"event": "journal", "time_sec": 0.0})
        at = {"time_sec": float(number), "task": "a"}
        events.append({"event": "slot", "reason": "index", "gain": 0.1, "unit": "ms/s", **at})
        events.append({"event": "round", "sample_sec": 0.1, "evolve_sec": 0.2, **at})
        events.append({"event": "build", "seconds": 0.5, **at})
        events += [{"event": "timing", "elapsed_sec": 0.1, **at} for _ in range(16)]
        events.append({"event": "forecast", "spearman": 0.5, **at})
        latencies_ms = [1.0 + 1.0 / (number + 1)] * 16
        events.append({"event": "measured", "latencies_ms": latencies_ms, "weighted_ms": 1.0, **at})
        events.append({"event": "slot-end", "seconds": 3.0, "n_trials": 16, **at})
    return events


def test_tasks_of_an_earlier_attempt_have_no_share() -> None:
    """Where forms were given up, a resumed run has the direct ones only."""
    history = RunHistory()
    direct, dense = {"name": "direct"}, {"name": "dense"}
    winograd = {"name": "winograd", "group": "c", "form": "winograd-2x2"}
    history.add({"event": "tasks", "tasks": [{**direct, "group": "c"}, winograd, dense]})
    for name, ms in (("direct", 10.0), ("winograd", 6.0), ("dense", 10.0)):
        history.add({"event": "measured", "task": name, "latencies_ms": [ms]})
    assert shares_of(history) == {"direct": "-", "winograd": "38%", "dense": "62%"}
    for event in ({"event": "journal"}, {"event": "run", "resumed": True}):
        history.add(event)
    history.add({"event": "tasks", "tasks": [direct, dense]})
    assert shares_of(history) == {"direct": "50%", "winograd": "-", "dense": "50%"}


def shares_of(history: RunHistory) -> dict[str, str]:
    rows = [line.split() for line in drawn(history, None).splitlines()]
    return {row[0]: row[-1] for row in rows if row and row[0] in history.tasks}


def test_a_time_that_a_play_off_refuted_is_not_shown_after_a_resumption() -> None:
    history, names = RunHistory(keeps_all=False), [{"name": "conv"}, {"name": "dense"}]
    fast = {"task": "conv", "latencies_ms": [1.0, 0.125], "best_ms": 0.125}
    history.add({"event": "tasks", "tasks": names})
    history.add({"event": "measured", **fast})
    history.add({"event": "measured", "task": "dense", "latencies_ms": [1.0], "best_ms": 1.0})
    assert shares_of(history) == {"conv": "11%", "dense": "89%"}
    for event in ({"event": "journal"}, {"event": "run", "resumed": True}):
        history.add(event)
    history.add({"event": "tasks", "tasks": names})
    history.add({"event": "measured", "task": "conv", "latencies_ms": [2.0], "best_ms": 1.0})
    assert shares_of(history) == {"conv": "50%", "dense": "50%"}
    history.add({"event": "measured", "task": "dense", "latencies_ms": [None], "best_ms": None})
    assert shares_of(history) == {"conv": "100%", "dense": "-"}


def test_a_screen_needs_no_event_of_the_past() -> None:
    brief, whole = RunHistory(keeps_all=False), RunHistory()
    events = rounds_of_a_run(200)
    for event in events:
        brief.add(event)
        whole.add(event)
    assert drawn(brief, Budget(600.0, lambda: 42.0)) == drawn(whole, Budget(600.0, lambda: 42.0))
    assert brief.search_secs() == pytest.approx(whole.search_secs())
    assert whole.search_secs()["measure"] == pytest.approx(0.1 * 16 * 200)
    assert brief.rounds == brief.timings == brief.forecasts == brief.slots == []
    assert len(brief.curve) == 1
    # A number per trial is left.
    assert len(pickle.dumps(brief)) < 12 * 16 * 200


@pytest.mark.parametrize("kind", ["terminal", "notebook"])
def test_what_shows_a_run_keeps_no_events(kind: str) -> None:
    view: Any
    if kind == "terminal":
        view = Display(Console(file=io.StringIO(), force_terminal=True))
    else:
        view = NotebookView(show=lambda _: None)
    for event in rounds_of_a_run(20):
        view.event(event)
    history = view._history
    assert history.n_trials == 20 * 16
    assert history.rounds == history.timings == history.slots == []
