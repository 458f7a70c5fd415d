"""Start workers in milliseconds: fork them from a process that has imported their modules.

Importing TVM takes seconds of a core, and workers are replaced often.
(``multiprocessing`` has one such server per process, which belongs to the user, and its
server runs the user's main module again.)

The server reports when a worker is forked, refused or ended. One thread reads these
messages, so that any number of threads may use workers and none waits for another's answer.
Only the server sends signals: only it knows which of its children still have their process id.
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
from tvm_adaptive.workers.forks import open_standard_streams
from tvm_adaptive.workers.main import MAX_MESSAGE_BYTES

# A fork waits for the imports, which take seconds, and tens of seconds where the machine
# swaps or many runs start at once. A server that needs longer hangs; a long limit is safer,
# because all its workers end with it.
_FORK_TIMEOUT_SEC = 120.0
# The server ends its workers and itself within milliseconds; then the system does it.
_LEAVE_TIMEOUT_SEC = 1.0
# A killed process is gone at once unless the kernel holds it.
_END_TIMEOUT_SEC = 5.0
_PROGRAM = Path(__file__).with_name("main.py")
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
)


def start_program(control: int) -> subprocess.Popen[bytes]:
    """Start ``main.py`` in a process group of its own, with a socket to control it."""
    # By its path, not as a module: that would import the whole package, which costs
    # seconds. The child finds modules where the parent does, whatever its directory.
    numbers = [str(control), str(os.getpid())]
    path = "\n".join(entry for entry in sys.path if isinstance(entry, str))  # Python skips others
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(_PROGRAM), *numbers, path],
        pass_fds=(control,),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # workers do not need numpy's threads
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class ForkedProcess:
    """A worker that a server has forked or will fork; any thread may use it."""

    def __init__(self, number: int, connection: _Connection) -> None:
        self.pid: int | None = None  # once the server has forked it
        self.started_sec: float | None = None
        self._requested_sec = time.monotonic()
        self._number = number
        self._connection = connection
        self._refusal = ""
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None until the server reports it."""
        if self._connection.is_copy:
            raise MachineError("the worker is one of the process that this one was forked from")
        with self._connection.lock:
            if self._code is not None:
                return self._code
            if self.pid is None and time.monotonic() - self._requested_sec > _FORK_TIMEOUT_SEC:
                self._connection.lose(f"has not answered for {_FORK_TIMEOUT_SEC:g} s")
            problem = self._refusal or self._connection.lost
            if problem:
                raise MachineError(problem)
            return None

    def kill(self) -> None:
        """Ask the server to kill the worker's group; returns at once."""
        self._connection.kill(self._number)

    def update(self, what: str, value: int) -> bool:
        """Apply a message of the server; False if the message is impossible."""
        if what == "forked" and self.pid is None and value > 1:
            self.pid, self.started_sec = value, time.monotonic()
        elif what == "refused" and self.pid is None:
            self._refusal = f"the system would not fork another worker: {os.strerror(value)}"
        elif what == "ended" and self.pid is not None:
            self._code = value
        else:
            return False
        return True


class ForkServer:
    """A process that imports modules once and forks workers; threads and pools may share it."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def start(self) -> None:
        """Start the process unless it runs; returns while the process imports."""
        self._running()

    def fork(self, descriptors: Sequence[int], env: dict[str, str] | None) -> ForkedProcess:
        """Request a worker, which is forked after the imports; restarts a dead server."""
        connection = self._running()
        try:
            return connection.fork(descriptors, env)
        except ConnectionError:  # it has just died
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
            if self._connection is None or self._connection.lost or self._connection.is_copy:
                self._connection = _Connection(self._modules)
            return self._connection


class _Connection:
    """A running server, the socket to it, and the thread that reads its messages."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.lock = threading.RLock()  # guards this object and its workers
        self.lost = ""  # why the server is unusable
        self._workers: dict[int, ForkedProcess] = {}
        self._numbers = itertools.count(1)
        self._has_forked = False
        self._owner = os.getpid()
        open_standard_streams()
        # SOCK_SEQPACKET keeps the borders between messages.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[None] = Future()
        # Linux kills a child when the thread that started it ends: this one outlives it.
        self._thread = threading.Thread(
            target=self._run, args=(theirs, started), name="tvm-adaptive-fork-server", daemon=True
        )
        try:
            self._thread.start()
            started.result()
        except RuntimeError as error:  # no more threads; OSError means the same of processes
            theirs.close()
            self._socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        with contextlib.suppress(OSError), self.lock:  # the first fork reports it
            self._send("import", 0, modules)

    def fork(self, descriptors: Sequence[int], env: dict[str, str] | None) -> ForkedProcess:
        """Request a worker."""
        with self.lock:
            if self.lost:
                raise ConnectionError(self.lost)
            number = next(self._numbers)
            self._send("fork", number, env or {}, descriptors)
            self._workers[number] = ForkedProcess(number, self)
            return self._workers[number]

    @property
    def is_copy(self) -> bool:
        """Whether the user has forked this process, whose workers are those of the original."""
        return os.getpid() != self._owner

    def kill(self, number: int) -> None:
        """Request a worker's end."""
        if self.is_copy:
            return
        with contextlib.suppress(OSError), self.lock:  # a lost server's workers end, too
            if number in self._workers:
                self._send("kill", number, None)

    def lose(self, reason: str) -> None:
        """Give the server up, so that the thread ends it and its workers."""
        if self.is_copy:
            return
        with self.lock:
            if self.lost:
                return
            self.lost = f"the process that workers are forked from {reason}"
            self._workers.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def close(self) -> None:
        """End the server and wait until it has ended."""
        if self.is_copy:
            return
        self.lose("was closed")
        # At the interpreter's end daemon threads do not continue.
        if not (sys.is_finalizing() or self._thread is threading.current_thread()):
            self._thread.join(_LEAVE_TIMEOUT_SEC + _END_TIMEOUT_SEC)

    def _send(self, what: str, number: int, argument: Any, descriptors: Sequence[int] = ()) -> None:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        message = json.dumps([what, number, argument]).encode()
        # A stopped server must not block this process.
        self._socket.sendmsg([message], ancillary, socket.MSG_DONTWAIT)

    def _run(self, theirs: socket.socket, started: Future[None]) -> None:
        try:
            with theirs:
                process = start_program(theirs.fileno())
        except BaseException as error:
            self._socket.close()
            started.set_exception(error)
            return
        started.set_result(None)
        while self._receive():
            pass
        if self._has_forked:  # it ends its workers' groups and then itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_TIMEOUT_SEC)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_SEC)
        self.lose("has ended")
        self._socket.close()

    def _receive(self) -> bool:
        """Handle one message; False when no more will come."""
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        with self.lock:
            if not message or self.lost:
                return False
            if not self._handle(message):
                self.lose("sent an impossible message")
                return False
            return True

    def _handle(self, message: bytes) -> bool:
        try:
            what, number, value = json.loads(message)
        except (ValueError, TypeError, RecursionError):
            return False
        if type(number) is not int or type(value) is not int or number not in self._workers:
            return False
        if not self._workers[number].update(what, value):
            return False
        if what == "forked":
            self._has_forked = True
        else:
            del self._workers[number]
        return True
