"""The report: figures and tables in one HTML file that needs nothing else.

All text of a journal is escaped; figures are JSON that no browser takes for markup, and one
script draws them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tvm_adaptive.errors import AdaptiveError, InvalidOptionError, JournalError
from tvm_adaptive.measure_callback.journal import DAMAGED_EVENT
from tvm_adaptive.report import charts
from tvm_adaptive.report.comparison import NOT_RUN, failure_text, peer_lines, speed_text
from tvm_adaptive.report.decisions import importances
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.report.run_options import option_differences
from tvm_adaptive.report.tables import TRIALS_SCRIPT, number, script_json, table, trial_table
from tvm_adaptive.report.trials import TrialRow, source_shares
from tvm_adaptive.values.forms import NO_FORM

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1b1b; --faint: #555; --line: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --text: #e4e4e4; --faint: #a5a5a5; --line: #3a3d42; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--page); color: var(--text); }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; }
.scroll { overflow-x: auto; } .caption { color: var(--faint); }
figure { margin: 0; }
th button { font: inherit; font-weight: bold; color: inherit; background: none; border: 0;
  padding: 0; cursor: pointer; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
"""
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function coloured({data, layout}) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map(name => style.getPropertyValue(name).trim());
  const result = {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: text}};
  for (const key of Object.keys(layout).filter(key => /^[xy]axis/.test(key)))
    result[key] = {...layout[key], gridcolor: line, zerolinecolor: line};
  const traces = data.map(trace =>
    trace.error_y ? {...trace, error_y: {...trace.error_y, color: text}} : trace);
  return [traces, result];
}
for (const place of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(document.getElementById(place.dataset.chart).textContent);
  const draw = () => Plotly.react(place, ...coloured(chart),
    {responsive: true, displaylogo: false});
  setTimeout(draw);  // one by one, after the page can be read
  dark.addEventListener("change", draw);
}
"""
_NO_SCRIPT = "<noscript><p>Figures and the table of trials need JavaScript.</p></noscript>"
_LAYOUT = {
    "margin": {"l": 70, "r": 70, "t": 10, "b": 50},
    "height": 420,
    "legend": {"orientation": "h", "y": -0.2},
}
_MAX_FAILURES = 20
# A forest of each takes a tenth of a second.
_MAX_IMPORTANCES = 8


def write_report(histories: Sequence[RunHistory], path: Path) -> Path:
    """Write the page of one run, or of several side by side.

    Parameters
    ----------
    histories : sequence of RunHistory
        The first is shown in full, the others are drawn beside it.
    path : Path
        The file to write or replace.

    Returns
    -------
    Path
        ``path``, absolute.

    Raises
    ------
    InvalidOptionError
        When Plotly is not installed, there is no run, or the file cannot be written.
    JournalError
        When a journal is damaged.
    """
    if not histories:
        raise InvalidOptionError("A report needs a run; give its directory.")
    try:
        text = page(histories)
    except AdaptiveError:
        raise
    except DAMAGED_EVENT as error:  # some fields are not looked at before they are drawn
        names = " and ".join(history.name for history in histories)
        raise JournalError(
            f"The journal of {names} has an event that is not what this version writes "
            f"({type(error).__name__}: {error}). Draw it with the version that wrote it."
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files may be no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InvalidOptionError(
            f"The report {path} cannot be written ({error.strerror}); choose another file."
        ) from error
    return path.resolve()


def page(histories: Sequence[RunHistory]) -> str:
    """Return the page as HTML; see :func:`write_report`."""
    first = histories[0]
    drawn = [
        charts.latency_chart(histories),
        charts.slots_chart(first),
        charts.belief_chart(first),
        charts.stages_chart(histories),
        charts.exploration_chart(first),
        charts.calibration_chart(first),
        charts.early_stops_chart(first),
    ]
    sections = [_section(chart) for chart in drawn if chart.is_drawable]
    sections.insert(1, _tasks(first))
    sections.insert(1, _peers(histories))
    sections += [_importances(first), _sources(first), _devices(first), _failures(first)]
    sections.append(trial_table(first.trials))
    body = "\n".join([_head(first), _NO_SCRIPT, _runs(histories), _options(histories), *sections])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(first.name)}</title>\n<style>{_STYLE}</style>\n"
        f"<script>{_plotly()}</script>\n</head>\n<body>\n{body}\n"
        f"<script>{TRIALS_SCRIPT}{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _plotly() -> str:
    if importlib.util.find_spec("plotly") is None:
        raise InvalidOptionError(
            "A report needs the package plotly: pip install 'tvm-adaptive[report]'."
        )
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _section(chart: charts.Chart) -> str:
    layout = _LAYOUT | chart.layout
    safe = script_json({"data": chart.data, "layout": layout})
    key = f"chart-{chart.key}"
    return (
        f'<h2 id="{chart.key}">{escape(chart.title)}</h2>\n<p class="caption">'
        f'{escape(chart.caption)}</p>\n<script type="application/json" id="{key}">{safe}</script>\n'
        f'<figure data-chart="{key}"></figure>'
    )


def _head(history: RunHistory) -> str:
    words = [f"{history.state}, {history.n_trials} trials in {history.spent_sec:.0f} s"]
    comparison = history.comparison
    if comparison is not None:
        before_sec, after_ms = comparison.before_sec, 1e3 * comparison.after_sec
        if math.isinf(after_ms):
            words.append("not timed")
        elif history.peers or math.isinf(before_sec):  # its framework could not be timed
            words += [f"{after_ms:.4g} ms compiled", *peer_lines(history.peers)]
        else:
            words.append(
                f"{1e3 * before_sec:.4g} ms untuned, {after_ms:.4g} ms tuned: "
                f"{speed_text(1e3 * before_sec, after_ms)}"
            )
        words.append("outputs agree" if comparison.agree else "OUTPUTS DISAGREE")
    elif history.sum_ms is not None:
        words.append(f"{history.sum_ms:.4g} ms, sum of tasks")
    report = history.current_report
    texts = (report.get("coverage"), _failure_text(history), report.get("shortfall"))
    words += [str(text) for text in texts if text]
    target = (history.last_report or {}).get("target")
    if not target and (wanted := history.run.get("target")):
        target = json.dumps(wanted)
    caption = f'<br><span class="caption">{escape(str(target))}</span>' if target else ""
    return f"<h1>{escape(history.name)}</h1>\n<p>{escape('; '.join(words))}.{caption}</p>"


def _failure_text(history: RunHistory) -> str:
    """Say why the tuned library could not be made, or that it could not be run, or nothing."""
    report = history.current_report
    if failure := report.get("failure"):
        return failure_text(failure)
    is_uncompared = "comparison" in report and report["comparison"] is None
    is_explained = report.get("interrupted") or report.get("shortfall")
    return NOT_RUN if is_uncompared and not is_explained else ""


def _runs(histories: Sequence[RunHistory]) -> str:
    if len(histories) == 1:
        return ""
    rows = []
    for history in histories:
        sum_ms = math.nan if history.sum_ms is None else history.sum_ms
        after_ms = 1e3 * history.comparison.after_sec if history.comparison else math.nan
        counts = [str(history.n_trials), f"{history.spent_sec:.0f}"]
        state = history.state
        if history.comparison is not None and not history.comparison.agree:
            state += ", OUTPUTS DISAGREE"
        if failure := _failure_text(history):
            state += f", {failure}"
        rows.append([history.name, state, *counts, number(sum_ms), number(after_ms)])
    head = ["run", "state", "trials", "seconds", "sum of tasks, ms", "network, ms"]
    return table(head, rows, n_text=2)


def _options(histories: Sequence[RunHistory]) -> str:
    """Return the options in which the runs differ; nothing for one run."""
    if len(histories) == 1:
        return ""
    differences = option_differences(histories)
    if not differences:
        return '<h2 id="options">Options</h2>\n<p>The runs have the same options.</p>'
    head = ["option", *(history.name for history in histories)]
    rows = [[name, *values] for name, values in differences.items()]
    return '<h2 id="options">Options that differ</h2>\n' + table(head, rows, n_text=len(head))


def _sources(history: RunHistory) -> str:
    """Return what recalled, seeded, analytical, modelled and random candidates brought."""
    shares = source_shares(history.trials)
    if not shares:
        return ""
    rows = [[str(value) for value in dataclasses.astuple(each)] for each in shares]
    head = ["source", "trials", "failed", "improvements", "first results", "fastest of a task"]
    return (
        '<h2 id="sources">Sources of candidates</h2>\n<p class="caption">Recalled: the best of '
        "this task from a store; seed: what was good for tasks of the same family, also from "
        "starter records; analytical: what suits the processor; prefetching: the fastest so far, "
        "with its weights loaded ahead of their use; model: the search's choice. An improvement is "
        "faster than all earlier trials of its task.</p>\n" + table(head, rows, n_text=1)
    )


def _importances(history: RunHistory) -> str:
    """Return which decisions explain the times of the heaviest tasks."""
    by_task: dict[str, list[TrialRow]] = {}
    for trial in history.trials:
        by_task.setdefault(trial.task, []).append(trial)
    found = [
        each
        for task in history.heaviest[:_MAX_IMPORTANCES]
        for each in importances(by_task.get(task.name, ()))
    ]
    if not found:
        return ""
    rows = [[each.task, each.decision, each.fastest, number(100 * each.share)] for each in found]
    return (
        '<h2 id="importance">Decisions that matter</h2>\n<p class="caption">How much of the '
        "differences of a task's times each decision explains, by the splits of a forest of "
        "randomised trees that learned them. Decisions are counted by their place in the "
        "schedule.</p>\n"
        + table(["task", "decision", "the fastest has", "share, %"], rows, n_text=3)
    )


def _peers(histories: Sequence[RunHistory]) -> str:
    """Return the ratios to frameworks, and the first run's rounds in turns, if any."""
    history, chart = histories[0], charts.peers_chart(histories)
    bars = _section(chart) + "\n" if chart.is_drawable else ""
    if not history.peers:
        return bars
    rows = []
    for peer in history.peers:
        for turn, (theirs, ours) in enumerate(zip(peer.secs, peer.tuned_secs, strict=True), 1):
            numbers = map(number, (1e3 * theirs, 1e3 * ours, theirs / ours))
            rows.append([peer.framework, str(turn), *numbers])
    head = ["framework", "round", "its latency, ms", "tuned, ms", "ratio"]
    caption = '<p class="caption">Latency in turns; above 1 the tuned network is faster.</p>'
    return bars + f'<h2 id="peers">Frameworks</h2>\n{caption}\n' + table(head, rows, n_text=1)


