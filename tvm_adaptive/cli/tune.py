"""``tvm-adaptive tune``: options in, a report on the screen out."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from tvm_adaptive import tune
from tvm_adaptive.cli.codes import EXIT_BAD_RESULT, EXIT_INTERRUPTED, EXIT_OK
from tvm_adaptive.cli.display import Display
from tvm_adaptive.cli.summary import print_report
from tvm_adaptive.config import TuneConfig, preset
from tvm_adaptive.outcome import TuneReport

_DEFAULT_BUDGET_SEC = 600.0


def run(options: argparse.Namespace) -> int:
    """Tune what the options say.

    Parameters
    ----------
    options : argparse.Namespace
        From :func:`tvm_adaptive.cli.main`.

    Returns
    -------
    int
        Exit code.

    Raises
    ------
    AdaptiveError
        For input that cannot be used.
    """
    config = config_of(options)
    budget_sec = options.budget
    if budget_sec is None and options.trials is None:
        budget_sec = _DEFAULT_BUDGET_SEC
    # Results go to standard output, what happens on the way to standard error.
    with Display(Console(stderr=True), quiet=options.quiet) as display:
        report = tune(
            options.what,
            work_dir=options.work_dir or default_work_dir(options.what),
            target=options.target,
            budget_sec=budget_sec,
            trials=options.trials,
            seed=options.seed,
            config=config,
            observer=display,
        )
    print_report(report, Console(file=sys.stdout))
    return exit_code(report)


def config_of(options: argparse.Namespace) -> TuneConfig:
    """Return the configuration that the options describe."""
    return preset(options.preset).replace(
        cost_model=options.cost_model,
        strategy=options.strategy,
        runner=options.runner,
        builder=options.builder,
        task_scheduler=options.task_scheduler,
        layout=options.layout,
        prepack=options.prepack,
        store=options.store,
    )


def default_work_dir(what: str) -> str:
    """Return a new directory's name for a run, below ``runs``."""
    return f"runs/{what.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def exit_code(report: TuneReport) -> int:
    """Return what the shell is told of a report."""
    if report.interrupted:
        return EXIT_INTERRUPTED
    if report.comparison is None or not report.comparison.agree:
        return EXIT_BAD_RESULT
    return EXIT_OK
