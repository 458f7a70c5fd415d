"""Tune what x with what x seeds, side by side, each run in a process of its own.

    python -m benchmarks.run --size small --out runs/small
    python -m benchmarks.compare runs/small

Killed or interrupted, the same command goes on where it stood: finished runs are kept,
the one that was running starts again. At the end all that was ever a run's best is timed anew,
by one neutral measurement (``benchmarks/remeasure.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.journals import BENCH_JOURNAL
from benchmarks.machine import describe_machine, measure_noise
from benchmarks.methods import METHODS, Method, choose_methods
from benchmarks.one_run import SPEC_FILE, STARTER
from benchmarks.plan import RunSpec, interleaved, is_finished, write_outcome
from benchmarks.remeasure import Effort, remeasure_all
from benchmarks.starter.without import write_others
from benchmarks.workloads import SIZES, UNNAMED, Size, Workload, choose_workloads
from tvm_adaptive.cli.arguments import parse_duration
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.models import is_gpu
from tvm_adaptive.tuning.doctor import check_gpu
from tvm_adaptive.tuning.target import n_cores_of, resolve_target

LOG_FILE = "log.txt"
# A run that takes so many times its budget, or this long without one, hangs.
_HANGS_FACTOR = 3.0
_HANGS_SEC = 6 * 3600.0
# Threads of the run before spin on for a while.
_SETTLE_SEC = 1.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--size", choices=list(SIZES), help="what other options leave open")
    parser.add_argument("--out", type=Path, required=True, help="folder of this benchmark")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="names or sets of them")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="names or sets of them")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--trials", type=int, metavar="N", help="of each operator's run")
    parser.add_argument("--budget", type=parse_duration, metavar="TIME", help="of every run")
    parser.add_argument("--network-budget", type=parse_duration, metavar="TIME")
    parser.add_argument("--network-trials", type=int, metavar="N", help="instead of seconds")
    parser.add_argument("--target", default="cpu", help="cpu, cuda or JSON")
    parser.add_argument("--noise", type=float, metavar="SEC", help="measure noise for so long")
    parser.add_argument("--no-remeasure", action="store_true", help="leave that for later")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    size = UNNAMED if options.size is None else SIZES[options.size]
    try:
        workloads = choose_workloads(options.workloads or size.workloads)
        methods = choose_methods(options.methods or size.methods)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if reason := why_not(options.target):
        print(f"skipped: {reason}")
        return 0
    n_threads = n_cores_of(resolve_target(options.target))
    seeds = range(options.first_seed, options.first_seed + (options.seeds or size.n_seeds))
    specs = [
        make_spec(workload, method, seed, size=size, options=options, n_threads=n_threads)
        for workload, method, seed in interleaved(workloads, methods, seeds)
    ]
    try:
        for spec in specs:
            is_finished(options.out, spec)
    except ValueError as error:  # other settings than what is there
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Journal(options.out / BENCH_JOURNAL)) as journal:
        journal.write("bench", size=options.size, target=options.target, **describe_machine())
        noise_sec = size.noise_sec if options.noise is None else options.noise
        journal.write("noise", when="before", **measure_noise(noise_sec, n_threads))
        for number, spec in enumerate(specs, start=1):
            do_run(options.out, spec, journal, f"{number} of {len(specs)}")
        journal.write("noise", when="after", **measure_noise(noise_sec, n_threads))
        if not options.no_remeasure:
            remeasure_all(options.out, Effort(size.rounds))
    return 0


def make_spec(
    workload: Workload,
    method: Method,
    seed: int,
    *,
    size: Size,
    options: argparse.Namespace,
    n_threads: int | None,
) -> RunSpec:
    """Return a run; operators are bounded by trials, and networks by seconds unless given."""
    budget_sec: float | None = options.budget
    trials: int | None = options.trials
    if workload.is_network and options.network_trials is not None:
        trials = options.network_trials
    elif workload.is_network:
        budget_sec = options.network_budget or budget_sec or size.network_sec
        trials = None
    elif budget_sec is None:
        trials = trials or size.trials
    if trials is not None:
        trials *= method.trials_factor
    return RunSpec(workload.name, method.name, seed, trials, budget_sec, options.target, n_threads)


def why_not(target: str) -> str:
    """Return why nothing can run for a target here; empty if it can."""
    try:
        resolved = resolve_target(target)
    except InvalidOptionError as error:
        return str(error)
    found = check_gpu() if is_gpu(resolved) else None
    return found.text if found is not None and found.verdict == "problem" else ""


def do_run(out: Path, spec: RunSpec, journal: Journal, count: str) -> None:
    """Do a run in a fresh process, unless it is finished already."""
    title = f"[{count}] {spec.workload}, {spec.method}, seed {spec.seed}"
    if is_finished(out, spec):
        print(f"{title}: finished before")
        return
    folder = out / spec.folder
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    fields: dict[str, Any] = dataclasses.asdict(spec)
    (folder / SPEC_FILE).write_text(json.dumps(fields))
    failure = ""
    if METHODS[spec.method].starter:  # of no run's seconds
        try:
            write_others(METHODS[spec.method].starter, spec, folder / STARTER)
        except ValueError as error:  # a network
            failure = str(error)
    time.sleep(_SETTLE_SEC)
    journal.write("run-start", **fields)
    start_sec = time.monotonic()
    failure = failure or _run_process(folder, spec)
    seconds = time.monotonic() - start_sec
    if failure:
        write_outcome(folder, spec, status="failed", message=failure, seconds=seconds)
    journal.write("run-end", **fields, seconds=seconds, failure=failure)
    print(f"{title}: {failure or 'done'} after {seconds:.0f} s", flush=True)


def _run_process(folder: Path, spec: RunSpec) -> str:
    """Return what went wrong, or nothing."""
    env = dict(os.environ)
    if spec.n_threads is not None:
        env["TVM_NUM_THREADS"] = str(spec.n_threads)
    command = [sys.executable, "-m", "benchmarks.one_run", str(folder)]
    limit_sec = _HANGS_SEC if spec.budget_sec is None else _HANGS_FACTOR * spec.budget_sec + 600.0
    with open(folder / LOG_FILE, "wb") as log:
        try:
            done = subprocess.run(
                command, stdout=log, stderr=log, env=env, timeout=limit_sec, check=False
            )
        except subprocess.TimeoutExpired:
            return f"killed after {limit_sec:.0f} s"
    if done.returncode == 0:
        return ""
    lines = (folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
    return f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(130)
