"""A run as figures for Plotly: plain mappings, one idea each."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from tvm_adaptive.measure_callback.history import TaskHistory
from tvm_adaptive.report.history import PlayedSlot, RunHistory
from tvm_adaptive.task_scheduler.forecast.belief import forecast
from tvm_adaptive.values.trial import FloatArray

Spec = dict[str, Any]

# Colours that colour-blind readers can tell apart (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
# The heaviest tasks get a line each; the others are small.
_MAX_TASKS = 30
# The minimum of stock's evaluator per candidate: 3 runs, and 100 ms.
_STOCK_RUNS, _STOCK_SEC = 3, 0.1
# Rounds of a running median: they show a trend and hide the noise.
_WINDOW = 15
# Tasks whose curves are drawn; a curve of fewer trials shows nothing.
_MAX_CURVES, _LEAST_TRIALS = 6, 16
# Trials ahead that the band of a forecast covers: a batch, its parts and its multiples.
_HORIZONS = (1, 2, 4, 8, 16, 32, 64)
_LEVELS = (0.05, 0.5, 0.95)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure with its title and caption."""

    key: str  # for the page's own links
    title: str  # plain text
    caption: str
    data: list[Spec]  # Plotly's traces
    layout: Spec  # Plotly's layout

    @property
    def is_drawable(self) -> bool:
        """Whether the figure has a point."""
        return any(trace["x"] for trace in self.data)


def latency_chart(histories: Sequence[RunHistory]) -> Chart:
    """Draw the network's latency against seconds of tuning, one line per run."""
    data: list[Spec] = []
    for number, history in enumerate(histories):
        colour = _colour(number)
        x = [sec for sec, _ in history.curve]
        y = [ms for _, ms in history.curve]
        if x:
            x, y = [*x, history.spent_sec], [*y, y[-1]]
        name = escape(history.name)
        data.append(_scatter(x, y, name=name, line={"color": colour, "shape": "hv", "width": 2}))
        if history.comparison is not None:
            after_ms = 1e3 * history.comparison.after_sec
            marker = {"color": colour, "symbol": "diamond", "size": 10}
            name = f"{name}, compiled"
            x = [history.compared_sec]
            data.append(_scatter(x, [after_ms], mode="markers", name=name, marker=marker))
    return Chart(
        "latency",
        "Latency against seconds of tuning",
        "The best of every task, times its calls, added up; lower is better. The line begins when "
        "every task has a result. A diamond is the whole network, compiled and timed at the end.",
        data,
        {"xaxis": _axis("seconds", rangemode="tozero"), "yaxis": _axis("milliseconds", type="log")},
    )


def peers_chart(histories: Sequence[RunHistory]) -> Chart:
    """Draw a bar per framework: its latency over that of the tuned network."""
    data: list[Spec] = []
    for number, history in enumerate(histories):
        ranges = [
            [theirs / ours for theirs, ours in zip(peer.secs, peer.tuned_secs, strict=True)]
            for peer in history.peers
        ]
        ratios = [peer.speedup for peer in history.peers]
        spread = {
            "type": "data",
            "array": [max(0.0, max(r) - s) for r, s in zip(ranges, ratios, strict=True)],
            "arrayminus": [max(0.0, s - min(r)) for r, s in zip(ranges, ratios, strict=True)],
        }
        names = [escape(peer.framework) for peer in history.peers]
        texts = [f"{ratio:.2f} x" for ratio in ratios]
        more = {"name": escape(history.name), "text": texts, "error_y": spread}
        data.append(_bar(names, ratios, _colour(number), **more))
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    return Chart(
        "ratios",
        "Speed against each framework",
        "Latency of the framework over that of the tuned network, medians of rounds in turns; "
        "above 1 the tuned network is faster. Lines show the range of the rounds.",
        data,
        {
            "barmode": "group",
            "showlegend": len(histories) > 1,
            "xaxis": _axis(""),
            "yaxis": _axis("ratio", rangemode="tozero"),
            "shapes": [{**line, "line": {"dash": "dot", "color": COLOURS[-1]}}],
        },
    )


def slots_chart(history: RunHistory) -> Chart:
    """Draw which task got each slot, and why."""
    order = [task.name for task in history.heaviest[:_MAX_TASKS]]
    data: list[Spec] = []
    for number, reason in enumerate(dict.fromkeys(slot.reason for slot in history.slots)):
        slots = [s for s in history.slots if s.reason == reason and s.task in order]
        if not slots:
            continue
        data.append(
            _bar(
                [slot.seconds for slot in slots],
                [escape(slot.task) for slot in slots],
                _colour(number),
                orientation="h",
                name=escape(reason) or "unknown",
                base=[slot.start_sec for slot in slots],
                text=[_slot_text(slot) for slot in slots],
                textposition="none",
                hovertemplate="%{y}<br>%{text}",
            )
        )
    return Chart(
        "slots",
        "Slots of each task, and their reasons",
        "Tasks by their share of the latency, the largest on top, those of forms that the network "
        "does not use at the bottom. The scheduler gives each slot to the task that promises the "
        "largest gain per second; warm-up gives every task a first result. Point at a slot to see "
        "its expected gain.",
        data,
        {
            "barmode": "overlay",
            "xaxis": _axis("seconds"),
            "yaxis": _axis(
                "", categoryorder="array", categoryarray=[escape(n) for n in order][::-1]
            ),
            "height": 180 + 22 * len(order),
        },
    )


