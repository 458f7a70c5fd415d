from __future__ import annotations

import json
import math
import os
from contextlib import nullcontext
from typing import NamedTuple

import pytest

from tvm_adaptive._tvm import Target, device
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.tuning import target as targets
from tvm_adaptive.tuning.config import MeasureConfig
from tvm_adaptive.tuning.target import (
    check_architecture,
    check_runs_here,
    describe_target,
    resolve_target,
    rpc_config_of,
)
from tvm_adaptive.values.cpu_features import CPU_FEATURES
from tvm_adaptive.workers.cores import usable_physical_cores


@pytest.mark.parametrize("spec", [None, "cpu", "auto", " cpu "])
def test_this_machine_has_a_processor_and_its_cores(spec):
    target = resolve_target(spec)
    assert target.kind.name == "llvm"
    assert target.attrs["num-cores"] == usable_physical_cores()
    assert target.attrs["mcpu"]


def test_cores_are_those_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert 1 <= usable_physical_cores() <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


CONFIG = {"kind": "llvm", "mcpu": "skylake", "num-cores": 4}


@pytest.mark.parametrize("spec", [CONFIG, json.dumps(CONFIG), Target(CONFIG)])
def test_spellings_of_one_target_agree(spec):
    assert str(resolve_target(spec)) == str(Target(CONFIG))


@pytest.mark.parametrize(
    "spec", [{"kind": "llvm", "num-cores": 3}, '{"kind":"llvm","num-cores":3}']
)
def test_a_target_that_names_no_processor_means_this_one(spec):
    given = dict(spec) if isinstance(spec, dict) else spec
    target = resolve_target(spec)
    assert target.attrs["mcpu"] == resolve_target("cpu").attrs["mcpu"]
    assert target.attrs["num-cores"] == 3
    assert spec == given


def test_a_farms_devices_are_not_this_machine():
    spec = {"kind": "llvm", "num-cores": 3}
    assert str(resolve_target(spec, is_here=False)) == str(Target(spec))
    with pytest.raises(InvalidOptionError, match=r"another processor.*--target, e\.g\. .*cpu if"):
        resolve_target(None, is_here=False)
    assert resolve_target("cpu", is_here=False).attrs["mcpu"]


@pytest.mark.parametrize(
    ("tracker", "host"), [("farm:9190", "farm"), ("[fd00::5]:9190", "fd00::5"), (None, None)]
)
def test_a_tracker_has_a_host_and_a_port(tracker, host):
    config = rpc_config_of(MeasureConfig(tracker=tracker))
    assert (config.tracker_host, config.tracker_port) == (host, 9190 if tracker else None)


@pytest.mark.parametrize("key", ["mattr", "mtriple"])
def test_a_target_that_names_other_processors_keeps_them(key):
    value = ["+avx2"] if key == "mattr" else "aarch64-linux-gnu"
    spec = {"kind": "llvm", "num-cores": 3, key: value}
    assert str(resolve_target(spec)) == str(Target(spec))
    assert str(resolve_target(Target(spec))) == str(Target(spec))


def test_a_tag_is_a_target():
    assert resolve_target("nvidia/geforce-rtx-3090").attrs["arch"] == "sm_86"


@pytest.mark.parametrize(
    "spec", ["llvm", {"kind": "llvm", "mcpu": "skylake"}, Target({"kind": "llvm"})]
)
def test_cpu_without_cores_is_refused_on_one_line(spec):
    with pytest.raises(InvalidOptionError, match=r'needs num-cores.*"num-cores": 8') as caught:
        resolve_target(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"kind": "bogus"}, r"one of .*cuda.*llvm.* but got 'bogus'"),
        ("bogus", r"one of .*llvm.* but got 'bogus'"),
        ({}, "but got None"),
        ("llvm -num-cores 2", r"but got 'llvm -num-cores 2'.*\"num-cores\": 8"),
        ("no/such-tag", "not one that TVM knows"),
        ({"kind": "llvm", "num-cores": 2, "mcpu": "native"}, "no processor 'native' of x86_64"),
        ({"kind": "llvm", "num-cores": 2, "mcpu": "znver_4"}, "it knows .*znver4"),
        (
            {
                "kind": "llvm",
                "num-cores": 2,
                "mcpu": "cortex_a72",
                "mtriple": "aarch64-linux-gnu",
            },
            "of aarch64.*it knows .*cortex-a72",
        ),
        ({"kind": "llvm", "num-cores": 0}, "num-cores must be at least 1"),
        ({"kind": "llvm", "num-cores": -1}, "num-cores must be at least 1"),
        ({"kind": "llvm", "num-cores": 2, "color": "red"}, "not one that TVM knows.*color"),
        ('{"kind": "llvm"', "looks like JSON but cannot be read"),
        (7, "must be a string, a mapping or a Target but got int"),
    ],
)
def test_what_cannot_be_used_says_how_to_write_it(spec, text):
    with pytest.raises(InvalidOptionError, match=text):
        resolve_target(spec)


