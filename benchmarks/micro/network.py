"""Time compiled networks and PyTorch on this machine, in one interleaved run.

Give it libraries that `tvm-adaptive tune` left in its work directories; each is loaded
in a process of its own and timed round after round, so that drift meets all alike.
PyTorch (oneDNN, frozen trace, same threads) takes part where torch is installed.

    python -m benchmarks.micro.network --network resnet18 ours=runs/a/resnet18.so
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.remeasure import interleave
from benchmarks.torch_models import TORCH_MODELS, time_torch, why_no_torch
from tvm_adaptive.models import BUILTIN, try_exported
from tvm_adaptive.workers.cores import thread_env, usable_physical_cores
from tvm_adaptive.workers.pool import WorkerPool

ROUND_SEC = 1.0
RUN_TIMEOUT_SEC = 120.0
# Threads of the one before spin for a while after their last inference.
SETTLE_SEC = 1.0


def time_libraries(
    network: str,
    paths: Mapping[str, str],
    rounds: int,
    cores: int,
    *,
    sizes: Mapping[str, int] | None = None,
    with_torch: bool = False,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time libraries of one network in turns, each in a process of its own.

    Parameters
    ----------
    network : str
        A built-in one.
    paths : mapping of str to str
        The libraries by their names.
    rounds, cores : int
    sizes : mapping of str to int, optional
        Options of the network that the libraries were tuned with.
    with_torch : bool, default False
        Let PyTorch take part.

    Returns
    -------
    (samples, errors)
        Milliseconds of an inference by names and rounds, and what went wrong by names.
    """
    inputs = BUILTIN[network](**(sizes or {})).random_inputs()
    errors: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        timers = {}
        for name, path in paths.items():
            pool = WorkerPool(1, env=thread_env(cores))
            stack.callback(pool.close)
            timers[name] = library_timer(pool, path, inputs)
        if with_torch:
            pool = WorkerPool(1)
            stack.callback(pool.close)
            timers["pytorch"] = torch_timer(pool, network, cores)
        return interleave(timers, rounds, errors, settle_sec=SETTLE_SEC), errors


def library_timer(pool: WorkerPool, path: str, inputs: Sequence[np.ndarray]) -> Callable[[], float]:
    """Return a function that times one round of a library, in milliseconds."""

    def one_round() -> float:
        (outcome,) = pool.map(try_exported, [(path, inputs)], RUN_TIMEOUT_SEC)
        if outcome.error is not None:
            raise outcome.error
        return float(outcome.value[1]) * 1e3

    return one_round


def torch_timer(pool: WorkerPool, network: str, cores: int) -> Callable[[], float]:
    """Return a function that times one round of PyTorch, in milliseconds."""

    def one_round() -> float:
        task = (network, cores, "cpu", ROUND_SEC)
        (outcome,) = pool.map(time_torch, [task], RUN_TIMEOUT_SEC)
        if outcome.error is not None:
            raise outcome.error
        return float(outcome.value)

    return one_round


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="networks side by side")
    parser.add_argument("libraries", nargs="+", metavar="NAME=LIBRARY")
    parser.add_argument("--network", choices=list(TORCH_MODELS), default="resnet18")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", type=int, default=usable_physical_cores())
    parser.add_argument("--out", help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if reason := why_no_torch("cpu"):
        print(f"PyTorch is left out: {reason}", file=sys.stderr)
    samples, errors = time_libraries(
        options.network,
        dict(pair.split("=", 1) for pair in options.libraries),
        options.rounds,
        options.cores,
        with_torch=not reason,
    )
    for name, error in errors.items():
        print(f"{name} is left out: {error}", file=sys.stderr)
    if not samples:
        return 1
    first = next(iter(samples))
    base = float(np.median(samples[first]))
    print(f"| | median ms | range | against {first} |\n|---|---|---|---|")
    for name, each in samples.items():
        middle = float(np.median(each))
        print(
            f"| {name} | {middle:.2f} | {min(each):.2f} to {max(each):.2f} | {middle / base:.2f} |"
        )
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"network": options.network, "cores": options.cores, "ms": samples}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
