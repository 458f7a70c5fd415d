"""The errors that a user of ``tvm_adaptive`` can meet.

Every message says what is wrong, what was found, and what to do next. Catch
:class:`AdaptiveError` to catch them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def essence(error: BaseException | str) -> str:
    """Return the line of an error that says most: of a traceback the last, else the first.

    Parameters
    ----------
    error : BaseException or str
        Or its message.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "unknown error" if isinstance(error, str) else type(error).__name__
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]


class AdaptiveError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedVersionError(AdaptiveError, ImportError):
    """The installed pair of apache-tvm and apache-tvm-ffi is known not to work."""


class InvalidOptionError(AdaptiveError, ValueError):
    """An option, a name, a target or a file that the user gave cannot be used."""


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn whatever is raised inside into one line of an :class:`InvalidOptionError`.

    For code that may raise anything: a user's own, or a framework's reader.

    Parameters
    ----------
    what : str
        What could not be done, the beginning of the message.
    """
    try:
        yield
    except Exception as error:
        raise InvalidOptionError(f"{what}: {type(error).__name__}: {essence(error)}") from error


class ModelFileError(AdaptiveError):
    """A saved cost model cannot be read; the model in memory is unchanged."""


class ImportMismatchError(AdaptiveError):
    """An imported model computes something else in TVM than in its own framework."""


class JournalError(AdaptiveError):
    """A journal is damaged in a place other than its last line."""


class WorkerError(AdaptiveError):
    """A task given to a worker process brought no result."""


class WorkerTimeoutError(WorkerError):
    """The deadline passed; the worker and everything it had started were killed."""


class WorkerDiedError(WorkerError):
    """The worker process ended (crash, exit, signal) before it answered."""


class WorkerTaskError(WorkerError):
    """The function raised inside the worker; the message carries the remote traceback."""


class NoDeviceError(WorkerError):
    """No device of a farm could be had; what should run there has done no wrong."""


class LaneError(AdaptiveError):
    """A batch could not be searched and built elsewhere, whoever tried."""


class StoreError(AdaptiveError):
    """A record store cannot be opened, read or written; what was in it still is."""