@pytest.mark.parametrize(
    ("changes", "flags", "text"),
    [
        ({"mcpu": "znver4"}, {"avx", "avx2", "fma"}, r"uses avx512bw, avx512dq.* lacks or hides"),
        ({"mcpu": "znver3"}, {"avx", "avx2"}, r"uses fma, which"),
        # Others are hidden on many machines where code runs that may use them.
        ({"mcpu": "znver3"}, {"avx", "avx2", "fma"}, None),
        ({"mtriple": "aarch64-linux-gnu"}, set(), r"is for aarch64, but this machine is x86_64"),
        ({"mcpu": "znver4"}, None, None),
    ],
)
def test_what_this_processor_cannot_run_is_refused(monkeypatch, changes, flags, text):
    monkeypatch.setattr(targets.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "processor_flags", lambda: flags)
    triple = {"mtriple": "x86_64-pc-linux-gnu"}
    target = resolve_target({"kind": "llvm", "num-cores": 2, **triple, **changes})
    with nullcontext() if text is None else pytest.raises(InvalidOptionError, match=text):
        check_runs_here(target)
    # It can still compile and link for newer processors of its architecture.
    if "mcpu" in changes:
        check_architecture(target)


def test_this_machine_runs_what_is_made_for_it():
    check_runs_here(resolve_target("cpu"))


def test_what_a_virtual_machine_hides_is_not_used(monkeypatch):
    monkeypatch.setattr(targets.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "llvm_get_system_cpu", lambda: "znver4")
    all_flags = {each.flag for each in CPU_FEATURES["x86_64"].values()}
    monkeypatch.setattr(targets, "processor_flags", lambda: all_flags)
    assert vector_unit_of(resolve_target("cpu")).lanes == 16
    hidden = {flag for flag in all_flags if not flag.startswith("avx512")}
    monkeypatch.setattr(targets, "processor_flags", lambda: hidden)
    found = resolve_target("cpu")
    assert vector_unit_of(found).lanes == 8
    check_runs_here(found)
    with pytest.raises(InvalidOptionError, match="lacks or hides"):
        check_runs_here(resolve_target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2}))


def test_a_farms_session_ends():
    with pytest.raises(InvalidOptionError, match="timeout_sec must be finite"):
        rpc_config_of(MeasureConfig(timeout_sec=math.inf))


def test_cuda_without_a_gpu_says_what_was_looked_for():
    if device("cuda", 0).exist:
        assert resolve_target("cuda").kind.name == "cuda"
        return
    with pytest.raises(InvalidOptionError, match=r"cuda:0.*nvidia-smi.*--tracker.*sm_90"):
        resolve_target("cuda")


def test_cuda_is_the_gpu_that_measures(monkeypatch):
    class Device(NamedTuple):
        kind: str
        index: int

        @property
        def exist(self) -> bool:
            return self.index < 2

    tags = ["nvidia/geforce-rtx-2080-ti", "nvidia/geforce-rtx-3090"]
    monkeypatch.setattr(targets, "device", Device)
    monkeypatch.setattr(Target, "from_device", lambda gpu: Target(tags[gpu.index]))
    assert resolve_target("cuda").attrs["arch"] == "sm_75"
    assert resolve_target("cuda", device_index=1).attrs["arch"] == "sm_86"
    with pytest.raises(InvalidOptionError, match=r"NVIDIA GPU 2 .*cuda:2.*nvidia-smi"):
        resolve_target("cuda", device_index=2)


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (CONFIG, "llvm, mcpu skylake, 4 cores"),
        (Target({"kind": "llvm", "num-cores": 1}), "llvm, 1 core"),
        ("nvidia/geforce-rtx-3090", "cuda, arch sm_86, 48 KiB shared memory"),
    ],
)
def test_description_is_one_line(spec, line):
    assert describe_target(resolve_target(spec)) == line
