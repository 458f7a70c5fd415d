"""``tvm-adaptive report``: write a page on a run."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from tvm_adaptive.cli.console import EXIT_OK, unless_closed
from tvm_adaptive.errors import InvalidOptionError


def run(options: argparse.Namespace) -> int:
    """Write the page, and open it if requested."""
    from tvm_adaptive.report import read_runs, write_report
    from tvm_adaptive.report.demo import read_demo

    if not options.work_dir and not options.demo:
        raise InvalidOptionError("Name a run's work directory, or give --demo.")
    folder = options.work_dir[0] if options.work_dir else Path()
    histories = read_runs(options.work_dir) + ([read_demo()] if options.demo else [])
    path = write_report(histories, options.out or folder / "report.html")
    with unless_closed():
        print(path)
    if options.open:
        webbrowser.open(path.as_uri())
    return EXIT_OK


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's."""
    report: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write a page on what a run did and why, or compare runs",
        description="Write one HTML file on a run, in progress, finished or killed; it can be "
        "read offline. Further runs are drawn beside the first.",
    )
    report.add_argument("work_dir", type=Path, nargs="*", metavar="DIR", help="work directories")
    report.add_argument(
        "--demo",
        action="store_true",
        help="show a recorded run; after directories, compare with it",
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: report.html in the first DIR, or here",
    )
    report.add_argument("--open", action="store_true", help="show it in the browser")
    report.set_defaults(run=run)
