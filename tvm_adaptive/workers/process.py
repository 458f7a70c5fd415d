"""A child process and its pipes for tasks and answers; a message is a length and a pickle."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from tvm_adaptive.errors import MachineError, WorkerDiedError, WorkerTaskError
from tvm_adaptive.workers.containers import OomKills
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.forks import pipe
from tvm_adaptive.workers.main import HEADER

# A killed process is gone within milliseconds unless the kernel holds it (a hung device
# driver); then it is left behind.
KILL_WAIT_SEC = 5.0
_WAIT_STEP_SEC = 0.002
_READ_BYTES = 1 << 20


class Worker:
    """One child process that runs one function at a time."""

    def __init__(self, server: ForkServer, env: dict[str, str] | None = None) -> None:
        with contextlib.ExitStack() as on_failure:
            child_reads, self._to_child = pipe(on_failure)
            self._from_child, child_writes = pipe(on_failure)
            os.set_blocking(self._to_child, False)
            self._process = server.fork((child_reads, child_writes), env)
            on_failure.pop_all()
        os.close(child_reads)
        os.close(child_writes)
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._sent_sec = 0.0
        self._oom_kills = OomKills()
        self._oom_kills_before: tuple[int, ...] = ()
        self._alive = True

    @property
    def elapsed_sec(self) -> float:
        """Seconds that the child has had for its task; 0 before the child exists."""
        started_sec = self._process.started_sec
        return 0.0 if started_sec is None else time.monotonic() - max(self._sent_sec, started_sec)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the child answers."""
        return self._from_child

    def send(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Start a task in the idle child; :meth:`flush` sends what the pipe does not take now."""
        payload = cloudpickle.dumps((function, tuple(args)))
        self._sent_sec = time.monotonic()
        self._oom_kills_before = self._oom_kills.count()
        self._unsent = memoryview(HEADER.pack(len(payload)) + payload)
        self.flush()

    def unsent_fileno(self) -> int | None:
        """Return the descriptor to wait on before :meth:`flush`; None if all is sent."""
        return self._to_child if self._unsent else None

    def flush(self) -> None:
        """Send what the pipe takes now, without blocking."""
        view = self._unsent
        try:
            while view:
                view = view[os.write(self._to_child, view) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            # receive() reports a dead child.
            view = view[:0]
        # Copies of the rest would take minutes of a large task; at the end, it is released.
        self._unsent = view or memoryview(b"")

    def receive(self) -> tuple[Any] | None:
        """Read without blocking; return the task's value in a tuple, None while incomplete."""
        if not _readable(self):
            failure = self._failure()
            # It may have answered between the two checks.
            if failure is None or _readable(self):
                return None
            raise failure
        chunk = os.read(self._from_child, _READ_BYTES)
        if not chunk:
            self._await_end()
            raise self._failure() or WorkerDiedError(
                "the worker process closed its pipe but still runs"
            )
        self._received += chunk
        if len(self._received) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._received)
        if len(self._received) < HEADER.size + size:
            return None
        answer = cloudpickle.loads(bytes(self._received[HEADER.size : HEADER.size + size]))
        del self._received[: HEADER.size + size]
        succeeded, value, machine_failure = answer
        if machine_failure:
            raise MachineError(machine_failure)
        if not succeeded:
            raise WorkerTaskError(value)
        return (value,)

    def has_ended(self) -> bool:
        """Say whether the child has ended or is lost."""
        return self._failure() is not None

    def begin_kill(self) -> None:
        """Start to kill the child and its process group."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the child and its process group and close the pipes; safe to call twice."""
        if not self._alive:
            return
        self._alive = False
        self.begin_kill()
        self._await_end()
        os.close(self._to_child)
        os.close(self._from_child)

    def _await_end(self) -> None:
        end_sec = time.monotonic() + KILL_WAIT_SEC
        while not self.has_ended() and time.monotonic() < end_sec:
            time.sleep(_WAIT_STEP_SEC)

    def _failure(self) -> WorkerDiedError | MachineError | None:
        """Return how the child has ended; None while it seems to run."""
        try:
            code = self._process.poll()
        except MachineError as error:
            return error
        if code is None:
            return None
        if code == -signal.SIGKILL and self._oom_kills.count() != self._oom_kills_before:
            return MachineError("the worker process was killed: the machine is out of memory")
        return WorkerDiedError(f"the worker process ended: {_describe_exit(code)}")


def _readable(worker: Worker) -> bool:
    with selectors.PollSelector() as selector:  # works without a free descriptor
        selector.register(worker, selectors.EVENT_READ)
        return bool(selector.select(0))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
