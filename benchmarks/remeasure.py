"""Time everything that was ever a run's best anew: interleaved, by processes that tuned nothing.

    python -m benchmarks.remeasure runs/operators
    python -m benchmarks.remeasure runs/operators --quick

Each round is journaled when it is made. Killed, the same command goes on with the next round;
what was built is kept. Several processes make the rounds, each with memory of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.entries import Entry, entries_of
from benchmarks.journals import NEUTRAL_JOURNAL, load_bench, read_events, read_rounds
from benchmarks.machine import describe_machine
from benchmarks.plan import RunSpec, runs_folder
from benchmarks.torch_models import TORCH_MODELS, time_torch, why_no_torch
from benchmarks.workloads import WORKLOADS
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

REPEAT_MS = 50.0
NETWORK_ROUND_SEC = 1.0
_TIMEOUT_SEC = 120.0
# Beside PyTorch: threads of the one before spin for a while.
_SETTLE_SEC = 0.3
# An untuned network takes seconds or minutes, and is hundreds of times slower than the others.
_UNTUNED = "untuned"
_UNTUNED_ROUNDS = 3

Timer = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long things are timed.

    Attributes
    ----------
    rounds : int
        Timings of each entry.
    n_processes : int
        Processes that make these rounds, one after the other.
    repeat_ms : float
        One timing of a kernel: long against whatever wakes up on a machine for a moment.
    """

    rounds: int = 21
    n_processes: int = 3
    repeat_ms: float = REPEAT_MS


# Shows that it works, and nothing else.
QUICK = Effort(rounds=2, n_processes=1, repeat_ms=1.0)


def remeasure_all(out: Path, effort: Effort) -> None:
    """Time the winners and incumbents of every workload, as far as that is not done yet."""
    bench = load_bench(out)
    for workload in bench.workloads:
        runs = [run for run in bench.runs if run.spec.workload == workload]
        entries = entries_of(out, runs)
        if WORKLOADS[workload].is_network:
            entries.append(Entry(_UNTUNED))
        path = out / runs_folder(workload) / NEUTRAL_JOURNAL
        if entries and remeasure(path, runs[0].spec, entries, effort):
            print(f"{workload}: {len(entries)} libraries timed anew", flush=True)


