"""A closed pipe or terminal ends the output, not the program."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from tvm_adaptive.cli.console import PlainConsole, flush_or_drop, unless_closed


class Stream:
    """A standard stream whose flush fails, as after ``| head``."""

    def __init__(self, descriptor, error=errno.EPIPE):
        self._descriptor, self._error = descriptor, error

    def fileno(self):
        return self._descriptor

    def flush(self):
        raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("closed", [errno.EPIPE, errno.EIO])
def test_printing_ends_where_the_reader_has_left(closed, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(1, closed))
    with unless_closed():
        pass  # the flush at its end fails
    with unless_closed():
        raise OSError(closed, "closed")
    monkeypatch.setattr(sys, "stdout", None)
    with unless_closed():
        pass


def test_other_errors_of_the_output_are_reported(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream(1, errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"), unless_closed():
        pass


def test_a_console_raises_where_rich_would_end_the_program():
    with pytest.raises(BrokenPipeError):
        PlainConsole().on_broken_pipe()


def test_what_cannot_be_written_is_dropped_so_that_the_end_is_in_order(monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    with pytest.raises(BrokenPipeError):
        os.write(writes, b"x")
    monkeypatch.setattr(sys, "stdout", Stream(writes))
    monkeypatch.setattr(sys, "stderr", None)
    flush_or_drop()
    assert os.write(writes, b"x") == 1  # it leads nowhere now
    os.close(writes)
    flush_or_drop()  # nothing is left to lead anywhere
