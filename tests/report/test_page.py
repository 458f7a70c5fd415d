from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import HOSTILE
from tvm_adaptive import TuneConfig, tune
from tvm_adaptive.cli import main
from tvm_adaptive.errors import JournalError
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.report import read_run, write_report
from tvm_adaptive.report.charts import (
    belief_chart,
    calibration_chart,
    early_stops_chart,
    exploration_chart,
    latency_chart,
    slots_chart,
    stages_chart,
)
from tvm_adaptive.report.page import page
from tvm_adaptive.report.tables import number
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig
from tvm_adaptive.tuning.outcome import Comparison, PeerTiming

plotly = pytest.importorskip("plotly")
WriteRun = Callable[..., Path]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ALL = ("latency", "slots", "belief", "stages", "exploration", "calibration", "early-stops")
ONE_RUN = (slots_chart, belief_chart, exploration_chart, calibration_chart, early_stops_chart)


@pytest.mark.parametrize("chart_of", ONE_RUN)
def test_plotly_knows_every_word_of_a_figure(chart_of: Callable, write_run: WriteRun) -> None:
    chart = chart_of(read_run(write_run()))
    assert chart.is_drawable
    plotly.graph_objects.Figure(data=chart.data, layout=chart.layout)


@pytest.mark.parametrize("chart_of", [latency_chart, stages_chart])
def test_plotly_knows_every_word_of_a_comparison(chart_of: Callable, write_run: WriteRun) -> None:
    chart = chart_of([read_run(write_run("a")), read_run(write_run("b", 3, ended=False))])
    assert chart.is_drawable
    plotly.graph_objects.Figure(data=chart.data, layout=chart.layout)


