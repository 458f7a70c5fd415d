from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tvm_adaptive._tvm.intrinsics import backends_for, only_intrinsics


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session", autouse=True)
def _intrinsics_of_this_machine() -> Iterator[None]:
    """Import no other machine's tensor intrinsics: those of GPUs take 40 s where torch is."""
    with only_intrinsics(backends_for("llvm")):
        yield


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def _own_home(
    _homes: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give every test a home of its own: runs remember what earlier ones measured."""
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("HOME", str(_homes / name))


@pytest.fixture(autouse=True)
def _leave_the_cores_alone() -> Iterator[None]:
    """Fail a test that binds this process, whose later tests would measure on one core."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before


@pytest.fixture(autouse=True)
def _forget_metaschedules_loggers() -> Iterator[None]:
    """Undo MetaSchedule's logging set-up, which cannot be done twice under pytest.

    It stops its loggers from propagating; pytest then hangs handlers of its own on them,
    and MetaSchedule's next set-up fails on a handler without a name.
    """
    yield
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("tvm.s_tir.meta_schedule"):
            logger = logging.getLogger(name)
            logger.propagate = True
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
                handler.close()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount small file systems; skip where that is not allowed."""
    mounted = []

    def make(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if (
            shutil.which("mount") is None
            or subprocess.run(mount, capture_output=True, check=False).returncode
        ):
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (missing := missing_for_gpu()):
        pytest.skip(f"needs an NVIDIA GPU and nvcc; missing: {missing}")


def missing_for_gpu() -> str:
    if shutil.which("nvcc") is None:
        return "nvcc on PATH"
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi on PATH"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "" if listed.stdout.startswith("GPU") else "a GPU in nvidia-smi -L"
