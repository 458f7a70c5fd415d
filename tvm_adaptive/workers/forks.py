"""Share jobs between a worker and copies of its process, which begin with its memory."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Callable

from tvm_adaptive.errors import check_at_least
from tvm_adaptive.workers.main import die_with

_NUMBER = struct.Struct("=H")
# A pipe takes at least this many bytes without a reader, and such a piece is never divided.
_PIPE_BYTES = 4096
MAX_JOBS = _PIPE_BYTES // _NUMBER.size


def run_in_forks(job: Callable[[int], object], n_jobs: int, n_processes: int) -> None:
    """Run ``job(0)`` to ``job(n_jobs - 1)``, each in this process or in a fork of it."""
    # Results are files: a fork's memory is lost. Jobs need no threads, which forks lack. What a
    # fork leaves undone this process does again; what a job raises here ends the forks.
    check_at_least("n_processes", n_processes, 1)
    if n_jobs > MAX_JOBS:
        raise ValueError(f"n_jobs must be at most {MAX_JOBS} but got {n_jobs}.")
    with contextlib.ExitStack() as stack:
        (next_jobs, to_jobs), (ended_jobs, to_ended) = pipe(stack), pipe(stack)
        os.write(to_jobs, b"".join(_NUMBER.pack(number) for number in range(n_jobs)))
        os.set_blocking(next_jobs, False)
        os.set_blocking(ended_jobs, False)

        def take_jobs() -> None:
            while (number := _read(next_jobs)) is not None:
                job(number)
                os.write(to_ended, _NUMBER.pack(number))

        forks: set[int] = set()
        stack.callback(_kill, forks)
        while len(forks) < min(n_processes, n_jobs) - 1:
            try:
                forks.add(_fork(take_jobs))
            except OSError:  # too many processes, too little memory
                break
        take_jobs()
        while forks:
            _wait(forks.pop())
        left = set(range(n_jobs))
        while (number := _read(ended_jobs)) is not None:
            left.remove(number)
        for number in sorted(left):
            job(number)


def open_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed.

    Otherwise the next pipe or socket gets such a number, and what native code writes to standard
    error goes there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a pipe to read and to write, which the stack closes."""
    open_standard_streams()
    reads, writes = os.pipe()
    stack.callback(os.close, reads)
    stack.callback(os.close, writes)
    return reads, writes


def _read(descriptor: int) -> int | None:
    """Take a number from a pipe; None if there is none."""
    try:
        (number,) = _NUMBER.unpack(os.read(descriptor, _NUMBER.size))
    except BlockingIOError:
        return None
    return int(number)


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):  # this process runs the job again, and raises
        if die_with(parent):
            work()
    os._exit(0)  # without what this process does at its own end


def _kill(forks: set[int]) -> None:
    for pid in forks:
        os.kill(pid, signal.SIGKILL)  # unreaped: the process id is still its own
    while forks:
        _wait(forks.pop())


def _wait(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # this process ignores its children's ends
        os.waitpid(pid, 0)
