"""The program of a worker process; started by :mod:`tvm_adaptive.workers`, never by hand."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from typing import Any

import cloudpickle

from tvm_adaptive.workers import HEADER

_PR_SET_PDEATHSIG = 1  # Linux <sys/prctl.h>


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
    with os.fdopen(reads, "rb") as tasks, os.fdopen(writes, "wb") as answers:
        while header := tasks.read(HEADER.size):
            (size,) = HEADER.unpack(header)
            answer = cloudpickle.dumps(_answer(tasks.read(size)))
            answers.write(HEADER.pack(len(answer)) + answer)
            answers.flush()
    return 0


def _answer(payload: bytes) -> tuple[bool, Any]:
    try:
        function, args = cloudpickle.loads(payload)
        value = function(*args)
        cloudpickle.dumps(value)  # an answer that cannot travel is the task's error
        return True, value
    except Exception:
        return False, traceback.format_exc()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
