"""Limits of containers, read from trees that look like those of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_adaptive.tuning import doctor
from tvm_adaptive.workers import cores
from tvm_adaptive.workers.containers import OomKills, available_memory, cpu_limit, memory_limit
from tvm_adaptive.workers.cores import (
    limits_note,
    n_build_workers,
    thread_env,
    usable_physical_cores,
)

GIB = 1 << 30
NONE_V1 = str(0x7FFFFFFFFFFFF000)


class Machine:
    """A file system as Linux shows it to a process in a group."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.mount = root / "sys fs"  # a space is written as a number in a list of mounts
        (self.proc / "self").mkdir(parents=True)
        self.mount.mkdir()
        self.write(self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount_version_2(self, ours: str, root: str = "/") -> None:
        self._mount([(root, self.mount, "cgroup2", "rw")], [f"0::{ours}"])

    def mount_version_1(self, ours: str, root: str = "/") -> None:
        self._mount(
            [
                (root, self.mount / "cpu", "cgroup", "rw,cpu,cpuacct"),
                (root, self.mount / "memory", "cgroup", "rw,memory"),
            ],
            [f"4:memory:{ours}", f"3:cpu,cpuacct:{ours}", "1:name=systemd:/x"],
        )

    def _mount(self, mounts: list[tuple[str, Path, str, str]], groups: list[str]) -> None:
        lines = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw"]
        for root, point, kind, options in mounts:
            where = str(point).replace(" ", "\\040")
            lines.append(f"31 22 0:28 {root} {where} rw,nosuid shared:9 - {kind} cgroup {options}")
        self.write(self.proc / "self" / "mountinfo", "\n".join(lines) + "\n")
        self.write(self.proc / "self" / "cgroup", "\n".join(groups) + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_allowed_cores", lambda: list(range(8)))


def test_without_groups_there_is_no_limit(machine: Machine, tmp_path: Path) -> None:
    for proc in (machine.proc, tmp_path / "nowhere"):
        assert (cpu_limit(proc), memory_limit(proc)) == (None, None)
        assert usable_physical_cores(proc) == 8
        assert limits_note(8, proc) == ""
    assert available_memory(machine.proc) == 48 * GIB
    assert available_memory(tmp_path / "nowhere") is None
    assert n_build_workers(8, tmp_path / "nowhere") == 8


@pytest.mark.parametrize(
    ("quota", "n_cores"),
    [("max", 8), ("50000", 1), ("100000", 1), ("190000", 1), ("200000", 2), ("6400000", 8)],
)
def test_the_quota_of_version_2(machine: Machine, quota: str, n_cores: int) -> None:
    machine.mount_version_2("/pod/box")
    machine.write(machine.mount / "pod" / "box" / "cpu.max", f"{quota} 100000\n")
    assert cpu_limit(machine.proc) == (None if quota == "max" else int(quota) / 1e5)
    assert usable_physical_cores(machine.proc) == n_cores


@pytest.mark.parametrize(("quota", "n_cores"), [("-1", 8), ("50000", 1), ("350000", 3)])
def test_the_quota_of_version_1(machine: Machine, quota: str, n_cores: int) -> None:
    machine.mount_version_1("/docker/box")
    group = machine.mount / "cpu" / "docker" / "box"
    machine.write(group / "cpu.cfs_quota_us", f"{quota}\n")
    machine.write(group / "cpu.cfs_period_us", "100000\n")
    assert cpu_limit(machine.proc) == (None if quota == "-1" else int(quota) / 1e5)
    assert usable_physical_cores(machine.proc) == n_cores


def test_the_smallest_limit_of_all_groups_above_counts(machine: Machine) -> None:
    machine.mount_version_2("/pod/box/inner")
    machine.write(machine.mount / "pod" / "box" / "inner" / "cpu.max", "max 100000\n")
    machine.write(machine.mount / "pod" / "box" / "cpu.max", "400000 100000\n")
    machine.write(machine.mount / "pod" / "cpu.max", "250000 100000\n")
    machine.write(machine.mount / "pod" / "box" / "inner" / "memory.max", f"{8 * GIB}\n")
    machine.write(machine.mount / "pod" / "box" / "memory.high", f"{2 * GIB}\n")
    machine.write(machine.mount / "pod" / "box" / "memory.max", f"{6 * GIB}\n")
    machine.write(machine.mount / "pod" / "memory.max", "max\n")
    assert cpu_limit(machine.proc) == 2.5
    assert memory_limit(machine.proc) == 2 * GIB


@pytest.mark.parametrize("root", ["/", "/docker/box"])
def test_a_container_sees_its_group_as_the_topmost(machine: Machine, root: str) -> None:
    """With a name space of its own (first), and without (second)."""
    machine.mount_version_1("/" if root == "/" else "/docker/box", root)
    machine.write(machine.mount / "memory" / "memory.limit_in_bytes", f"{GIB}\n")
    assert memory_limit(machine.proc) == GIB


def test_a_group_outside_what_is_mounted(machine: Machine) -> None:
    machine.mount_version_2("/../other")
    machine.write(machine.mount / "memory.max", f"{GIB}\n")
    assert memory_limit(machine.proc) == GIB


def test_what_is_available_leaves_out_cached_files(machine: Machine) -> None:
    machine.mount_version_2("/box")
    group = machine.mount / "box"
    machine.write(group / "memory.max", f"{4 * GIB}\n")
    machine.write(group / "memory.current", f"{3 * GIB}\n")
    machine.write(group / "memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    assert available_memory(machine.proc) == 3 * GIB


def test_version_1_has_other_names(machine: Machine) -> None:
    machine.mount_version_1("/box")
    group = machine.mount / "memory" / "box"
    machine.write(group / "memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write(group / "memory.usage_in_bytes", f"{3 * GIB}\n")
    machine.write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    machine.write(machine.mount / "memory" / "memory.limit_in_bytes", f"{NONE_V1}\n")
    assert memory_limit(machine.proc) == 4 * GIB
    assert available_memory(machine.proc) == 2 * GIB
    machine.write(group / "memory.limit_in_bytes", f"{NONE_V1}\n")
    assert memory_limit(machine.proc) is None
    assert available_memory(machine.proc) == 48 * GIB


@pytest.mark.parametrize("text", ["", "garbage", "1 2 3\n", "-7 0\n", "100000 0\n", "\udcff"])
def test_files_that_say_nothing(machine: Machine, text: str) -> None:
    machine.mount_version_2("/box")
    for name in ("cpu.max", "memory.max", "memory.current", "memory.stat", "memory.events"):
        path = machine.mount / "box" / name
        machine.write(path, "")
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert (cpu_limit(machine.proc), memory_limit(machine.proc)) == (None, None)
    assert available_memory(machine.proc) == 48 * GIB
    assert set(OomKills(machine.proc).count()) == {0}


@pytest.mark.parametrize("version", [1, 2])
def test_kills_are_counted(machine: Machine, version: int) -> None:
    if version == 1:
        machine.mount_version_1("/box")
        path = machine.mount / "memory" / "box" / "memory.oom_control"
    else:
        machine.mount_version_2("/box")
        path = machine.mount / "box" / "memory.events"
    machine.write(path, "oom 7\nunder_oom 0\noom_kill 3\n")
    machine.write(machine.proc / "vmstat", "nr_free_pages 9\noom_kill 4\n")
    kills = OomKills(machine.proc)
    before = kills.count()
    assert (sum(before), kills.count()) == (7, before)
    machine.write(path, "oom 7\nunder_oom 0\noom_kill 4\n")
    assert kills.count() != before


@pytest.mark.parametrize(
    ("available_gib", "n_workers"), [(0.1, 1), (0.9, 1), (1.5, 3), (2.5, 8), (48, 8)]
)
def test_workers_are_as_many_as_there_is_memory_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, available_gib: float, n_workers: int
) -> None:
    class Tuner:
        """One that takes 300 MiB now, and will take 1.2 GB."""

        def memory_info(self) -> Tuner:
            return self

        rss = 300 << 20

    monkeypatch.setattr(cores.psutil, "Process", Tuner)
    machine.write(machine.proc / "meminfo", f"MemAvailable: {int(available_gib * 2**20)} kB\n")
    assert n_build_workers(8, machine.proc) == n_workers


def test_a_run_in_a_small_container_says_what_it_has(machine: Machine) -> None:
    machine.mount_version_2("/box")
    machine.write(machine.mount / "box" / "cpu.max", "50000 100000\n")
    machine.write(machine.mount / "box" / "memory.max", f"{GIB}\n")
    machine.write(machine.mount / "box" / "memory.current", f"{GIB // 2}\n")
    n_cores = usable_physical_cores(machine.proc)
    assert limits_note(n_cores, machine.proc) == (
        "this container has 0.5 of a core and 1.0 GiB: 1 compile worker; "
        "kernel times under a CPU quota are throttled"
    )
    assert thread_env(n_cores)["TVM_NUM_THREADS"] == "1"


def test_limits_that_change_nothing_give_no_note(machine: Machine) -> None:
    machine.mount_version_2("/box")
    machine.write(machine.mount / "box" / "cpu.max", "800000 100000\n")
    machine.write(machine.mount / "box" / "memory.max", f"{32 * GIB}\n")
    assert limits_note(8, machine.proc) == ""
    machine.write(machine.mount / "box" / "memory.max", f"{GIB}\n")
    # Less is free than two workers need, however much of it this process holds already.
    machine.write(machine.mount / "box" / "memory.current", f"{GIB * 7 // 8}\n")
    assert (
        limits_note(8, machine.proc) == "this container has 8 cores and 1.0 GiB: 1 compile worker"
    )


def test_doctor_tells_a_containers_limits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    for module in (doctor, cores):
        monkeypatch.setattr(module, "cpu_limit", lambda *_: 0.5)
    monkeypatch.setattr(doctor, "memory_limit", lambda: GIB)
    monkeypatch.setattr(doctor, "available_memory", lambda: GIB // 2)
    found = doctor.check_cores()
    assert found.verdict == "warning"
    assert "this container has 0.5 of a core" in found.text
    assert "--cpuset-cpus" in found.fix
    found = doctor.check_memory()
    assert (found.verdict, found.text) == ("warning", "0.5 GB free of this container's 1.0")


def test_doctor_leaves_a_quota_of_all_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a container with eight cores of its own on a machine with 64."""
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 64)
    for module in (doctor, cores):
        monkeypatch.setattr(module, "cpu_limit", lambda *_: 8.0)
    assert doctor.check_cores().verdict == "ok"
