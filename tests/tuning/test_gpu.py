"""Tuning for an NVIDIA GPU: what can be checked without one, and the whole job on one."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir.meta_schedule.arg_info import TensorInfo
from tvm.s_tir.meta_schedule.runner import RunnerInput
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tvm_adaptive import TuneConfig, tune
from tvm_adaptive._tvm import Target, load_module, tensor
from tvm_adaptive._tvm.default_schedules import with_default_schedules
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.models import compile_tir
from tvm_adaptive.runner.local import AdaptiveRunner
from tvm_adaptive.tuning import doctor, registry
from tvm_adaptive.tuning.config import DEFAULT, FinishConfig, SearchConfig
from tvm_adaptive.tuning.deploy import apply
from tvm_adaptive.tuning.parts import make_parts
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.workers.cores import usable_physical_cores

NO_GPU_HERE = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
}
QUICK = TuneConfig(
    search=SearchConfig(n_trials_per_round=8, population_size=64, genetic_num_iters=1),
    finish=FinishConfig(top_k=2, max_task_sec=0.5),
    store="none",
)
SIZE = 128


def test_the_forest_of_a_gpus_tasks_takes_this_machines_cores(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    create = registry.create

    def note(part: str, name: str, **options: Any) -> Any:
        made[part] = options
        return create(part, name, **options)

    monkeypatch.setattr(registry, "create", note)
    with contextlib.closing(make_parts(make_session(target=Target(NO_GPU_HERE)))):
        assert made["cost_model"]["n_jobs"] == usable_physical_cores()
        assert made["runner"]["overlap"]
        assert made["builder"]["patience"] < DEFAULT.measure.build_patience
        assert made["task_scheduler"]["warm_up_trials"] >= DEFAULT.scheduler.warm_up_trials


def gmm() -> Any:
    return tvm.IRModule({"main": create_te_workload("GMM", 0)})


def test_a_default_schedule_leaves_the_module_as_it_was() -> None:
    mod = gmm()
    before = mod.script()
    scheduled = with_default_schedules(mod, Target(NO_GPU_HERE))
    assert mod.script() == before
    assert "blockIdx.x" in scheduled.script()
    assert "blockIdx.x" not in before


@pytest.fixture
def intrinsics() -> None:
    """Register CUDA's tensor intrinsics, which the other tests do without."""
    importlib.import_module("tvm.s_tir.tensor_intrin.dot_product_common")
    importlib.import_module("tvm.s_tir.tensor_intrin.cuda")


@pytest.mark.gpu
def test_doctor_compiles_a_kernel_for_the_gpu() -> None:
    found = doctor.check_gpu()
    assert found.verdict == "ok", found.text


@pytest.mark.gpu
@pytest.mark.usefixtures("intrinsics")
@pytest.mark.parametrize("runner", ["adaptive", "local"])
def test_an_operator_is_tuned_checked_and_deployed(tmp_path: Path, runner: str) -> None:
    store = str(tmp_path / "records.db")
    config = QUICK.replace(store=store, runner=runner)
    report = tune("te:GMM", work_dir=tmp_path / "run", target="cuda", trials=32, config=config)
    (task,) = report.tasks
    assert task.played_off
    assert report.comparison is not None
    assert report.comparison.agree
    assert report.coverage == "1 of 1 functions tuned"

    applied = apply("te:GMM", out_dir=tmp_path / "out", target="cuda", config=config)
    module = load_module(str(applied.library))
    rng = np.random.default_rng(0)
    values = [rng.random((1, SIZE, SIZE), np.float32) for _ in range(3)]
    args = [tensor(each, tvm.cuda(0)) for each in values]
    module["main"](*args)
    np.testing.assert_allclose(args[2].numpy(), values[0] @ values[1], rtol=1e-4)
    (example,) = applied.examples
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.usefixtures("intrinsics")
def test_a_network_is_tuned_and_agrees_with_the_untuned_one(tmp_path: Path) -> None:
    report = tune("resnet18", work_dir=tmp_path, target="cuda", trials=48, config=QUICK)
    assert report.comparison is not None
    assert report.comparison.agree
    assert any(task.played_off for task in report.tasks)
    events = list(read_journal(tmp_path / "journal.jsonl"))
    assert not [event for event in events if event["event"] == "error"]


@pytest.mark.gpu
def test_a_kernel_that_faults_costs_only_itself(tmp_path: Path) -> None:
    target = resolve_target("cuda")
    x = te.placeholder((SIZE,), name="x")
    # 4 GB behind the end of its argument.
    far = te.create_prim_func([x, te.compute((SIZE,), lambda i: x[i + 1_000_000_000] + 1.0)])
    square = [TensorInfo("float32", [1, SIZE, SIZE])] * 3
    inputs = []
    for number, (module, infos) in enumerate(
        [
            (gmm(), square),
            (tvm.IRModule({"main": far}), [TensorInfo("float32", [SIZE])] * 2),
            (gmm(), square),
        ]
    ):
        path = str(tmp_path / f"{number}.so")
        compile_tir(module, target).export_library(path)
        inputs.append(RunnerInput(path, "cuda", infos))
    with contextlib.closing(AdaptiveRunner()) as runner:
        errors = [future.result().error_msg for future in runner.run(inputs)]
    assert errors[0] is None
    # The fault ends the worker: CUDA would fail each later kernel in the same process.
    assert errors[1] is not None
    assert errors[2] is None
