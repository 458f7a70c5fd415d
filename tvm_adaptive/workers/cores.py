"""The cores that this process may use, and settings that let TVM's runtime use them all."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from pathlib import Path

import psutil

from tvm_adaptive.errors import check_at_least
from tvm_adaptive.workers.containers import PROC, available_memory, cpu_limit, memory_limit

# Turns in which a thread of TVM's pool waits for the next kernel before it sleeps: 4 ms, longer
# than between the kernels of a network. The default of 300,000 takes 0.1 s, and up to 1 s where
# another process wants the core: then builds, and the next process that is timed, run beside it.
# Libraries of a detector that were timed in turns took 30 instead of 12 ms.
_SPIN_COUNT = 10_000
# Memory of the tuner of a network, and of each of its workers.
_TUNER_BYTES = 1200 << 20
_WORKER_BYTES = 200 << 20


def usable_physical_cores(proc: Path = PROC) -> int:
    """Count the physical cores behind the processors that this process may run on.

    Hardware threads of one core share what bounds a tuned kernel. A kernel with more threads
    than a container's processor time would be stopped in the middle of each period.
    """
    n_cores, quota = len(_allowed_cores()), cpu_limit(proc)
    return n_cores if quota is None else max(1, min(n_cores, math.floor(quota)))


def n_build_workers(n_cores: int, proc: Path = PROC) -> int:
    """Return how many compile workers memory allows, at least 1."""
    available = available_memory(proc)
    if available is None:
        return n_cores
    growth = max(0, _TUNER_BYTES - int(psutil.Process().memory_info().rss))
    return max(1, min(n_cores, (available - growth) // _WORKER_BYTES))


def limits_note(n_cores: int, proc: Path = PROC) -> str:
    """Describe what a container's limits change for a run; "" if nothing."""
    quota, memory = cpu_limit(proc), memory_limit(proc)
    n_workers = n_build_workers(n_cores, proc)
    stops = stops_kernels(quota, n_cores)
    if not stops and (memory is None or n_workers == n_cores):
        return ""
    parts = [] if quota is None else [describe_quota(quota)]
    parts += [] if memory is None else [f"{memory / 2**30:.1f} GiB"]
    text = f"this container has {' and '.join(parts)}: {n_workers} compile worker"
    text += "s" * (n_workers != 1)
    return f"{text}; kernel times under a CPU quota are throttled" if stops else text


def stops_kernels(quota: float | None, n_cores: int) -> bool:
    """Say whether a quota stops kernels of so many threads in the middle of a period."""
    return quota is not None and quota < max(n_cores, len(_allowed_cores()))


def describe_quota(quota: float) -> str:
    """Return a processor quota in words, e.g. ``"0.5 of a core"``."""
    return f"{quota:.3g} of a core" if quota < 1 else f"{quota:.3g} core{'s' * (quota != 1)}"


def thread_env(n_threads: int | None = None) -> dict[str, str]:
    """Return environment variables for a process that runs kernels."""
    # On x86, TVM's runtime takes every processor for half a core, which it is not on most
    # virtual machines: kernels would be timed, and chosen, for half the machine.
    if n_threads is None:
        n_threads = usable_physical_cores()
    check_at_least("n_threads", n_threads, 1)
    env = {"TVM_NUM_THREADS": str(n_threads), "TVM_THREAD_POOL_SPIN_COUNT": str(_SPIN_COUNT)}
    # TVM binds its threads, whichever processors this process may use: two runs on processors of
    # their own (taskset) would both be timed on the same ones.
    allowed = _allowed_cores()
    is_free = allowed == list(range(n_threads)) and _bound_by_tvm(n_threads) == set(allowed)
    return env if is_free else {**env, "TVM_BIND_THREADS": "0"}


def take_free_core() -> None:
    """Bind this thread to the cores, if any, that no other thread of the process is bound to.

    TVM's runtime binds the threads of its pool, once it has started, but not the thread that
    calls the kernel and computes a share of it: on another's core it would double the time.
    """
    free = os.sched_getaffinity(0)
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) == threading.get_native_id():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            bound = os.sched_getaffinity(int(thread.name))
            free -= bound if len(bound) == 1 else set()
    if free:
        os.sched_setaffinity(0, free)


def _bound_by_tvm(n_threads: int) -> set[int]:
    """Return the processors of TVM's threads: the fastest, and of equal ones the first."""
    speeds = {cpu: _max_khz(cpu) for cpu in range(max(os.cpu_count() or 1, n_threads))}
    return set(sorted(speeds, key=lambda cpu: (-speeds[cpu], cpu))[:n_threads])


def _max_khz(cpu: int) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq").read_text())
    except (OSError, ValueError):  # virtual machines have none
        return 0


def _allowed_cores() -> list[int]:
    """Return the first processor of each core of this process's affinity, whatever its quota."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = siblings.read_text().strip()
        except OSError:  # some containers hide the topology: every processor counts
            core = str(cpu)
        first.setdefault(core, cpu)
    return list(first.values())
