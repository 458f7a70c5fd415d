"""``tvm-adaptive tune``: tune a model, and print the report."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tvm_adaptive import tune
from tvm_adaptive.cli.arguments import (
    WHAT_HELP,
    add_farm_options,
    add_model_options,
    parse_count,
    parse_duration,
    parse_latency,
    with_farm,
)
from tvm_adaptive.cli.console import EXIT_BAD_RESULT, EXIT_OK, PlainConsole, unless_closed
from tvm_adaptive.cli.display import Display
from tvm_adaptive.cli.native_log import NATIVE_LOG, NativeLog
from tvm_adaptive.cli.summary import print_report
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.models.frontend import slug
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.config import TuneConfig, preset, replaced
from tvm_adaptive.tuning.config_file import read_config, write_config
from tvm_adaptive.tuning.interrupts import EXIT_INTERRUPTED
from tvm_adaptive.tuning.option_types import spelled
from tvm_adaptive.tuning.outcome import TuneReport
from tvm_adaptive.tuning.resume import resume

_DEFAULT_BUDGET_SEC = 600.0
# Two for each task of ResNet-18.
_PLATEAU_SLOTS = 40
# Options of a new run; a resumed run has them in its journal.
_NEW_RUN_OPTIONS = (
    *("what", "work_dir", "target", "seed", "preset", "config", "layout", "prepack"),
    *("vector_math", "forms", "input_shape", "inputs", "until_plateau", *registry.PARTS),
    *("devices", "tracker", "tracker_key", "lanes", "ray", "starter", "peers"),
)
# Options of the same name in the configuration.
_CONFIG_OPTIONS = (
    *registry.PARTS,
    *("layout", "prepack", "vector_math", "forms", "store", "starter", "use_all", "peers"),
)


def run(options: argparse.Namespace) -> int:
    """Tune a model by the options."""
    check_resume(options)
    if options.print_config:
        if options.resume is not None:
            raise InvalidOptionError(
                f"--print-config prints the options of a new run; those of {options.resume} are "
                "in its journal's event run."
            )
        text = write_config(config_of(options))
        with unless_closed():
            print(text, end="")
        return EXIT_OK
    # The report goes to standard output, progress to standard error.
    work_dir = Path(options.resume or options.work_dir or _new_work_dir(options.what))
    with (
        NativeLog(work_dir / NATIVE_LOG).opened() as log,
        Display(PlainConsole(stderr=True), quiet=options.quiet, native_log=log) as display,
    ):
        report = _report(options, work_dir, display)
    with unless_closed():
        print_report(report, PlainConsole(file=sys.stdout))
    return exit_code(report)


def _new_work_dir(what: str | None) -> str:
    """Return the default for a new run."""
    return f"runs/{slug(Path(what or '').name)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _report(options: argparse.Namespace, work_dir: Path, display: Display) -> TuneReport:
    """Begin a run, or resume one."""
    shared: dict[str, Any] = {
        "trials": options.trials,
        "until_ms": options.until_latency,
        "observer": display,
        "allow_other_machine": options.allow_other_machine,
        "spent_sec": options.spent_sec,
    }
    if options.resume:
        return resume(
            options.resume,
            budget_sec=options.budget,
            use_all=options.use_all,
            store=options.store,
            **shared,
        )
    config = config_of(options)
    if options.what is None:
        raise InvalidOptionError("Say what to tune; see tvm-adaptive tune --help.")
    budget_sec = options.budget
    if budget_sec is None and options.trials is None:
        budget_sec = _DEFAULT_BUDGET_SEC
    return tune(
        options.what,
        work_dir=work_dir,
        target=options.target,
        budget_sec=budget_sec,
        seed=options.seed,
        config=config,
        input_shapes=dict(options.input_shape),
        inputs=options.inputs,
        **shared,
    )


def check_resume(options: argparse.Namespace) -> None:
    """Raise InvalidOptionError if a resumed run gets options of a new one."""
    if options.resume is None:
        return
    values = {name: getattr(options, name) for name in _NEW_RUN_OPTIONS}
    given = [spelled(name, value) for name, value in values.items() if value not in (None, [])]
    if given:
        raise InvalidOptionError(
            f"--resume continues the run in {options.resume} with its own options; leave out "
            f"{', '.join(given)}."
        )


def config_of(options: argparse.Namespace) -> TuneConfig:
    """Return the configuration of the options, which override a file's."""
    if options.config is not None and options.preset is not None:
        raise InvalidOptionError("Give --preset or --config; a file says preset = itself.")
    base = preset(options.preset or "default")
    if options.config is not None:
        base = read_config(options.config)
    if options.until_plateau is not None:
        scheduler = options.task_scheduler or base.task_scheduler
        if scheduler not in registry.PARTS["task_scheduler"].constructors:
            raise InvalidOptionError(
                f"--until-plateau needs a task scheduler of ours, not {scheduler!r}."
            )
    base = with_farm(base, options)
    return base.replace(
        scheduler=replaced(base.scheduler, plateau_slots=options.until_plateau),
        search=replaced(base.search, lanes=options.lanes, ray=options.ray),
        measure=replaced(base.measure, devices=options.devices),
        **{name: getattr(options, name) for name in _CONFIG_OPTIONS},
    )


