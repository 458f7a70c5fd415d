"""Keep what native libraries write to standard error off the terminal, in a file of the run.

TVM's C++ code writes warnings to file descriptor 2, through any live screen. Only the command
moves that descriptor: it owns its process. In another program descriptor 2 belongs to that
program, whose other threads may write to it at any time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Below the work directory, beside the logs of MetaSchedule.
NATIVE_LOG = "logs/native.log"
_DESCRIPTOR = 2


class NativeLog:
    """File descriptor 2 of this process, which :meth:`begin` sends to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_open = False  # whether begin has an effect
        self._has_begun = False

    def begin(self) -> None:
        """Append to the file from now on; later calls do nothing."""
        if self._has_begun or not self._is_open:
            return
        self._has_begun = True
        with contextlib.suppress(OSError):  # the run works without this log
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, _DESCRIPTOR, inheritable=True)
            os.close(file)

    @contextlib.contextmanager
    def opened(self) -> Iterator[NativeLog]:
        """Give Python's messages a descriptor of their own inside; restore all of it after."""
        try:
            is_ours = sys.stderr is not None and sys.stderr.fileno() == _DESCRIPTOR
            kept = os.dup(_DESCRIPTOR) if is_ours else -1
        except (OSError, ValueError, io.UnsupportedOperation):  # closed, or not a file
            is_ours = False
        if not is_ours:  # a host of this command has its own standard error
            yield self
            return
        before = sys.stderr
        before.flush()
        own = open(  # noqa: SIM115 - closed below
            kept, "w", buffering=1, encoding=before.encoding, errors=before.errors
        )
        had_dumps = faulthandler.is_enabled()
        sys.stderr, self._is_open = own, True
        # TVM's own handler writes the native stack to the log: a crash must be seen, too.
        faulthandler.disable()  # enabled twice, it would not come before TVM's
        faulthandler.enable(own)
        try:
            yield self
        finally:
            self._is_open = False
            with contextlib.suppress(OSError):
                own.flush()
            os.dup2(kept, _DESCRIPTOR, inheritable=True)
            sys.stderr = before
            faulthandler.disable()
            if had_dumps:
                faulthandler.enable(before)
            with contextlib.suppress(OSError):
                own.close()
            self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Leave no empty file and folder behind, such as in a folder to deploy."""
        with contextlib.suppress(OSError):
            if self._has_begun and not self._path.stat().st_size:
                self._path.unlink()
                self._path.parent.rmdir()  # fails where other logs are


class StandardErrorHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to standard error as it is at each message: a live screen prints it above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, if there is a standard error."""
        if sys.stderr is not None:
            self.stream = sys.stderr
            super().emit(record)
