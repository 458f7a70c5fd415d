"""``tvm-adaptive apply``: compile a model with its best records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tvm_adaptive.cli.arguments import WHAT_HELP, add_farm_options, add_model_options, with_farm
from tvm_adaptive.cli.console import EXIT_BAD_RESULT, EXIT_OK, PlainConsole, unless_closed
from tvm_adaptive.cli.display import Display
from tvm_adaptive.cli.native_log import NATIVE_LOG, NativeLog
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.models.frontend import slug
from tvm_adaptive.report.comparison import comparison_lines, peer_lines, threads_text
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.config_file import read_config


def run(options: argparse.Namespace) -> int:
    """Compile, check and time a model; print the result."""
    from tvm_adaptive.tuning.deploy import APPLY_FILE, apply

    what: str = options.what
    out_dir = options.out or Path("applied") / slug(Path(what).name)
    names = ("layout", "prepack", "vector_math", "forms", "store")
    base = DEFAULT
    if options.config is not None:
        if (Path(what) / JOURNAL_FILE).is_file():
            raise InvalidOptionError(f"{what} is a run, which has its own options: omit --config.")
        base = read_config(options.config)
    config = base.replace(**{name: getattr(options, name) for name in names})
    with (
        NativeLog(out_dir / NATIVE_LOG).opened() as log,
        Display(PlainConsole(stderr=True), quiet=options.quiet, native_log=log) as display,
    ):
        applied = apply(
            what,
            out_dir=out_dir,
            target=options.target,
            config=with_farm(config, options),
            observer=display,
            input_shapes=dict(options.input_shape),
            inputs=options.inputs,
        )
    lines = [f"{applied.what} on {applied.target}"]
    if applied.comparison is None and applied.shortfall:
        lines.append(f"not compared: {applied.shortfall}")
    elif applied.comparison is None:
        lines.append(
            "the library, or what it is compared with, could not be run; see "
            f"{applied.out_dir / APPLY_FILE}"
        )
    else:
        lines = peer_lines(applied.comparison.peers) + lines
        lines += comparison_lines(applied.comparison)
    if applied.thread_secs:
        lines.append(f"threads       {threads_text(applied.thread_secs)}")
    lines.append(f"coverage      {applied.coverage}")
    lines.append(f"library       {applied.library}")
    lines.append(f"manifest      {applied.manifest}")
    lines += [f"example       {path}" for path in applied.examples]
    with unless_closed():
        console = PlainConsole(file=sys.stdout)
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if applied.comparison is None:
        return EXIT_OK if applied.shortfall else EXIT_BAD_RESULT
    return EXIT_OK if applied.comparison.agree else EXIT_BAD_RESULT


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's."""
    apply: argparse.ArgumentParser = commands.add_parser(
        "apply",
        help="compile a model with the best records there are",
        description="Compile WHAT to a library with the best records of a run, or of the "
        "store; check and time it, and write examples that load it. Records that were not "
        "checked yet are checked first. Exit code 0, 1 if outputs disagree, 2 for bad input.",
    )
    apply.add_argument(
        "what", metavar="WHAT", help=f"a run's work directory; or, with a store, {WHAT_HELP}"
    )
    apply.add_argument("--out", type=Path, metavar="DIR", help="default: below applied")
    add_model_options(apply)
    add_farm_options(apply)
    apply.add_argument(
        "--store",
        metavar="NAME",
        help="where records are, if not of a run (default: your own store)",
    )
    apply.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the options that a model was tuned with, from a TOML file; a run has its own",
    )
    apply.add_argument("-q", "--quiet", action="store_true", help="print the result only")
    apply.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
    apply.set_defaults(run=run)
