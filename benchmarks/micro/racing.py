"""What races drop: never the better one, and most of the others, for a fraction of the price.

    python -m benchmarks.micro.racing --out racing.json

Each random candidate is timed by a reference of half a second, then raced, in random
order, against incumbents that are by the reference as fast, a tenth slower, and 1.5, 2
and 4 times faster than itself, and measured once without a race.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.runtime import load_module
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common, run_evaluator_common

from benchmarks.machine import write_figure
from benchmarks.micro.runner import REFERENCE, WORKLOADS, random_candidates
from tvm_adaptive.runner.evaluator import RACED, Race
from tvm_adaptive.runner.measure import (
    RANDOM_FILL,
    MeasureOptions,
    evaluated,
    give_threads_cores,
    timer_for,
)
from tvm_adaptive.runner.stopping import make_rule
from tvm_adaptive.tuning.target import n_cores_of, resolve_target
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

# How many times as long as its incumbent a candidate takes; None is without a race.
FACTORS = (0.9, 1.0, 1.5, 2.0, 4.0, None)
REPEATS = 3
_TIMEOUT_SEC = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description="what races drop")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--candidates", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = resolve_target("cpu")
    found: dict[str, list[dict[str, Any]]] = {}
    with contextlib.closing(WorkerPool(1, env=thread_env(n_cores_of(target)))) as pool:
        for name in options.workloads:
            inputs = random_candidates(name, options.candidates, target, seed=1)
            tasks = [
                (str(each.artifact_path), [info.as_json() for info in each.args_info], seed)
                for seed, each in enumerate(inputs)
            ]
            outcomes = pool.map(races, tasks, _TIMEOUT_SEC)
            found[name] = [race for each in outcomes if each.error is None for race in each.value]
    write_figure(options.out, {"factors": FACTORS, "races": found})
    print(table(found))


def races(artifact_path: str, args_info: Sequence[Any], seed: int) -> list[dict[str, Any]]:
    """Race one candidate; runs in a worker."""
    give_threads_cores()
    module, dev = load_module(artifact_path), tvm.runtime.device("cpu", 0)
    fill = tvm.get_global_func(RANDOM_FILL)
    (args,) = alloc_argument_common(fill, dev, args_info, 1)
    truth_sec = float(np.median(run_evaluator_common(module, dev, REFERENCE, [args])))
    factors = list(FACTORS) * REPEATS
    found = []
    for i in np.random.default_rng(seed).permutation(len(factors)):
        factor = factors[i]
        race = None if factor is None else Race(truth_sec / factor)
        options = MeasureOptions(rule=make_rule("precision"), race=race)
        timing = evaluated(timer_for(module, dev, fill, args_info, options), options)
        found.append(
            {
                "factor": factor,
                "raced": timing.reason == RACED,
                "elapsed_sec": timing.elapsed_sec,
                "error": timing.mean_sec / truth_sec - 1.0,
            }
        )
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return shares and seconds by operator and factor, as Markdown."""
    lines = [
        "| workload | times as long as its incumbent | dropped | median s | median error |",
        "|---|---|---|---|---|",
    ]
    for name, all_races in found.items():
        for factor in FACTORS:
            group = [race for race in all_races if race["factor"] == factor]
            if not group:
                continue
            dropped = np.mean([race["raced"] for race in group])
            seconds = np.median([race["elapsed_sec"] for race in group])
            error = np.median([abs(race["error"]) for race in group])
            label = "no race" if factor is None else f"{factor:g}"
            share = f"{dropped:.1%} of {len(group)}"
            lines.append(f"| {name} | {label} | {share} | {seconds:.3f} | {error:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
