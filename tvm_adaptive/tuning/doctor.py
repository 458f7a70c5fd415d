"""Checks whether this machine is fit for tuning, with a fix for each problem."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tvm_adaptive._tvm import FFI_VERSION, TVM_VERSION, device, get_cc, load_module, tensor
from tvm_adaptive._tvm.products import matrix_product, parallel_product
from tvm_adaptive.builder.compile import link_shared
from tvm_adaptive.database.location import USER_STORE, user_store
from tvm_adaptive.database.store import open_store
from tvm_adaptive.errors import AdaptiveError, WorkerError, summary_line
from tvm_adaptive.models import compile_tir
from tvm_adaptive.runner.measure import give_threads_cores
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.workers.containers import available_memory, cpu_limit, memory_limit
from tvm_adaptive.workers.cores import (
    describe_quota,
    stops_kernels,
    thread_env,
    usable_physical_cores,
)
from tvm_adaptive.workers.environment import compiler_problem
from tvm_adaptive.workers.file_system import forbids_programs
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

CheckState = Literal["ok", "warning", "problem"]

# Compiling and running one small kernel takes three seconds; longer than this, it hangs.
_KERNEL_TIMEOUT_SEC = 120.0
_COMMAND_TIMEOUT_SEC = 20.0
_NOISE_SEC = 5.0
# A ten-minute run of ResNet-18 writes some 150 MB, most of it temporary.
_LEAST_DISK_GB = 1.0
# The tuner of a network takes 1.2 GB, and its workers some 200 MB each.
_LEAST_MEMORY_GB = 3.0
# LLVM's names for a processor that it does not know.
_NAMELESS_CPUS = ("", "generic", "x86-64", "i686")
# If eight of ten timings of one kernel differ by more than this, smaller differences between
# candidates are noise, too.
NOISY_SPREAD = 0.1
# Long against the timer and the scheduler's tick, short against disturbances of seconds.
_SAMPLE_MS = 20
_SIZE = 128


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    verdict: CheckState  # "problem": nothing can be tuned, or results cannot be trusted
    text: str
    fix: str = ""  # empty if the verdict is "ok"


def examine(work_dir: Path, *, with_noise: bool = True) -> list[CheckResult]:
    """Check everything that tuning needs."""
    checks: list[tuple[str, Callable[[], CheckResult]]] = [
        ("versions", check_versions),
        ("compiler", check_compiler),
        ("processor", check_processor),
        ("cores", check_cores),
        ("memory", check_memory),
        ("kernel", lambda: check_kernel(_existing(work_dir))),
        ("GPU", check_gpu),
        ("work directory", lambda: check_work_dir(work_dir)),
        ("record store", check_store),
    ]
    if with_noise:
        checks.append(("noise", lambda: check_noise(_existing(work_dir))))
    return [_run(name, check) for name, check in checks]


def check_versions() -> CheckResult:
    """Return the versions of TVM; the import refuses a pair that crashes."""
    return CheckResult("versions", "ok", f"apache-tvm {TVM_VERSION}, apache-tvm-ffi {FFI_VERSION}")


def check_compiler() -> CheckResult:
    """Check for the programs that link kernels and compiled networks."""
    if text := compiler_problem():
        fix = "Install one: apt install gcc, or conda install gxx_linux-64. CXX may name another."
        return CheckResult("compiler", "problem", text, fix)
    compiler = get_cc()
    if shutil.which("ld") is None:
        text = f"{compiler}, but no ld on PATH: linking takes 26 ms a candidate instead of 3"
        return CheckResult("compiler", "warning", text, "Install binutils.")
    return CheckResult("compiler", "ok", f"{compiler}, {shutil.which('ld')}")


def check_processor() -> CheckResult:
    """Check that LLVM knows the processor."""
    name = str(resolve_target("cpu").attrs.get("mcpu", ""))
    if name in _NAMELESS_CPUS:
        fix = 'Name it yourself: --target \'{"kind": "llvm", "mcpu": "...", "num-cores": N}\'.'
        return CheckResult("processor", "warning", "LLVM does not know this processor", fix)
    return CheckResult("processor", "ok", f"mcpu {name}")


def check_cores() -> CheckResult:
    """Check that TVM's runtime will use the physical cores, and no quota stops them."""
    n_cores = usable_physical_cores()
    variable = "TVM_NUM_THREADS"
    wanted, given = str(n_cores), os.environ.get(variable)
    text = f"{n_cores} physical cores of {os.cpu_count()} processors"
    if given is not None and given != wanted:
        fix = f"Unset {variable} for tuning, or set it to {wanted}."
        return CheckResult("cores", "warning", f"{text}, but {variable} is {given}", fix)
    quota = cpu_limit()
    if quota is not None and stops_kernels(quota, n_cores):
        text = f"{text}, as this container has {describe_quota(quota)}"
        fix = (
            "The quota stops kernels in the middle of a timing: give the container cores of "
            "its own (docker run --cpuset-cpus) instead of a quota (--cpus)."
        )
        return CheckResult("cores", "warning", text, fix)
    return CheckResult("cores", "ok", text)


