"""Workers in milliseconds: fork a process that has imported what they need.

Importing TVM takes seconds of a core, and a run has four kinds of workers: those that
compile, one that measures, one for play-offs, one that runs the whole network. They are
forked from one process that has the modules and does nothing else, so that this is paid
once, in the background, and a worker that was killed or is worn out costs nothing to
replace. (``multiprocessing`` has such a server, too, but one for the whole process, which
belongs to the user, and it runs the user's main module again.)

Each worker has a number, which all messages about it carry. The server tells of itself
what becomes of a worker: forked, refused, ended. One thread reads that, so that any number
of threads may fork and look, and none waits for another's answer. Signals are sent by the
server alone: only it knows which of its children still have their process id.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tvm_adaptive.errors import MachineError
from tvm_adaptive.workers.main import MAX_MESSAGE_BYTES, kill_group

# Forking a process that holds an initialised device or threads of its own is unsafe; this
# one holds neither. Only Linux also ends the workers when their parent dies.
_IS_AVAILABLE = sys.platform == "linux"
# A fork waits for the imports, which take seconds, and tens of seconds where the machine
# swaps or many runs start at once. A server that needs longer has been stopped; all its
# workers end with it, so we rather wait too long.
_FORK_TIMEOUT_SEC = 120.0
# It ends its workers and leaves within milliseconds; then the system does it.
_LEAVE_TIMEOUT_SEC = 1.0
# A killed process is gone at once unless the kernel holds it.
_END_TIMEOUT_SEC = 5.0
_WAIT_STEP_SEC = 0.002
_PROGRAM = Path(__file__).with_name("main.py")
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
)


def start_program(
    role: str, descriptors: Sequence[int], env: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start ``main.py`` in a process group of its own."""
    numbers = [str(number) for number in (*descriptors, os.getpid())]
    # By its path, not as a module: that would import the whole package, which costs
    # seconds. The child finds modules where the parent does, whatever its directory.
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(_PROGRAM), role, *numbers, "\n".join(sys.path)],
        pass_fds=tuple(descriptors),
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class Program:
    """A worker that is a program of its own; what a pool needs of it.

    It is left unreaped until its process group has been ended: as long as that, the
    system gives its process id, which is its group's, to nobody else.
    """

    def __init__(self, descriptors: Sequence[int], env: dict[str, str] | None) -> None:
        self._popen = start_program("worker", descriptors, env)
        self.pid = self._popen.pid
        self.started_sec = time.monotonic()

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number if one ended it; None if it runs."""
        if self._popen.returncode is None and _is_unreaped(self.pid):
            self._end_group()
        return self._popen.poll()

    def wait(self, timeout: float) -> int:
        """Return the exit code once it has ended."""
        end_sec = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end_sec:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_WAIT_STEP_SEC)
        return code

    def kill(self) -> None:
        """Send SIGKILL to it and what it has started, unless it has ended."""
        if self.poll() is None:
            self._end_group()
            self._popen.kill()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_group(self.pid)


def _is_unreaped(pid: int) -> bool:
    """Say whether a child of ours has ended and still has its process id."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has reaped it
        return False


class ForkedProcess:
    """A worker that a server has forked, or will have soon; what a pool needs of it.

    Made by :meth:`ForkServer.fork`. May be used by any thread.
    """

    def __init__(self, number: int, connection: _Connection) -> None:
        self.started_sec: float | None = None
        self._asked_sec = time.monotonic()
        self._number = number
        self._connection = connection
        self._pid: int | None = None
        self._refusal = ""
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Process id, for messages; waits until there is one."""
        with self._connection.changed:
            while self._pid is None and self.poll() is None:
                self._connection.changed.wait(_FORK_TIMEOUT_SEC)
            assert self._pid is not None
            return self._pid

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number if one ended it; None if it runs.

        None also says that the server has not told yet.
        """
        with self._connection.changed:
            if self._code is not None:
                return self._code
            if self._pid is None and time.monotonic() - self._asked_sec > _FORK_TIMEOUT_SEC:
                self._connection.lose(f"has not answered for {_FORK_TIMEOUT_SEC:g} s")
            problem = self._refusal or self._connection.lost
            if problem:
                raise MachineError(problem)
            return None

    def wait(self, timeout: float) -> int:
        """Return the exit code once it has ended."""
        with self._connection.changed:
            end_sec = time.monotonic() + timeout
            while (code := self.poll()) is None:
                left_sec = end_sec - time.monotonic()
                if left_sec <= 0.0:
                    raise subprocess.TimeoutExpired(f"worker {self._number}", timeout)
                self._connection.changed.wait(left_sec)
            return code

    def kill(self) -> None:
        """Have it and what it has started killed, unless it has ended; returns at once."""
        self._connection.kill(self._number)

    def tell(self, what: str, value: int) -> bool:
        """Take what its server says of it; False if that cannot be."""
        if what == "forked" and self._pid is None and value > 1:
            self._pid, self.started_sec = value, time.monotonic()
        elif what == "refused" and self._pid is None:
            reason = os.strerror(value)
            self._refusal = f"the system would not fork another worker: {reason}"
        elif what == "ended" and self._pid is not None:
            self._code = value
        else:
            return False
        return True


