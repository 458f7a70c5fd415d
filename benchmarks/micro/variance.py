"""Time single runs of random candidates, for AdaTune's figure 3.

python -m benchmarks.micro.variance --out runs/variance.json
python -m benchmarks.figures adatune-3 --runs runs/variance.json --out runs/figures
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import tvm
from tvm.runtime import load_module
from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common

from benchmarks.machine import write_figure
from benchmarks.micro.runner import WORKLOADS, random_candidates
from tvm_adaptive.runner.measure import RANDOM_FILL, give_threads_cores
from tvm_adaptive.tuning.target import n_cores_of, resolve_target
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import WorkerPool

# A candidate whose single run takes longer would need minutes.
_TIMEOUT_SEC = 60.0


def single_runs(artifact_path: str, args_info: list[Any], device_type: str, n: int) -> list[float]:
    """Return the milliseconds of n single runs; runs in a worker."""
    if device_type == "cpu":
        give_threads_cores()
    module, dev = load_module(artifact_path), tvm.runtime.device(device_type, 0)
    (args,) = alloc_argument_common(tvm.get_global_func(RANDOM_FILL), dev, args_info, 1)
    evaluator = module.time_evaluator(module.entry_name, dev, number=1, repeat=n)
    return [1e3 * float(sec) for sec in evaluator(*args).results]


def main() -> int:
    parser = argparse.ArgumentParser(description="single runs of random candidates")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = resolve_target(options.target)
    device = "cpu" if target.kind.name in ("llvm", "c") else target.kind.name
    found: dict[str, list[list[float]]] = {}
    with contextlib.closing(WorkerPool(1, env=thread_env(n_cores_of(target)))) as pool:
        for name in options.workloads:
            inputs = random_candidates(name, options.candidates, target, options.seed + 1)
            tasks = [
                (str(each.artifact_path), [i.as_json() for i in each.args_info], device)
                for each in inputs
            ]
            jobs = [(*task, options.runs) for task in tasks]
            outcomes = pool.map(single_runs, jobs, _TIMEOUT_SEC)
            found[name] = [each.value for each in outcomes if each.error is None]
    write_figure(options.out, {"runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