def check_memory() -> CheckResult:
    """Check that enough memory is free."""
    free = available_memory()
    if free is None:
        return CheckResult("memory", "ok", "not visible here")
    free_gb = free / 2**30
    limit = memory_limit()
    where = "" if limit is None else f" of this container's {limit / 2**30:.1f}"
    text = f"{free_gb:.1f} GB free{where}"
    if free_gb < _LEAST_MEMORY_GB:
        fix = (
            "Close something, give the container more, or give --target fewer num-cores: each "
            "is a worker of 200 MB."
        )
        return CheckResult("memory", "warning", text, fix)
    return CheckResult("memory", "ok", text)


def check_kernel(place: Path) -> CheckResult:
    """Compile a kernel, load it from a folder and run it, in a separate process."""
    samples = _time_in_worker(0.0, place)
    return CheckResult("kernel", "ok", f"compiles, links and runs ({samples[0]:.2f} ms)")


def check_gpu() -> CheckResult:
    """Check that --target cuda can be used, if there is a GPU."""
    listed = _output_of(["nvidia-smi", "-L"])
    gpus = [line for line in listed.splitlines() if line.startswith("GPU")]
    if not gpus:
        return CheckResult("GPU", "ok", "none; targets are CPUs here")
    try:
        resolve_target("cuda")
    except AdaptiveError as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES is {hidden!r}"
        text = f"{len(gpus)}, but none for this TVM{where}: {error}"
        return CheckResult("GPU", "warning", text, "Only --target cuda needs it.")
    try:
        _in_worker(run_gpu_kernel, (), 0.0)
    except WorkerError as error:
        fix = (
            "Install the CUDA toolkit, 13 for this TVM, name its folder in CUDA_PATH, and `pip "
            "install tvm-adaptive[cuda]`, with which TVM compiles; or TVM_CUDA_COMPILE_MODE=nvcc. "
            "Only --target cuda needs it."
        )
        text = f"{len(gpus)}, but a kernel could not be compiled and run: {summary_line(error)}"
        return CheckResult("GPU", "warning", text, fix)
    name = gpus[0].split("(UUID")[0].strip()
    return CheckResult("GPU", "ok", f"{name}; a kernel compiles and runs")


def check_work_dir(work_dir: Path) -> CheckResult:
    """Check that runs can be written, and that the disk has room for them."""
    place = _existing(work_dir)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
        free_gb = shutil.disk_usage(place).free / 2**30
    except OSError as error:
        fix = "Choose another with --work-dir, or change its owner."
        return CheckResult("work directory", "problem", f"{place}: {error.strerror}", fix)
    if forbids_programs(place):
        fix = "Choose another with --work-dir: a run loads the libraries that it writes."
        return CheckResult("work directory", "problem", f"{place} is mounted noexec", fix)
    text = f"{place}, {free_gb:.0f} GB free"
    if free_gb < _LEAST_DISK_GB:
        fix = "Make room, or choose another disk with --work-dir."
        return CheckResult("work directory", "problem", text, fix)
    return CheckResult("work directory", "ok", text)


