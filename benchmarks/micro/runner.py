"""Compare the adaptive runner with stock's on the same random candidates.

Two passes. *Cost*: both runners measure the candidates in blocks, in alternating order.
*Accuracy*: in one process, each candidate is measured as stock does it, as the adaptive
runner does it (in alternating order), and at length just before and just after. A host
moves virtual cores about, which changes the time of a kernel by up to a half for
seconds; a reference of another minute would charge that to the runner. Prints a table
in Markdown, or JSON with --json.

    python -m benchmarks.micro.runner --candidates 32
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm.runtime import load_module
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, LocalRunner, RunnerInput
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common, run_evaluator_common
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu

from benchmarks.tables import markdown
from tvm_adaptive._tvm import MeasureCandidate
from tvm_adaptive._tvm.intrinsics import backends_of, only_intrinsics
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.runner.measure import (
    RANDOM_FILL,
    MeasureOptions,
    evaluated,
    give_threads_cores,
    timer_for,
)
from tvm_adaptive.runner.stopping import make_rule
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

WORKLOADS = ("GMM", "C2D", "SFM")
# Before a candidate and again after it, half a second each; their median is the truth.
REFERENCE = EvaluatorConfig(number=1, repeat=5, min_repeat_ms=100)
# One candidate of a second per run would take eleven in the reference.
REFERENCE_TIMEOUT_SEC = 120.0
STOCK = EvaluatorConfig()
# Halves of the reference that differ by more saw two states of the machine.
STEADY = 0.03
# TVM's threads go on spinning for a while after a kernel, in every process that has run
# one; measuring in another process meanwhile shares the cores with them.
SETTLE_SEC = 0.4
# Long enough that the pause between two blocks does not count, short enough that both
# runners see the same hour.
BLOCK = 8


def random_candidates(name: str, n: int, target: Target, seed: int) -> list[RunnerInput]:
    """Build n random schedules of a testing workload; fewer if some do not build."""
    candidates = drawn_candidates(name, n, target, seed)
    inputs = [ms.builder.BuilderInput(each.sch.mod, target) for each in candidates]
    # Kept until the process ends: the artifacts are measured later.
    directory = tempfile.mkdtemp(prefix=f"runner-benchmark-{name}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    builder = PersistentBuilder(artifact_dir=directory)
    built = builder.build(inputs)
    return [
        RunnerInput(result.artifact_path, "cpu", each.args_info)
        for each, result in zip(candidates, built, strict=True)
        if result.artifact_path is not None
    ]


def drawn_candidates(name: str, n: int, target: Target, seed: int) -> list[MeasureCandidate]:
    """Draw n random schedules of a testing workload."""
    with only_intrinsics(backends_of([target])):  # those of all take a minute to import
        context = ms.TuneContext(
            mod=create_te_workload(name, 0),
            target=target,
            space_generator="post-order-apply",
            search_strategy="replay-trace",
            rand_state=seed,
        )
    context.pre_tuning(max_trials=n, num_trials_per_iter=n)
    return list(context.generate_measure_candidates() or [])


def compare(inputs: Sequence[RunnerInput], cores: int) -> dict[str, dict[str, float]]:
    """Return cost and accuracy of both runners."""
    costs, errors = measure_costs(inputs), measure_accuracy(inputs, cores)
    return {name: {**costs[name], **errors[name]} for name in ("stock", "adaptive")}


def measure_costs(inputs: Sequence[RunnerInput]) -> dict[str, dict[str, float]]:
    """Return the seconds of both runners, and how many of them are not spent on loading."""
    runners: dict[str, Any] = {
        "stock": LocalRunner(),
        "adaptive": AdaptiveRunner(),
        # The same without running the kernel: what loading it costs either of them.
        "stock loading": LocalRunner(f_run_evaluator=no_run),
        "adaptive loading": AdaptiveRunner(measure=load_only),
    }
    for runner in runners.values():
        run_block(runner, inputs[:1])  # starts the workers
    seconds = dict.fromkeys(runners, 0.0)
    blocks = [inputs[i : i + BLOCK] for i in range(0, len(inputs), BLOCK)]
    for index, block in enumerate(blocks):
        for name in list(runners) if index % 2 == 0 else list(runners)[::-1]:
            seconds[name] += run_block(runners[name], block)
    return {
        name: {"seconds": seconds[name], "measuring": seconds[name] - seconds[f"{name} loading"]}
        for name in ("stock", "adaptive")
    }


def run_block(runner: Any, inputs: Sequence[RunnerInput]) -> float:
    """Measure candidates and return the seconds it took."""
    time.sleep(SETTLE_SEC)
    start = time.perf_counter()
    for future in runner.run(list(inputs)):
        future.result()
    return time.perf_counter() - start


def measure_accuracy(inputs: Sequence[RunnerInput], cores: int) -> dict[str, dict[str, float]]:
    """Return how far both ways of measuring are from a reference of a second."""
    found = []
    with contextlib.closing(WorkerPool(1, env=thread_env(cores))) as pool:
        for index, each in enumerate(inputs):
            args_info = [info.as_json() for info in each.args_info]
            task = (str(each.artifact_path), args_info, index % 2 == 0)
            (outcome,) = pool.map(measure_in_place, [task], REFERENCE_TIMEOUT_SEC)
            if outcome.error is None:
                found.append(outcome.value)
    before, after = (np.array([each[name] for each in found]) for name in ("before", "after"))
    truth = (before + after) / 2
    steady = float(np.mean(np.abs(before - after) <= STEADY * truth))
    return {
        name: {"steady": steady, **accuracy(np.array([each[name] for each in found]), truth)}
        for name in ("stock", "adaptive")
    }


def measure_in_place(
    artifact_path: str, args_info: Sequence[Any], stock_first: bool
) -> dict[str, float]:
    """Measure one candidate in both ways, between two halves of its reference."""
    all_cores = os.sched_getaffinity(0)
    give_threads_cores()
    own_core = os.sched_getaffinity(0)
    module, dev = load_module(artifact_path), tvm.runtime.device("cpu", 0)
    fill = tvm.get_global_func(RANDOM_FILL)
    (args,) = alloc_argument_common(fill, dev, args_info, 1)

    def as_stock(config: EvaluatorConfig) -> float:
        return float(np.median(run_evaluator_common(module, dev, config, [args])))

    def stock() -> float:
        os.sched_setaffinity(0, all_cores)  # stock binds nothing
        return as_stock(STOCK)

    def adaptive() -> float:
        os.sched_setaffinity(0, own_core)
        options = MeasureOptions(rule=make_rule("precision"))
        return evaluated(timer_for(module, dev, fill, args_info, options), options).mean_sec

    before = as_stock(REFERENCE)
    ways = {"stock": stock, "adaptive": adaptive}
    found = {name: ways[name]() for name in (ways if stock_first else reversed(ways))}
    os.sched_setaffinity(0, own_core)
    after = as_stock(REFERENCE)
    os.sched_setaffinity(0, all_cores)
    return {**found, "before": before, "after": after}


def no_run(
    _module: Any, _device: Any, _config: EvaluatorConfig, _repeated_args: Any
) -> list[float]:
    """Take the evaluator's place in the stock runner and measure nothing."""
    return [1.0]


