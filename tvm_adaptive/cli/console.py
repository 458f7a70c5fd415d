"""Output to a pipe or terminal that may be closed before all is written (``| head``)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console

# Of a pipe without a reader, and of a terminal that was closed.
_CLOSED = (errno.EPIPE, errno.EIO)


class PlainConsole(Console):
    """A console that raises when nobody reads it; rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextlib.contextmanager
def unless_closed() -> Iterator[None]:
    """Go on behind this block when standard output is closed while it prints."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _CLOSED:
            raise


def settle() -> None:
    """Write what is left of both streams, or drop it; Python would end with an error later."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed from the beginning
            continue
        try:
            stream.flush()
        except OSError:
            _drop(stream)


def _drop(stream: TextIO) -> None:
    """Send a stream's unwritten text nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
