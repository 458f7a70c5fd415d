"""One owner for a work directory: a second run there would write into the first one's files.

A lock of the system (``flock``) on a file in the directory says whether the owner lives; it
is gone when its process is, however that ended. On network file systems, where such locks
may hold on one machine only or not at all, what the file says counts, too: which process
of which host, and since when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tvm_adaptive.errors import InvalidOptionError, WorkDirInUseError
from tvm_adaptive.workers.file_system import file_system_of, is_shared_by_network

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
# The clock may be set while a run goes on; a process's number is not given again so soon.
_CLOCK_SLACK_SEC = 5.0
# Each try that is lost is lost to another run that begins or ends at the same moment.
_MAX_TRIES = 100


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who owns a work directory, as its lock file says."""

    pid: int
    host: str
    # when the process started, which tells it from a later one with the same number
    started_unix_sec: float
    since_unix_sec: float  # when the run began

    @classmethod
    def current(cls) -> Holder:
        """Return this process."""
        started_sec = psutil.Process().create_time()
        return cls(os.getpid(), socket.gethostname(), started_sec, time.time())

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it is a process of this host that runs."""
        if not self.is_here:
            return False
        try:
            started_sec = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # it is there
            return True
        return bool(abs(started_sec - self.started_unix_sec) < _CLOCK_SLACK_SEC)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_sec))
        return f"process {self.pid} on {self.host}, since {since}"


class Ownership:
    """A work directory that is ours until :meth:`release`."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self._made = _make_folders(work_dir)
        self._file: int | None = None
        try:
            self._file = _taken_file(work_dir / LOCK_FILE)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the directory back; remove it if it was made here and nothing was written."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                (self.work_dir / LOCK_FILE).unlink()
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
        for folder in self._made:
            with contextlib.suppress(OSError):  # it is not empty: the run has begun
                folder.rmdir()
        self._made = []


@contextlib.contextmanager
def owned(work_dir: Path) -> Iterator[Ownership]:
    """Own a work directory while inside; it is made if it is not there."""
    ownership = Ownership(work_dir)
    try:
        yield ownership
    finally:
        ownership.release()


def _make_folders(work_dir: Path) -> list[Path]:
    """Make a directory; return it and the parents that had to be made, innermost first."""
    chain = (work_dir, *work_dir.absolute().parents)
    missing = [folder for folder in chain if not folder.exists()]
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOptionError(
            f"The work directory {work_dir} cannot be made ({error.strerror}); choose another."
        ) from error
    return missing


def _taken_file(path: Path) -> int:
    """Return a descriptor of the lock file, which says that we own it."""
    try:
        if is_shared_by_network(file_system_of(path)):
            return _created_file(path)
        return _locked_file(path)
    except OSError as error:
        raise InvalidOptionError(
            f"The work directory {path.parent} cannot be written ({error.strerror}); make room "
            "there, or choose another."
        ) from error


def _locked_file(path: Path) -> int:
    """Take the lock file by a lock of the system, whatever a dead owner has left in it."""
    for _ in range(_MAX_TRIES):
        # Python's descriptors are closed when a program is started: workers that outlive a
        # killed tuner do not hold its lock.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                _write(file)
                return file
        except OSError as error:
            holder = _holder(path)
            os.close(file)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _refusal(path, holder, is_certain=True) from error
            if error.errno in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL):
                if holder is None:  # made above
                    path.unlink(missing_ok=True)
                return _created_file(path)
            raise
        os.close(file)  # its owner has removed it since
    raise _refusal(path, _holder(path), is_certain=True)


def _created_file(path: Path) -> int:
    """Take the lock file by making it, unless the one that is there names a living owner."""
    for _ in range(_MAX_TRIES):
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            holder = _holder(path)
            if holder is None or not holder.is_here or holder.is_alive:
                raise _refusal(path, holder, is_certain=False) from None
            logger.warning("%s: its owner is gone (%s); taken over", path, holder)
            path.unlink(missing_ok=True)
            continue
        try:
            _write(file)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file
    raise _refusal(path, _holder(path), is_certain=False)


def _refusal(path: Path, holder: Holder | None, *, is_certain: bool) -> WorkDirInUseError:
    who = "another process" if holder is None else str(holder)
    fix = "wait for it, end it, or choose another directory"
    if not is_certain and (holder is None or not holder.is_here):
        fix = f"wait for it, or delete {path} if that run is known to be dead"
    return WorkDirInUseError(f"A run goes on in {path.parent} ({who}); {fix}.")


def _holder(path: Path) -> Holder | None:
    """Return whom a lock file names; None if it names nobody."""
    try:
        fields = json.loads(path.read_bytes())
        return Holder(
            pid=int(fields["pid"]),
            host=str(fields["host"]),
            started_unix_sec=float(fields["started_unix_sec"]),
            since_unix_sec=float(fields["since_unix_sec"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(dataclasses.asdict(Holder.current())).encode(), 0)


def _is_at(path: Path, file: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(file))
