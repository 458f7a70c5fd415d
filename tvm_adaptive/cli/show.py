"""``tvm-adaptive show``: print the results of a run."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from tvm_adaptive.cli.console import EXIT_OK, PlainConsole, unless_closed
from tvm_adaptive.report.comparison import comparison_lines, peer_lines


def run(options: argparse.Namespace) -> int:
    """Print the tasks of a run, or the best schedule of one of them."""
    from tvm_adaptive.tuning.inspect import best_schedule, shown_comparison, shown_tasks

    if options.task is not None or options.trace:
        script, trace = best_schedule(options.work_dir, options.task)
        with unless_closed():
            print(trace if options.trace else script)
        return EXIT_OK
    names = [Column(name, overflow="fold") for name in ("task", "family")]
    table = Table(*names, "calls", "best, ms", "in all, ms", "checked")
    for task in shown_tasks(options.work_dir):
        best = task.best
        known = math.isfinite(best.seconds)
        table.add_row(
            Text(task.name),  # names may look like markup
            Text(task.family),
            f"{task.weight:g}",
            f"{best.seconds * 1e3:.4g}" if known else "-",
            f"{task.weight * best.seconds * 1e3:.4g}" if known else "-",
            ("yes" if best.is_checked else "no") if known else "-",
        )
    comparison = shown_comparison(options.work_dir)
    lines = []
    if comparison is not None:
        lines = peer_lines(comparison.peers) + comparison_lines(comparison)
    with unless_closed():
        console = PlainConsole(file=sys.stdout)
        console.print(table)
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return EXIT_OK


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's."""
    show: argparse.ArgumentParser = commands.add_parser(
        "show",
        help="show the results of a run: its tasks, or a task's best schedule",
        description="List the tasks of a run, in progress, finished or killed; with --task print "
        "the best schedule of one as TVMScript.",
    )
    show.add_argument("work_dir", type=Path, metavar="DIR", help="a run's work directory")
    show.add_argument("--task", metavar="NAME", help="optional if there is only one")
    show.add_argument("--trace", action="store_true", help="print the steps that make it instead")
    show.set_defaults(run=run)
