"""A closed pipe or terminal ends the output, not the program."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest
from rich.table import Table

from tvm_adaptive.cli.console import PlainConsole, flush_or_drop, unless_closed
from tvm_adaptive.cli.display import Display
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.tuning.budget import Budget


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


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def shown(file):
    """Return what a display writes of a stage and a round."""
    with Display(PlainConsole(file=file)) as display:
        display.stage("search")
        display.event({"event": "journal"})
        display.round(RunProgress([TaskProgress("a", 1.0, 4, 1, 0.001)]), Budget(10.0))
    return file.getvalue()


@pytest.mark.parametrize(
    ("term", "is_live", "file"),
    [("xterm", True, Terminal), ("dumb", False, Terminal), ("xterm", False, io.StringIO)],
)
def test_only_a_terminal_that_can_move_its_cursor_is_drawn_on(term, is_live, file, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = shown(file())
    assert ("\x1b[?25l" in text) is is_live
    assert ("search ..." in text) is not is_live
    assert ("sum of tasks 1.000 ms" in text) is not is_live


def test_off_a_terminal_names_are_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for file, is_whole in ((io.StringIO(), True), (Terminal(), False)):
        table = Table("task")
        table.add_row("n" * 100)
        PlainConsole(file=file).print(table)
        assert ("n" * 100 in file.getvalue()) is is_whole


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
