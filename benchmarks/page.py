"""The results as one HTML page that needs nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from benchmarks.charts import Figure
from benchmarks.svg import draw

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
td, th { border: 1px solid #ccc; padding: 2px 8px; text-align: left; }
.figure svg { max-width: 100%; height: auto; }
.figure { margin: 1.5em 0; }
"""


def make_page(title: str, sections: Sequence[tuple[str, str | Figure]]) -> str:
    """Return a page.

    Parameters
    ----------
    title : str
    sections : sequence of (str, str or Figure)
        Heading (none if empty) and content: Markdown of the kinds that ``tables.py``
        writes (tables, lists, paragraphs, bold), or a figure.
    """
    body = [f"<h1>{escape(title)}</h1>"]
    for heading, content in sections:
        if heading:
            body.append(f"<h2>{escape(heading)}</h2>")
        body.append(_figure(content) if isinstance(content, Figure) else to_html(content))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def to_html(markdown: str) -> str:
    """Return the little Markdown that tables and lists need as HTML."""
    return "".join(_block(block) for block in re.split(r"\n\s*\n", markdown.strip()))


def _block(block: str) -> str:
    lines = block.splitlines()
    if lines and lines[0].startswith("|"):
        head, rows = _cells(lines[0]), [_cells(line) for line in lines[2:]]
        top = "".join(f"<th>{_inline(each)}</th>" for each in head)
        body = "".join(
            f"<tr>{''.join(f'<td>{_inline(each)}</td>' for each in row)}</tr>" for row in rows
        )
        return f"<table><tr>{top}</tr>{body}</table>"
    if lines and all(line.startswith("- ") for line in lines):
        return f"<ul>{''.join(f'<li>{_inline(line[2:])}</li>' for line in lines)}</ul>"
    return f"<p>{_inline(' '.join(lines))}</p>"


def _cells(line: str) -> list[str]:
    return [each.strip() for each in line.strip().strip("|").split("|")]


def _inline(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text))


def _figure(figure: Figure) -> str:
    panels = "".join(draw(panel) for panel in figure.panels)
    return f'<div class="figure">{panels}<p>{_inline(figure.caption)}</p></div>'
