"""What is on the screen while a run goes on."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tvm_adaptive.budget import Budget
from tvm_adaptive.measure_callback.recorder import RunProgress

# Not on a terminal: a line as often as a patient reader wants one.
_PLAIN_LINE_SEC = 15.0


class Display:
    """A live line on a terminal, plain lines elsewhere, nothing when quiet.

    Parameters
    ----------
    console : rich.console.Console
    quiet : bool, default False
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._last_line_sec = -math.inf
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Display:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """Show that a stage begins."""
        if self._live:
            self._bar.update(self._task, description=name)
        elif not self._quiet:
            self._print(f"{name} ...")

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Show what a round brought."""
        text = describe(progress)
        if self._live:
            total = None if budget.seconds is None else budget.seconds
            self._bar.update(
                self._task, description=text, total=total, completed=budget.elapsed_sec
            )
        elif not self._quiet and budget.elapsed_sec >= self._last_line_sec + _PLAIN_LINE_SEC:
            self._last_line_sec = budget.elapsed_sec
            self._print(f"{budget.elapsed_sec:6.0f} s  {text}")

    def note(self, text: str) -> None:
        """Show a line."""
        if not self._quiet:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def _live(self) -> bool:
        return self._console.is_terminal and not self._quiet


def describe(progress: RunProgress) -> str:
    """Return one line on a run: trials, errors, and the latency that its best add up to."""
    done = sum(math.isfinite(task.best_sec) for task in progress.tasks)
    text = f"{progress.n_trials} trials, {progress.n_errors} errors, "
    if done < len(progress.tasks):
        return text + f"{done} of {len(progress.tasks)} tasks timed, now {progress.current}"
    return text + f"sum of tasks {progress.weighted_sec * 1e3:.3f} ms, now {progress.current}"