def _tasks(history: RunHistory) -> str:
    checked = {str(task["name"]): _checked(task) for task in history.reported_tasks}
    rows, used = [], history.network_tasks()
    for task in history.deployed_tasks():
        gflops = task.flop / task.best_ms / 1e6 if task.flop else math.nan
        limit_ms = history.limit_ms(task)
        left_ms = max(0.0, task.share_ms - task.weight * limit_ms)
        if task.name not in used:
            left_ms = math.nan
        counts = [f"{task.weight:g}", str(task.n_trials), str(task.n_errors)]
        numbers = map(
            number,
            (
                *(task.best_ms, task.share_ms, gflops),
                *(100.0 * limit_ms / task.best_ms, left_ms, task.spent_sec),
            ),
        )
        form = history.forms.get(task.name, NO_FORM).form
        rows.append([task.name, form, *counts, *numbers, checked.get(task.name, "-")])
    head = ["task", "form", "calls", "trials", "failed", "best, ms", "in all, ms", "GFLOP/s"]
    head += ["roofline, %", "left, ms", "seconds", "checked"]
    caption = (
        '<p class="caption">Roofline: the share of what the processor reaches, in single-precision '
        "operations or in bytes of the task's arguments, as measured at the end of the run. Left: "
        "milliseconds of the network above that. Seconds are of tuning: of all slots of the "
        "task.</p>"
    )
    return f"<h2>Tasks</h2>\n{caption}\n" + table(head, rows, n_text=2)


