"""The command ``tvm-adaptive``: parses, calls the library, prints. No work is done here."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import tvm_adaptive
from tvm_adaptive.cli import db
from tvm_adaptive.cli.codes import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from tvm_adaptive.cli.tune import run
from tvm_adaptive.errors import AdaptiveError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str or None, default None
        None takes those of the process.

    Returns
    -------
    int
        0; 1 when the tuned network computes something else than the untuned one; 2 for
        input that cannot be used, after one line that says why; 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    _set_up_logging(getattr(options, "verbose", False))
    try:
        code: int = options.run(options)
    except AdaptiveError as error:
        print(f"tvm-adaptive: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:  # before the run caught interrupts itself
        return EXIT_INTERRUPTED
    return code


def parse_duration(text: str) -> float:
    """Return the seconds of ``"90s"``, ``"10m"``, ``"1.5h"`` or ``"600"``.

    Raises
    ------
    argparse.ArgumentTypeError
        When it is none of these, or not above 0.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration; write for example 90s, 10m or 1.5h"
        )
    return seconds


def _parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of trials; write for example 200")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with exit code 2."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tvm-adaptive", description="Adaptive auto-tuning for Apache TVM.")
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {tvm_adaptive.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser(
        "tune",
        help="tune a network or an operator",
        description="Tune WHAT until the budget or the trials are spent, then compile, check "
        "and time it. Exit code 0, 1 if outputs disagree, 2 for bad input, 130 after Ctrl-C.",
    )
    tune.add_argument(
        "what",
        metavar="WHAT",
        help="resnet18, squeezenet1_1, mobilenet_v2, vgg16, transformer or bert_base, "
        "or te:C2D and its like",
    )
    tune.add_argument(
        "--budget",
        type=parse_duration,
        metavar="TIME",
        help="wall-clock time for the whole command, e.g. 90s, 10m, 1h "
        "(10m if --trials is not given either)",
    )
    tune.add_argument("--trials", type=_parse_count, metavar="N", help="trials at the most")
    tune.add_argument(
        "--target",
        metavar="T",
        help="cpu (this machine), cuda, or a JSON target, e.g. '{\"kind\": ...}'",
    )
    tune.add_argument("--work-dir", metavar="DIR", help="where everything is written")
    tune.add_argument("--seed", type=int, metavar="N", help="makes the search repeatable")
    tune.add_argument("--preset", default="default", metavar="NAME", help="default or paper")
    tune.add_argument("--layout", metavar="NAME", help="auto, keep or NHWC")
    tune.add_argument(
        "--prepack",
        action=argparse.BooleanOptionalAction,
        help="let schedules choose the layout of weights (default: on CPUs)",
    )
    for part in ("cost-model", "strategy", "runner", "builder", "task-scheduler"):
        tune.add_argument(f"--{part}", metavar="NAME", help=f"{part.replace('-', ' ')}, by name")
    tune.add_argument(
        "--store",
        metavar="NAME",
        help="where records are kept and found again: a path, a URL, or none "
        "(default: a file below your home directory)",
    )
    tune.add_argument("-q", "--quiet", action="store_true", help="print the result only")
    tune.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
    tune.set_defaults(run=run)
    db.add_parser(commands)
    return parser


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # MetaSchedule prints a table per round otherwise; its own files under the work
    # directory keep all of it.
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
