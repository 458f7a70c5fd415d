"""The picture of models and peers: one line per model, one mark per framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.peers.table import Row
from benchmarks.svg import colour_of, scale, text, ticks
from tvm_adaptive.models.frontend import PEERS

_WIDTH, _LEFT, _RIGHT = 720, 150, 20
_TOP, _LINE, _BOTTOM = 52, 22, 44
_RADIUS = 5
# Room beside the outermost marks, as a factor.
_MARGIN = 1.15
# The page's own colours: a picture in a README stands on white or on black.
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#333}.axis{stroke:#999}.one{stroke:#333}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.one{stroke:#ddd}}</style>"
)


def picture(rows: Sequence[Row]) -> str:
    """Return an SVG of how many times as fast the tuned libraries are, on a log scale."""
    timed = [row for row in rows if row.peers]
    if not timed:
        raise ValueError("rows must have at least one model that was timed")
    ratios = [peer.speedup for row in timed for peer in row.peers.values()]
    low, high = min(1.0, *ratios) / _MARGIN, max(1.0, *ratios) * _MARGIN
    height = _TOP + _LINE * len(timed) + _BOTTOM
    bottom = height - _BOTTOM
    place = scale(low, high, _LEFT, _WIDTH - _RIGHT, log=True)
    colours = colour_of(PEERS)
    parts = [_legend(colours), text(_WIDTH / 2, height - 8, "times as fast as")]
    for value in ticks(low, high, log=True):
        parts.append(_upright(place(value), bottom, "axis"))
        parts.append(text(place(value), bottom + 16, f"{value:g} x"))
    parts.append(_upright(place(1.0), bottom, "one"))
    for number, row in enumerate(timed):
        y = _TOP + _LINE * (number + 0.5)
        parts.append(text(_LEFT - 10, y + 4, row.model, "end"))
        for name, peer in row.peers.items():
            title = f"{row.model}: {peer.speedup:.2f} x as fast as {peer.framework}"
            parts.append(
                f'<circle cx="{place(peer.speedup):.1f}" cy="{y:.1f}" r="{_RADIUS}" '
                f'fill="{colours[name]}"><title>{escape(title)}</title></circle>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}">{_STYLE}{"".join(parts)}</svg>\n'
    )


def _legend(colours: Mapping[str, str]) -> str:
    parts, step = [], (_WIDTH - _LEFT - _RIGHT) / len(colours)
    for number, (name, colour) in enumerate(colours.items()):
        x = _LEFT + step * number
        parts.append(f'<circle cx="{x:.1f}" cy="20" r="{_RADIUS}" fill="{colour}"/>')
        parts.append(text(x + 10, 24, PEERS[name].title, "start"))
    return "".join(parts)


def _upright(x: float, bottom: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
