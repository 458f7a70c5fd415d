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
from typing import Any

logger = logging.getLogger(__name__)

# In the pipe of signals: no signal has this number.
_END = b"\0"
# They request an end.
_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A shell reports it for a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130
# One keystroke, one closed terminal and one "kill" may arrive twice: from the kernel and
# from a shell, from "timeout" to the process and to its group. No user repeats so soon.
_ONE_REQUEST_SEC = 0.5
# For a display to restore the screen; it may hang as the main thread does.
_RESTORE_SEC = 1.0

# The handlers that each active `interruptible` has replaced, the outermost first.
_replaced: list[dict[int, Any]] = []
_forking = threading.local()  # its `mask`: the signals that a thread blocked before it forks


@contextlib.contextmanager
def interruptible(
    interrupt: Callable[[], None],
    *,
    restore_screen: Callable[[], None],
    release: Callable[[], None],
) -> Iterator[None]:
    """Turn signals into a flag; a second one ends a program within two seconds.

    Python's own handler would raise wherever the main thread happens to be; inside TVM's
    native search that is a segmentation fault. Workers end with the process. Outside the
    main thread, where Python sets no handlers, nothing is caught, and signals that are ignored
    stay ignored; in an interactive interpreter a second signal ends nothing, as its variables
    are the user's. A process that the program forks meanwhile has the handlers of before.
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

    owner = os.getpid()
    # Known before the first is replaced: another thread may fork at any time.
    _replaced.append({number: signal.getsignal(number) for number in numbers})
    wakeup_before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        if os.getpid() == owner:  # else a forked child, where nothing is left to undo
            _restore(_replaced[-1])
            signal.set_wakeup_fd(wakeup_before)
            _replaced.pop()
            # A child that the program has forked may keep the pipe open.
            os.set_blocking(writes, True)
            os.write(writes, _END)
            watcher.join()
            os.close(writes)
            os.close(reads)


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Set this program's handlers again after code that sets its own, as Ray does.

    Also where Python knows of no change: a library in C replaces them without its knowledge.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        _restore(handlers)


def raise_when_signalled() -> None:
    """Let SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does.

    For the main program, whose ``finally`` blocks restore the screen and remove scratch files
    also before and after it is :func:`interruptible`.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _numbers() - {signal.SIGINT}:  # which Python raises itself
        signal.signal(number, signal.default_int_handler)


def _restore(handlers: dict[int, Any]) -> None:
    """Set handlers as they were."""
    for number, handler in handlers.items():
        if handler is not None:  # of a library in C, which Python cannot set again
            signal.signal(number, handler)


def _before_fork() -> None:
    """Let signals to a child wait until it has its own handlers."""
    numbers = {number for handlers in _replaced for number in handlers}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _after_fork_in_parent() -> None:
    """Let signals through again."""
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    """Undo what is the parent's; the wakeup descriptor is the parent's pipe."""
    if _replaced:
        signal.set_wakeup_fd(-1)
    while _replaced:
        _restore(_replaced.pop())
    _after_fork_in_parent()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def _numbers() -> frozenset[int]:
    """Return the signals that request an end: those that this process does not ignore."""
    # Some are ignored on purpose: by "nohup", and Ctrl-C in the background jobs of scripts.
    return frozenset(each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN)


def _watch(
    reads: int, numbers: frozenset[int], interrupt: Callable[[], None], end: Callable[[str], None]
) -> None:
    """Handle signals until the end is written to the pipe."""
    first_sec: float | None = None
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    sooner = "a second one ends it within two seconds"
    if is_interactive:  # its variables are the user's
        sooner = "restart Python to end it now"
    text = f"%s: the run ends after this batch; {sooner}"
    while (received := os.read(reads, 64)) and not received.endswith(_END):
        for number in numbers.intersection(received):
            name = signal.Signals(number).name
            if first_sec is None:
                first_sec = time.monotonic()
                interrupt()
                _log(text, name)
            elif time.monotonic() - first_sec < _ONE_REQUEST_SEC:
                continue  # an echo of the first one
            elif is_interactive:
                _log(text, name)
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