def check_store() -> CheckResult:
    """Check that the user's own record store opens."""
    with open_store(USER_STORE) as store:
        if store is None:
            fix = "Name another with --store, or none; without it, runs have no warm start."
            return CheckResult("record store", "warning", "your own does not open", fix)
        n_tasks = len(store.tasks())
    return CheckResult("record store", "ok", f"{user_store()}, {n_tasks} tasks")


def check_noise(place: Path) -> CheckResult:
    """Time one kernel repeatedly: smaller differences cannot be measured here."""
    return noise_result(_time_in_worker(_NOISE_SEC, place))


def noise_result(samples_ms: Sequence[float]) -> CheckResult:
    """Return the result for timings of one kernel."""
    low, high = np.quantile(samples_ms, [0.1, 0.9])
    spread = float(high / low - 1.0)
    text = f"eight of ten timings of one kernel within {spread:.1%}"
    if spread <= NOISY_SPREAD:
        return CheckResult("noise", "ok", text)
    fix = (
        "Stop other programs, or use an unshared machine; here, only the play-off "
        "can distinguish candidates that differ by less."
    )
    return CheckResult("noise", "warning", text, fix)


def time_fixed_kernel(seconds: float, place: Path | None = None) -> list[float]:
    """Return milliseconds of one matrix product, a sample per 20 ms; for a separate process.

    The kernel is loaded from a folder, ``place`` or that of temporary files.
    """
    # All cores take part, as in tuned kernels: their disturbances count.
    # Linked and loaded as candidates are, from below the work directory: the folder of temporary
    # files may not allow that.
    with ScratchFolder("doctor", place) as folder:
        path = str(folder / "kernel.so")
        built = compile_tir(parallel_product(_SIZE), resolve_target("cpu"))
        built.export_library(path, fcompile=link_shared)
        module = load_module(path)
    cpu = device("cpu", 0)
    rng = np.random.default_rng(0)
    args = [tensor(rng.random((_SIZE, _SIZE), np.float32), cpu) for _ in range(3)]
    give_threads_cores()
    evaluator = module.time_evaluator(
        module.entry_name, cpu, number=1, repeat=1, min_repeat_ms=_SAMPLE_MS
    )
    evaluator(*args)
    samples: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not samples:
        samples.append(float(evaluator(*args).mean) * 1e3)
    return samples


def run_gpu_kernel() -> None:
    """Compile a matrix product for the first GPU and run it; for a separate process."""
    module = compile_tir(matrix_product(_SIZE), resolve_target("cuda"))
    gpu = device("cuda", 0)
    values = np.ones((_SIZE, _SIZE), np.float32)
    args = [tensor(values, gpu) for _ in range(3)]
    module[module.entry_name](*args)
    gpu.sync()
    np.testing.assert_array_equal(args[-1].numpy(), _SIZE * values)


def is_fit(results: Sequence[CheckResult]) -> bool:
    """Return True if no result is a problem."""
    return all(each.verdict != "problem" for each in results)


def _run(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except Exception as error:
        logger.info("the check of %s failed", name, exc_info=True)
        fix = "Tuning would fail in the same way; --verbose shows the whole message."
        lines = str(error).strip().splitlines() or [repr(error)]
        return CheckResult(name, "problem", lines[-1], fix)


def _existing(work_dir: Path) -> Path:
    """Return the directory, or the nearest above it that exists."""
    return next(each for each in (work_dir, *work_dir.absolute().parents) if each.exists())


def _time_in_worker(seconds: float, place: Path) -> list[float]:
    samples: list[float] = _in_worker(time_fixed_kernel, (seconds, place), seconds)
    return samples


def _in_worker(function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> Any:
    """Call a function that takes so many seconds and a compilation in a separate process."""
    with contextlib.closing(WorkerPool(1, env=thread_env())) as pool:
        (outcome,) = pool.map(function, [args], seconds + _KERNEL_TIMEOUT_SEC)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_SEC, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
