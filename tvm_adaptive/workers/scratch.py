"""Temporary folders that name their owner; a new one removes those of dead owners."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from tvm_adaptive.workers.file_system import text_of

PREFIX = "tvm-adaptive-"
OWNER_FILE = "owner.json"
_PROC = Path("/proc")
# A killed process may write for a moment longer; a later folder removes what is left.
_REMOVE_TRIES = 5
_REMOVE_PAUSE_SEC = 0.1


class ScratchFolder:
    """A folder that is removed when this process, its owner, ends."""

    def __init__(self, purpose: str, parent: str | Path | None = None) -> None:
        place = Path(tempfile.gettempdir() if parent is None else parent)
        remove_abandoned(place)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=place))
        self._remove = weakref.finalize(self, _remove_own, self.path, os.getpid())
        owner = json.dumps(dataclasses.asdict(Owner.of(os.getpid())))
        (self.path / OWNER_FILE).write_text(owner)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with its content as far as possible."""
        self._remove()


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process, distinguished from all others that ever ran on this machine."""

    host: str
    boot: str  # differs after every start of the machine; empty if unknown
    namespace: str  # of process ids: each container has its own
    pid: int
    started: str  # in the kernel's ticks; empty if there is no such process

    @classmethod
    def of(cls, pid: int, proc: Path = _PROC) -> Owner:
        """Describe a process of this machine."""
        boot = text_of(proc / "sys" / "kernel" / "random" / "boot_id").strip()
        try:
            namespace = os.readlink(proc / "self" / "ns" / "pid")
        except OSError:
            namespace = ""
        # Behind the program's name, which may hold spaces and brackets itself.
        fields = text_of(proc / str(pid) / "stat").rpartition(")")[2].split()
        is_alive = len(fields) > 19 and fields[0] not in "ZX"
        return cls(socket.gethostname(), boot, namespace, pid, fields[19] if is_alive else "")

    def is_gone(self, proc: Path = _PROC) -> bool:
        """Say whether the process has ended; False if unknown."""
        if not (self.boot and self.namespace and self.started):
            return False
        present = Owner.of(self.pid, proc)
        return dataclasses.replace(present, started=self.started) == self != present

    def is_alive_here(self) -> bool:
        """Say whether it is a process of this machine and container; True if unknown."""
        return Owner.of(self.pid) == self


def remove_abandoned(place: Path) -> None:
    """Remove scratch folders whose owners, of the same user and machine, are gone."""
    _remove_where(place, Owner.is_gone)


def remove_left_behind(place: Path) -> None:
    """Remove the scratch folders in a locked directory, but those of living processes here.

    Whoever has the lock knows that the owners on other machines and in containers have ended.
    """
    _remove_where(place, lambda owner: not owner.is_alive_here())


def _remove_where(place: Path, is_gone: Callable[[Owner], bool]) -> None:
    """Remove the scratch folders of this user that name such an owner."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError, ValueError, TypeError):
                is_ours = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                if not is_ours or not entry.is_dir(follow_symlinks=False):
                    continue
                folder = Path(entry.path)
                if is_gone(Owner(**json.loads((folder / OWNER_FILE).read_bytes()))):
                    remove_folder(folder)


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # else a copy of the owner, forked by the user
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, the owner's name last, so that an interrupted removal can be repeated."""
    for _ in range(_REMOVE_TRIES):
        with contextlib.suppress(OSError):
            for entry in [each for each in folder.iterdir() if each.name != OWNER_FILE]:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
            if {entry.name for entry in folder.iterdir()} <= {OWNER_FILE}:
                shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_REMOVE_PAUSE_SEC)
