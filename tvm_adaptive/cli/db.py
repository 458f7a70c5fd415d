"""``tvm-adaptive db``: list, export, import and prune a record store."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from tvm_adaptive.cli.arguments import parse_count
from tvm_adaptive.cli.console import EXIT_OK, PlainConsole, unless_closed
from tvm_adaptive.database import maintenance
from tvm_adaptive.tuning.target import possible_targets


def run(options: argparse.Namespace) -> int:
    """Run the action of the options."""
    line = _ACTIONS[options.action](options)
    with unless_closed():
        print(line)
    return EXIT_OK


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's."""
    db: argparse.ArgumentParser = commands.add_parser(
        "db",
        help="look into the store of records, export, import or prune it",
        description="Runs keep their trials in a store, and start from its records.",
    )
    db.add_argument(
        "--store", default="user", metavar="NAME", help="a path or URL (default: your own)"
    )
    db.set_defaults(run=run)
    actions = db.add_subparsers(dest="action", required=True)
    actions.add_parser("stats", help="tasks, trials and best times")
    export = actions.add_parser("export", help="write a JSON database of MetaSchedule")
    export.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    export.add_argument("--best", type=parse_count, metavar="N", help="at most N of each task")
    export.add_argument(
        "--target", metavar="T", help="whose records, as of tune; needed if there are several"
    )
    read = actions.add_parser("import", help="add a run's records, a JSON database or a store")
    read.add_argument("source", type=Path, metavar="PATH", help="a directory, or a store's file")
    prune = actions.add_parser("prune", help="delete all but the fastest trials of each task")
    prune.add_argument("--keep", type=parse_count, default=64, metavar="N", help="default: 64")


def _stats(options: argparse.Namespace) -> str:
    name, stats = maintenance.stats(options.store)
    names = [Column(name, overflow="fold") for name in ("task", "family", "target")]
    table = Table(*names, "trials", "failed", "best, ms", "last")
    for each in stats:
        table.add_row(
            _printable(each.task.name),
            _printable(each.task.family),
            _printable(_short(each.task.target)),
            str(each.n_trials),
            str(each.n_failures),
            "-" if each.best_sec is None else f"{each.best_sec * 1e3:.4g}",
            time.strftime("%Y-%m-%d", time.gmtime(each.last_unix_sec)),
        )
    if stats:
        with unless_closed():
            PlainConsole(file=sys.stdout).print(table)
    return f"{name}: {len(stats)} tasks, {sum(each.n_trials for each in stats)} trials"


def _export(options: argparse.Namespace) -> str:
    targets = [] if options.target is None else possible_targets(options.target)
    n_written = maintenance.export_records(options.store, options.folder, options.best, targets)
    return f"{options.folder}: {n_written} records"


def _import(options: argparse.Namespace) -> str:
    name, n_added, n_skipped = maintenance.import_records(options.store, options.source)
    return f"{name}: {n_added} records added, {n_skipped} left out (known or not readable)"


def _prune(options: argparse.Namespace) -> str:
    name, n_deleted = maintenance.prune(options.store, options.keep)
    return f"{name}: {n_deleted} trials deleted"


_ACTIONS: dict[str, Callable[[argparse.Namespace], str]] = {
    "stats": _stats,
    "export": _export,
    "import": _import,
    "prune": _prune,
}


def _printable(text: str) -> Text:
    """Return a store's text without characters that control a terminal."""
    return Text("".join(char if char.isprintable() else "?" for char in text))


def _short(target: str) -> str:
    fields = json.loads(target)
    return " ".join(str(fields[key]) for key in ("kind", "mcpu", "arch") if key in fields)
