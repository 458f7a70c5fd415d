"""Compare the adaptive runner with stock's on the same random candidates.

Candidates are measured by both runners one after the other, in alternating order, and
then at length for a reference. Prints a table in Markdown, or JSON with --json.

    python benchmarks/micro/runner.py --candidates 32
"""

from __future__ import annotations

import argparse
import atexit
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
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu

from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.records import Timing
from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.runner.measure import RANDOM_FILL, MeasureOptions

WORKLOADS = ("GMM", "C2D", "SFM")
# Ten repeats of 100 ms: a median over a second, at twenty times the adaptive effort.
REFERENCE = EvaluatorConfig(number=1, repeat=10, min_repeat_ms=100)
# One candidate of a second per run would take eleven in the reference.
REFERENCE_TIMEOUT_SEC = 120.0


# TVM's threads go on spinning for a while after a kernel, in every process that has run
# one; measuring in another process meanwhile shares the cores with them.
SETTLE_SEC = 0.4


def random_candidates(name: str, n: int, target: Target, seed: int) -> list[RunnerInput]:
    """Build n random schedules of a testing workload; fewer if some do not build."""
    context = ms.TuneContext(
        mod=create_te_workload(name, 0),
        target=target,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        rand_state=seed,
    )
    context.pre_tuning(max_trials=n, num_trials_per_iter=n)
    candidates = list(context.generate_measure_candidates() or [])
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


def measure(runner: Any, runner_input: RunnerInput) -> tuple[float, float]:
    """Return the median seconds of one run (nan for a failure) and the seconds it cost."""
    time.sleep(SETTLE_SEC)
    start = time.perf_counter()
    (future,) = runner.run([runner_input])
    result = future.result()
    cost = time.perf_counter() - start
    if result.run_secs is None:
        return float("nan"), cost
    return float(np.median([float(value) for value in result.run_secs])), cost


def compare(inputs: Sequence[RunnerInput]) -> dict[str, dict[str, float]]:
    """Measure every candidate with both runners and at length."""
    runners: dict[str, Any] = {
        "stock": LocalRunner(),
        "adaptive": AdaptiveRunner(),
        # The same without running the kernel: what loading it costs either of them.
        "stock loading": LocalRunner(f_run_evaluator=no_run),
        "adaptive loading": AdaptiveRunner(measure=load_only),
    }
    reference = LocalRunner(timeout_sec=REFERENCE_TIMEOUT_SEC, evaluator_config=REFERENCE)
    for runner in (*runners.values(), reference):
        measure(runner, inputs[0])  # starts the workers
    times: dict[str, list[float]] = {name: [] for name in (*runners, "reference")}
    costs: dict[str, float] = dict.fromkeys(runners, 0.0)
    for index, runner_input in enumerate(inputs):
        order = list(runners) if index % 2 == 0 else list(runners)[::-1]
        for name in order:
            seconds, cost = measure(runners[name], runner_input)
            times[name].append(seconds)
            costs[name] += cost
        times["reference"].append(measure(reference, runner_input)[0])
    truth = np.array(times["reference"])
    return {
        name: {
            "seconds": costs[name],
            "measuring": costs[name] - costs[f"{name} loading"],
            **accuracy(np.array(times[name]), truth),
        }
        for name in ("stock", "adaptive")
    }


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
    columns += ["median error", "90 % error", "regret"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for workload, rows in report.items():
        for runner, row in rows.items():
            cells = [workload, runner, f"{row['n']:.0f}"]
            cells += [f"{row[key]:.2f}" for key in ("seconds", "measuring")]
            cells += [f"{row[key]:.2%}" for key in ("median_error", "error_90", "regret")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
            report[name] = compare(inputs)
    print(json.dumps(report, indent=1) if options.json else as_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