def test_bands_hold_what_is_known_and_go_on_from_there(write_run: WriteRun) -> None:
    chart = belief_chart(read_run(write_run(n_slots=9)))
    curve = chart.data[0]
    high, low, middle = chart.data[1:4]
    n_trials = curve["x"][-1]
    assert high["x"][:2] == [n_trials // 2, n_trials // 2 + 1]
    known = curve["y"][curve["x"].index(n_trials // 2)]
    assert high["y"][0] == low["y"][0] == known
    for below, between, above in zip(low["y"], middle["y"], high["y"], strict=True):
        assert below <= between <= above


def test_seconds_of_stages_add_up(write_run: WriteRun) -> None:
    chart = stages_chart([read_run(write_run())])
    assert sum(trace["x"][0] for trace in chart.data) == pytest.approx(22.0)


def test_the_network_of_an_earlier_attempt_is_drawn_when_it_was_timed(
    write_run: WriteRun,
) -> None:
    folder = write_run()
    before = read_run(folder)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"event":"journal","time_sec":0.0}\n{"event":"fit","time_sec":90.0}\n')
    history = read_run(folder)
    assert history.spent_sec >= 90.0
    *_, diamond = latency_chart([history]).data
    assert diamond["x"] == [before.compared_sec]
    assert 0.0 < before.compared_sec <= before.spent_sec


def test_a_slot_without_a_success_has_no_best_time(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("measured", task="a", latencies_ms=[None, 2.0])
        for best_ms in (None, 2.0):
            journal.write("slot", task="a", reason="index", gain=0.25, unit="ms/<s>")
            journal.write("slot-end", task="a", seconds=1.0, n_trials=1, best_ms=best_ms)
    (bars,) = slots_chart(read_run(tmp_path)).data
    gain = "<br>expected gain 0.25 ms/&lt;s&gt;"
    assert bars["text"] == [f"1 trials in 1.0 s{gain}", f"1 trials in 1.0 s, best 2 ms{gain}"]


def test_second_timings_count_as_time_of_measuring(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("timing", mean_sec=0.5, elapsed_sec=0.6, reason="slow")
        journal.write("duet", elapsed_sec=0.3, raw_sec=[], corrected_sec=[], relative_errors=[])
    caption = early_stops_chart(read_run(tmp_path)).caption
    assert "timed in 0.9 s, second timings included" in caption
    assert "1.5 s for the runs alone: 0.6 s saved." in caption


def test_the_seconds_of_what_hangs_are_of_measuring_but_time_nothing(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("timing", error=None, mean_sec=0.5, elapsed_sec=0.6, reason="slow")
        journal.write("timing", error="timeout: killed after 30 s of running", elapsed_sec=30.0)
    history = read_run(tmp_path)
    assert history.search_secs()["measure"] == pytest.approx(30.6)
    assert "1 candidates were timed in 0.6 s" in early_stops_chart(history).caption


def test_every_task_has_a_row_that_says_whether_it_was_checked(tmp_path: Path) -> None:
    flags = [{"played_off": True}, {"is_used": False, "played_off": True}, {"in_network": False}]
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        for number in range(40):
            journal.write("measured", task=f"task{number}", latencies_ms=[1.0 + number])
        tasks = [{"name": f"task{number}", **each} for number, each in enumerate(flags)]
        journal.write("report", tasks=tasks, interrupted=False)
    text = page([read_run(tmp_path)])
    section = text[text.index("<h2>Tasks</h2>") :]
    rows = section[: section.index("</table>")].split("<tr>")[2:]
    found = {re.sub("<[^>]*>", "|", row).strip("|").split("||")[0]: row for row in rows}
    checked = {name: row.rsplit("<td class=n>", 1)[1] for name, row in found.items()}
    words = {"task0": "yes", "task1": "not used", "task2": "no", "task3": "-"}
    assert {name: checked[name].split("<")[0] for name in words} == words
    assert len(found) == 40


def test_the_page_says_what_it_needs_and_can_be_scrolled_by_keys(write_run: WriteRun) -> None:
    text = page([read_run(write_run())])
    assert "<noscript><p>Figures and the table of trials need JavaScript.</p></noscript>" in text
    n_tables = text[text.index("<body>") :].count("<table")
    assert text.count('<div class="scroll" tabindex="0"><table') == n_tables > 1


def test_tasks_state_how_far_they_are_from_the_roofline(write_run: WriteRun) -> None:
    folder = write_run()
    history = read_run(folder)
    assert all(math.isnan(history.limit_ms(task)) for task in history.tasks.values())
    first, *others = history.tasks
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("tasks", tasks=[{"name": first, "weight": 2.0, "bytes": 1e7}])
        journal.write("roofline", flop_per_sec=1e12, bytes_per_sec=2e10)
    history = read_run(folder)
    # 0.1 ms for the operations of each task, 0.5 ms for the bytes of the first.
    limits_ms = {first: 0.5} | dict.fromkeys(others, 0.1)
    assert {name: history.limit_ms(task) for name, task in history.tasks.items()} == limits_ms
    for name, task in history.tasks.items():
        share = number(100 * limits_ms[name] / task.best_ms)
        left_ms = number(2.0 * (task.best_ms - limits_ms[name]))
        assert f"<td class=n>{share}</td><td class=n>{left_ms}</td>" in page([history])


def test_a_roofline_of_nothing_is_none(write_run: WriteRun) -> None:
    folder = write_run()
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("roofline", flop_per_sec=None, bytes_per_sec=1.0)
    assert read_run(folder).roofline is None


def test_the_rounds_of_frameworks_are_listed(write_run: WriteRun) -> None:
    folder = write_run()
    before = page([read_run(folder)])
    assert "125.0 x faster" in before
    assert 'id="peers"' not in before
    peer = PeerTiming("ort", f"ORT {HOSTILE}", 2, (0.02, 0.03), (0.01, 0.01), 0.0, 0.0, True)
    with closing(Journal(folder / "journal.jsonl")) as journal:
        comparison = Comparison(0.025, 0.01, 0.0, 0.0, True, peer.framework, (peer,))
        journal.write("comparison", **dataclasses.asdict(comparison))
    text = page([read_run(folder)])
    assert "2.50 x faster than ORT &lt;/script&gt;" in text
    assert "125.0 x faster" not in text
    assert "<td class=n>30</td><td class=n>10</td><td class=n>3</td>" in text
    assert HOSTILE not in text[text.index("<body>") :]


@pytest.mark.parametrize(
    ("secs", "tuned_secs", "text"),
    [
        ((0.02, 0.03), (0.01,), "other rounds than the library"),
        ((), (), "no rounds"),
        ((0.02,), (0.0,), "took no time"),
    ],
)
def test_rounds_that_cannot_be_are_damage(
    write_run: WriteRun, secs: tuple[float, ...], tuned_secs: tuple[float, ...], text: str
) -> None:
    folder = write_run()
    peer = PeerTiming("ort", "ORT", 2, secs, tuned_secs, 0.0, 0.0, True)
    with closing(Journal(folder / "journal.jsonl")) as journal:
        found = Comparison(1.0, 1.0, 0.0, 0.0, agree=True, peers=(peer,))
        journal.write("comparison", **dataclasses.asdict(found))
    with pytest.raises(JournalError, match=text):
        read_run(folder)


def test_nothing_of_a_journal_becomes_markup(write_run: WriteRun) -> None:
    text = page([read_run(write_run())])
    body = text[text.index("<body>") :]
    assert HOSTILE not in body
    assert "<img" not in body
    assert "&lt;img src=x onerror=alert(1)&gt;" in body
    assert body.count("</script>") == body.count("<script")
    for chart in re.findall(r'type="application/json"[^>]*>(.*?)</script>', body, re.DOTALL):
        data = json.loads(chart)
        assert data.get("data") or data["rows"]


def test_what_each_device_did_is_reported(write_run: WriteRun) -> None:
    folder = write_run()
    assert "<h2>Devices</h2>" not in page([read_run(folder)])
    with closing(Journal(folder / "journal.jsonl")) as journal:
        for error in (None, None, "hang"):
            journal.write("timing", board="a:1", error=error, mean_sec=1.0)
        journal.write("board", address="a:1", state="calibrated", speed=0.5)
        journal.write("board", address=HOSTILE, state="fault", n_faults=1, reason="gone")
        journal.write("board", address=HOSTILE, state="quarantined", seconds=60.0)
    text = page([read_run(folder)])
    section = text[text.index("<h2>Devices</h2>") :]
    rows = re.findall(r"<tr>(.*?)</tr>", section[: section.index("</table>")])
    cells = [re.sub("<[^>]*>", "|", row).replace("||", "|").strip("|") for row in rows[1:]]
    assert cells == [f"{escape(HOSTILE)}|0|0|1|1|-", "a:1|3|1|0|0|0.5"]


def test_the_page_asks_for_nothing_from_outside(write_run: WriteRun) -> None:
    text = page([read_run(write_run())])
    ours = text.replace(text[text.index("<script>") : text.index("</head>")], "")
    assert "http" not in ours
    assert "src=" not in ours.replace("src=x", "")
    assert "<link" not in ours


def test_a_run_that_has_only_begun_has_a_page(write_run: WriteRun, tmp_path: Path) -> None:
    folder = write_run(n_slots=0, ended=False)
    path = write_report([read_run(folder)], tmp_path / "deep" / "report.html")
    assert "running or killed, 0 trials" in path.read_text()


def test_a_run_of_which_only_the_header_is_there_names_no_target(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.jsonl").close()
    assert "<p>running or killed, 0 trials in 0 s.</p>" in page([read_run(tmp_path)])


def dom_of(path: Path, tmp_path: Path) -> tuple[str, str]:
    """Return the page as a browser leaves it, and what it logged."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
    command += ["--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom"]
    result = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    return result.stdout, result.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("n_runs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_browser_draws_every_figure_without_an_error(
    n_runs: int, write_run: WriteRun, tmp_path: Path
) -> None:
    folders = [write_run(f"run{number}", ended=number == 0) for number in range(n_runs)]
    out = tmp_path / "report.html"
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    dom, log = dom_of(out, tmp_path)
    assert "Uncaught" not in log
    assert "CONSOLE" not in log
    assert len(re.findall(r"<figure[^>]*js-plotly-plot", dom)) == len(ALL)
    assert dom.count('class="main-svg"') >= len(ALL)
    assert "<title>owned" not in dom
    for key in ALL:
        assert f'id="{key}"' in dom
    # Lines, bars and bands are there, not just axes.
    assert dom.count("scatterlayer") >= 4
    assert dom.count('class="point"') > 20


def test_bad_input(write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run("run")
    cases = {
        "is no run's directory": [str(tmp_path / "nowhere")],
        "cannot be written": [str(folder), "--out", str(folder / "journal.jsonl" / "r.html")],
    }
    for text, arguments in cases.items():
        assert main(["report", *arguments]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert text in line


def row_of(text: str, task: str) -> str:
    return text[text.index(f"<td>{task}</td>") :].split("</tr>", maxsplit=1)[0]


def test_a_time_that_was_refuted_is_not_shown_as_checked(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("measured", task="conv", weight=2.0, latencies_ms=[1.0, 0.125])
        task = {"name": "conv", "best_sec": 0.0015, "played_off": True, "is_used": True}
        journal.write("report", interrupted=False, tasks=[task])
    row = row_of(page([read_run(tmp_path)]), "conv")
    assert row.endswith("<td class=n>yes</td>")
    assert ("<td class=n>1.5</td><td class=n>3</td>" in row, "0.125" in row) == (True, False)


@pytest.mark.parametrize(
    ("best_sec", "is_used", "shown"),
    [(None, True, "-"), (0.001, True, "1"), (None, False, "0.125")],
)
def test_a_task_that_stays_untuned_has_no_time_that_was_refuted(
    tmp_path: Path, best_sec: float | None, is_used: bool, shown: str
) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("measured", task="conv", weight=2.0, latencies_ms=[1.0, 0.125])
        flags = {"played_off": False, "in_network": False, "n_disqualified": 1, "is_used": is_used}
        task = {"name": "conv", "best_sec": best_sec, **flags}
        journal.write("report", interrupted=False, tasks=[task])
    row = row_of(page([read_run(tmp_path)]), "conv")
    cells = [f"<td class=n>{text}</td>" for text in ("2", "2", "0", shown)]
    assert "".join(cells) in row  # calls, trials, failed, best


def test_a_resumed_run_does_not_call_unchecked_times_checked(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("measured", task="conv", weight=2.0, latencies_ms=[1.0, 0.125])
        task = {"name": "conv", "best_sec": 0.0015, "played_off": True, "is_used": True}
        journal.write("report", interrupted=False, tasks=[task])
    assert row_of(page([read_run(tmp_path)]), "conv").endswith("<td class=n>yes</td>")
    Journal(tmp_path / "journal.jsonl").close()  # resumed, then killed
    assert row_of(page([read_run(tmp_path)]), "conv").endswith("<td class=n>-</td>")


def test_what_is_left_is_that_of_the_deployed_form(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        tasks = [
            {"name": "direct", "group": "g"},
            {"name": "winograd", "group": "g", "form": "winograd-2x2"},
        ]
        journal.write("tasks", tasks=tasks)
        for name, ms in (("direct", 2.0), ("winograd", 1.0)):
            journal.write("measured", task=name, flop=5e8, latencies_ms=[ms])
        journal.write("roofline", flop_per_sec=1e12, bytes_per_sec=1e12)
        played = {"name": "direct", "best_sec": 0.002, "played_off": True, "is_used": True}
        lost = {"name": "winograd", "best_sec": 0.001, "is_used": False}
        journal.write("report", interrupted=False, tasks=[played, lost])
    text = page([read_run(tmp_path)])
    assert "<td class=n>25</td><td class=n>1.5</td>" in row_of(text, "direct")
    assert "<td class=n>50</td><td class=n>-</td>" in row_of(text, "winograd")


def test_a_task_that_runs_with_a_draft_has_a_row_instead_of_the_form_that_lost(
    tmp_path: Path,
) -> None:
    direct = {"name": "conv", "weight": 3.0, "group": "g"}
    steps = [
        {"name": name, "weight": 3.0, "group": "g", "form": "winograd-2x2"}
        for name in ("input", "product")
    ]
    checked = {"is_used": True, "in_network": True}
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        journal.write("tasks", tasks=[direct, *steps])
        journal.write("measured", task="product", weight=3.0, latencies_ms=[1.0])
        journal.write("slot-end", task="conv", n_rounds=0, seconds=0.0, best_ms=None)
        tasks = [
            {"name": "conv", "best_sec": None, "is_used": False},
            {"name": "input", "best_sec": 2e-5, "is_drafted": True, **checked},
            {"name": "product", "best_sec": 1e-3, **checked},
        ]
        journal.write("report", interrupted=False, tasks=tasks)
    text = page([read_run(tmp_path)])
    row = row_of(text, "input")
    cells = [f"<td class=n>{each}</td>" for each in ("3", "0", "0", "0.02", "0.06")]
    assert "".join(cells) in row
    assert row.endswith("<td class=n>yes</td>")
    assert row_of(text, "product").endswith("<td class=n>yes</td>")
    assert "<td>conv</td>" not in text


def test_a_compared_run_with_wrong_outputs_is_marked(write_run: WriteRun) -> None:
    right, wrong = write_run("a"), write_run("b")
    assert "OUTPUTS DISAGREE" not in page([read_run(right), read_run(wrong)])
    with closing(Journal(wrong / "journal.jsonl")) as journal:
        found = Comparison(0.5, 0.004, 9.0, 9.0, agree=False)
        journal.write("comparison", **dataclasses.asdict(found))
    assert "OUTPUTS DISAGREE" in page([read_run(right), read_run(wrong)])


def test_the_sum_of_tasks_is_that_of_the_last_lines(write_run: WriteRun) -> None:
    """Play-offs have timed anew what is deployed."""
    folder, other = write_run("a", ended=False), write_run("b", n_slots=1)
    running = page([read_run(folder)])
    assert "; 0.5 ms, sum of tasks" in running
    for weighted_sec, text in ((0.0007, "0.7"), (None, "-")):
        with closing(Journal(folder / "journal.jsonl")) as journal:
            journal.write("report", interrupted=False, weighted_sec=weighted_sec)
        history = read_run(folder)
        assert ("0.7 ms, sum of tasks" in page([history])) == (weighted_sec is not None)
        assert "0.5 ms, sum of tasks" not in page([history])
        assert f"<td class=n>{text}</td><td class=n>-</td></tr>" in page([read_run(other), history])
    Journal(folder / "journal.jsonl").close()  # resumed
    assert "; 0.5 ms, sum of tasks" in page([read_run(folder)])


def test_a_sum_of_tasks_that_are_gone_is_not_on_the_page(
    write_run: WriteRun, tmp_path: Path
) -> None:
    path, other = tmp_path / "journal.jsonl", write_run("other")
    for key, is_known in (("x", True), ("y", False)):
        with closing(Journal(path)) as journal:
            journal.write("tasks", tasks=[{"name": "conv", "workload_key": key}])
            if is_known:
                journal.write("measured", task="conv", latencies_ms=[2.0], weighted_ms=2.0)
        history = read_run(tmp_path)
        assert ("; 2 ms, sum of tasks" in page([history])) == is_known
        row = f"<td class=n>{2 if is_known else '-'}</td><td class=n>-</td></tr>"
        assert row in page([read_run(other), history])
    assert [ms for _, ms in history.curve] == [2.0]


def end(folder: Path, **fields: str) -> None:
    """Write that a run was slower than its framework, and its report."""
    peer = PeerTiming("ort", "ORT", 2, (0.02,), (0.025,), 0.0, 0.0, True)
    found = Comparison(0.02, 0.025, 0.0, 0.0, True, peer.framework, (peer,))
    with closing(Journal(folder / "journal.jsonl")) as journal:
        journal.write("comparison", **dataclasses.asdict(found))
        journal.write("report", interrupted=False, **fields)


def test_a_library_in_which_nothing_is_tuned_is_not_called_tuned(write_run: WriteRun) -> None:
    folder = write_run()
    coverage = "0 of 20 functions tuned (0 of 30 calls)"
    shortfall = "nothing is tuned; the library is the untuned one"
    end(folder, coverage=coverage, shortfall=shortfall, failure="")
    text = page([read_run(folder)])
    assert f"outputs agree; {coverage}; {shortfall}." in text
    assert "25 ms compiled; 1.25 x slower than ORT" in text
    assert "ms tuned" not in text


def test_a_tuned_library_that_could_not_be_made_is_named(write_run: WriteRun) -> None:
    right, broken = write_run("a"), write_run("b")
    end(broken, coverage="19 of 20 functions tuned", shortfall="", failure="ld: no space")
    text = "the tuned library could not be made: ld: no space"
    assert f"19 of 20 functions tuned; {text}." in page([read_run(broken)])
    assert f"<td>finished, {text}</td>" in page([read_run(right), read_run(broken)])
    Journal(broken / "journal.jsonl").close()  # resumed, then killed
    assert text not in page([read_run(broken)])


def test_a_tuned_library_that_could_not_be_run_is_named(write_run: WriteRun) -> None:
    right, broken = write_run("a"), write_run("b")
    text = "the tuned result could not be run; see the journal"
    coverage = "19 of 20 functions tuned"
    report: dict[str, Any] = {"interrupted": False, "comparison": None, "coverage": coverage}
    reasons: list[dict[str, Any]] = [
        {},
        {"shortfall": "no time was left to run net.so"},
        {"failure": "ld: no space"},
        {"interrupted": True},
    ]
    for fields in reasons:
        with closing(Journal(broken / "journal.jsonl")) as journal:
            journal.write("library", tuned=True)
            journal.write("report", **{**report, "shortfall": "", "failure": "", **fields})
        history = read_run(broken)
        assert (f"; {coverage}; {text}." in page([history])) == (not fields)
        compared = page([read_run(right), history])
        assert (f"<td>finished, {text}</td>" in compared) == (not fields)
        assert (text in page([history])) == (not fields)


def test_every_stage_looks_different(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        for name in ("prepare", "untuned", "search", "play-off", "compile", "check", "compare"):
            journal.write("stage", stage=name, seconds=1.0)
    chart = stages_chart([read_run(tmp_path)])
    assert len({json.dumps(trace["marker"], sort_keys=True) for trace in chart.data}) == 10
    plotly.graph_objects.Figure(data=chart.data, layout=chart.layout)


def test_tasks_that_no_trial_reached_have_rows_and_their_calls(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        tasks = [{"name": name, "weight": 4.0} for name in ("conv", "dense", "late")]
        tasks.append({"name": "other", "weight": 4.0, "group": "g", "form": "winograd"})
        tasks[0] |= {"group": "g", "form": "direct"}
        journal.write("tasks", tasks=tasks)
        journal.write("measured", task="conv", weight=4.0, latencies_ms=[1.0])
        journal.write("slot-end", task="dense", n_rounds=0, seconds=0.0, best_ms=None)
    history = read_run(tmp_path)
    text = page([history])
    for name in ("dense", "late"):
        assert "<td class=n>4</td><td class=n>0</td>" in row_of(text, name)
    assert "<td>other</td>" not in text  # the network would not use it
    assert {task.weight for task in history.tasks.values()} == {4.0}


@pytest.mark.parametrize(
    "events",
    [
        [{"event": "report", "tasks": [{}]}],
        [
            {"event": "slot", "task": "a", "gain": "x"},
            {"event": "slot-end", "task": "a"},
            {"event": "measured", "task": "a", "latencies_ms": [1.0]},
        ],
    ],
)
def test_an_event_that_cannot_be_drawn_is_one_line(
    events: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(event) + "\n" for event in [{"event": "journal"}, *events]]
    (tmp_path / "journal.jsonl").write_text("".join(lines))
    assert main(["report", str(tmp_path)]) == 2
    assert "is not what this version writes" in capsys.readouterr().err


def test_without_plotly_the_message_says_what_to_install(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(folder)]) == 2
    assert "pip install 'tvm-adaptive[report]'" in capsys.readouterr().err


def test_a_folder_whose_name_is_no_text_has_a_page(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run("caf\udce9")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "argv", ["tvm-adaptive", "report", str(folder)])
    assert main() == 0
    shown.seek(0)
    assert shown.read() == f"{folder.parent / 'caf'}\\udce9/report.html\n"
    assert "(caf\\udce9)" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_the_command_reports_on_a_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TuneConfig(
        search=SearchConfig(n_trials_per_round=4, population_size=64, genetic_num_iters=1),
        finish=FinishConfig(top_k=1, max_task_sec=0.5),
    )
    tune("te:GMM", work_dir=tmp_path / "run", trials=12, seed=1, config=config)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 0
    text = Path(capsys.readouterr().out.strip()).read_text()
    assert "te:GMM" in text
    assert "x faster" in text
    assert read_run(tmp_path / "run").roofline is not None
    for key in ("latency", "slots", "stages", "exploration", "early-stops"):
        assert f'id="{key}"' in text
