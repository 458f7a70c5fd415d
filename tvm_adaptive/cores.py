"""Which cores this process may use, and how TVM's runtime is told to use them all."""

from __future__ import annotations

import os
from pathlib import Path

from tvm_adaptive.errors import InvalidOptionError


def usable_physical_cores() -> int:
    """Count the physical cores behind the processors that this process may run on.

    Two hardware threads of one core count once: tuned kernels are bound by arithmetic
    and by cache, which the threads share.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def thread_env(n_threads: int | None = None) -> dict[str, str]:
    """Return what a process that runs kernels needs in its environment.

    On x86, TVM's runtime takes every processor for half a core and starts half as many
    threads as there are processors. Where each is a whole core, as on most virtual
    machines, kernels would be timed, and chosen, for half the machine.

    Parameters
    ----------
    n_threads : int or None, default None
        None for the physical cores that this process may use.

    Raises
    ------
    InvalidOptionError
        When ``n_threads`` is below 1.
    """
    if n_threads is None:
        n_threads = usable_physical_cores()
    if n_threads < 1:
        raise InvalidOptionError(f"n_threads must be at least 1 but got {n_threads}.")
    return {"TVM_NUM_THREADS": str(n_threads)}


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:  # some containers hide the topology: every processor counts
        return str(cpu)
