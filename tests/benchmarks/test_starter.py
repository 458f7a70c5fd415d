from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.starter import __main__ as making
from benchmarks.starter.pack import SAMPLES_PER_TASK, pack_starter
from benchmarks.starter.without import pass_off, write_without
from benchmarks.starter.workloads import WORKLOADS, Workload
from tests.tuning.test_prior_trials import trials
from tvm_adaptive._tvm import IRModule, Target, anchor_of, te_workload, workload_key
from tvm_adaptive.database.location import STARTER_FOLDER
from tvm_adaptive.database.metaschedule import task_of
from tvm_adaptive.database.starter_file import read_starter, write_starter
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.models import BUILTIN, TIRWorkload, load_workload
from tvm_adaptive.models.network import Network, network_of_relax
from tvm_adaptive.models.prepare import extract, prepare
from tvm_adaptive.workers.environment import Environment

TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})


def tasks_of(network: Network) -> dict[str, IRModule]:
    """Return the tasks of a network by their keys."""
    prepared = prepare(network, TARGET, prepack=None)
    mods = [task.dispatched[0] for task in extract(prepared, TARGET)]
    return {workload_key(mod): mod for mod in mods}


def network_of(workload: Workload) -> Network:
    return network_of_relax(workload.name, workload.module(), {})


def first(prefix: str) -> Workload:
    return next(each for each in WORKLOADS if each.name.startswith(prefix))


def test_names_are_different_and_fit_into_paths() -> None:
    names = [each.name for each in WORKLOADS]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in names)


@pytest.mark.parametrize(
    ("prefix", "family"),
    [
        ("conv-1x1", "conv2d_nhwc"),
        ("depthwise", "group_conv2d_nhwc"),
        ("dense", "matmul"),
        ("transposed", "conv2d_transpose_nhwc"),
        ("global-pool", "adaptive_pool_sum"),
        ("resize", ""),
    ],
)
def test_a_workload_is_one_task_of_its_family(prefix: str, family: str) -> None:
    anchors = [anchor_of(mod) for mod in tasks_of(network_of(first(prefix))).values()]
    assert anchors.count(family) >= 1
    assert len(anchors) == 1


@pytest.mark.parametrize(
    "name",
    ["conv-3x3-16-16-80", "conv-3x3-3-32-96", "conv-3x3-96-192-20-s2", "grouped-3x3", "dense"],
)
def test_convolutions_that_have_forms_are_known(name: str) -> None:
    workload = first(name)
    prepared = prepare(network_of(workload), TARGET, prepack=None, forms=True)
    assert workload.has_forms == (prepared.alternatives is not None)


def test_every_prefix_has_the_kinds_that_matter() -> None:
    kinds = {each.name.partition("-")[0] for each in WORKLOADS[:4]}
    assert kinds == {"conv", "depthwise", "dense"}


@pytest.mark.slow
def test_no_workload_is_a_task_of_a_built_in_network() -> None:
    ours = {key: each.name for each in WORKLOADS for key in tasks_of(network_of(each))}
    for name, build in BUILTIN.items():
        assert {ours[key] for key in tasks_of(build()) if key in ours} == set(), name


def test_what_a_store_knows_is_packed(tmp_path: Path) -> None:
    mod, path = te_workload("GMM"), tmp_path / "avx2-2.json.xz"
    target = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
    task = task_of(mod, TARGET, "then")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dense-1.done.json").write_text("{}")
    with RecordStore(tmp_path / "records.db", Environment.current(TARGET)) as store:
        store.add(task, trials(mod, TARGET, [3e-3, None, 1e-3, *[5e-3] * SAMPLES_PER_TASK]))
    line = pack_starter(tmp_path, tmp_path / "records.db", target, path, "make")
    assert "1 tasks, 4 records" in line
    header, (packed,) = read_starter(path)
    assert (header.instruction_set, header.n_threads, header.mcpu) == ("avx2", 2, "x86-64-v3")
    assert header.workloads == ("dense-1",)
    assert (packed.family, packed.workload_key) == (task.family, task.workload_key)
    assert [seconds for _, seconds in packed.records][:2] == [1e-3, 3e-3]
    # Failures are not packed.
    assert 0 < len(packed.seconds) <= SAMPLES_PER_TASK
    assert packed.seconds.min() == 1e-3


class Commands:
    """Records the names of workloads instead of tuning them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.names.append(command[-1])
        if len(self.names) == 2:
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, 1 if len(self.names) == 3 else 0)


def test_a_making_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands()
    monkeypatch.setattr(making.subprocess, "run", commands)
    monkeypatch.setattr(making, "WORKLOADS", WORKLOADS[:4])
    done = making.done_file(tmp_path, WORKLOADS[0].name)
    done.write_text("{}")
    assert making.main([str(tmp_path), "--threads", "2"]) == 0
    assert commands.names == [each.name for each in WORKLOADS[1:4]]
    problems = [
        json.loads(making.done_file(tmp_path, each.name).read_text())["problem"]
        for each in WORKLOADS[1:4]
    ]
    assert problems == ["", "timeout", "exit code 1"]
    assert making.main([str(tmp_path)]) == 0
    assert len(commands.names) == 3


def test_after_the_budget_no_workload_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands()
    monkeypatch.setattr(making.subprocess, "run", commands)
    times = iter([0.0, 1.0, 2.0, 3.0, 11.0])
    monkeypatch.setattr(making.time, "monotonic", lambda: next(times))
    assert making.main([str(tmp_path), "--budget", "10s"]) == 3
    assert commands.names == [WORKLOADS[0].name]


def test_a_workloads_own_records_can_be_left_out(tmp_path: Path) -> None:
    name = "avx2-2.json.xz"
    families = {"conv2d_nhwc", "conv2d_transpose_nhwc"}
    header, tasks = read_starter(STARTER_FOLDER / name, families.__contains__)
    own = load_workload("te:C2D")
    assert isinstance(own, TIRWorkload)
    same = dataclasses.replace(tasks[0], workload_key=workload_key(own.mod))
    write_starter(tmp_path / name, header, [same, tasks[0], tasks[-1]])

    found_header, found = read_starter(write_without(tmp_path, tmp_path / "others", own) / name)
    assert found_header == header
    assert {tasks[0].family, tasks[-1].family} == families
    left = [tasks[0].workload_key, tasks[-1].workload_key]
    assert [task.workload_key for task in found] == left


def test_a_networks_records_are_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resnet18 is a network"):
        write_without(STARTER_FOLDER, tmp_path, load_workload("resnet18"))


def test_files_of_another_processor_pass_for_ones_own(tmp_path: Path) -> None:
    for name in ("avx2-2.json.xz", "avx512-2.json.xz", "avx512-4.json.xz"):
        (tmp_path / name).write_text(name)
    pass_off(tmp_path, "avx2")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"avx2-2.json.xz": "avx512-2.json.xz", "avx2-4.json.xz": "avx512-4.json.xz"}
