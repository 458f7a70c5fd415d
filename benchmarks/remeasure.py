"""Time all winners anew: one measurement for all, interleaved, the median of many rounds.

python -m benchmarks.remeasure runs/small --rounds 15
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.entries import Entry, entries_of
from benchmarks.journals import NEUTRAL_FILE, Bench, load_bench
from benchmarks.torch_models import TORCH_MODELS, time_torch, why_no_torch
from benchmarks.workloads import WORKLOADS
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

# One timing of a kernel: long against whatever wakes up on a machine for a moment.
REPEAT_MS = 50.0
NETWORK_ROUND_SEC = 1.0
_TIMEOUT_SEC = 120.0
# Threads of the one before spin for a while.
_SETTLE_SEC = 0.3
# An untuned network takes seconds or minutes, and is hundreds of times slower than the others.
_UNTUNED = "untuned"
_UNTUNED_ROUNDS = 3

Timer = Callable[[], float]


def remeasure_all(out: Path, *, rounds: int) -> None:
    """Time the winners of every workload, unless just these were timed before."""
    bench = load_bench(out)
    for workload in bench.workloads:
        runs = [run for run in bench.runs if run.spec.workload == workload]
        entries = entries_of(out, runs)
        if WORKLOADS[workload].is_network:
            entries.append(Entry(_UNTUNED))
        known = set(bench.neutral.get(workload, {}))
        if entries and not {entry.name for entry in entries} <= known:
            remeasure(out, bench, workload, entries, rounds=rounds)
            print(f"{workload}: {len(entries)} winners timed anew", flush=True)


def remeasure(
    out: Path, bench: Bench, workload: str, entries: Sequence[Entry], *, rounds: int
) -> None:
    """Build and time entries of one workload; write ``neutral.json`` beside its runs."""
    spec = next(run.spec for run in bench.runs if run.spec.workload == workload)
    folder = (out / spec.folder).parents[1]
    samples, errors = time_anew(
        folder / "neutral", workload, spec.target, entries, rounds=rounds, n_threads=spec.n_threads
    )
    found = {
        "workload": workload,
        "rounds": rounds,
        "n_threads": spec.n_threads,
        "unix_sec": time.time(),
        "entries": {name: {"samples_ms": each} for name, each in samples.items()},
        "errors": errors,
    }
    (folder / NEUTRAL_FILE).write_text(json.dumps(found, indent=1))


def time_anew(
    folder: Path,
    workload: str,
    target: str,
    entries: Sequence[Entry],
    *,
    rounds: int,
    n_threads: int | None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Build entries of one workload into a folder, and time them in turns.

    Returns
    -------
    (samples, errors)
        Milliseconds of each round by the entries' names, and what went wrong by names.
    """
    built = _build(folder, workload, target, entries)
    timers: dict[str, Timer] = {}
    errors = {name: each["error"] for name, each in built["entries"].items() if "error" in each}
    with contextlib.ExitStack() as stack:
        pool = _pool(built["device"], n_threads, WORKLOADS[workload].is_network)
        stack.callback(pool.close)
        for name, each in built["entries"].items():
            if "path" in each:
                timers[name] = _library_timer(pool, workload, built, each["path"])
        if workload in TORCH_MODELS:
            if reason := why_no_torch(built["device"]):
                errors["pytorch"] = reason
            else:
                torch_pool = WorkerPool(1)
                stack.callback(torch_pool.close)
                timers["pytorch"] = _torch_timer(torch_pool, workload, n_threads, built)
        limits = {_UNTUNED: _UNTUNED_ROUNDS}
        samples = interleave(timers, rounds, errors, limits=limits, settle_sec=_SETTLE_SEC)
        return samples, errors


def interleave(
    timers: dict[str, Timer],
    rounds: int,
    errors: dict[str, str],
    *,
    limits: Mapping[str, int] | None = None,
    settle_sec: float = 0.0,
) -> dict[str, list[float]]:
    """Ask every timer once per round, in alternating order.

    Parameters
    ----------
    timers : dict of str to callable
        Each returns milliseconds, or raises.
    rounds : int
    errors : dict of str to str
        A timer that raised is written here and never asked again.
    limits : mapping of str to int, optional
        Rounds after which a timer is not asked any more.
    settle_sec : float, default 0.0
        Pause before each.

    Returns
    -------
    dict of str to list of float
        Without those that raised.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(rounds):
        for name in list(timers) if number % 2 == 0 else list(timers)[::-1]:
            if name in errors or number >= (limits or {}).get(name, rounds):
                continue
            time.sleep(settle_sec)
            try:
                value = timers[name]()
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"measured {value} ms, which is no time")
                samples[name].append(value)
            except Exception as error:  # a winner that crashes is a result, too
                errors[name] = (str(error).strip() or repr(error)).splitlines()[-1]
    return {name: each for name, each in samples.items() if name not in errors}


def _build(folder: Path, workload: str, target: str, entries: Sequence[Entry]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "workload": workload,
        "target": target,
        "entries": {entry.name: dataclasses.asdict(entry) for entry in entries},
    }
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    command = [sys.executable, "-m", "benchmarks.winners", str(folder / "plan.json")]
    subprocess.run(command, check=True, env=dict(os.environ))
    built: dict[str, Any] = json.loads((folder / "built.json").read_text())
    return built


def _pool(device: str, n_threads: int | None, is_network: bool) -> WorkerPool:
    from tvm_adaptive.runner.measure import give_threads_cores
    from tvm_adaptive.runner.playoff.playoff import finalist_pool

    if is_network and device == "cpu":
        return WorkerPool(1, setup=give_threads_cores, env=thread_env(n_threads))
    return finalist_pool(n_threads)


def _library_timer(pool: WorkerPool, workload: str, built: dict[str, Any], path: str) -> Timer:
    from tvm_adaptive.models import Network, load_workload, try_exported
    from tvm_adaptive.runner.playoff.worker import Kernel, time_once

    if WORKLOADS[workload].is_network:
        network = load_workload(workload)
        assert isinstance(network, Network)
        inputs = network.random_inputs()
        task: tuple[Any, ...] = (path, inputs, built["device"])
        return lambda: _ask(pool, try_exported, task)[1] * 1e3
    buffers = tuple((dtype, tuple(shape)) for dtype, shape in built["buffers"])
    kernel = Kernel(path, built["device"], buffers)
    return lambda: _ask(pool, time_once, (kernel, 0, REPEAT_MS)) * 1e3


def _torch_timer(
    pool: WorkerPool, workload: str, n_threads: int | None, built: dict[str, Any]
) -> Timer:
    task = (workload, n_threads, built["device"], NETWORK_ROUND_SEC)
    return lambda: float(_ask(pool, time_torch, task))


def _ask(pool: WorkerPool, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    (outcome,) = pool.map(function, [task], _TIMEOUT_SEC)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def main() -> int:
    parser = argparse.ArgumentParser(description="time all winners of a benchmark anew")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    remeasure_all(options.folder, rounds=options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