def _slot_text(slot: PlayedSlot) -> str:
    """Return what a slot brought, as markup of Plotly."""
    text = f"{slot.n_trials} trials in {slot.seconds:.1f} s"
    if math.isfinite(slot.best_ms):
        text += f", best {slot.best_ms:.4g} ms"
    if slot.gain is not None:
        text += f"<br>expected gain {slot.gain:.3g} {escape(slot.unit)}"
    return text


def stages_chart(histories: Sequence[RunHistory]) -> Chart:
    """Draw the seconds of each stage."""
    rows = [
        {name: sec for name, sec in history.stage_secs.items() if name != "search"}
        | history.search_secs()
        for history in histories
    ]
    runs = [escape(history.name) for history in histories]
    data = [
        _bar(
            [row.get(name, 0.0) for row in rows],
            runs,
            _colour(n),
            orientation="h",
            name=escape(name),
        )
        for n, name in enumerate(dict.fromkeys(name for row in rows for name in row))
    ]
    for trace in data[len(COLOURS) :]:  # in a colour that another one has
        trace["marker"]["pattern"] = {"shape": "/"}
    return Chart(
        "stages",
        "Seconds of each stage",
        "Build and measure are seconds of compiling and timing candidates; propose is the "
        "search for them; the rest of the search is bookkeeping and learning. With several "
        "devices or lanes they overlap, and add up to more than the time that passed.",
        data,
        {
            "barmode": "stack",
            "xaxis": _axis("seconds"),
            "yaxis": _axis(""),
            "height": 220 + 30 * len(histories),
            "legend": {"orientation": "h", "y": -0.5},
        },
    )


def early_stops_chart(history: RunHistory) -> Chart:
    """Draw the reasons why measurements ended, and the time saved."""
    timed = [event for event in history.timings if not event.get("error")]
    counts = Counter(str(event.get("reason")) for event in timed)
    spent = dict.fromkeys(counts, 0.0)
    for event in timed:
        spent[str(event.get("reason"))] += float(event.get("elapsed_sec") or 0.0)
    failed_sec = sum(
        float(event.get("elapsed_sec") or 0.0) for event in history.timings if event.get("error")
    )
    used_sec = history.part_secs["measure"] - failed_sec
    stock_sec = sum(
        max(_STOCK_SEC, _STOCK_RUNS * float(event.get("mean_sec") or 0.0)) for event in timed
    )
    saved = f": {stock_sec - used_sec:.1f} s saved." if stock_sec > used_sec else "."
    reasons = [reason for reason, _ in counts.most_common()]
    bar = _bar(
        [escape(reason) for reason in reasons],
        [counts[reason] for reason in reasons],
        COLOURS[0],
        name="candidates",
        text=[f"{spent[reason]:.1f} s" for reason in reasons],
    )
    return Chart(
        "early-stops",
        "Reasons why measurements ended",
        f"{len(timed)} candidates were timed in {used_sec:.1f} s, second timings included. "
        "Stock's evaluator, which "
        f"gives each {_STOCK_RUNS} runs and {_STOCK_SEC * 1e3:.0f} ms, would have taken "
        f"{stock_sec:.1f} s for the runs alone{saved}",
        [bar],
        {"xaxis": _axis("reason"), "yaxis": _axis("candidates")},
    )


def exploration_chart(history: RunHistory) -> Chart:
    """Draw epsilon, and the posterior's standard deviation that sets it."""
    return Chart(
        "exploration",
        "Exploration: epsilon and sigma per round",
        "Epsilon is the share of a batch that is drawn at random. Once a task has its first "
        "trials, it is the posterior's mean standard deviation (sigma) over the best "
        "throughput: the surer the model, the less is left to chance. Lines are running "
        "medians.",
        [
            *_trend("epsilon", history.rounds, "epsilon", COLOURS[0]),
            *_trend("sigma", history.rounds, "mean_std", COLOURS[1], yaxis="y2"),
        ],
        {
            "xaxis": _axis("seconds"),
            "yaxis": _axis("epsilon", range=[0, 1.02]),
            "yaxis2": _axis("sigma", overlaying="y", side="right", rangemode="tozero"),
        },
    )


