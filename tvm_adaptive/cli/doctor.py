"""``tvm-adaptive doctor``: whether this machine is fit for tuning."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tvm_adaptive.cli.console import EXIT_BAD_RESULT, EXIT_OK, unless_closed

_MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def run(options: argparse.Namespace) -> int:
    """Print the results; exit code 1 if one is a problem."""
    from tvm_adaptive.tuning.doctor import examine, is_fit

    results = examine(options.work_dir, with_noise=not options.quick)
    width = max(len(each.name) for each in results)
    with unless_closed():
        for each in results:
            print(f"{_MARKS[each.verdict]}  {each.name:<{width}}  {each.text}")
            if each.fix:
                print(f"{'':<{width + 11}}{each.fix}")
    return EXIT_OK if is_fit(results) else EXIT_BAD_RESULT


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's."""
    doctor: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check whether this machine is fit for tuning",
        description="Check versions, compiler, processor, memory, GPU, disk and noise; print a "
        "fix for each problem. Exit code 1 if there is one.",
    )
    doctor.add_argument(
        "--work-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="the directory whose disk is checked (default: runs)",
    )
    doctor.add_argument("--quick", action="store_true", help="skip the noise")
    doctor.add_argument("-v", "--verbose", action="store_true", help="show whole error messages")
    doctor.set_defaults(run=run)
