"""Draw charts as SVG, so that a page needs nothing but a browser."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from benchmarks.charts import Bars, Chart, Figure, Line

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 28, 46
# Okabe and Ito's colours, which people who are colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
# More labels than that take colours of this scale (viridis, without its palest end), in
# their order: rungs of a ladder stay distinct and keep their order.
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (190, 210, 40))
# A longer legend stands below the axes; inside it would hide the lines.
LEGEND_INSIDE = 4
# More names below bars than that run into one another.
_MAX_NAMES = 16
_LEGEND_ROW = 15
# Characters of a label that fits into half of the width.
_HALF_LABEL = 31
_N_TICKS = 5
_PANELS_PER_ROW = 3

Scale = Callable[[float], float]


def draw(panel: Chart | Bars) -> str:
    """Return an ``<svg>`` element."""
    return _bars(panel) if isinstance(panel, Bars) else _chart(panel)


def save_svg(figure: Figure, folder: Path) -> Path:
    """Draw a figure's panels into one file and return it."""
    path = folder / f"{figure.name}.svg"
    path.write_text(draw_figure(figure), encoding="utf-8")
    return path


def draw_figure(figure: Figure) -> str:
    """Return an ``<svg>`` element with the panels side by side, on white."""
    n_panels = max(1, len(figure.panels))
    n_columns = 2 if n_panels == 4 else min(_PANELS_PER_ROW, n_panels)  # two rows of two
    parts, y = [], 0
    for first in range(0, len(figure.panels), n_columns):
        row = figure.panels[first : first + n_columns]
        for place, panel in enumerate(row):
            parts.append(f'<g transform="translate({place * WIDTH} {y})">{draw(panel)}</g>')
        y += max(map(_height, row))
    return _element(
        n_columns * WIDTH, y, f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}'
    )


def _height(panel: Chart | Bars) -> int:
    labels = panel.parts if isinstance(panel, Bars) else [line.label for line in panel.lines]
    return HEIGHT + _legend_rows(colour_of(labels)) * _LEGEND_ROW


def colour_of(labels: Iterable[str]) -> dict[str, str]:
    """Return one colour per label, in their order; no two labels share one."""
    names = list(dict.fromkeys(labels))
    if len(names) <= len(COLOURS):
        return dict(zip(names, COLOURS, strict=False))
    return {name: _on_scale(n / (len(names) - 1)) for n, name in enumerate(names)}


