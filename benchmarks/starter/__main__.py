"""Make starter records: tune the published list, and pack the best of each task.

    python -m benchmarks.starter runs/starter --threads 2 --mcpu native --trials 48
    python -m benchmarks.starter runs/starter --threads 2 --pack starter/avx2-2.json.xz

Each workload is tuned in a process of its own, in a folder of its own; all share one record
store, so that later ones begin with the records of earlier ones. Killed, the same command goes
on: finished workloads are kept, and the one that was cut short is resumed. ``--pack`` writes
what is there at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.starter.pack import pack_starter
from benchmarks.starter.workloads import WORKLOADS
from tvm_adaptive.cli.arguments import parse_count, parse_duration
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.tuning.tune import tune_relax
from tvm_adaptive.workers.cores import thread_env

STORE = "records.db"
# What made the records; a packed file names it.
COMMAND_FILE = "command.txt"
# A run keeps its budget; this ends one that does not.
_GRACE_SEC = 300.0
# On two idle cores 48 trials take about a minute with start, check and play-offs.
_WORKLOAD_SEC = 300.0
# An exit code of its own: Python ends with 1 after an exception.
_OUT_OF_TIME = 3
# A convolution with Winograd's forms is seven tasks, four of which are small.
_FORMS_FACTOR = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make starter records")
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder of runs and store")
    parser.add_argument("--threads", type=parse_count, default=2, help="threads of the kernels")
    parser.add_argument("--mcpu", default="native", help="LLVM's name of the processor, or native")
    parser.add_argument(
        "--trials", type=parse_count, default=48, help="of each workload with one form"
    )
    parser.add_argument(
        "--seconds-per-workload", type=parse_duration, default=_WORKLOAD_SEC, metavar="TIME"
    )
    parser.add_argument(
        "--budget", type=parse_duration, metavar="TIME", help="no workload begins after it"
    )
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the file, tune nothing")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # this process tunes one workload
    options = parser.parse_args(arguments)
    if options.only:
        tune_one(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.pack is None:
        return 0 if tune_all(options) else _OUT_OF_TIME
    target = target_of(options)
    command = (options.out / COMMAND_FILE).read_text(encoding="utf-8")
    print(pack_starter(options.out, options.out / STORE, target, options.pack, command))
    return 0


def target_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the target of the options as a mapping."""
    mcpu = options.mcpu
    if mcpu == "native":
        mcpu = str(resolve_target("cpu").attrs["mcpu"])
    return {"kind": "llvm", "mcpu": mcpu, "num-cores": options.threads}


def tune_all(options: argparse.Namespace) -> bool:
    """Tune each workload that is not finished until the budget is spent; say if all are."""
    start_sec = time.monotonic()
    env = {**os.environ, **thread_env(options.threads)}
    command = ["python", "-m", "benchmarks.starter", "OUT_DIR", *_arguments(options)]
    (options.out / COMMAND_FILE).write_text(shlex.join(command), encoding="utf-8")
    for number, workload in enumerate(WORKLOADS):
        done = done_file(options.out, workload.name)
        if done.exists():
            continue
        if options.budget is not None and time.monotonic() - start_sec > options.budget:
            print(f"the budget ends here: {number} of {len(WORKLOADS)}", flush=True)
            return False
        command = [sys.executable, "-m", "benchmarks.starter", str(options.out)]
        command += _arguments(options)
        began_sec = time.monotonic()
        problem = run_process([*command, "--only", workload.name], env, options)
        took_sec = time.monotonic() - began_sec
        # A workload that fails is not tried again: the next command would end there, too.
        done.write_text(json.dumps({"problem": problem, "seconds": round(took_sec, 1)}))
        print(
            f"{number + 1}/{len(WORKLOADS)} {workload.name}: {problem or f'{took_sec:.0f} s'}",
            flush=True,
        )
    return True


def _arguments(options: argparse.Namespace) -> list[str]:
    """Return the options that say what is measured, as a command has them."""
    names = ("threads", "mcpu", "trials", "seconds_per_workload")
    pairs = [(f"--{name.replace('_', '-')}", str(getattr(options, name))) for name in names]
    return [part for pair in pairs for part in pair]


def run_process(command: Sequence[str], env: dict[str, str], options: argparse.Namespace) -> str:
    """Run a command with a limit; return what went wrong, or ""."""
    name = command[-1]
    with open(folder_of(options.out, name).with_suffix(".log"), "ab") as log:
        try:
            limit_sec = options.seconds_per_workload + _GRACE_SEC
            ended = subprocess.run(
                command, stdout=log, stderr=log, env=env, timeout=limit_sec, check=False
            )
        except subprocess.TimeoutExpired:
            return "timeout"
    # Outputs that differ end a command with 1; the store has the verdict.
    return "" if ended.returncode == 0 else f"exit code {ended.returncode}"


def tune_one(options: argparse.Namespace) -> None:
    """Tune one workload, in this process."""
    (workload,) = (each for each in WORKLOADS if each.name == options.only)
    tune_relax(
        workload.module(),
        work_dir=folder_of(options.out, workload.name),
        target=target_of(options),
        name=workload.name,
        budget_sec=options.seconds_per_workload,
        trials=options.trials * (_FORMS_FACTOR if workload.has_forms else 1),
        seed=WORKLOADS.index(workload),
        config=DEFAULT.replace(store=str(options.out / STORE), starter=False),
        resume=True,
    )


def folder_of(out: Path, name: str) -> Path:
    """Return the work directory of a workload."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def done_file(out: Path, name: str) -> Path:
    """Return the file that says that a workload is finished."""
    return folder_of(out, name).with_suffix(".done.json")


if __name__ == "__main__":
    sys.exit(main())