def calibration_chart(history: RunHistory) -> Chart:
    """Draw the errors of the forecasts of each batch before it was measured."""
    return Chart(
        "calibration",
        "The forest's forecasts, compared before it learned the batch",
        "Rank correlation of forecast and measured throughput within each batch: 1 ranks "
        "perfectly, 0 is chance. z is the distance of measurements from forecasts, in the "
        "forest's own standard deviations, root mean square: 1 is calibrated, above is too "
        "sure. The model picked the candidates of a batch as alike and good, so that ranking "
        "them is harder than ranking at random.",
        [
            *_trend("rank correlation", history.forecasts, "spearman", COLOURS[2]),
            *_trend("z", history.forecasts, "z_rms", COLOURS[3], yaxis="y2"),
        ],
        {
            "xaxis": _axis("seconds"),
            "yaxis": _axis("rank correlation", range=[-1.02, 1.02]),
            "yaxis2": _axis("z", overlaying="y", side="right", type="log"),
        },
    )


def belief_chart(history: RunHistory) -> Chart:
    """Draw the heaviest tasks' curves with forecasts from halfway and from the end."""
    tasks = [t for t in history.heaviest if len(t.latencies_ms) >= _LEAST_TRIALS][:_MAX_CURVES]
    data: list[Spec] = []
    for number, task in enumerate(tasks):
        colour = _colour(number)
        best = _best_runs_per_ms(task)
        first = int(np.argmax(best > 0)) if (best > 0).any() else 0
        x = range(first + 1, len(best) + 1)
        line = {"color": colour, "shape": "hv"}
        traces = [_scatter(x, best[first:].tolist(), name=escape(task.name), line=line)]
        traces += _band(best, len(best) // 2, colour, "dot")
        traces += _band(best, len(best), colour, "solid")
        group = {"legendgroup": str(number), "visible": True if number == 0 else "legendonly"}
        data += [trace | group for trace in traces]
    return Chart(
        "belief",
        "Tuning curves and their forecasts",
        "Best throughput (runs per millisecond) against trials, for the tasks with the "
        "largest share of the latency; click a name to see another. Bands hold 90 % of what "
        "the default scheduler's curve belief forecasts for the next 64 trials by the task's own "
        "trials alone (the scheduler knows the other tasks' throughput, too): once from "
        "halfway (dotted), to compare with the curve, and once from the end.",
        data,
        {"xaxis": _axis("trials"), "yaxis": _axis("runs per ms")},
    )


def _best_runs_per_ms(task: TaskHistory) -> FloatArray:
    """Return the best throughput after each trial; 0 before the first success."""
    latencies_ms = np.array(task.latencies_ms, dtype=np.float64)
    valid = np.isfinite(latencies_ms) & (latencies_ms > 0)
    speed = np.divide(1.0, latencies_ms, out=np.zeros(len(latencies_ms)), where=valid)
    return np.asarray(np.maximum.accumulate(speed), dtype=np.float64)


def _band(best: FloatArray, known: int, colour: str, dash: str) -> list[Spec]:
    """Return the forecast after ``known`` trials: an area and its median."""
    if known < 2 or best[known - 1] <= 0:
        return []
    rng = np.random.default_rng(0)
    rows = [forecast(best[:known], n, rng=rng).quantile(_LEVELS) for n in _HORIZONS]
    low, middle, high = np.array([np.full(3, best[known - 1]), *rows]).T.tolist()
    x = [known + n for n in (0, *_HORIZONS)]
    hidden: Spec = {"showlegend": False, "hoverinfo": "skip"}
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    area = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.15)"}
    return [
        _scatter(x, high, line={"width": 0}, **hidden),
        _scatter(x, low, line={"width": 0}, **area, **hidden),
        _scatter(x, middle, line={"color": colour, "dash": dash}, **hidden),
    ]


def _trend(
    name: str, events: Sequence[dict[str, Any]], key: str, colour: str, **more: Any
) -> list[Spec]:
    """Return a field of events as points, and their running median."""
    events = [event for event in events if event.get(key) is not None]
    x = [float(event["time_sec"]) for event in events]
    y = [float(event[key]) for event in events]
    half = _WINDOW // 2
    median = [float(np.median(y[max(0, i - half) : i + half + 1])) for i in range(len(y))]
    text = [escape(f"{event.get('task')}: {event.get('reason', '')}") for event in events]
    marker = {"color": colour, "size": 4, "opacity": 0.4}
    return [
        _scatter(x, y, mode="markers", name=name, text=text, marker=marker, **more),
        _scatter(x, median, showlegend=False, line={"color": colour, "width": 2}, **more),
    ]


def _axis(title: str, **more: Any) -> Spec:
    return {"title": {"text": title}, "automargin": True, **more}


def _scatter(x: Sequence[float], y: Sequence[float], mode: str = "lines", **more: Any) -> Spec:
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), **more}


def _bar(x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Spec:
    return {"type": "bar", "x": x, "y": y, "marker": {"color": colour}, **more}


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
