"""Draw figures as PNG; needs matplotlib (``pip install tvm-adaptive[bench]``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.charts import Bars, Chart, Figure
from benchmarks.svg import LEGEND_INSIDE, colour_of, name_stride

_PANEL_INCHES = (5.2, 3.8)
_PER_ROW = 3


def why_no_plots() -> str:
    """Return why no PNG can be drawn; empty if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install tvm-adaptive[bench]): no PNG files"
    return ""


def save_png(figure: Figure, folder: Path) -> Path:
    """Draw a figure's panels side by side and return the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    n_panels = max(1, len(figure.panels))
    n_columns = 2 if n_panels == 4 else min(_PER_ROW, n_panels)  # two rows of two
    n_rows = -(-n_panels // n_columns)
    size = (_PANEL_INCHES[0] * n_columns, _PANEL_INCHES[1] * n_rows)
    canvas, axes = plt.subplots(
        n_rows, n_columns, figsize=size, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(figure.panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, figure.panels, strict=False):
        if isinstance(panel, Bars):
            _bars(axis, panel)
        else:
            _chart(axis, panel)
    _legends(canvas, axes.flat)
    path = folder / f"{figure.name}.png"
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
    return path


def _chart(axis: Any, chart: Chart) -> None:
    colours = colour_of(line.label for line in chart.lines)
    named: set[str] = set()
    for line in sorted(chart.lines, key=lambda each: not each.thick):
        style: dict[str, Any] = {"color": colours[line.label]}
        style |= {"linewidth": 2.5} if line.thick else {"linewidth": 0.8, "alpha": 0.4}
        if line.label not in named:
            style["label"] = line.label
            named.add(line.label)
        if line.markers:
            style |= {"linestyle": "", "marker": "o", "markersize": 4}
        if line.steps:
            axis.step(line.x, line.y, where="post", **style)
        else:
            axis.plot(line.x, line.y, **style)
    axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axis.set_xscale("log")
    if chart.log_y:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)


def _bars(axis: Any, bars: Bars) -> None:
    colours = colour_of(bars.parts)
    places = list(range(len(bars.groups)))
    width = 0.7 if bars.stacked else 0.7 / max(1, len(bars.parts))
    base = [0.0] * len(places)
    for k, (label, values) in enumerate(bars.parts.items()):
        left = places if bars.stacked else [x + (k + 0.5) * width - 0.35 for x in places]
        axis.bar(left, values, width, bottom=base, label=label, color=colours[label])
        if bars.stacked:
            base = [b + v for b, v in zip(base, values, strict=True)]
    axis.set(title=bars.title, ylabel=bars.y_label)
    stride = name_stride(bars)
    axis.set_xticks(places[::stride], bars.groups[::stride], rotation=20)


def _legends(canvas: Any, axes: Iterable[Any]) -> None:
    """Give each panel a legend; long ones become one for the whole figure, below it."""
    shared: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        if len(labels) > LEGEND_INSIDE:
            shared |= dict(zip(labels, handles, strict=True))
        elif labels:
            axis.legend(fontsize="small")
    if shared:
        canvas.legend(
            shared.values(), shared, loc="outside lower center", ncols=_PER_ROW, fontsize="small"
        )
