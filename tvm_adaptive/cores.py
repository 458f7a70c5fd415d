"""Which cores this process may use, and how TVM's runtime is told to use them all."""

from __future__ import annotations

import contextlib
import os
import threading
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


def take_free_core() -> None:
    """Bind this thread to the cores that no other thread of the process is bound to.

    TVM's runtime binds each thread of its pool to a core of its own but leaves the one
    that calls the kernel, and computes a share of it, free to run anywhere. Where the
    system puts it beside one of the others, the same kernel takes twice as long for as
    long as that lasts. Call it after the pool has started. Does nothing where the
    system has no such bindings, or where no core is left.
    """
    threads = Path("/proc/self/task")
    if not (hasattr(os, "sched_setaffinity") and threads.is_dir()):
        return
    free = os.sched_getaffinity(0)
    for thread in threads.iterdir():
        if int(thread.name) == threading.get_native_id():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            bound = os.sched_getaffinity(int(thread.name))
            free -= bound if len(bound) == 1 else set()
    if free:
        os.sched_setaffinity(0, free)


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:  # some containers hide the topology: every processor counts
        return str(cpu)