def remeasure(path: Path, spec: RunSpec, entries: Sequence[Entry], effort: Effort) -> int:
    """Build and time entries of one workload; each round goes to a journal.

    Parameters
    ----------
    path : Path
        The journal, which is continued. Libraries lie in a folder beside it.
    spec : RunSpec
        Of any of the workload's runs.
    entries : sequence of Entry
        When others were timed before, or for less time, all are timed again, together.
    effort : Effort

    Returns
    -------
    int
        Rounds that were missing.
    """
    names = [entry.name for entry in entries]
    folder = path.with_suffix("")
    events = read_events(path) if path.exists() else []
    planned = [event for event in events if event["event"] == "plan"]
    known_ms = planned[-1].get("repeat_ms", REPEAT_MS) if planned else 0.0
    if planned and (planned[-1]["entries"] != names or known_ms < effort.repeat_ms):
        os.replace(path, path.with_name(f"{path.name}.earlier"))
        shutil.rmtree(folder, ignore_errors=True)
        events, known_ms = [], 0.0
    repeat_ms = max(effort.repeat_ms, known_ms)  # what is there is continued alike
    n_done = len([event for event in events if event["event"] == "round"])
    per_process = math.ceil(effort.rounds / effort.n_processes)
    n_missing: int = max(0, effort.rounds - n_done)
    settle_sec = _SETTLE_SEC if spec.workload in TORCH_MODELS else 0.0
    with contextlib.closing(Journal(path)) as journal:
        if n_missing and n_done == 0:
            plan = {"workload": spec.workload, "entries": names, "repeat_ms": repeat_ms}
            journal.write("plan", **plan, machine=describe_machine())
        while n_done < effort.rounds:
            last = min(effort.rounds, (n_done // per_process + 1) * per_process)
            with timers_of(folder, spec, entries, repeat_ms) as (timers, errors):
                errors.update(read_rounds(path)[1])
                for number in range(n_done, last):
                    ms = one_round(timers, errors, number, settle_sec=settle_sec)
                    journal.write("round", ms=ms, errors=errors)
            n_done = last
    return n_missing


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
    spec = RunSpec(workload, "", 0, None, None, target, n_threads)
    with timers_of(folder, spec, entries) as (timers, errors):
        return interleave(timers, rounds, errors), errors


@contextlib.contextmanager
def timers_of(
    folder: Path, spec: RunSpec, entries: Sequence[Entry], repeat_ms: float = REPEAT_MS
) -> Iterator[tuple[dict[str, Timer], dict[str, str]]]:
    """Build entries unless that was done before; yield their timers and what went wrong."""
    built = _build(folder, spec.workload, spec.target, entries)
    timers: dict[str, Timer] = {}
    errors = {name: each["error"] for name, each in built["entries"].items() if "error" in each}
    inputs = _inputs_of(spec.workload)
    with contextlib.ExitStack() as stack:
        pool = _pool(built["device"], spec.n_threads, inputs is not None)
        stack.callback(pool.close)
        for name, each in built["entries"].items():
            if "path" in each:
                timers[name] = _library_timer(pool, inputs, built, each["path"], repeat_ms)
        if spec.workload in TORCH_MODELS:
            if reason := why_no_torch(built["device"]):
                errors["pytorch"] = reason
            else:
                torch_pool = WorkerPool(1)
                stack.callback(torch_pool.close)
                timers["pytorch"] = _torch_timer(torch_pool, spec.workload, spec.n_threads, built)
        yield timers, errors


def one_round(
    timers: Mapping[str, Timer], errors: dict[str, str], number: int, *, settle_sec: float = 0.0
) -> dict[str, float]:
    """Ask every timer once, in another order in each round: none always follows the same one.

    Parameters
    ----------
    timers : mapping of str to callable
        Each returns milliseconds, or raises.
    errors : dict of str to str
        A timer that raised is written here and never asked again.
    number : int
        Of the round.
    settle_sec : float, default 0.0
        Pause before each.

    Returns
    -------
    dict of str to float
        Milliseconds.
    """
    found: dict[str, float] = {}
    names = list(timers)
    for place in np.random.default_rng(number).permutation(len(names)):
        name = names[place]
        if name in errors or (name == _UNTUNED and number >= _UNTUNED_ROUNDS):
            continue
        time.sleep(settle_sec)
        try:
            value = timers[name]()
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"measured {value} ms, which is no time")
            found[name] = value
        except Exception as error:  # a winner that crashes is a result, too
            errors[name] = (str(error).strip() or repr(error)).splitlines()[-1]
    return found


def interleave(
    timers: Mapping[str, Timer], rounds: int, errors: dict[str, str], *, settle_sec: float = 0.0
) -> dict[str, list[float]]:
    """Return all rounds by timers, without those that raised; see :func:`one_round`."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(rounds):
        for name, ms in one_round(timers, errors, number, settle_sec=settle_sec).items():
            samples[name].append(ms)
    return {name: each for name, each in samples.items() if name not in errors}


def _build(folder: Path, workload: str, target: str, entries: Sequence[Entry]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "workload": workload,
        "target": target,
        "entries": {entry.name: dataclasses.asdict(entry) for entry in entries},
    }
    text = json.dumps(plan, indent=1)
    path, result = folder / "plan.json", folder / "built.json"
    if not (result.exists() and path.read_text() == text):
        result.unlink(missing_ok=True)
        path.write_text(text)
        command = [sys.executable, "-m", "benchmarks.winners", str(path)]
        subprocess.run(command, check=True, env=dict(os.environ))
    built: dict[str, Any] = json.loads(result.read_text())
    return built


def _pool(device: str, n_threads: int | None, is_network: bool) -> WorkerPool:
    from tvm_adaptive.runner.measure import give_threads_cores
    from tvm_adaptive.runner.playoff.playoff import finalist_pool

    if is_network and device == "cpu":
        return WorkerPool(1, setup=give_threads_cores, env=thread_env(n_threads))
    return finalist_pool(n_threads)


def _inputs_of(workload: str) -> list[Any] | None:
    """Return inputs of a network; None for an operator."""
    from tvm_adaptive.models import Network, load_workload

    if not WORKLOADS[workload].is_network:
        return None
    network = load_workload(workload)
    assert isinstance(network, Network)
    return list(network.random_inputs())


def _library_timer(
    pool: WorkerPool,
    inputs: list[Any] | None,
    built: dict[str, Any],
    path: str,
    repeat_ms: float,
) -> Timer:
    from tvm_adaptive.models import try_exported
    from tvm_adaptive.runner.playoff.worker import Kernel, time_once

    if inputs is not None:
        task: tuple[Any, ...] = (path, inputs, built["device"])
        return lambda: _ask(pool, try_exported, task)[1] * 1e3
    buffers = tuple((dtype, tuple(shape)) for dtype, shape in built["buffers"])
    # Weights change from run to run, as in the runs' own play-offs.
    kernel = Kernel(path, built["device"], buffers, tuple(built["weights"]))
    return lambda: _ask(pool, time_once, (kernel, 0, repeat_ms)) * 1e3


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="time all that was ever a run's best anew")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--processes", type=int, default=Effort.n_processes, metavar="N")
    parser.add_argument("--quick", action="store_true", help="shows that it works, no more")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else Effort(options.rounds, options.processes)
    remeasure_all(options.folder, effort)
    return 0


if __name__ == "__main__":
    sys.exit(main())