def load_only(
    artifact_path: str, device_type: str, args_info: Sequence[Any], _options: MeasureOptions
) -> Timing:
    """Do all that the adaptive runner's worker does but run the kernel."""
    load_module(artifact_path)
    fill = tvm.get_global_func(RANDOM_FILL)
    alloc_argument_common(fill, tvm.runtime.device(device_type, 0), args_info, 1)
    return Timing(1.0, float("nan"), 0, 0, "not-run", 0.0)


def accuracy(measured: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Compare times of candidates with their reference.

    Returns
    -------
    dict
        ``median_error`` and ``error_90`` (relative), ``regret`` (how much slower than
        the truly best is the one called best, relative) and ``n`` candidates compared.
    """
    valid = np.isfinite(measured) & np.isfinite(truth)
    if not valid.any():
        return {"n": 0.0, "median_error": np.nan, "error_90": np.nan, "regret": np.nan}
    measured, truth = measured[valid], truth[valid]
    errors = np.abs(measured / truth - 1.0)
    return {
        "n": float(len(truth)),
        "median_error": float(np.median(errors)),
        "error_90": float(np.quantile(errors, 0.9)),
        "regret": float(truth[np.argmin(measured)] / truth.min() - 1.0),
    }


def as_markdown(report: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the report as a table."""
    columns = ["workload", "runner", "candidates", "seconds", "of these measuring"]
    columns += ["median error", "90 % error", "regret", "steady"]
    lines = []
    for workload, rows in report.items():
        for runner, row in rows.items():
            cells = [workload, runner, f"{row['n']:.0f}"]
            cells += [f"{row[key]:.2f}" for key in ("seconds", "measuring")]
            cells += [f"{row[key]:.2%}" for key in ("median_error", "error_90", "regret", "steady")]
            lines.append(cells)
    return markdown(columns, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description="adaptive runner against stock's")
    parser.add_argument("--candidates", type=int, default=32, help="per workload")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--cores", type=int, default=2, help="num-cores of the target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    # Stock takes its threads from the environment; both runners get the same number.
    os.environ["TVM_NUM_THREADS"] = str(options.cores)
    target = Target({"kind": "llvm", "mcpu": llvm_get_system_cpu(), "num-cores": options.cores})
    report = {}
    for name in options.workloads:
        inputs = random_candidates(name, options.candidates, target, options.seed + 1)
        if inputs:
            report[name] = compare(inputs, options.cores)
    print(json.dumps(report, indent=1) if options.json else as_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
