"""The errors that a user of ``tvm_adaptive`` can meet.

Every message says what is wrong, what was found, and what to do next. Catch
:class:`AdaptiveError` to catch them all.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

# Begins the error message of a result that is missing for a MachineError: whoever reads
# the result must not hold it against the candidate.
MACHINE_FAILURE = "machine: "
# What the system answers when it is out of processes, memory, descriptors or disk space.
MACHINE_ERRNOS = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}
)
# As a compiler or TVM quotes them. EAGAIN is left out: a network's timeout says the same.
_MACHINE_TEXTS = tuple(os.strerror(number) for number in MACHINE_ERRNOS - {errno.EAGAIN})


def is_machine_failure(message: str | None) -> bool:
    """Say whether a result's error message tells of the machine, not of the candidate.

    Parameters
    ----------
    message : str or None
        None, of a result without an error, is no failure.
    """
    return message is not None and message.startswith(MACHINE_FAILURE)


def machine_failure(error: BaseException) -> str:
    """Return one line about the machine's failure behind an exception; "" if there is none.

    The exceptions that led to it count, and so does a text that quotes the system, as a
    compiler's output does.

    Parameters
    ----------
    error : BaseException
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        is_known = isinstance(current, MemoryError) or (
            isinstance(current, OSError) and current.errno in MACHINE_ERRNOS
        )
        lines = [line.strip() for line in str(current).splitlines()]
        quoted = [line for line in lines if any(text in line for text in _MACHINE_TEXTS)]
        if is_known or quoted:
            told = quoted or [line for line in lines if line]
            return ": ".join([type(current).__name__, *told[:1]])
        current = current.__cause__ or current.__context__
    return ""


def summary_line(error: BaseException | str) -> str:
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


# What results say that are none: nothing was tried, or it was stopped for want of time.
OUT_OF_TIME = "the time of the run was over"


def is_out_of_time(message: object) -> bool:
    """Say whether an error message of a result is that of an :class:`OutOfTimeError`."""
    return message is not None and OUT_OF_TIME in str(message)


def is_untried(message: str | None) -> bool:
    """Say whether a result's error message tells nothing of the candidate: it is no trial.

    Parameters
    ----------
    message : str or None
        None, of a result without an error, is that of a trial.
    """
    return is_machine_failure(message) or is_out_of_time(message)


class AdaptiveError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedVersionError(AdaptiveError, ImportError):
    """The installed pair of apache-tvm and apache-tvm-ffi is known not to work."""


class InvalidOptionError(AdaptiveError, ValueError):
    """An option, a name, a target or a file that the user gave cannot be used."""


@contextlib.contextmanager
def as_invalid_option(what: str) -> Iterator[None]:
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
        raise InvalidOptionError(
            f"{what}: {type(error).__name__}: {summary_line(error)}"
        ) from error


class WorkDirInUseError(AdaptiveError):
    """Another run owns the work directory; the message names its process and host."""


class OtherMachineError(AdaptiveError):
    """The times in a work directory are another machine's, or another version of TVM's."""


class OtherModelError(AdaptiveError):
    """The model has changed since the run began that is to be resumed."""


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


class MachineError(WorkerError):
    """The machine could not do the work; what was asked for has done no wrong.

    No process, memory or disk space was left, or a worker was ended from outside.
    """


class OutOfTimeError(WorkerError):
    """The time of the run was over first; what was not done has done no wrong."""


class NoDeviceError(WorkerError):
    """No device of a farm could be had; what should run there has done no wrong."""


class LaneError(AdaptiveError):
    """A batch could not be searched and built elsewhere, whoever tried."""


class StoreError(AdaptiveError):
    """A record store cannot be opened, read or written; what was in it still is."""


def check_positive(name: str, value: float, advice: str = "") -> None:
    """Raise InvalidOptionError unless an option is above 0.

    Parameters
    ----------
    name : str
        The option's.
    value : float
    advice : str
        A sentence for the user, what to give instead. Default none.
    """
    if not value > 0:
        raise InvalidOptionError(f"{name} must be above 0 but got {value}. {advice}".rstrip())


def check_at_least(name: str, value: float, least: float, advice: str = "") -> None:
    """Raise InvalidOptionError unless an option is at least a given number.

    Parameters
    ----------
    name : str
        The option's.
    value, least : float
    advice : str
        A sentence for the user, what to give instead. Default none.
    """
    if not value >= least:
        raise InvalidOptionError(
            f"{name} must be at least {least:g} but got {value}. {advice}".rstrip()
        )
