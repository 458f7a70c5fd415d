"""A run in progress as a screen, for terminals and notebooks; nothing is printed here."""

from __future__ import annotations

import math
from collections import Counter

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tvm_adaptive.report.comparison import peer_lines, speed_text
from tvm_adaptive.report.history import RunHistory
from tvm_adaptive.tuning.budget import Budget

# A screen is read at a glance; the report shows all tasks.
MAX_ROWS = 12
_BAR_WIDTH = 30
_MAX_NAME = 44


def screen(history: RunHistory, budget: Budget | None, stage: str) -> RenderableType:
    """Return the screen of a run."""
    lines: list[RenderableType] = [_clock(budget, stage)]
    if line := latency_line(history):
        lines.append(Text(line))
    if history.tasks:
        lines.append(_task_table(history))
    lines += [Text(line, overflow="ellipsis", no_wrap=True) for line in status_lines(history)]
    return Group(*lines)


def latency_line(history: RunHistory) -> str:
    """Return the sum of the tasks' best latencies, against the untuned; "" before a search."""
    if history.weighted_ms is None:
        # Of other forms, as plain lines count: the network needs one form only.
        if not history.weights:
            return ""
        used = history.used_tasks
        n_done = sum(math.isfinite(task.best_sec) for task in used)
        return f"{n_done} of {len(used)} tasks timed, {history.n_trials} trials"
    now_ms = history.weighted_ms
    text = f"sum of tasks {now_ms:.4g} ms"
    if history.untuned_sec is not None:
        untuned_ms = 1e3 * history.untuned_sec
        text += f", untuned {untuned_ms:.4g} ms: {speed_text(untuned_ms, now_ms)}"
    return f"{text}; {history.n_trials} trials"


def status_lines(history: RunHistory) -> list[str]:
    """Return the frameworks' ratios, the current slot, the shares of time, and the failures."""
    lines = [f"result   {line}" for line in peer_lines(history.peers)]
    if history.now is not None:
        slot = history.now
        text = f"now      {slot.get('task')}: {slot.get('reason')}"
        if slot.get("gain") is not None:
            text += f", expected gain {float(slot['gain']):.3g} {slot.get('unit') or ''}"
        lines.append(text.rstrip())
    shares = history.search_secs()
    total_sec = sum(shares.values())
    if total_sec > 0:
        parts = (f"{name} {seconds / total_sec:.0%}" for name, seconds in shares.items())
        lines.append(f"seconds  {', '.join(parts)}")
    return lines + failure_lines(history.errors)


def failure_lines(failures: Counter[str]) -> list[str]:
    """Return the number of failed trials and the commonest reason; nothing without any."""
    if not failures:
        return []
    message, count = failures.most_common(1)[0]
    return [f"failed   {sum(failures.values())}, mostly ({count}): {message}"]


def _clock(budget: Budget | None, stage: str) -> RenderableType:
    if budget is None:
        return Text(stage, style="bold")
    elapsed_sec = budget.elapsed_sec
    row = Table.grid(padding=(0, 1))
    name, gone = Text(stage, style="bold"), f"{_minutes(elapsed_sec)} gone"
    if budget.seconds is None:
        row.add_row(name, gone)
        return row
    bar = ProgressBar(budget.seconds, min(elapsed_sec, budget.seconds), width=_BAR_WIDTH)
    row.add_row(name, bar, f"{gone}, {_minutes(max(0.0, budget.left_sec))} left")
    return row


def _task_table(history: RunHistory) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("task", no_wrap=True, max_width=_MAX_NAME)
    for column in ("calls", "trials", "failed", "best ms", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    used = history.network_tasks()
    total_ms = sum(task.share_ms for name, task in history.tasks.items() if name in used)
    current = history.now and history.now.get("task")
    for task in history.heaviest[:MAX_ROWS]:
        is_timed = math.isfinite(task.best_ms)
        table.add_row(
            Text(task.name),  # a name is not markup
            f"{task.weight:g}",
            str(task.n_trials),
            str(task.n_errors or ""),
            f"{task.best_ms:.4g}" if is_timed else "-",
            f"{task.share_ms / total_ms:.0%}" if is_timed and task.name in used else "-",
            style="bold" if task.name == current else None,
        )
    n_more = len(history.tasks) - MAX_ROWS
    if n_more > 0:
        table.add_row(f"and {n_more} more", style="dim")
    return table


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
