"""Ctrl-C, SIGTERM and a closed terminal: the first ends a run in order, a second at once.

The main thread of a run is mostly inside TVM, or waits for a worker or a database, and
Python's own handlers do not run there. So a separate thread reads the numbers that Python's
handler in C writes at once (:func:`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

logger = logging.getLogger(__name__)

# In the pipe of signals: no signal has this number.
_END = b"\0"
# A shell reports it for a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130
# One keystroke, one closed terminal and one "kill" may arrive twice: from the kernel and
# from a shell, from "timeout" to the process and to its group. No user repeats so soon.
_ONE_REQUEST_SEC = 0.5
# For a display to restore the screen; it may hang as the main thread does.
_RESTORE_SEC = 1.0


@contextlib.contextmanager
def interruptible(
    interrupt: Callable[[], None],
    *,
    restore_screen: Callable[[], None],
    release: Callable[[], None],
) -> Iterator[None]:
    """Turn signals into a flag; a second one ends the process within two seconds.

    Python's own handler would raise wherever the main thread happens to be; inside TVM's
    native search that is a segmentation fault. Workers end with the process. Outside the
    main thread, where Python sets no handlers, nothing is caught; in an interactive
    interpreter a second signal ends nothing, as its variables are the user's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = _numbers()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def end(name: str) -> None:
        _end_display(name, restore_screen)
        release()
        os._exit(EXIT_INTERRUPTED)

    watcher = threading.Thread(
        target=_watch, args=(reads, numbers, interrupt, end), name="signals", daemon=True
    )
    watcher.start()

    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupt()

    wakeup_before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # of a library in C, which Python cannot set again
                signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        # A child that the program has forked may keep the pipe open.
        os.set_blocking(writes, True)
        os.write(writes, _END)
        watcher.join()
        os.close(writes)
        os.close(reads)


def _numbers() -> frozenset[int]:
    """Return the signals that request an end."""
    numbers = {signal.SIGINT, signal.SIGTERM}
    # "nohup" lets a run outlive its terminal.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.add(signal.SIGHUP)
    return frozenset(numbers)


def _watch(
    reads: int, numbers: frozenset[int], interrupt: Callable[[], None], end: Callable[[str], None]
) -> None:
    """Handle signals until the end is written to the pipe."""
    first_sec: float | None = None
    while (received := os.read(reads, 64)) and not received.endswith(_END):
        for number in numbers.intersection(received):
            name = signal.Signals(number).name
            if first_sec is None:
                first_sec = time.monotonic()
                interrupt()
                _log("%s: stopping after this round; once more ends at once", name)
            elif time.monotonic() - first_sec < _ONE_REQUEST_SEC:
                continue  # an echo of the first one
            elif hasattr(sys, "ps1") or sys.flags.interactive:
                _log("%s: stopping after this round; restart Python to end now", name)
            else:
                end(name)


def _log(text: str, name: str) -> None:
    """Log in a thread: a blocked standard error must not hide a second signal."""
    with contextlib.suppress(RuntimeError):  # there may be no more threads
        threading.Thread(target=logger.warning, args=(text, name), daemon=True).start()


def _end_display(name: str, restore_screen: Callable[[], None]) -> None:
    """Restore the screen and log the end, in a thread: a display may hang."""

    def restore() -> None:
        restore_screen()
        logger.warning("%s again: ended at once; what was written is kept", name)

    with contextlib.suppress(RuntimeError):  # there may be no more threads
        thread = threading.Thread(target=restore, daemon=True)
        thread.start()
        thread.join(_RESTORE_SEC)
