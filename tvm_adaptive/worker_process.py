"""One child process and the pipes to it; :mod:`tvm_adaptive.workers` decides what it does.

A task goes down one pipe and its answer comes back through another, each as a length
and a pickle.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from tvm_adaptive.errors import WorkerDiedError
from tvm_adaptive.fork_server import ForkedProcess, ForkServer, start_program

HEADER = struct.Struct("<Q")
# A killed process is gone within milliseconds unless the kernel holds it (a hung device
# driver); then we leave it behind rather than wait with it.
KILL_WAIT_SEC = 5.0
_READ_BYTES = 1 << 20


class Worker:
    """One child process that runs one function at a time.

    Parameters
    ----------
    setup : callable or None
        Called once in the child before its first task, e.g. to import TVM; its time
        does not count against a task's deadline.
    env : dict of str to str, or None
        Variables added to the child's environment.
    server : ForkServer or None
        Forks the child; None starts a new program.

    Raises
    ------
    OSError
        When the process cannot be started.
    """

    def __init__(
        self,
        setup: Callable[[], Any] | None = None,
        env: dict[str, str] | None = None,
        server: ForkServer | None = None,
    ) -> None:
        with contextlib.ExitStack() as on_failure:
            child_reads, self._to_child = _pipe(on_failure)
            self._from_child, child_writes = _pipe(on_failure)
            os.set_blocking(self._to_child, False)
            descriptors = (child_reads, child_writes)
            self._process: subprocess.Popen[bytes] | ForkedProcess = (
                start_program("worker", descriptors, env)
                if server is None
                else server.fork(descriptors, env)
            )
            on_failure.pop_all()
        os.close(child_reads)
        os.close(child_writes)
        self._received = bytearray()
        self._unsent = b""
        self.n_tasks = 0
        self.started_sec = 0.0
        self._alive = True
        if setup is not None:
            self.send(setup, ())

    @property
    def pid(self) -> int:
        """Process id of the child, which is also the id of its process group."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the child answers."""
        return self._from_child

    def send(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Give the child a task; it must be idle.

        Returns at once: what the pipe does not take is left for :meth:`flush`.
        """
        payload = cloudpickle.dumps((function, tuple(args)))
        self.started_sec = time.monotonic()
        self.n_tasks += 1
        self._unsent = HEADER.pack(len(payload)) + payload
        self.flush()

    def unsent_fileno(self) -> int | None:
        """Return the descriptor to wait on before :meth:`flush`; None if all is sent."""
        return self._to_child if self._unsent else None

    def flush(self) -> None:
        """Send what the pipe takes now, without blocking."""
        view = memoryview(self._unsent)
        try:
            while view:
                view = view[os.write(self._to_child, view) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            # A dead child shows in receive(); what counts is that the task gets an answer.
            view = view[:0]
        self._unsent = bytes(view)

    def receive(self) -> tuple[bool, Any] | None:
        """Read what has arrived, without blocking.

        Returns
        -------
        (succeeded, value) or None
            None while the answer is incomplete; ``value`` is the remote traceback when
            the function raised.

        Raises
        ------
        WorkerDiedError
            When the child has ended.
        """
        if not _readable(self):
            code = self._process.poll()
            # It may have answered between our two looks.
            if code is None or _readable(self):
                return None
            raise WorkerDiedError(f"the worker process ended: {_describe_exit(code)}")
        chunk = os.read(self._from_child, _READ_BYTES)
        if not chunk:
            raise WorkerDiedError(f"the worker process ended: {self._await_exit()}")
        self._received += chunk
        if len(self._received) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._received)
        if len(self._received) < HEADER.size + size:
            return None
        answer = cloudpickle.loads(bytes(self._received[HEADER.size : HEADER.size + size]))
        del self._received[: HEADER.size + size]
        succeeded, value = answer
        return bool(succeeded), value

    def kill(self) -> None:
        """Kill the child and its process group, and forget it; safe to call twice."""
        if not self._alive:
            return
        self._alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_SEC)
        os.close(self._to_child)
        os.close(self._from_child)

    def _await_exit(self) -> str:
        try:
            return _describe_exit(self._process.wait(KILL_WAIT_SEC))
        except subprocess.TimeoutExpired:
            return "it closed its pipe and goes on"


def _pipe(on_failure: contextlib.ExitStack) -> tuple[int, int]:
    reads, writes = os.pipe()
    on_failure.callback(os.close, reads)
    on_failure.callback(os.close, writes)
    return reads, writes


def _readable(worker: Worker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(worker, selectors.EVENT_READ)
        return bool(selector.select(0))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
