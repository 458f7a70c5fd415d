"""The display of a run in progress."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from tvm_adaptive.cli.native_log import NativeLog
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.report.live import failure_lines, screen
from tvm_adaptive.tuning.budget import Budget

# Between lines off a terminal: often enough to show progress.
_PLAIN_LINE_SEC = 15.0
# Between updates on a terminal. Drawing takes some ten milliseconds of the processor that
# measures, and so it happens between rounds, not by a clock.
_DRAW_SEC = 0.5


class Display:
    """A live screen on a terminal, plain lines elsewhere, nothing when quiet."""

    def __init__(
        self, console: Console, quiet: bool = False, native_log: NativeLog | None = None
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._native_log = native_log
        self._history = RunHistory(keeps_all=False)
        self._budget: Budget | None = None
        self._stage = "starting"
        self._last_sec = -math.inf
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Display:
        if self._is_live:
            with contextlib.suppress(OSError):  # the run works without a screen
                self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the screen."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def stage(self, name: str) -> None:
        """Show the start of a stage."""
        self._stage = name
        if self._is_live:
            self._draw()
        elif not self._quiet:
            self._print(f"{name} ...")

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Show the results of a round."""
        self._budget = budget
        if self._is_live:
            if time.monotonic() >= self._last_sec + _DRAW_SEC:
                self._draw()
        elif not self._quiet and budget.elapsed_sec >= self._last_sec + _PLAIN_LINE_SEC:
            self._last_sec = budget.elapsed_sec
            self._print(f"{budget.elapsed_sec:6.0f} s  {describe(progress)}")
            for line in failure_lines(progress.errors):
                self._print(f"          {line}")

    def note(self, text: str) -> None:
        """Show a line."""
        if not self._quiet:
            self._print(text)

    def event(self, event: dict[str, Any]) -> None:
        """Keep an event of the journal; the next round shows it, the comparison is shown now."""
        if self._native_log is not None:
            self._native_log.begin()  # the run owns its directory since the first event
        if self._is_live:
            self._history.add(event)
            if event["event"] == "comparison":
                self._draw()

    def _draw(self) -> None:
        self._last_sec = time.monotonic()
        self._live.update(screen(self._history, self._budget, self._stage), refresh=True)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def _is_live(self) -> bool:
        return self._console.is_interactive and not self._quiet


def describe(progress: RunProgress) -> str:
    """Return one line on a run: trials, errors, and the sum of its tasks."""
    used = progress.used_tasks
    done = sum(math.isfinite(task.best_sec) for task in used)
    text = f"{progress.n_trials} trials, {progress.n_errors} errors, "
    if done < len(used):
        return text + f"{done} of {len(used)} tasks timed, now {progress.current}"
    return text + f"sum of tasks {progress.weighted_sec * 1e3:.3f} ms, now {progress.current}"