class ForkServer:
    """A process that imports modules once and forks workers that have them.

    Any number of threads, and of pools, may share one.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def start(self) -> None:
        """Start the process unless it runs; returns at once, while it imports."""
        self._running()

    def fork(self, descriptors: Sequence[int], env: dict[str, str] | None) -> ForkedProcess:
        """Have a worker forked as soon as the modules are imported; returns at once.

        What becomes of it, the worker's own methods tell. A server that has died is
        started again.
        """
        connection = self._running()
        try:
            return connection.fork(descriptors, env)
        except ConnectionError:  # it died, and that was not known yet
            connection.lose("has ended")
            return self._running().fork(descriptors, env)

    def close(self) -> None:
        """End the process and all its workers; a later :meth:`fork` starts a new one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        # At the end of the interpreter parts of it may be gone; the server sees the end
        # of its connection and leaves by itself.
        with contextlib.suppress(Exception):
            self.close()

    def _running(self) -> _Connection:
        with self._lock:
            if self._connection is None or self._connection.lost:
                self._connection = _Connection(self._modules)
            return self._connection


def new_fork_server(modules: Sequence[str]) -> ForkServer | None:
    """Return a server, not started yet; None where workers must be started one by one."""
    return ForkServer(modules) if _IS_AVAILABLE else None


class _Connection:
    """A running server, the socket to it, and the thread that reads what it tells."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        # Guards everything here and in the workers; notified when a worker's state changes.
        self.changed = threading.Condition()
        # Why the server is of no use any more.
        self.lost = ""
        self._workers: dict[int, ForkedProcess] = {}
        self._numbers = itertools.count(1)
        self._has_forked = False
        self._owner = os.getpid()
        # Keeps the borders between messages.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[None] = Future()
        # Linux kills a child when the thread that started it ends: this one lives as long.
        self._thread = threading.Thread(
            target=self._run, args=(theirs, started), name="tvm-adaptive-fork-server", daemon=True
        )
        try:
            self._thread.start()
            started.result()
        except RuntimeError as error:  # as OSError says it of processes
            theirs.close()
            self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        with contextlib.suppress(OSError), self.changed:  # it shows in the first fork
            self._send("import", 0, modules)

    def fork(self, descriptors: Sequence[int], env: dict[str, str] | None) -> ForkedProcess:
        """Ask for a worker."""
        with self.changed:
            if self.lost:
                raise ConnectionError(self.lost)
            number = next(self._numbers)
            self._send("fork", number, env or {}, descriptors)
            self._workers[number] = ForkedProcess(number, self)
            return self._workers[number]

    def kill(self, number: int) -> None:
        """Ask for a worker's end."""
        with contextlib.suppress(OSError), self.changed:  # a lost server takes it along
            if number in self._workers:
                self._send("kill", number, None)

    def lose(self, reason: str) -> None:
        """Have the server ended; whatever it was doing is lost."""
        with self.changed:
            if self.lost:
                return
            self.lost = f"the process that workers are forked from {reason}"
            self._workers.clear()
            self.changed.notify_all()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def close(self) -> None:
        """End the server and wait until it has ended."""
        if os.getpid() != self._owner:  # a copy, in a process that the user has forked
            return
        self.lose("was closed")
        # At the interpreter's end such threads do not go on.
        if not (sys.is_finalizing() or self._thread is threading.current_thread()):
            self._thread.join(_LEAVE_TIMEOUT_SEC + _END_TIMEOUT_SEC)

    def _send(self, what: str, number: int, argument: Any, descriptors: Sequence[int] = ()) -> None:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        message = json.dumps([what, number, argument]).encode()
        # A server that has been stopped must not stop us, too.
        self._socket.sendmsg([message], ancillary, socket.MSG_DONTWAIT)

    def _run(self, theirs: socket.socket, started: Future[None]) -> None:
        try:
            with theirs:
                # numpy's threads would be lost by forking; workers have no use for them.
                env = {"OPENBLAS_NUM_THREADS": "1"}
                process = start_program("server", (theirs.fileno(),), env)
        except BaseException as error:
            self._socket.close()
            started.set_exception(error)
            return
        started.set_result(None)
        while self._hear():
            pass
        if self._has_forked:  # it ends its workers and what they have started, and leaves
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_TIMEOUT_SEC)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_SEC)
        self.lose("has ended")
        self._socket.close()

    def _hear(self) -> bool:
        """Take one message; False when no more will come."""
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        with self.changed:
            if not message or self.lost:
                return False
            if not self._take(message):
                self.lose("answered what nobody asked")
                return False
            self.changed.notify_all()
            return True

    def _take(self, message: bytes) -> bool:
        try:
            what, number, value = json.loads(message)
        except (ValueError, TypeError, RecursionError):
            return False
        if type(number) is not int or type(value) is not int or number not in self._workers:
            return False
        if not self._workers[number].tell(what, value):
            return False
        if what == "forked":
            self._has_forked = True
        else:
            del self._workers[number]
        return True
