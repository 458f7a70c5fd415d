"""What a run believed, as figures: exploration, the forest's calibration, tuning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from tvm_adaptive.report.charts import COLOURS, Chart, Spec, axis
from tvm_adaptive.report.story import Story, TaskStory
from tvm_adaptive.task_scheduler.forecast.belief import forecast
from tvm_adaptive.values.trial import FloatArray

# Of a running median: so many rounds show a trend and hide the noise.
_WINDOW = 15
# Tasks whose curves are drawn; those with fewer trials have none worth drawing.
_MAX_CURVES, _LEAST_TRIALS = 6, 16
# Trials ahead that the band reaches, in steps of a batch and its parts.
_HORIZONS = (1, 2, 4, 8, 16, 32, 64)
_LEVELS = (0.05, 0.5, 0.95)


def exploration_chart(story: Story) -> Chart:
    """Draw epsilon, and the posterior's standard deviation that it follows."""
    rounds = [event for event in story.rounds if event.get("epsilon") is not None]
    searched = [event for event in rounds if event.get("mean_std") is not None]
    return Chart(
        "exploration",
        "Exploration: epsilon and sigma per round",
        "Epsilon is the share of a batch that is drawn at random. Once a task has its first "
        "trials, it is the posterior's mean standard deviation (sigma) over the best "
        "throughput: the surer the model, the less is left to chance. Lines are running "
        "medians.",
        [
            *_trend("epsilon", rounds, "epsilon", COLOURS[0]),
            *_trend("sigma", searched, "mean_std", COLOURS[1], yaxis="y2"),
        ],
        {
            "xaxis": axis("seconds"),
            "yaxis": axis("epsilon", range=[0, 1.02]),
            "yaxis2": axis("sigma", overlaying="y", side="right", rangemode="tozero"),
        },
    )


def calibration_chart(story: Story) -> Chart:
    """Draw how well each batch was forecast before it was measured."""
    ranked = [event for event in story.forecasts if event.get("spearman") is not None]
    sure = [event for event in story.forecasts if event.get("z_rms") is not None]
    return Chart(
        "calibration",
        "The forest's forecasts, judged before it learned the batch",
        "Rank correlation of forecast and measured throughput within each batch: 1 ranks "
        "perfectly, 0 is chance. z is how far measurements lie from forecasts, in the "
        "forest's own standard deviations, root mean square: 1 is calibrated, above is too "
        "sure. Batches are what the model itself picked as alike and good, so that ranking "
        "them is harder than ranking at random.",
        [
            *_trend("rank correlation", ranked, "spearman", COLOURS[2]),
            *_trend("z", sure, "z_rms", COLOURS[3], yaxis="y2"),
        ],
        {
            "xaxis": axis("seconds"),
            "yaxis": axis("rank correlation", range=[-1.02, 1.02]),
            "yaxis2": axis("z", overlaying="y", side="right", type="log"),
        },
    )


def belief_chart(story: Story) -> Chart:
    """Draw the heaviest tasks' curves, and what was to be expected of them halfway."""
    tasks = [t for t in story.heaviest if len(t.latencies_ms) >= _LEAST_TRIALS][:_MAX_CURVES]
    data: list[Spec] = []
    for place, task in enumerate(tasks):
        colour, visible = COLOURS[place % len(COLOURS)], True if place == 0 else "legendonly"
        best = best_runs_per_ms(task)
        first = int(np.argmax(best > 0)) if (best > 0).any() else 0
        x = np.arange(first + 1, len(best) + 1)
        group: Spec = {"legendgroup": str(place), "visible": visible}
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(task.name),
                "x": x.tolist(),
                "y": best[first:].tolist(),
                "line": {"color": colour, "shape": "hv"},
                **group,
            }
        )
        known = len(best) // 2
        for known_now, dash in ((known, "dot"), (len(best), "solid")):
            data += [trace | group for trace in _band(best, known_now, colour, dash)]
    return Chart(
        "belief",
        "Tuning curves and what is expected of them",
        "Best throughput (runs per millisecond) against trials, for the tasks with the "
        "largest share of the latency; click a name to see another. Bands hold 90 % of what "
        "the default scheduler's curve belief expects of the next 64 trials: once as it was "
        "halfway (dotted), to compare with what then came, and once from the end on.",
        data,
        {"xaxis": axis("trials"), "yaxis": axis("runs per ms")},
    )


def best_runs_per_ms(task: TaskStory) -> FloatArray:
    """Return the best throughput after each trial; 0 before the first success."""
    latencies_ms = np.array(task.latencies_ms, dtype=np.float64)
    valid = np.isfinite(latencies_ms) & (latencies_ms > 0)
    speed = np.divide(1.0, latencies_ms, out=np.zeros(len(latencies_ms)), where=valid)
    return np.asarray(np.maximum.accumulate(speed), dtype=np.float64)


def _band(best: FloatArray, known: int, colour: str, dash: str) -> list[Spec]:
    """Return the forecast after ``known`` trials: an area, and its median."""
    if known < 2 or best[known - 1] <= 0:
        return []
    rng = np.random.default_rng(0)
    rows = [forecast(best[:known], n, rng=rng).quantile(_LEVELS) for n in _HORIZONS]
    low, middle, high = np.array([np.full(3, best[known - 1]), *rows]).T
    x = [known + n for n in (0, *_HORIZONS)]
    hidden: Spec = {"type": "scatter", "mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    return [
        {**hidden, "x": x, "y": high.tolist(), "line": {"width": 0}},
        {
            **hidden,
            "x": x,
            "y": low.tolist(),
            "line": {"width": 0},
            "fill": "tonexty",
            "fillcolor": _faint(colour),
        },
        {**hidden, "x": x, "y": middle.tolist(), "line": {"color": colour, "dash": dash}},
    ]


def _trend(
    name: str, events: Sequence[dict[str, Any]], key: str, colour: str, **more: Any
) -> list[Spec]:
    """Return a value of each event as points, and their running median."""
    x = [float(event["time_sec"]) for event in events]
    y = [float(event[key]) for event in events]
    points: Spec = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": y,
        "text": [escape(f"{event.get('task')}: {event.get('reason', '')}") for event in events],
        "marker": {"color": colour, "size": 4, "opacity": 0.4},
    }
    median: Spec = {
        "type": "scatter",
        "mode": "lines",
        "showlegend": False,
        "x": x,
        "y": _running_median(y),
        "line": {"color": colour, "width": 2},
    }
    return [points | more, median | more]


def _running_median(values: Sequence[float]) -> list[float]:
    half = _WINDOW // 2
    return [float(np.median(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def is_drawable(chart: Chart) -> bool:
    """Say whether a figure has anything to show."""
    return any(
        math.isfinite(value) if isinstance(value, int | float) else value is not None
        for trace in chart.data
        for value in trace.get("x", ())
    )
