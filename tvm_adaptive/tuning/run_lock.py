"""One owner for a work directory: a second run there would write into the first one's files.

A lock of the system (``flock``) on a file in the directory shows whether the owner lives;
it ends with its process. On network file systems, where such locks may hold on one machine
only or not at all, the content of the file counts too: an owner is gone if it was a process of
this host, this start of it and this container, and none of these is the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tvm_adaptive.errors import InvalidOptionError, WorkDirInUseError
from tvm_adaptive.workers.file_system import file_system_of, is_shared_by_network
from tvm_adaptive.workers.scratch import Owner

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
# A try fails only if another run begins or ends at the same moment.
_MAX_TRIES = 100


@dataclasses.dataclass(frozen=True)
class Holder:
    """The owner of a work directory, by its lock file."""

    owner: Owner
    since_unix_sec: float  # of the run

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_sec))
        return f"process {self.owner.pid} on {self.owner.host}, since {since}"


class Ownership:
    """A work directory that this process owns until :meth:`release`."""

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
        """Release the directory; remove it if it was made here and is still empty."""
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
    """Own a work directory while inside; create it if it does not exist."""
    ownership = Ownership(work_dir)
    try:
        yield ownership
    finally:
        ownership.release()


def _make_folders(work_dir: Path) -> list[Path]:
    """Create a directory; return what was created of its path, innermost first."""
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
    """Take the lock file; return its descriptor."""
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
    """Take the lock file by a lock of the system; a dead owner's content does not count."""
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
    """Take the lock file by creating it, unless it exists and names a living owner."""
    for _ in range(_MAX_TRIES):
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            holder = _holder(path)
            if holder is None or not holder.owner.is_gone():
                raise _refusal(path, holder, is_certain=False) from None
            if _removed(path, holder):
                logger.warning("%s: its owner is gone (%s); taken over", path, holder)
            continue
        try:
            _write(file)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file
    raise _refusal(path, _holder(path), is_certain=False)


def _removed(path: Path, holder: Holder) -> bool:
    """Remove the lock file of an owner that is gone, unless another one has followed it."""
    found = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.rename(found)
    except FileNotFoundError:
        return False
    is_gone = _holder(found) == holder
    if is_gone:
        found.unlink()
    else:
        found.rename(path)
    return is_gone


def _refusal(path: Path, holder: Holder | None, *, is_certain: bool) -> WorkDirInUseError:
    who = "another process" if holder is None else str(holder)
    fix = "wait for it, end it, or choose another directory"
    if not is_certain and (holder is None or Owner.of(holder.owner.pid) != holder.owner):
        fix = f"wait for it, or delete {path} if you know that the run has ended"
    return WorkDirInUseError(f"A run is in progress in {path.parent} ({who}); {fix}.")


def _holder(path: Path) -> Holder | None:
    """Return the owner that a lock file names; None if it names none."""
    try:
        fields = json.loads(path.read_bytes())
        since_unix_sec = float(fields.pop("since_unix_sec"))
        return Holder(Owner(**fields), since_unix_sec)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(file: int) -> None:
    fields = {**dataclasses.asdict(Owner.of(os.getpid())), "since_unix_sec": time.time()}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(fields).encode(), 0)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
