"""What tests ask about processes they started."""

from __future__ import annotations

import time

import psutil


def gone(pid: int) -> bool:
    """Return whether a process ends within ten seconds; a zombie has ended."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False
