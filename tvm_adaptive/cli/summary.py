"""The report on the screen."""

from __future__ import annotations

import math
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tvm_adaptive.report.comparison import NOT_RUN, comparison_lines, failure_text, peer_lines
from tvm_adaptive.tuning.outcome import TuneReport

_MAX_ERRORS = 3


def print_report(report: TuneReport, console: Console) -> None:
    """Print a report."""
    console.print(_task_table(report))
    for line in summary_lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def summary_lines(report: TuneReport) -> list[str]:
    """Return the report below the table of tasks, line by line."""
    lines = _result_lines(report)
    if math.isfinite(report.weighted_sec):
        lines.append(f"sum of tasks  {report.weighted_sec * 1e3:.3f} ms")
    if report.coverage:
        lines.append(f"coverage      {report.coverage}")
    if forms := _forms_text(report) if report.is_compiled else "":
        lines.append(f"forms         {forms}")
    used = [task for task in report.tasks if task.is_used]
    if n_missed := sum(math.isinf(task.best_sec) and not task.n_trials for task in used):
        lines.append(
            f"not reached   {n_missed} of {len(used)} tasks, which stay untuned; "
            f"--resume {report.work_dir} with more --budget and --trials, where it had them, "
            "reaches them"
        )
    n_drafted = sum(task.is_drafted for task in used)
    if n_drafted and report.is_compiled:
        lines.append(
            f"drafted       {n_drafted} of {len(used)} tasks, which had no trial and run "
            "with a schedule that suits the processor"
        )
    lines.append(f"trials        {report.n_trials}, {report.n_errors} failed")
    most = sorted(report.errors.items(), key=lambda item: -item[1])[:_MAX_ERRORS]
    lines += [f"  {count} x {message}" for message, count in most]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.stage_secs.items())
    lines.append(f"time          {report.elapsed_sec:.0f} s: {stages}")
    lines.append(f"database      {report.database_dir}")
    if report.library is not None:
        lines.append(f"library       {report.library}")
    if report.stopped:
        lines.append(report.stopped)
    return lines


def _result_lines(report: TuneReport) -> list[str]:
    """Say what was tuned, and how the result compares."""
    lines = [f"{report.what} on {report.target}"]
    if report.comparison is not None:
        # What the user asks first: does it beat what they have?
        lines = peer_lines(report.comparison.peers) + lines
        lines += comparison_lines(report.comparison)
        if report.shortfall:
            lines.append(f"left out      {report.shortfall}")
        if report.failure:
            lines.append(f"left out      {failure_text(report.failure)}")
    elif report.interrupted:
        lines.append(
            "interrupted: all results are kept; tasks that were not checked stay untuned "
            f"until --resume {report.work_dir} or apply {report.work_dir} checks them"
        )
    elif report.failure:
        lines.append(failure_text(report.failure))
    elif report.shortfall:
        lines.append(f"not compared: {report.shortfall}")
    else:
        lines.append(NOT_RUN)
    return lines


def _forms_text(report: TuneReport) -> str:
    """Return how many groups of convolutions are computed in which form; "" without any."""
    forms = {task.group: task.form or "direct" for task in report.tasks if task.is_used}
    forms.pop("", None)
    counts = sorted(Counter(forms.values()).items())
    text = ", ".join(f"{form} {n}" for form, n in counts)
    return f"{text} (of {len(forms)} groups of convolutions)" if forms else ""


def _task_table(report: TuneReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("task", overflow="fold")
    for column in ("calls", "trials", "failed", "best ms", "checked"):
        table.add_column(column, justify="right")
    shown = [task for task in report.tasks if task.is_used or task.n_trials]
    for task in sorted(shown, key=lambda task: -task.weight * _finite(task.best_sec)):
        best = f"{task.best_sec * 1e3:.4f}" if math.isfinite(task.best_sec) else "-"
        checked = task.checked
        if task.n_disqualified:
            checked += f", {task.n_disqualified} out"
        table.add_row(
            Text(task.name),
            f"{task.weight:g}",
            str(task.n_trials),
            str(task.n_errors),
            best,
            checked,
        )
    return table


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
