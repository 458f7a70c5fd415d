"""The program of a worker process, and of the server that forks workers.

Started by :mod:`tvm_adaptive.fork_server`, never by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle

_PR_SET_PDEATHSIG = 1  # Linux <sys/prctl.h>
# As in worker_process.py, which would bring the package with it.
_HEADER = struct.Struct("<Q")
_MAX_MESSAGE_BYTES = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Serve until the parent closes the connection.

    Parameters
    ----------
    arguments : sequence of str
        ``"worker"``, descriptor to read tasks from, descriptor to write answers to, id
        of the parent; or ``"server"``, descriptor of a socket, id of the parent.
    """
    role, *numbers = arguments
    *descriptors, parent = (int(number) for number in numbers)
    # Ctrl-C belongs to the parent: it decides what becomes of the running task.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not _die_with(parent):
        return 1
    defer_package("tvm_adaptive")
    return serve(*descriptors) if role == "server" else work(*descriptors)


def work(reads: int, writes: int) -> int:
    """Answer tasks until the parent closes the pipe.

    Parameters
    ----------
    reads, writes : int
        Descriptors of tasks and answers.
    """
    with os.fdopen(reads, "rb") as tasks, os.fdopen(writes, "wb") as answers:
        while header := tasks.read(_HEADER.size):
            (size,) = _HEADER.unpack(header)
            answer = cloudpickle.dumps(_answer(tasks.read(size)))
            answers.write(_HEADER.pack(len(answer)) + answer)
            answers.flush()
    return 0


def serve(control: int) -> int:
    """Import modules and fork workers until the parent closes the socket.

    Parameters
    ----------
    control : int
        Descriptor of a socket that keeps the borders of messages.
    """
    server = os.getpid()
    with socket.socket(fileno=control) as connection:
        while True:
            message, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 2)
            if not message:
                return 0
            what, argument = pickle.loads(message)
            if what == "import":
                _import_all(argument)
            elif what == "exit-code":
                connection.sendall(pickle.dumps(_exit_code(argument)))
            else:
                pid = _fork()
                if pid == 0:
                    connection.close()
                    return _work_after_fork(server, descriptors, argument)
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.sendall(pickle.dumps(pid))


def defer_package(name: str) -> None:
    """Let parts of a package be imported without its ``__init__``.

    A worker needs one or two parts; ``__init__`` imports all of them. It is run when
    a name is asked of the package itself that is none of its modules'.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader = spec.loader
    package = importlib.util.module_from_spec(spec)

    def load(attribute: str) -> Any:
        # Python itself asks modules for names of its own, which must not load anything.
        if attribute.startswith("__") and attribute not in ("__all__", "__version__"):
            raise AttributeError(attribute)
        if importlib.util.find_spec(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, attribute)

    package.__dict__["__getattr__"] = load
    sys.modules[name] = package


def _answer(payload: bytes) -> tuple[bool, Any]:
    try:
        function, args = cloudpickle.loads(payload)
        value = function(*args)
        cloudpickle.dumps(value)  # an answer that cannot travel is the task's error
        return True, value
    except Exception:
        return False, traceback.format_exc()


def _die_with(parent: int) -> bool:
    """Let the system kill this process when its parent dies; False if it has already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return sys.platform != "linux" or os.getppid() == parent


def _import_all(modules: Sequence[str]) -> None:
    # TVM imports PyTorch if there is one, for a second; no worker of ours uses it.
    without_torch = "torch" not in sys.modules
    if without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own convention
    for name in modules:
        with contextlib.suppress(Exception):  # the worker that needs it says so
            importlib.import_module(name)
    if without_torch:
        del sys.modules["torch"]
    # What is here stays: a collection in a worker would copy all of it for nothing.
    gc.collect()
    gc.freeze()


def _fork() -> int | None:
    try:
        return os.fork()
    except OSError:  # too many processes, too little memory
        return None


def _work_after_fork(server: int, descriptors: Sequence[int], env: dict[str, str]) -> int:
    os.setsid()  # killing its group must not kill the server's
    if not _die_with(server):
        return 1
    os.environ.update(env)
    tempfile.tempdir = None  # it was chosen in another environment
    reads, writes = descriptors
    return work(reads, writes)


def _exit_code(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # told before
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))  # behind the path of this file, which stands there twice
