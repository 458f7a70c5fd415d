"""The program of a worker process; started by :mod:`tvm_adaptive.worker_process`, never by hand."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import struct
import sys
import traceback
from typing import Any

import cloudpickle

_PR_SET_PDEATHSIG = 1  # Linux <sys/prctl.h>
# As in worker_process.py, which would bring the package with it.
_HEADER = struct.Struct("<Q")


def main(arguments: list[str]) -> int:
    """Answer tasks until the parent closes the pipe.

    Parameters
    ----------
    arguments : list of str
        Descriptor to read tasks from, descriptor to write answers to, id of the parent.
    """
    reads, writes, parent = (int(argument) for argument in arguments)
    # Ctrl-C belongs to the parent: it decides what becomes of the running task.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the signal was armed
            return 1
    defer_package("tvm_adaptive")
    with os.fdopen(reads, "rb") as tasks, os.fdopen(writes, "wb") as answers:
        while header := tasks.read(_HEADER.size):
            (size,) = _HEADER.unpack(header)
            answer = cloudpickle.dumps(_answer(tasks.read(size)))
            answers.write(_HEADER.pack(len(answer)) + answer)
            answers.flush()
    return 0


def defer_package(name: str) -> None:
    """Let parts of a package be imported without its ``__init__``.

    A worker needs one or two parts; ``__init__`` imports all of them. It is run when
    a name is asked of the package itself.
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[-3:]))