def _on_scale(place: float) -> str:
    """Return the colour at a place between 0 and 1."""
    at = place * (len(_SCALE) - 1)
    left = min(int(at), len(_SCALE) - 2)
    share = at - left
    mixed = (
        round((1 - share) * a + share * b)
        for a, b in zip(_SCALE[left], _SCALE[left + 1], strict=True)
    )
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _name_stride(bars: Bars) -> int:
    """Return which of the bars are named: every so many."""
    return max(1, -(-len(bars.groups) // _MAX_NAMES))


def ticks(low: float, high: float, log: bool = False) -> list[float]:
    """Return round numbers between two values, at least one."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
        return found or [low, high]
    step = 10.0 ** math.floor(math.log10((high - low) / _N_TICKS))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= _N_TICKS)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _chart(chart: Chart) -> str:
    points = [(line, _finite(line, chart)) for line in chart.lines]
    xs = [x for _, pairs in points for x, _ in pairs]
    ys = [y for _, pairs in points for _, y in pairs]
    if not xs:
        return _frame(chart.title, [text(WIDTH / 2, HEIGHT / 2, "no data")])
    x_low, x_high = _limits(xs, chart.log_x, from_zero=not chart.log_x)
    y_low, y_high = _limits(ys, chart.log_y, from_zero=False)
    to_x = scale(x_low, x_high, LEFT, WIDTH - RIGHT, chart.log_x)
    to_y = scale(y_low, y_high, HEIGHT - BOTTOM, TOP, chart.log_y)
    colours = colour_of(line.label for line in chart.lines)
    parts = _axes(chart.x_label, chart.y_label)
    parts += [_tick_x(to_x(x), x) for x in ticks(x_low, x_high, chart.log_x)]
    parts += [_tick_y(to_y(y), y) for y in ticks(y_low, y_high, chart.log_y)]
    for line, pairs in sorted(points, key=lambda each: each[0].thick):
        parts += _line(line, [(to_x(x), to_y(y)) for x, y in pairs], colours[line.label])
    return _frame(chart.title, parts + _legend(colours), _legend_rows(colours))


def _line(line: Line, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    if line.markers:
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    if not points:
        return []
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        path += f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f} {y:.1f}"
    width, opacity = (2.5, 1.0) if line.thick else (1.0, 0.4)
    style = f'fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"'
    return [f'<path d="{path}" {style}/>']


def _bars(bars: Bars) -> str:
    columns = range(len(bars.groups))
    sums = [sum(_or_zero(part[n]) for part in bars.parts.values()) for n in columns]
    tallest = sums if bars.stacked else [_or_zero(y) for part in bars.parts.values() for y in part]
    high = max([*tallest, 0.0]) or 1.0
    to_y = scale(0.0, high, HEIGHT - BOTTOM, TOP, False)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(bars.groups))
    share = 0.7 if bars.stacked else 0.7 / max(1, len(bars.parts))
    colours = colour_of(bars.parts)
    parts = _axes("", bars.y_label)
    parts += [_tick_y(to_y(y), y) for y in ticks(0.0, high)]
    for n, group in enumerate(bars.groups):
        base = 0.0
        for k, (label, values) in enumerate(bars.parts.items()):
            value = _or_zero(values[n])
            x = LEFT + slot * (n + 0.15 + (0.0 if bars.stacked else k * share))
            y = to_y(base + value)
            height = to_y(base) - y
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{slot * share:.1f}" '
                f'height="{height:.1f}" fill="{colours[label]}">'
                f"<title>{escape(f'{group}, {label}: {value:.4g}')}</title></rect>"
            )
            base += value if bars.stacked else 0.0
        if n % _name_stride(bars) == 0:
            parts.append(text(LEFT + slot * (n + 0.5), HEIGHT - BOTTOM + 14, group))
    return _frame(bars.title, parts + _legend(colours), _legend_rows(colours))


def _finite(line: Line, chart: Chart) -> list[tuple[float, float]]:
    # Below it, multiplying by 1.05 changes nothing.
    least = sys.float_info.min
    return [
        (x, y)
        for x, y in zip(line.x, line.y, strict=True)
        if math.isfinite(x)
        and math.isfinite(y)
        and not (chart.log_x and x < least)
        and not (chart.log_y and y < least)
    ]


def _limits(values: Sequence[float], log: bool, *, from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    if log:
        return low / 1.05, high * 1.05
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if from_zero else low - margin), high + margin


def scale(low: float, high: float, start: float, end: float, log: bool) -> Scale:
    """Return the map of values to places, from ``start`` for ``low`` to ``end`` for ``high``."""
    if log:
        return lambda v: start + (end - start) * math.log(v / low) / math.log(high / low)
    return lambda v: start + (end - start) * (v - low) / (high - low)


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    """Return a line of text; ``more`` are further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def _axes(x_label: str, y_label: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = (TOP + bottom) / 2
    return [
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#444"/>',
        text((LEFT + right) / 2, HEIGHT - 8, x_label),
        text(14, middle, y_label, more=f'transform="rotate(-90 14 {middle})"'),
    ]


def _tick_x(x: float, value: float) -> str:
    bottom = HEIGHT - BOTTOM
    mark = f'<path d="M{x:.1f} {bottom}v4" stroke="#444"/>'
    return mark + text(x, bottom + 16, f"{value:g}")


def _tick_y(y: float, value: float) -> str:
    grid = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
    return grid + text(LEFT - 6, y + 4, f"{value:g}", "end")


def _legend(colours: dict[str, str]) -> list[str]:
    if len(colours) > LEGEND_INSIDE:
        return _legend_below(colours)
    parts = []
    for n, (label, colour) in enumerate(colours.items()):
        y = TOP + 8 + n * _LEGEND_ROW
        parts.append(f'<rect x="{WIDTH - 26}" y="{y - 5}" width="12" height="5" fill="{colour}"/>')
        parts.append(text(WIDTH - 32, y, label, "end"))
    return parts


def _legend_below(colours: dict[str, str]) -> list[str]:
    """Return a legend in columns, filled one after the other."""
    n_rows = _legend_rows(colours)
    parts = []
    for n, (label, colour) in enumerate(colours.items()):
        x = 12 + n // n_rows * (WIDTH - 12) / 2
        y = HEIGHT + 8 + n % n_rows * _LEGEND_ROW
        parts.append(f'<rect x="{x:.0f}" y="{y - 6}" width="12" height="5" fill="{colour}"/>')
        parts.append(text(x + 17, y, label, "start"))
    return parts


def _legend_rows(colours: dict[str, str]) -> int:
    """Return the rows that a legend takes below the axes."""
    if len(colours) <= LEGEND_INSIDE:
        return 0
    return len(colours) if max(map(len, colours)) > _HALF_LABEL else -(-len(colours) // 2)


def _frame(title: str, parts: Sequence[str], n_rows_below: int = 0) -> str:
    head = text(WIDTH / 2, 16, title, more='font-weight="bold"')
    height = HEIGHT + n_rows_below * _LEGEND_ROW
    return _element(WIDTH, height, head + "".join(parts))


def _element(width: int, height: int, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        f"{content}</svg>"
    )
