"""Compare times that were taken while tuning with those of a machine that does nothing else.

    python -m benchmarks.micro.agreement runs/c2d --out agreement.json

Of a finished run of an operator, candidates from all over its range of times are built
again and timed at length, one after the other, with nothing else running. What the run
recorded is divided by that. A host moves processors about, and a kernel's time with them,
so that each candidate is timed in several rounds, of which the median counts; how far a
round alone is from that median says what no single timing can do better.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from scipy.stats import spearmanr
from tvm.runtime import load_module
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common, run_evaluator_common

from benchmarks.machine import write_figure
from benchmarks.micro.runner import REFERENCE, REFERENCE_TIMEOUT_SEC, SETTLE_SEC
from tvm_adaptive._tvm import json_database
from tvm_adaptive.builder import PersistentBuilder
from tvm_adaptive.runner.measure import RANDOM_FILL, give_threads_cores
from tvm_adaptive.tuning.target import n_cores_of, resolve_target
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

Times = npt.NDArray[np.float64]

# MetaSchedule records a failed trial as 1e10 s.
_FAILED_SEC = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="recorded times against those of an idle machine")
    parser.add_argument("folder", type=Path, help="a run's work directory")
    parser.add_argument("--candidates", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = resolve_target("cpu")
    candidates = spread(options.folder, options.candidates)
    with tempfile.TemporaryDirectory() as folder:
        paths = build([candidate for _, candidate in candidates], target, folder)
        built = list(zip(candidates, paths, strict=True))
        env = thread_env(n_cores_of(target))
        with contextlib.closing(WorkerPool(1, env=env)) as pool:
            alone = [
                [time_in(pool, path, candidate) for (_, candidate), path in built]
                for _ in range(options.rounds)
            ]
    found = [
        {"recorded_sec": recorded_sec, "alone_sec": rounds}
        for (recorded_sec, _), *rounds in zip(candidates, *alone, strict=True)
        if all(rounds)
    ]
    write_figure(options.out, {"candidates": found})
    print(table(str(options.folder), found))


def spread(folder: Path, n: int) -> list[tuple[float, Any]]:
    """Return n candidates of a run with their recorded seconds, evenly over the ranks."""
    records = json_database(folder).get_all_tuning_records()
    timed = sorted(
        (
            (float(np.median([float(sec) for sec in record.run_secs])), i)
            for i, record in enumerate(records)
        ),
    )
    usable = [(sec, i) for sec, i in timed if sec < _FAILED_SEC]
    picked = sorted(set(np.linspace(0, len(usable) - 1, n).round().astype(int).tolist()))
    return [(usable[p][0], records[usable[p][1]].as_measure_candidate()) for p in picked]


def build(candidates: Sequence[Any], target: Any, folder: str) -> list[str | None]:
    """Build candidates; None for one that does not build."""
    with contextlib.closing(PersistentBuilder(artifact_dir=folder, patience=None)) as builder:
        inputs = [ms.builder.BuilderInput(each.sch.mod, target) for each in candidates]
        return [
            None if built.artifact_path is None else str(built.artifact_path)
            for built in builder.build(inputs)
        ]


def time_in(pool: WorkerPool, path: str | None, candidate: Any) -> float | None:
    """Return the seconds of a built candidate; None for one that fails."""
    if path is None:
        return None
    time.sleep(SETTLE_SEC)
    task = (path, [info.as_json() for info in candidate.args_info])
    (outcome,) = pool.map(time_alone, [task], REFERENCE_TIMEOUT_SEC)
    return None if outcome.error is not None else float(outcome.value)


def time_alone(artifact_path: str, args_info: Sequence[Any]) -> float:
    """Return the median seconds of a candidate; runs in a worker."""
    give_threads_cores()
    module, dev = load_module(artifact_path), tvm.runtime.device("cpu", 0)
    (args,) = alloc_argument_common(tvm.get_global_func(RANDOM_FILL), dev, args_info, 1)
    return float(np.median(run_evaluator_common(module, dev, REFERENCE, [args])))


def table(name: str, found: Sequence[dict[str, Any]]) -> str:
    """Return how far recorded times are from those taken alone, as Markdown."""
    lines = [
        "| times | candidates | over alone, median | 10th to 90th percentile | rank corr. |",
        "|---|---|---|---|---|",
    ]
    if len(found) > 1:
        rounds = np.array([each["alone_sec"] for each in found])
        alone = np.median(rounds, axis=1)
        recorded = np.array([each["recorded_sec"] for each in found])
        lines.append(f"| {name} | {len(found)} | {compared(recorded, alone)} |")
        lines.append(f"| one round alone | {len(found)} | {compared(rounds[:, 0], alone)} |")
    return "\n".join(lines)


def compared(times: Times, alone: Times) -> str:
    """Return three cells: the median ratio, its range, and Spearman's correlation."""
    low, middle, high = np.quantile(times / alone, [0.1, 0.5, 0.9])
    return f"{middle:.3f} | {low:.3f} to {high:.3f} | {spearmanr(times, alone).statistic:.2f}"


if __name__ == "__main__":
    main()
