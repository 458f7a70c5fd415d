"""The program of the server that forks workers, and of these."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

_PR_SET_PDEATHSIG = 1  # Linux <sys/prctl.h>
# Comes before each pickle in a pipe: its length.
HEADER = struct.Struct("<Q")
# Linux allows some 200 kB; messages are names and numbers.
MAX_MESSAGE_BYTES = 1 << 16
_N_DESCRIPTORS = 2
# Out of memory, Linux kills the process with most of it, to which it adds this many
# thousandths of all memory. Workers are replaced at once, and go first; their server next;
# the tuner, which is larger than either but cannot be replaced, last.
_OOM_SCORE_WORKER = 1000
_OOM_SCORE_SERVER = 900


def main(arguments: Sequence[str]) -> int:
    """Serve until the parent closes the connection."""
    control, parent = (int(number) for number in arguments)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent may block the end of children
    # Only the parent handles Ctrl-C, and SIGTERM, which a job manager sends to each process of a
    # job: it decides whether the running task ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not ignored: the programs that a task starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if not die_with(parent):
        return 1
    defer_package("tvm_adaptive")
    importlib.import_module("tvm_adaptive.errors")  # now, not when memory has run out
    _offer_to_oom_killer(_OOM_SCORE_SERVER)
    return serve(control)


def work(reads: int, writes: int) -> int:
    """Answer tasks until the parent closes the pipe."""
    with os.fdopen(reads, "rb") as tasks, os.fdopen(writes, "wb") as answers:
        while header := tasks.read(HEADER.size):
            (size,) = HEADER.unpack(header)
            answer = _answer(tasks.read(size))
            answers.write(HEADER.pack(len(answer)))
            answers.write(answer)
            answers.flush()
    return 0


def serve(control: int) -> int:
    """Import modules and fork workers until the parent closes the socket.

    Messages are JSON, ``[what, number of the worker, argument]``. The parent sends
    ``import`` with names of modules, ``fork`` with the worker's environment and two
    descriptors, and ``kill``. The server sends ``forked`` with the process id, or
    ``refused`` with the error's number, and ``ended`` with the exit code.
    """
    server = os.getpid()
    children: dict[int, int] = {}
    with socket.socket(fileno=control) as connection, _woken_by_children() as woken:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(woken, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if woken.fileno() in ready:
                    woken.recv(MAX_MESSAGE_BYTES)
                    _reap(connection, children)
                if connection.fileno() not in ready:
                    continue
                message, descriptors, _, _ = socket.recv_fds(
                    connection, MAX_MESSAGE_BYTES, _N_DESCRIPTORS
                )
                if not message:
                    return 0
                what, number, argument = json.loads(message)
                if what == "import":
                    _import_all(argument)
                elif what == "kill" and number in children:
                    kill_worker(children[number])
                elif what == "fork":
                    pid = _fork(connection, number, descriptors)
                    if pid == 0:
                        children.clear()
                        _forget_children(woken)
                        connection.close()
                        return _work_after_fork(server, descriptors, argument)
                    if pid is not None:
                        children[number] = pid
        except ConnectionError:  # the parent has closed the socket, or is gone
            return 0
        finally:
            for pid in children.values():
                kill_worker(pid)


def is_unreaped(pid: int) -> bool:
    """Say whether a child process has ended and still has its process id."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it is reaped already
        return False


def kill_worker(pid: int) -> None:
    """Kill an unreaped worker and its group, which it may not lead yet."""
    if type(pid) is not int or pid < 2:
        raise ValueError(f"{pid!r} is not the id of a worker")
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def defer_package(name: str) -> None:
    """Let modules of a package be imported without its ``__init__``, which imports them all.

    ``__init__`` runs when a name of the package is needed that is none of its modules.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader = spec.loader
    package = importlib.util.module_from_spec(spec)

    def load(attribute: str) -> Any:
        # Python itself looks up such names, which must not load anything.
        if attribute.startswith("__") and attribute not in ("__all__", "__version__"):
            raise AttributeError(attribute)
        if importlib.util.find_spec(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, attribute)

    package.__dict__["__getattr__"] = load
    sys.modules[name] = package


class _Hiding:
    """A finder that finds no package of a name, wherever it is installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports inside find no package of a name, unless it is imported already.

    An entry None in ``sys.modules`` would do so, too; SciPy takes it for an imported module.
    """
    finder: Any = _Hiding(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _answer(payload: bytes) -> bytes:
    """Pickle whether the function returned, its value or traceback, the machine's failure."""
    answer: bytes
    try:
        function, args = cloudpickle.loads(payload)
        answer = cloudpickle.dumps((True, function(*args), ""))
    except Exception as error:  # also of an answer that cannot be pickled
        from tvm_adaptive.errors import machine_failure

        answer = cloudpickle.dumps((False, traceback.format_exc(), machine_failure(error)))
    return answer


def die_with(parent: int) -> bool:
    """Let the system kill this process when its parent dies; False if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _import_all(modules: Sequence[str]) -> None:
    # TVM would import PyTorch, for seconds; those workers that use it import it themselves.
    with hidden("torch"):
        for name in modules:
            with contextlib.suppress(Exception):  # the worker that needs it raises again
                importlib.import_module(name)
    # These objects stay: a collection in a worker would only copy their memory.
    gc.collect()
    gc.freeze()


def _fork(connection: socket.socket, number: int, descriptors: Sequence[int]) -> int | None:
    """Fork and report it; return the process id, 0 in the child, None if refused."""
    # The system drops descriptors beyond the process's limit.
    pid, problem = None, 0 if len(descriptors) == _N_DESCRIPTORS else errno.EMFILE
    if not problem:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, too little memory
            problem = error.errno or errno.EAGAIN
    if pid == 0:
        return pid
    for descriptor in descriptors:
        os.close(descriptor)
    _tell(connection, *(("refused", number, problem) if pid is None else ("forked", number, pid)))
    return pid


def _work_after_fork(server: int, descriptors: Sequence[int], env: dict[str, str]) -> int:
    os.setsid()  # killing its group must not kill the server's
    if not die_with(server):
        return 1
    _offer_to_oom_killer(_OOM_SCORE_WORKER)
    # What a task forks, such as a pool of multiprocessing, is ended by this signal.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    os.environ.update(env)
    # It was chosen in another environment. Python would try it, and take another one if its disk
    # is full, in which nobody removes what is left.
    tempfile.tempdir = env.get("TMPDIR")
    reads, writes = descriptors
    return work(reads, writes)


@contextlib.contextmanager
def _woken_by_children() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable when a child ends."""
    reads, writes = socket.socketpair()
    with reads, writes:
        writes.setblocking(False)
        signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the system drops it without a handler
        yield reads


def _forget_children(woken: socket.socket) -> None:
    """Undo :func:`_woken_by_children` in a new child."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    woken.close()


def _reap(connection: socket.socket, children: dict[int, int]) -> None:
    """Reap the children that have ended and report them."""
    for number, pid in list(children.items()):
        if is_unreaped(pid):
            kill_worker(pid)  # its group; the process id is still its own
            _, status = os.waitpid(pid, 0)
            del children[number]
            _tell(connection, "ended", number, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, what: str, number: int, value: int) -> None:
    connection.sendall(json.dumps([what, number, value]).encode())


def _offer_to_oom_killer(score: int) -> None:
    """Let the system kill this process rather than those with a lower score."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):  # no Linux, or no such file system
        if int(path.read_text()) < score:
            path.write_text(str(score))


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))  # after the path of this file, which comes twice
