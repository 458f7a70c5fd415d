"""Tables of a page; all text is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from tvm_adaptive.measure_callback.journal import finite
from tvm_adaptive.report.decisions import difference
from tvm_adaptive.report.trials import TrialRow, fastest_trials

# Rows in the document at a time: twenty thousand would take seconds to lay out.
_PAGE_ROWS = 100
_TRIAL_HEAD = ("task", "form", "source", "ms", "error, %", "timing ended", "seconds", "differs in")
_NUMBERS = ("ms", "error, %", "seconds")

TRIALS_SCRIPT = """
const trials = document.getElementById("trial-data");
if (trials) {
  const {words, rows, size} = JSON.parse(trials.textContent);
  const isText = [true, true, true, false, false, true, false, true];
  const value = (row, c) => isText[c] ? words[row[c]] : row[c];
  const body = document.querySelector("#trial-table tbody");
  const count = document.getElementById("trial-count");
  const filter = document.getElementById("trial-filter");
  const heads = [...document.querySelectorAll("#trial-table th")];
  let shown = rows, page = 0, column = -1, sign = 1;
  function draw() {
    const last = Math.max(0, Math.ceil(shown.length / size) - 1);
    page = Math.min(Math.max(page, 0), last);
    body.replaceChildren(...shown.slice(page * size, (page + 1) * size).map(row => {
      const line = document.createElement("tr");
      isText.forEach((text, c) => {
        const cell = line.insertCell(), v = value(row, c);
        cell.textContent = text ? v : v === null ? "-" : Number(v.toPrecision(4));
        if (!text) cell.className = "n";
      });
      return line;
    }));
    count.textContent = `${shown.length} of ${rows.length} trials, page ${page + 1} of ${last + 1}`;
  }
  function select() {
    const parts = filter.value.toLowerCase().split(/\\s+/).filter(part => part);
    const fits = words.map(word => parts.map(part => word.toLowerCase().includes(part)));
    shown = rows.filter(row => parts.every((_, p) =>
      isText.some((text, c) => text && fits[row[c]][p])));
    if (column >= 0) shown.sort((a, b) => {
      const left = value(a, column), right = value(b, column);
      if (left === null || right === null) return (left === null) - (right === null);
      return sign * (left < right ? -1 : left > right ? 1 : 0);
    });
    page = 0;
    draw();
  }
  heads.forEach((head, c) => {
    const sort = () => {
      sign = column === c ? -sign : 1;
      column = c;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      select();
    };
    head.querySelector("button").addEventListener("click", sort);
  });
  filter.addEventListener("input", select);
  document.getElementById("trial-back").addEventListener("click", () => { page -= 1; draw(); });
  document.getElementById("trial-next").addEventListener("click", () => { page += 1; draw(); });
  draw();
}
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], n_text: int) -> str:
    """Return a table whose first ``n_text`` columns are text, the others numbers."""

    def line(row: Sequence[str], kind: str) -> str:
        cells = (
            f"<{kind}{'' if column < n_text else ' class=n'}>{escape(cell)}</{kind}>"
            for column, cell in enumerate(row)
        )
        return f"<tr>{''.join(cells)}</tr>"

    lines = [line(head, "th"), *(line(row, "td") for row in rows)]
    return f'<div class="scroll" tabindex="0"><table>{"".join(lines)}</table></div>'


def number(value: float) -> str:
    """Return four digits; "-" for zero and what is not known."""
    return f"{value:.4g}" if math.isfinite(value) and value else "-"


def script_json(value: Any) -> str:
    """Return JSON that may stand in a script element, where only "<" can end it."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def trial_table(trials: Sequence[TrialRow]) -> str:
    """Return a table that a script fills, page by page, sorted and filtered; "" without trials."""
    if not trials:
        return ""
    words: dict[str, int] = {}  # each text once: the names of tasks are long

    def place(word: str) -> int:
        return words.setdefault(word, len(words))

    fastest, rows = fastest_trials(trials), []
    for t in trials:
        texts = map(place, (t.task, t.form, t.source))
        numbers = map(_short, (t.ms, 100.0 * t.error))
        ended = place(t.reason or ("failed" if math.isnan(t.ms) else ""))
        best = fastest.get(t.task)
        known = None if best is None else best.decisions
        differs = place("fastest" if t is best else difference(t.decisions, known))
        rows.append([*texts, *numbers, ended, _short(t.seconds), differs])
    data = script_json({"words": list(words), "rows": rows, "size": _PAGE_ROWS})
    heads = "".join(
        f"<th{' class=n' if name in _NUMBERS else ''}>"
        f'<button type="button">{escape(name)}</button></th>'
        for name in _TRIAL_HEAD
    )
    return (
        '<h2 id="trials">Trials</h2>\n<p class="caption">In the order measured. A click on a head '
        "sorts; words in the filter must all be in a row. The error is the standard error of the "
        "mean. The last column has the decisions that the task's fastest trial takes otherwise, by "
        "their place in the schedule; splits from the outermost loop to the innermost.</p>\n"
        f'<script type="application/json" id="trial-data">{data}</script>\n'
        '<p><input id="trial-filter" type="search" placeholder="filter" aria-label="filter"> '
        '<button type="button" id="trial-back">back</button> '
        '<button type="button" id="trial-next">next</button> <span id="trial-count"></span></p>\n'
        f'<div class="scroll" tabindex="0"><table id="trial-table"><thead><tr>{heads}</tr></thead>'
        "<tbody></tbody></table></div>"
    )


def _short(value: float) -> float:
    """Return five digits, which a page needs at most: the whole data stand in it."""
    return float(f"{value:.5g}")
