"""Record a pool of random candidates: features and measured seconds, for off-line study.

    python -m benchmarks.micro.record_pool GMM --n 640 --seed 0 --out benchmarks/micro/pools/GMM.npz

Writes a ``.npz`` without pickles: ``stores`` (float32, all candidates' stores one below
the other, (sum of n_stores, 164)), ``n_stores`` (n,), ``seconds`` (n,; NaN for a
candidate that failed) and ``about`` (JSON: how sampled, how measured, on what machine).
Keep the machine quiet meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import MemoryDatabase
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload
from tvm.target.codegen import llvm_get_system_cpu

from benchmarks.machine import describe_machine
from tvm_adaptive import _tvm
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.pool import Outcome, WorkerPool

# Random schedules of a small space repeat themselves; after so many rounds without
# enough new ones the space is as good as exhausted.
MAX_SAMPLING_ROUNDS = 20
SAMPLED_PER_ROUND = 256
# Three repeats of 10 ms: the median sheds a hiccup, and a pool of 640 stays in minutes.
REPEATS = 3
MIN_REPEAT_MS = 10
RUN_TIMEOUT_SEC = 10.0
BUILD_TIMEOUT_SEC = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", help="a name of TVM's te_workload, e.g. GMM")
    parser.add_argument("--n", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    target = _tvm.Target(
        {"kind": "llvm", "mcpu": llvm_get_system_cpu(), "num-cores": options.cores}
    )
    context, schedules = sample(options.workload, target, options.n, options.seed)
    print(f"{options.workload}: {len(schedules)} distinct schedules")
    features, feature_sec = extract(context, schedules)
    start_sec = time.monotonic()
    seconds, errors = measure(schedules, target, options.cores)
    about = {
        "workload": options.workload,
        "seed": options.seed,
        "sampling": "EvolutionarySearch initial population, distinct by structural hash",
        "measuring": f"median of {REPEATS} x {MIN_REPEAT_MS} ms, one process at a time",
        "target": str(target),
        "tvm": _tvm.TVM_VERSION,
        "machine": describe_machine(),
        "feature_sec_per_candidate": round(feature_sec / len(schedules), 6),
        "measuring_sec": round(time.monotonic() - start_sec, 1),
        "first_errors": errors[:3],
    }
    if np.isnan(seconds).all():
        raise SystemExit(f"no candidate could be measured; the first errors: {errors[:3]}")
    save(options.out, features, seconds, about)
    print(
        f"{options.out}: {options.out.stat().st_size / 1e3:.0f} kB, "
        f"{int(np.isnan(seconds).sum())} failures, best {np.nanmin(seconds) * 1e3:.4f} ms"
    )


def sample(
    workload: str, target: Any, n: int, seed: int
) -> tuple[_tvm.TuneContext, list[_tvm.Schedule]]:
    """Draw up to ``n`` schedules that differ from one another."""
    function = create_te_workload(workload, 0)
    strategy = _tvm.EvolutionarySearch(population_size=SAMPLED_PER_ROUND)
    context = _tvm.TuneContext(
        _tvm.IRModule({"main": function}),
        target=target,
        space_generator="post-order-apply",
        search_strategy=strategy,
        task_name=workload,
        rand_state=seed + 1,  # 0 is not a state of TVM's generator
        num_threads=1,
    )
    spaces = context.generate_design_space()
    # No candidate is scored here, but the strategy insists on a model.
    model = _tvm.CostModel.create("random")
    strategy.pre_tuning(n, SAMPLED_PER_ROUND, spaces, MemoryDatabase(), model)
    found: dict[int, _tvm.Schedule] = {}
    for _ in range(MAX_SAMPLING_ROUNDS):
        for schedule in _tvm.sample_population(strategy, SAMPLED_PER_ROUND):
            found.setdefault(_tvm.structural_hash(schedule.mod), schedule)
        if len(found) >= n:
            break
    return context, list(found.values())[:n]


def extract(
    context: _tvm.TuneContext, schedules: list[_tvm.Schedule]
) -> tuple[list[np.ndarray], float]:
    """Return the per-store features and the seconds that they took."""
    arguments = ArgInfo.from_entry_func(schedules[0].mod)
    candidates = [_tvm.MeasureCandidate(schedule, arguments) for schedule in schedules]
    start_sec = time.perf_counter()
    tensors = _tvm.PerStoreFeature().extract_from(context, candidates)
    elapsed_sec = time.perf_counter() - start_sec
    return [tensor.numpy().astype(np.float32) for tensor in tensors], elapsed_sec


def measure(
    schedules: list[_tvm.Schedule], target: Any, cores: int
) -> tuple[np.ndarray, list[str]]:
    """Build all, then run one at a time; NaN for what failed."""
    folder = Path(tempfile.mkdtemp(prefix="record_pool_"))
    seconds = np.full(len(schedules), np.nan)
    try:
        builders, runner = (
            WorkerPool(cores, setup=import_tvm),
            WorkerPool(1, setup=import_tvm, env=thread_env(cores)),
        )
        tasks = [
            (schedule.mod, target, str(folder / f"{i}.tar")) for i, schedule in enumerate(schedules)
        ]
        builds = builders.map(build, tasks, BUILD_TIMEOUT_SEC)
        builders.close()
        built = [i for i, outcome in enumerate(builds) if outcome.error is None]
        arguments = [info.as_json() for info in ArgInfo.from_entry_func(schedules[0].mod)]
        runs = runner.map(run, [(builds[i].value, arguments) for i in built], RUN_TIMEOUT_SEC)
        runner.close()
        for i, outcome in zip(built, runs, strict=True):
            if outcome.error is None:
                seconds[i] = outcome.value
    finally:
        shutil.rmtree(folder)
    return seconds, _messages([*builds, *runs])


def import_tvm() -> None:
    import tvm  # noqa: F401 - its import must not count as the first task's time


def build(module: Any, target: Any, path: str) -> str:
    """Compile as TVM's local builder does, without importing the tensor intrinsics."""
    from tvm.driver import build as build_tir
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
    from tvm.support.tar import tar

    module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module)
    build_tir(module, target=target).export_library(path, fcompile=tar)
    return path


def run(path: str, arguments: list[Any]) -> float:
    """Return the median seconds of one run."""
    import numpy as np
    import tvm
    from tvm.s_tir.meta_schedule.runner.utils import alloc_argument_common

    device = tvm.cpu(0)
    module = tvm.runtime.load_module(path)
    # Whatever lies in fresh memory may be subnormal, which is slow to compute with.
    fill = tvm.get_global_func("tvm.contrib.random.random_fill_for_measure")
    (values,) = alloc_argument_common(fill, device, arguments, 1)
    evaluator = module.time_evaluator(
        "main", device, number=1, repeat=REPEATS, min_repeat_ms=MIN_REPEAT_MS
    )
    return float(np.median(evaluator(*values).results))


def save(path: Path, features: list[np.ndarray], seconds: np.ndarray, about: dict) -> None:
    """Write the pool; see the module for its entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stores = [block for block in features if block.size]
    np.savez_compressed(
        path,
        stores=np.concatenate(stores),
        n_stores=np.array([len(block) for block in features], dtype=np.int32),
        seconds=seconds,
        about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
    )


def _messages(outcomes: list[Outcome]) -> list[str]:
    return [str(outcome.error)[-300:] for outcome in outcomes if outcome.error is not None]


if __name__ == "__main__":
    main()
