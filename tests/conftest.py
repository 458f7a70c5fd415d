from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tvm_adaptive._tvm.intrinsics import backends_for, only_intrinsics
from tvm_adaptive.runner import local
from tvm_adaptive.tuning import session, turns
from tvm_adaptive.tuning.checks import peers
from tvm_adaptive.workers import pool
from tvm_adaptive.workers.early_start import RUN_MODULES
from tvm_adaptive.workers.fork_server import ForkServer

# What the workers of runs, builders, runners and readers import.
MODULES = (*RUN_MODULES, *local._WORKER_MODULES)
# Those that end a run in order.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How often compiled networks are timed: beside frameworks, and with each number of threads.
_ROUNDS = [(peers, "_ROUNDS", peers._ROUNDS), (turns, "_COUNT_ROUNDS", turns._COUNT_ROUNDS)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _subnormal_numbers() -> Iterator[None]:
    """Take subnormal numbers for what they are again, after a session of ONNX Runtime.

    The first one in a process sets for its thread, too, whether they are zero.
    """
    yield
    if sys.float_info.min / 2 == 0.0:
        default_environment = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc
        ctypes.CDLL(None).fesetenv(default_environment)
        assert sys.float_info.min / 2 > 0.0


@pytest.fixture(scope="session", autouse=True)
def _intrinsics_of_this_machine() -> Iterator[None]:
    """Import no other machine's tensor intrinsics: those of GPUs take 40 s where torch is."""
    with only_intrinsics(backends_for("llvm")):
        yield


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Restore what the command line, as a program, has the process's signals do."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _KeptServer(ForkServer):
    """A server that outlives its user: the next one need not import TVM, which takes seconds."""

    def close(self) -> None:
        """Leave the server to the next test; it ends with this process."""


@pytest.fixture(scope="session", autouse=True)
def _commands_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hide PyTorch from commands: TVM imports it where it is, which takes each of them 2 s."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "torch.py").write_text('raise ImportError("hidden by the tests")\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder


@pytest.fixture
def torch_for_commands(_commands_without_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands that a test starts import PyTorch."""
    others = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(others))


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server(_commands_without_torch: Path) -> Iterator[None]:
    """Share a server among runs in this process that would start theirs alike."""
    first = _surroundings()
    kept = {first: _KeptServer(MODULES)}

    def new_server(modules: Sequence[str]) -> ForkServer:
        if not set(modules) <= set(MODULES):
            return ForkServer(modules)
        here = _surroundings()
        if here not in kept:  # tests of a file often have a folder in common
            for other in set(kept) - {first}:
                ForkServer.close(kept.pop(other))
            kept[here] = _KeptServer(MODULES)
        return kept[here]

    with pytest.MonkeyPatch.context() as patch:
        for module in (session, pool):
            patch.setattr(module, "ForkServer", new_server)
        yield
    for server in kept.values():
        ForkServer.close(server)


def _surroundings() -> tuple[object, ...]:
    """Return what workers inherit from this process, but for what none of them uses.

    That is the home, and what scikit-learn and PyTorch set when they are imported.
    """
    own = {"HOME", "PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    own |= {"TORCHINDUCTOR_CACHE_DIR"}
    env = frozenset(item for item in os.environ.items() if item[0] not in own)
    return os.getcwd(), tuple(sys.path), env


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


@pytest.fixture(scope="module")
def brief_timings() -> Iterator[None]:
    """Time compiled networks in one round in a file whose fast tests need no more.

    Fixtures of its module that time a network name this one, so that it comes first.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name, _ in _ROUNDS:
            patch.setattr(module, name, 1)
        yield


@pytest.fixture(autouse=True)
def _all_rounds_of_slow_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time compiled networks in all rounds in slow tests, also of a file with brief timings."""
    if request.node.get_closest_marker("slow"):
        for module, name, n_rounds in _ROUNDS:
            monkeypatch.setattr(module, name, n_rounds)


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


def pytest_configure() -> None:
    """Take Ctrl-C, which runs are to see, also in the background of a script, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
