"""A run's progress in a notebook: ``tune(..., observer=NotebookView())``."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from html import escape
from typing import Any

from rich.console import Console

from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.report.live import screen
from tvm_adaptive.tuning.budget import Budget

# Drawing costs the processor that measures some ten milliseconds.
_LEAST_SEC = 1.0
_WIDTH = 100
_MAX_NOTES = 6


class NotebookView:
    """An observer that keeps one output cell up to date, between measurements only.

    Parameters
    ----------
    show : callable or None, default None
        ``show(html)`` displays HTML and returns an object whose method ``update`` replaces
        it; None takes IPython's display.

    Raises
    ------
    ImportError
        When ``show`` is None and IPython is not installed.
    """

    def __init__(self, show: Callable[[str], Any] | None = None) -> None:
        if show is None:
            import IPython.display  # noqa: F401 - better now than after the first stage
        self._show = _Cell if show is None else show
        self._history = RunHistory(keeps_all=False)
        self._budget: Budget | None = None
        self._stage = "starting"
        self._notes: list[str] = []
        self._cell: Any = None
        self._drawn_sec = 0.0

    def stage(self, name: str) -> None:
        """Show that a stage begins."""
        self._stage = name
        self._draw()

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Show the state after a round."""
        del progress  # the events hold more
        self._budget = budget
        if time.monotonic() - self._drawn_sec >= _LEAST_SEC:
            self._draw()

    def note(self, text: str) -> None:
        """Show a line."""
        self._notes = [*self._notes, text][-_MAX_NOTES:]
        self._draw()

    def event(self, event: dict[str, Any]) -> None:
        """Add an event of the journal; the comparison is shown at once."""
        self._history.add(event)
        if event["event"] == "comparison":
            self._draw()

    def html(self) -> str:
        """Return the displayed HTML."""
        # In a notebook rich would display what it prints, whatever its file is.
        console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
        console.print(screen(self._history, self._budget, self._stage))
        body = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        return body + "".join(f"<div>{escape(note)}</div>" for note in self._notes)

    def _draw(self) -> None:
        self._drawn_sec = time.monotonic()
        if self._cell is None:
            self._cell = self._show(self.html())
        else:
            self._cell.update(self.html())


class _Cell:
    """An output of a notebook."""

    def __init__(self, html: str) -> None:
        from IPython.display import HTML, DisplayHandle

        self._html = HTML
        self._handle = DisplayHandle()
        self._handle.display(HTML(html))

    def update(self, html: str) -> None:
        self._handle.update(self._html(html))
