"""The command ``tvm-adaptive``: parses options, calls the library, prints."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import psutil

import tvm_adaptive
from tvm_adaptive.workers.early_start import early_start

with early_start():
    from tvm_adaptive.cli import apply, db, doctor, report, show, tune
    from tvm_adaptive.cli.console import EXIT_BAD_INPUT, flush_or_drop
    from tvm_adaptive.cli.native_log import StandardErrorHandler
    from tvm_adaptive.errors import AdaptiveError
    from tvm_adaptive.tuning.interrupts import EXIT_INTERRUPTED, raise_when_signalled

logger = logging.getLogger(__name__)

# Importing TVM takes seconds, tens of them on a slow disk.
_MAX_START_SEC = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    try:
        options = _parser().parse_args(arguments)
        # A program's budget includes its start: importing TVM takes seconds.
        age_sec = max(0.0, time.time() - psutil.Process().create_time())
        if age_sec > _MAX_START_SEC:  # of the shell that "exec" has turned into this program
            age_sec = time.process_time()
        if arguments is None:
            raise_when_signalled()
        options.spent_sec = 0.0 if arguments is not None else age_sec
        return _run(options)
    finally:
        flush_or_drop()


def _run(options: argparse.Namespace) -> int:
    _set_up_logging(getattr(options, "verbose", False))
    try:
        code: int = options.run(options)
    except AdaptiveError as error:
        logger.info("the whole error", exc_info=True)  # a model's own code may have raised it
        return _bad_input(str(error))
    except OSError as error:
        if error.errno is None:  # a defect, not the system: such as a timeout of Python's own
            raise
        # A full disk, a folder of somebody else.
        logger.info("the whole error", exc_info=True)
        reason = error.strerror or str(error)
        return _bad_input(f"{error.filename}: {reason}" if error.filename else reason)
    except KeyboardInterrupt:  # before a run handles signals
        return EXIT_INTERRUPTED
    return code


def _bad_input(reason: str) -> int:
    with contextlib.suppress(OSError):  # standard error is closed
        print(f"tvm-adaptive: error: {reason}", file=sys.stderr)
    return EXIT_BAD_INPUT


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with exit code 2."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tvm-adaptive", description="Adaptive auto-tuning for Apache TVM.")
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {tvm_adaptive.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (tune, apply, report, db, doctor, show):
        command.add_parser(commands)
    return parser


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        handlers=[StandardErrorHandler()],
    )
    # MetaSchedule prints a table per round otherwise; its own files under the work
    # directory keep all of it.
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
