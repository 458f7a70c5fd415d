"""The journal: one append-only JSON-lines file per run.

Each line is one event: ``{"event": ..., "time_sec": ..., **fields}``, where ``time_sec``
counts seconds since this process opened it. The first line is the header
(``event == "journal"``) with the format version. Each line is one unbuffered ``write``, so
that a killed run loses at most its last line; :func:`read_journal` forgives exactly that torn
line.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tvm_adaptive.errors import JournalError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
# Of a run's folder.
JOURNAL_FILE = "journal.jsonl"
# What comes of an event whose fields are missing, or are something else.
DAMAGED_EVENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class JournalWriter(Protocol):
    """The interface of :class:`Journal` and :class:`NullJournal`."""

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``fields`` must be JSON-ready."""


class NullJournal:
    """A journal that drops all events."""

    def write(self, event: str, **fields: Any) -> None:
        """Do nothing."""


class Journal:
    """Append events to a JSON-lines file."""

    def __init__(
        self, path: Path, listener: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.path = path
        self.failure: OSError | None = None
        self._listener = listener
        # The runner's thread writes beside the run's: a failed line is cut off again.
        self._lock = threading.Lock()
        self._start_sec = time.monotonic()
        # What ends a torn line and begins the attempt is one write: either alone is damage.
        self._beginning = b"\n" if _ends_torn(path) else b""
        self._has_begun = False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        self.write("journal", version=FORMAT_VERSION, started_unix_sec=time.time(), pid=os.getpid())

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        time_sec = round(time.monotonic() - self._start_sec, 6)
        # The listener gets what a reader of the file gets: None for what JSON lacks.
        line = finite({"event": event, "time_sec": time_sec, **fields})
        text = json.dumps(line, allow_nan=False, separators=(",", ":"), default=str)
        with self._lock:
            self._append(text.encode() + b"\n")
        if self._listener is not None:
            try:
                self._listener(line)
            except Exception:
                logger.exception("the journal's listener failed at %s", event)

    def _append(self, line: bytes) -> None:
        """Write a whole line or nothing."""
        line = self._beginning + line
        before = os.fstat(self._file.fileno()).st_size
        try:
            n_written = self._file.write(line)
            if n_written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._beginning, self._has_begun = b"", True
        except OSError as error:
            if self.failure is None:
                logger.error("%s cannot be written: %s", self.path, error)
            self.failure = error
            if not self._has_begun:
                self._beginning = line
            with contextlib.suppress(OSError):
                self._file.truncate(before)

    def close(self) -> None:
        """Close the file; writing afterwards is an error."""
        self._file.close()


def write_guarded(journal: JournalWriter, event: str, **fields: Any) -> None:
    """Append one event; an error is logged: a full disk must not cost a batch."""
    try:
        journal.write(event, **fields)
    except Exception:
        logger.exception("the event %s could not be written to the journal", event)


def follow(path: Path, take: Callable[[dict[str, Any]], None]) -> None:
    """Pass the events of a journal to a function, one after another."""
    for number, event in _events(path):
        try:
            take(event)
        except DAMAGED_EVENT as error:
            raise JournalError(
                f"{path}, line {number} ({event['event']}) is not what this version writes "
                f"({type(error).__name__}: {error}). Remove its line to read the rest."
            ) from error


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read all events of a journal, also of a run that still runs or was killed."""
    return [event for _, event in _events(path)]


def _events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each event with the number of its line, up to a line that is still being written."""
    for number, (line, after) in enumerate(_with_next(path), start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("no event")
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                return
            if after.startswith(b'{"event":"journal"'):
                continue
            raise JournalError(
                f"{path}, line {number} is not valid JSON ({error}). Only a torn last line "
                "is forgiven; remove the damaged line to read the rest."
            ) from error
        version = event.get("version") if event["event"] == "journal" else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise JournalError(
                f"{path} has format version {version}, this package reads up to "
                f"{FORMAT_VERSION}. Update tvm_adaptive."
            )
        yield number, event
        if not line.endswith(b"\n"):  # the rest, written meanwhile, would be taken for a line
            return


def _with_next(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield each line and its successor, empty at the end, without reading the whole file."""
    with open(path, "rb") as file:
        yield from itertools.pairwise(itertools.chain(file, [b""]))


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def finite(value: Any) -> Any:
    """Return a JSON-ready value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
