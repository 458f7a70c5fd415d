"""Workers in milliseconds: fork a process that has imported what they need.

Importing TVM takes seconds of a core, and a run has four kinds of workers: those that
compile, one that measures, one for play-offs, one that runs the whole network. They are
forked from one process that has the modules and does nothing else, so that this is paid
once, in the background, and a worker that was killed or is worn out costs nothing to
replace. (``multiprocessing`` has such a server, too, but one for the whole process, which
belongs to the user, and it runs the user's main module again.)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Forking a process that holds an initialised device or threads of its own is unsafe; this
# one holds neither. Only Linux also ends the workers when their parent dies.
_IS_AVAILABLE = sys.platform == "linux"
# An import that has not ended by then never will; see also workers.START_TIMEOUT_SEC.
_IMPORT_TIMEOUT_SEC = 120.0
# It answers at once unless the system has stopped it.
_ANSWER_TIMEOUT_SEC = 5.0
# Linux gives a message of this kind a limit of some 200 kB; ours are names and numbers.
_MAX_MESSAGE_BYTES = 1 << 16
_WAIT_STEP_SEC = 0.002
_PROGRAM = Path(__file__).with_name("worker_main.py")
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
)


def start_program(
    role: str, descriptors: Sequence[int], env: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start ``worker_main.py`` in a process group of its own.

    Parameters
    ----------
    role : {"worker", "server"}
    descriptors : sequence of int
        What the child talks to us through.
    env : dict of str to str, or None
        Variables added to the child's environment.

    Raises
    ------
    OSError
        When the process cannot be started.
    """
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


class ForkedProcess:
    """A worker that a server has forked; as much of ``subprocess.Popen`` as a worker needs.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, pid: int, server: _Connection) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, minus the signal's number if one ended it; None if it runs."""
        if self._code is None:
            try:
                self._code = self._server.ask("exit-code", self.pid)
            except OSError:  # the system kills workers together with their server
                self._code = -signal.SIGKILL
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code once it has ended.

        Raises
        ------
        subprocess.TimeoutExpired
            When it has not ended after ``timeout`` seconds.
        """
        end_sec = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end_sec:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_WAIT_STEP_SEC)
        return code

    def kill(self) -> None:
        """Send SIGKILL unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that imports modules once and forks workers that have them.

    Use it from one thread, like :class:`~tvm_adaptive.workers.WorkerPool`. Several pools
    may share one.

    Parameters
    ----------
    modules : sequence of str
        Imported in the server. One that cannot be imported is left for the workers,
        where it fails with an error that somebody sees. None of them may start threads
        or open a device when imported.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._connection: _Connection | None = None

    def start(self) -> None:
        """Start the process unless it runs; returns at once, while it imports.

        Raises
        ------
        OSError
            When the process cannot be started.
        """
        if self._connection is None:
            self._connection = _Connection(self._modules)

    def fork(self, descriptors: Sequence[int], env: dict[str, str] | None) -> ForkedProcess:
        """Return a new worker; waits until the modules are imported.

        A server that has died is started again, once.

        Parameters
        ----------
        descriptors : sequence of int
            Those that the worker reads tasks from and writes answers to.
        env : dict of str to str, or None
            Variables added to the worker's environment.

        Raises
        ------
        OSError
            When the server cannot be started or does not answer.
        """
        for attempt in range(2):
            self.start()
            assert self._connection is not None
            try:
                pid = self._connection.ask(
                    "fork", env or {}, descriptors, timeout_sec=_IMPORT_TIMEOUT_SEC
                )
            except OSError:
                self.close()
                if attempt:
                    raise
            else:
                if pid is None:
                    raise OSError("the system would not fork another worker")
                return ForkedProcess(pid, self._connection)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the process and all its workers; a later :meth:`fork` starts a new one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def __del__(self) -> None:
        # At the end of the interpreter parts of it may be gone; the server sees the end
        # of its connection and leaves by itself.
        with contextlib.suppress(Exception):
            self.close()


def new_fork_server(modules: Sequence[str]) -> ForkServer | None:
    """Return a server, not started yet; None where workers must be started one by one."""
    return ForkServer(modules) if _IS_AVAILABLE else None


class _Connection:
    """A running server and the socket to it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        # Keeps the borders between messages.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                # numpy's threads would be lost by forking; workers have no use for them.
                env = {"OPENBLAS_NUM_THREADS": "1"}
                self._process = start_program("server", (theirs.fileno(),), env)
        except OSError:
            self._socket.close()
            raise
        with contextlib.suppress(OSError):  # it shows when it is asked for something
            self._socket.sendall(pickle.dumps(("import", modules)))

    def ask(
        self,
        what: str,
        argument: Any,
        descriptors: Sequence[int] = (),
        *,
        timeout_sec: float = _ANSWER_TIMEOUT_SEC,
    ) -> Any:
        """Return the server's answer.

        Raises
        ------
        OSError
            When there is none; there will be none to later questions either.
        """
        try:
            self._socket.settimeout(timeout_sec)
            socket.send_fds(self._socket, [pickle.dumps((what, argument))], list(descriptors))
            message = self._socket.recv(_MAX_MESSAGE_BYTES)
            if not message:
                raise ConnectionError("the process that workers are forked from has ended")
        except OSError:
            self.close()  # an answer that came late would be taken for the next one's
            raise
        return pickle.loads(message)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_TIMEOUT_SEC)
