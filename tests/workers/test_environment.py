"""Where times are taken: what tells two places apart, and what does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tvm_adaptive._tvm import RPCConfig, Target
from tvm_adaptive.workers import environment
from tvm_adaptive.workers.environment import UNKNOWN, Environment, processor_name

HERE = Environment("this processor, 2 cores", "0.27.0", "0.1.14", "0.1.0")


def test_another_device_or_tvm_is_another_place_and_another_package_is_not() -> None:
    assert dataclasses.replace(HERE, tvm_adaptive="0.2.0") == HERE
    for name in ("device", "tvm", "tvm_ffi"):
        assert dataclasses.replace(HERE, **{name: "another"}) != HERE


def test_an_environment_without_a_device_is_unknown() -> None:
    assert not UNKNOWN.is_known
    assert not dataclasses.replace(HERE, device="").is_known
    assert "unknown" in str(UNKNOWN)


def test_fields_go_out_and_come_in() -> None:
    fields = HERE.as_fields()
    assert Environment.from_fields({**fields, "event": "run", "seed": 7}) == HERE
    assert Environment.from_fields({}) == UNKNOWN
    assert Environment.from_fields({"device": 7, "tvm": None}) == UNKNOWN


def test_the_cpu_is_identified_by_its_model_and_the_cores_in_use() -> None:
    two, four = (
        Environment.current(Target({"kind": "llvm", "num-cores": cores})) for cores in (2, 4)
    )
    assert two.is_known
    assert two.device.endswith(", 2 cores")
    assert two != four


def test_a_farm_is_identified_by_its_key() -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    farm = RPCConfig("host", 9190, "phones", 10)
    assert Environment.current(target, farm).device == "tracker key phones"


def test_a_gpu_that_is_not_there_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_name", lambda kind, index: "")
    gpu = Target({"kind": "cuda", "arch": "sm_90"})
    assert not Environment.current(gpu).is_known
    monkeypatch.setattr(environment, "gpu_name", lambda kind, index: f"{kind} device {index}")
    assert Environment.current(gpu).device == "cuda device 0"
    assert Environment.current(gpu, device_index=1).device == "cuda device 1"


def test_the_processors_name_is_reported_with_its_generation(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
        "stepping\t: 1\n\nprocessor\t: 1\nmodel name\t: another\n"
    )
    assert processor_name(path) == "AMD EPYC (25 17 1)"
    path.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert processor_name(path).endswith(" (0x41 0xd0c)")
    assert processor_name(tmp_path / "missing")
