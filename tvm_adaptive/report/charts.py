"""What a run did, as figures for Plotly: plain mappings, one idea each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from tvm_adaptive.report.story import Story

Spec = dict[str, Any]

# Colours that stay apart for those who see few of them (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
# Tasks that get a line of their own; the others are small.
MAX_TASKS = 30
# What stock's evaluator gives each candidate at the least: 3 runs, and 100 ms.
_STOCK_RUNS, _STOCK_SEC = 3, 0.1


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure and what it says."""

    key: str  # for the page's own links
    title: str  # plain text
    caption: str
    data: list[Spec]  # plotly's traces
    layout: Spec  # plotly's layout


def axis(title: str, **more: Any) -> Spec:
    """Return an axis with a title."""
    return {"title": {"text": title}, "automargin": True, **more}


def latency_chart(stories: Sequence[Story]) -> Chart:
    """Draw the network's latency against seconds of tuning, one line per run."""
    data: list[Spec] = []
    for story, colour in zip(stories, _cycle(len(stories)), strict=True):
        x = [sec for sec, _ in story.curve]
        y = [ms for _, ms in story.curve]
        if x:
            x, y = [*x, story.elapsed_sec], [*y, y[-1]]
        data.append(_line(escape(story.name), x, y, colour))
        if story.comparison is not None:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{escape(story.name)}, compiled",
                    "x": [story.elapsed_sec],
                    "y": [1e3 * float(story.comparison["after_sec"])],
                    "marker": {"color": colour, "symbol": "diamond", "size": 10},
                }
            )
    return Chart(
        "latency",
        "Latency against seconds of tuning",
        "The best of every task, times its calls, added up; lower is better. It begins when "
        "every task has a result. A diamond is the whole, compiled and timed at the end.",
        data,
        {
            "xaxis": axis("seconds", rangemode="tozero"),
            "yaxis": axis("milliseconds", type="log"),
        },
    )


def slots_chart(story: Story) -> Chart:
    """Draw who got which slot, and why."""
    order = [task.name for task in story.heaviest[:MAX_TASKS]]
    reasons = list(dict.fromkeys(slot.reason for slot in story.slots))
    data: list[Spec] = []
    for reason, colour in zip(reasons, _cycle(len(reasons)), strict=True):
        slots = [s for s in story.slots if s.reason == reason and s.task in order]
        if not slots:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escape(reason) or "unknown",
                "y": [escape(slot.task) for slot in slots],
                "x": [slot.seconds for slot in slots],
                "base": [slot.start_sec for slot in slots],
                "text": [_slot_text(slot.gain, slot.unit) for slot in slots],
                "textposition": "none",
                "customdata": [[slot.n_trials, slot.best_ms] for slot in slots],
                "hovertemplate": "%{y}<br>%{customdata[0]} trials in %{x:.1f} s, best "
                "%{customdata[1]:.4g} ms<br>%{text}",
                "marker": {"color": colour},
            }
        )
    return Chart(
        "slots",
        "Who got which slot, and why",
        "Tasks by their share of the latency, the largest on top. The scheduler gives each "
        "slot to the task that promises the largest gain per second; warm-up gives every "
        "task a first result. Point at a slot to see what it was expected to bring.",
        data,
        {
            "barmode": "overlay",
            "xaxis": axis("seconds"),
            "yaxis": axis(
                "", categoryorder="array", categoryarray=[escape(n) for n in order][::-1]
            ),
            "height": 180 + 22 * len(order),
        },
    )


def stages_chart(stories: Sequence[Story]) -> Chart:
    """Draw where the seconds went."""
    rows = [_seconds_by_stage(story) for story in stories]
    names = list(dict.fromkeys(name for row in rows for name in row))
    data: list[Spec] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [escape(story.name) for story in stories],
            "x": [row.get(name, 0.0) for row in rows],
            "marker": {"color": colour},
        }
        for name, colour in zip(names, _cycle(len(names)), strict=True)
    ]
    return Chart(
        "stages",
        "Where the seconds went",
        "Build and measure are seconds of compiling and timing candidates; propose is the "
        "search for them; the rest of the search is bookkeeping and learning.",
        data,
        {
            "barmode": "stack",
            "xaxis": axis("seconds"),
            "yaxis": axis(""),
            "height": 220 + 30 * len(stories),
            "legend": {"orientation": "h", "y": -0.5},
        },
    )


def early_stops_chart(story: Story) -> Chart:
    """Draw why measurements ended, and what that saved."""
    timed = [event for event in story.timings if not event.get("error")]
    counts = Counter(str(event.get("reason")) for event in timed)
    spent = dict.fromkeys(counts, 0.0)
    for event in timed:
        spent[str(event.get("reason"))] += float(event.get("elapsed_sec") or 0.0)
    used_sec = sum(spent.values())
    stock_sec = sum(
        max(_STOCK_SEC, _STOCK_RUNS * float(event.get("mean_sec") or 0.0)) for event in timed
    )
    reasons = [reason for reason, _ in counts.most_common()]
    return Chart(
        "early-stops",
        "Why measurements ended",
        f"{len(timed)} candidates were timed in {used_sec:.1f} s. Stock's evaluator, which "
        f"gives each {_STOCK_RUNS} runs and {_STOCK_SEC * 1e3:.0f} ms, would have taken "
        f"{stock_sec:.1f} s for the runs alone"
        + (f": {stock_sec - used_sec:.1f} s saved." if stock_sec > used_sec else "."),
        [
            {
                "type": "bar",
                "name": "candidates",
                "x": [escape(reason) for reason in reasons],
                "y": [counts[reason] for reason in reasons],
                "text": [f"{spent[reason]:.1f} s" for reason in reasons],
                "marker": {"color": COLOURS[0]},
            }
        ],
        {"xaxis": axis("reason"), "yaxis": axis("candidates")},
    )


def _seconds_by_stage(story: Story) -> dict[str, float]:
    row = {name: seconds for name, seconds in story.stage_secs.items() if name != "search"}
    return row | story.search_secs()


def _slot_text(gain: float | None, unit: str) -> str:
    return "" if gain is None else f"expected gain {gain:.3g} {escape(unit)}"


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str) -> Spec:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "shape": "hv", "width": 2},
    }


def _cycle(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]
