"""Exit codes, and output to a pipe or terminal that may be closed before all is written."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

EXIT_OK = 0
EXIT_BAD_RESULT = 1
EXIT_BAD_INPUT = 2

# Off a terminal: scripts and logs need whole names.
_LEAST_COLUMNS = 1000
# Of a pipe without a reader, and of a terminal that was closed.
_CLOSED = (errno.EPIPE, errno.EIO)


class PlainConsole(Console):
    """A console of long lines off a terminal, and that raises when its reader is gone.

    Rich's own would end the program.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.file.isatty():
            self.is_interactive = False  # also where FORCE_COLOR calls the file a terminal
            self.width = max(self.width, _LEAST_COLUMNS)

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextlib.contextmanager
def unless_closed() -> Iterator[None]:
    """Leave this block when standard output is closed while it prints."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _CLOSED:
            raise


def flush_or_drop() -> None:
    """Flush both streams, or drop their text; otherwise Python would end with an error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed from the beginning
            continue
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
