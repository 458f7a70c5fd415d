"""Child processes that do the dangerous work: compile a candidate, run a candidate.

The parent keeps the deadline, because a kernel that holds the interpreter outlives any
timer in its own process. A worker is the leader of its own process group, so killing
the group also kills what it had started; it dies with its parent (``PR_SET_PDEATHSIG``
on Linux, end-of-file on its pipe elsewhere).

Start and use a :class:`WorkerPool` from one thread: Linux sends the death signal when
the *thread* that started the child ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cloudpickle

from tvm_adaptive.errors import (
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
)

HEADER = struct.Struct("<Q")
# A worker that has not imported its modules by then never will: the slowest import we
# know (all tensor intrinsics of TVM) takes about 15 s on an idle core.
START_TIMEOUT_SEC = 120.0
_READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one task: a value, or the error that took its place."""

    value: Any = None
    error: WorkerError | None = None
    elapsed_sec: float = 0.0


class Worker:
    """One child process that runs one function at a time.

    Parameters
    ----------
    setup : callable or None
        Called once in the child before its first task, e.g. to import TVM; its time
        does not count against a task's deadline.
    env : dict of str to str, or None
        Variables added to the child's environment.
    """

    def __init__(
        self, setup: Callable[[], Any] | None = None, env: dict[str, str] | None = None
    ) -> None:
        child_reads, self._to_child = os.pipe()
        self._from_child, child_writes = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tvm_adaptive.worker_main",
                str(child_reads),
                str(child_writes),
                str(os.getpid()),
            ],
            pass_fds=(child_reads, child_writes),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer = bytearray()
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
        """Give the child a task; it must be idle."""
        payload = cloudpickle.dumps((function, tuple(args)))
        self.started_sec = time.monotonic()
        self.n_tasks += 1
        # A dead child shows in receive(); what counts is that the task gets an answer.
        with contextlib.suppress(BrokenPipeError):
            _write_all(self._to_child, HEADER.pack(len(payload)) + payload)

    def receive(self) -> tuple[bool, Any] | None:
        """Read what has arrived.

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
        chunk = os.read(self._from_child, _READ_BYTES)
        if not chunk:
            code = self._process.wait()
            raise WorkerDiedError(f"the worker process ended: {_describe_exit(code)}")
        self._buffer += chunk
        if len(self._buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._buffer)
        if len(self._buffer) < HEADER.size + size:
            return None
        answer = cloudpickle.loads(bytes(self._buffer[HEADER.size : HEADER.size + size]))
        del self._buffer[: HEADER.size + size]
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
        self._process.wait()
        os.close(self._to_child)
        os.close(self._from_child)


class WorkerPool:
    """Run a function over many arguments in worker processes that stay.

    Parameters
    ----------
    max_workers : int
        Processes at the most; they start when first needed.
    setup : callable or None
        Called once in each new worker, outside any task's deadline.
    max_uses : int or None
        Tasks after which a worker is replaced (bounds a leak); None for no limit.
    replace_after_error : bool
        Replace the worker also when the function only raised: after a device error the
        process can no longer be trusted.
    env : dict of str to str, or None
        Variables added to the workers' environment.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        setup: Callable[[], Any] | None = None,
        max_uses: int | None = None,
        replace_after_error: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1 but got {max_workers}.")
        self.max_workers = max_workers
        self._setup = setup
        self._max_uses = max_uses
        self._replace_after_error = replace_after_error
        self._env = env
        self._idle: list[Worker] = []

    def map(
        self,
        function: Callable[..., Any],
        tasks: Iterable[Sequence[Any]],
        timeout_sec: float,
    ) -> list[Outcome]:
        """Run ``function(*args)`` for every ``args`` in ``tasks``.

        Parameters
        ----------
        function : callable
            Picklable by cloudpickle.
        tasks : iterable of argument tuples
        timeout_sec : float
            Deadline of each task, from the moment a worker starts on it.

        Returns
        -------
        list of Outcome
            In the order of ``tasks``; a task that failed carries its error.
        """
        queue = list(enumerate(tasks))[::-1]
        outcomes: list[Outcome] = [Outcome()] * len(queue)
        busy: dict[Worker, tuple[int, Sequence[Any], bool]] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while queue or busy:
                    while queue and len(busy) < self.max_workers:
                        index, args = queue.pop()
                        worker, fresh = self._take()
                        selector.register(worker, selectors.EVENT_READ)
                        busy[worker] = (index, args, fresh)
                        if not fresh:
                            worker.send(function, args)
                    for worker in self._wait(selector, busy, timeout_sec):
                        index, args, in_setup = busy[worker]
                        outcome = self._collect(worker, in_setup, timeout_sec)
                        if outcome is None:
                            continue
                        if in_setup and outcome.error is None:
                            busy[worker] = (index, args, False)
                            worker.send(function, args)
                            continue
                        outcomes[index] = outcome
                        selector.unregister(worker)
                        del busy[worker]
                        self._give_back(worker, outcome)
            finally:
                for worker in busy:
                    worker.kill()
        return outcomes

    def close(self) -> None:
        """Kill the workers; the pool can be used again and then starts new ones."""
        while self._idle:
            self._idle.pop().kill()

    def __del__(self) -> None:
        self.close()

    def _take(self) -> tuple[Worker, bool]:
        if self._idle:
            return self._idle.pop(), False
        worker = Worker(self._setup or _no_setup, self._env)
        return worker, True

    def _wait(
        self,
        selector: selectors.BaseSelector,
        busy: dict[Worker, tuple[int, Sequence[Any], bool]],
        timeout_sec: float,
    ) -> list[Worker]:
        now = time.monotonic()
        deadlines = {
            worker: worker.started_sec + (START_TIMEOUT_SEC if in_setup else timeout_sec)
            for worker, (_, _, in_setup) in busy.items()
        }
        ready = selector.select(max(0.0, min(deadlines.values()) - now))
        workers = [key.fileobj for key, _ in ready if isinstance(key.fileobj, Worker)]
        now = time.monotonic()
        return workers + [w for w, end in deadlines.items() if end <= now and w not in workers]

    def _collect(self, worker: Worker, in_setup: bool, timeout_sec: float) -> Outcome | None:
        elapsed = time.monotonic() - worker.started_sec
        limit = START_TIMEOUT_SEC if in_setup else timeout_sec
        ready = selectors_readable(worker)
        try:
            answer = worker.receive() if ready else None
        except WorkerError as error:
            return Outcome(error=error, elapsed_sec=elapsed)
        except Exception as error:  # an answer that cannot be unpickled
            text = f"the worker's answer could not be read: {error!r}"
            return Outcome(error=WorkerDiedError(text), elapsed_sec=elapsed)
        if answer is None:
            if elapsed < limit:
                return None
            doing = "starting" if in_setup else "running"
            text = f"timeout: killed after {limit:g} s of {doing}"
            return Outcome(error=WorkerTimeoutError(text), elapsed_sec=elapsed)
        succeeded, value = answer
        if succeeded:
            return Outcome(value=value, elapsed_sec=elapsed)
        return Outcome(error=WorkerTaskError(str(value)), elapsed_sec=elapsed)

    def _give_back(self, worker: Worker, outcome: Outcome) -> None:
        broken = outcome.error is not None and (
            self._replace_after_error or not isinstance(outcome.error, WorkerTaskError)
        )
        # The setup was a task, too.
        used_up = self._max_uses is not None and worker.n_tasks > self._max_uses
        if broken or used_up:
            worker.kill()
        else:
            self._idle.append(worker)


def selectors_readable(worker: Worker) -> bool:
    """Say whether the worker's answer can be read without blocking."""
    with selectors.DefaultSelector() as selector:
        selector.register(worker, selectors.EVENT_READ)
        return bool(selector.select(0))


def _no_setup() -> None:
    return None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