def exit_code(report: TuneReport) -> int:
    """Return the exit code of a report."""
    if report.interrupted:
        return EXIT_INTERRUPTED
    if report.failure or _is_fruitless(report):
        return EXIT_BAD_RESULT
    if report.comparison is None:
        # Without time to compare, the result contains only checked records, or none.
        return EXIT_OK if report.shortfall else EXIT_BAD_RESULT
    return EXIT_OK if report.comparison.agree else EXIT_BAD_RESULT


def _is_fruitless(report: TuneReport) -> bool:
    """Whether all trials failed, and no kernel was checked, by this run or an earlier one."""
    has_winner = any(task.played_off or task.in_network for task in report.tasks)
    return 0 < report.n_trials == report.n_errors and not has_winner


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's."""
    tune: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="tune a network or an operator",
        description="Tune WHAT until the budget or the trials are spent, then compile, check "
        "and time it. Exit code 0, 1 if there is no tuned result or its outputs disagree, 2 for "
        "bad input, 130 after Ctrl-C.",
    )
    tune.add_argument("what", metavar="WHAT", nargs="?", help=WHAT_HELP)
    tune.add_argument(
        "--resume",
        metavar="DIR",
        help="continue the run in DIR, which was interrupted or killed, or which gets a larger "
        "--budget or more --trials; seconds and trials count from its beginning",
    )
    tune.add_argument(
        "--allow-other-machine",
        action="store_true",
        help="continue although another machine, version of TVM or target took the times in "
        "the directory: they are set aside, and the fastest records measured again",
    )
    tune.add_argument(
        "--budget",
        type=parse_duration,
        metavar="TIME",
        help="wall-clock time for the whole command, e.g. 90s, 10m, 1h "
        "(10m if --trials is not given either)",
    )
    tune.add_argument("--trials", type=parse_count, metavar="N", help="largest number of trials")
    tune.add_argument(
        "--until-latency",
        type=parse_latency,
        metavar="TIME",
        help="end when the sum of all tasks is as fast, e.g. 5ms or 800us",
    )
    tune.add_argument(
        "--until-plateau",
        nargs="?",
        type=parse_count,
        const=_PLATEAU_SLOTS,
        metavar="SLOTS",
        help=f"end when so many slots, turns of one task, in a row ({_PLATEAU_SLOTS} by default) "
        "saved next to nothing",
    )
    tune.add_argument(
        "--use-all",
        action="store_const",
        const=True,
        help="search until the budget is spent or no task promises a gain, also when the second "
        "half of the search has saved nothing that can be seen",
    )
    _add_parts(tune)
    tune.set_defaults(run=run)


def _add_parts(tune: argparse.ArgumentParser) -> None:
    """Add the options of the model, the configuration and the directories."""
    add_model_options(tune)
    tune.add_argument(
        "--work-dir", metavar="DIR", help="for the run's files (default: a new one in runs)"
    )
    tune.add_argument("--seed", type=int, metavar="N", help="of random choices; times still differ")
    tune.add_argument("--preset", metavar="NAME", help="default or paper")
    tune.add_argument("--config", type=Path, metavar="FILE", help="options from a TOML file")
    tune.add_argument(
        "--print-config", action="store_true", help="print the options that --config takes, as TOML"
    )
    for part in registry.PARTS:
        name = part.replace("_", "-")
        tune.add_argument(f"--{name}", metavar="NAME", help=f"{name.replace('-', ' ')}, by name")
    tune.add_argument(
        "--devices", metavar="LIST", help="local devices that measure, e.g. 0,1 for two GPUs"
    )
    add_farm_options(tune)
    tune.add_argument(
        "--lanes",
        type=parse_count,
        metavar="N",
        help="processes that search and build at the same time, for devices elsewhere",
    )
    tune.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="search and build on a Ray cluster: host:port, auto or local",
    )
    tune.add_argument(
        "--store",
        metavar="NAME",
        help="where records are kept and found again: a path, a URL, env:NAME for a URL in "
        "an environment variable, or none (default: a file below your home directory)",
    )
    tune.add_argument(
        "--no-starter",
        dest="starter",
        action="store_const",
        const=False,
        help="begin without the package's own records of common operators, which help where "
        "the store has none yet",
    )
    tune.add_argument(
        "--peers",
        metavar="LIST",
        help="frameworks to time beside the result, besides the model's own: ort, openvino, "
        "torch, inductor, with commas between",
    )
    tune.add_argument("-q", "--quiet", action="store_true", help="print the result only")
    tune.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
