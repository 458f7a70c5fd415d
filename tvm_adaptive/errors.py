"""The errors that a user of ``tvm_adaptive`` can meet.

Every message says what is wrong, what was found, and what to do next. Catch
:class:`AdaptiveError` to catch them all.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator

# Begins the error message of a result that failed by a MachineError, which says nothing of
# the candidate.
MACHINE_FAILURE = "machine: "
# System errors for a lack of processes, memory, descriptors or disk space, and for a disk or a
# server of files that fails.
MACHINE_ERRNOS = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}
    | {errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
)
# As a compiler or TVM quotes them; not EAGAIN, because a network's timeout says the same.
_MACHINE_TEXTS = (
    *(os.strerror(number) for number in MACHINE_ERRNOS - {errno.EAGAIN}),
    # Of C++, whose tensors a limit on memory refuses.
    "std::bad_alloc",
    # Of a GPU whose memory other programs hold, or whose driver was replaced, as TVM says it.
    "CUDA: out of memory",
    "CUDA: no CUDA-capable device is detected",
)


def is_machine_failure(message: str | None) -> bool:
    """Say whether a result's error message, None without one, is a failure of the machine."""
    return message is not None and message.startswith(MACHINE_FAILURE)


def machine_failure(error: BaseException) -> str:
    """Return one line about the machine's failure behind an exception; "" if there is none.

    Checks the exception, its causes, and texts that quote the system, e.g. compiler output.
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
            shown = quoted or [line for line in lines if line]
            return ": ".join([type(current).__name__, *shown[:1]])
        current = current.__cause__ or current.__context__
    return ""


def summary_line(error: BaseException | str) -> str:
    """Return an error's most informative line: the last of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "unknown error" if isinstance(error, str) else type(error).__name__
    # A runner or builder puts its own name before the worker's traceback.
    head = "Traceback (most recent call last):"
    has_traceback = any(line.startswith("Traceback") or line.endswith(head) for line in lines)
    return lines[-1] if has_traceback else lines[0]


# Error message of candidates that were not tried or were stopped when time ran out.
OUT_OF_TIME = "the time of the run was over"


def is_out_of_time(message: object) -> bool:
    """Say whether an error message of a result is that of an :class:`OutOfTimeError`."""
    return message is not None and OUT_OF_TIME in str(message)


def is_untried(message: str | None) -> bool:
    """Say whether a result is no trial: its error message says nothing of the candidate."""
    return is_machine_failure(message) or is_out_of_time(message)


class AdaptiveError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedVersionError(AdaptiveError, ImportError):
    """The installed pair of apache-tvm and apache-tvm-ffi is known not to work."""


class InvalidOptionError(AdaptiveError, ValueError):
    """An option, a name, a target or a file that the user gave cannot be used."""


@contextlib.contextmanager
def as_invalid_option(what: str) -> Iterator[None]:
    """Turn any exception inside into an :class:`InvalidOptionError` that begins with ``what``.

    For a user's own code, frameworks and compilers, which may raise anything, and may end the
    program (``SystemExit``). Errors of this package pass.
    """
    try:
        yield
    except AdaptiveError:
        raise
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise InvalidOptionError(f"{what}: {kind}: {summary_line(error)}") from error


class WorkDirInUseError(AdaptiveError):
    """Another run owns the work directory; the message names its process and host."""


class OtherMachineError(AdaptiveError):
    """The times in a work directory are of another machine, another TVM or another target."""


class OtherModelError(AdaptiveError):
    """The model has changed since the start of the run to be resumed or applied."""


class ModelFileError(AdaptiveError):
    """A saved cost model cannot be read; the model in memory is unchanged."""


class ImportMismatchError(AdaptiveError):
    """An imported model computes other results in TVM than in its own framework."""


class JournalError(AdaptiveError):
    """A journal is damaged in a place other than its last line."""


class WorkerError(AdaptiveError):
    """A task of a worker process failed."""


class WorkerTimeoutError(WorkerError):
    """The deadline passed; the worker's process group was killed."""


class WorkerDiedError(WorkerError):
    """The worker process ended (crash, exit, signal) before it answered."""


class WorkerTaskError(WorkerError):
    """The function raised inside the worker; the message carries the remote traceback."""


class MachineError(WorkerError):
    """The machine failed, not the task: no process, memory or disk space was left."""


class OutOfTimeError(WorkerError):
    """The time of the run was over before the task ended; the task did not fail."""


class NoDeviceError(WorkerError):
    """No device of a farm was available; the task did not fail."""


class DeviceUnreachableError(NoDeviceError):
    """The device that a farm offered gave no session; another one may."""


class LaneError(AdaptiveError):
    """No lane could search and build a batch."""


class StoreError(AdaptiveError):
    """A record store cannot be opened, read or written; its content is unchanged."""


class StoreDataError(StoreError):
    """A record store refuses what it is given: another try would end alike."""


def check_at_least(name: str, value: float | None, low: float) -> None:
    """Raise an :class:`InvalidOptionError` if a number is too small; None passes."""
    if value is not None and not value >= low:
        raise InvalidOptionError(f"{name} must be at least {low} but got {value}.")


def check_positive(name: str, value: float | None) -> None:
    """Raise an :class:`InvalidOptionError` unless a number is above 0; None passes."""
    if value is not None and not value > 0:
        raise InvalidOptionError(f"{name} must be above 0 but got {value}.")


def check_share(name: str, value: float | None, interval: str = "[0, 1)") -> None:
    """Raise an :class:`InvalidOptionError` unless a number is in the interval; None passes."""
    if value is None:
        return
    above = value >= 0.0 if interval[0] == "[" else value > 0.0
    below = value <= 1.0 if interval[-1] == "]" else value < 1.0
    if not (above and below):
        raise InvalidOptionError(f"{name} must be in {interval} but got {value}.")


def check_choices(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise an :class:`InvalidOptionError` unless a value is one of the choices."""
    known = tuple(choices)
    if value not in known:
        raise InvalidOptionError(f"{name} must be one of {', '.join(known)} but got {value!r}.")