def _checked(task: Mapping[str, Any]) -> str:
    """Return whether a task of a run's report was checked, if the network uses it."""
    if not task.get("is_used", True):
        return "not used"
    return "yes" if task.get("played_off") or task.get("in_network") else "no"


def _devices(history: RunHistory) -> str:
    """Return the table of a farm's devices; nothing for a run on one machine."""
    counters = n_timings, n_errors, n_faults, n_rests = [Counter[str]() for _ in range(4)]
    for event in history.timings:
        if event.get("board"):
            n_timings[str(event["board"])] += 1
            n_errors[str(event["board"])] += event.get("error") is not None
    speeds: dict[str, float] = {}
    for event in history.boards:
        address = str(event.get("address"))
        if event.get("state") == "fault":
            n_faults[address] += 1
        elif event.get("state") == "quarantined":
            n_rests[address] += 1
        elif event.get("speed"):
            speeds[address] = float(event["speed"])
    addresses = sorted({*n_timings, *n_faults})
    if not addresses:
        return ""
    rows = [
        [each, *(str(n[each]) for n in counters), number(speeds.get(each, math.nan))]
        for each in addresses
    ]
    head = ["device", "timings", "of these errors", "faults", "suspended", "speed"]
    return (
        '<h2>Devices</h2>\n<p class="caption">A fault is the device\'s own; speed is against the '
        "first device, by a reference kernel.</p>\n" + table(head, rows, n_text=1)
    )


def _failures(history: RunHistory) -> str:
    if not history.errors:
        return "<h2>Failures</h2>\n<p>None.</p>"
    rows = [[text, str(count)] for text, count in history.errors.most_common(_MAX_FAILURES)]
    return "<h2>Failures by cause</h2>\n" + table(["message", "trials"], rows, n_text=1)
