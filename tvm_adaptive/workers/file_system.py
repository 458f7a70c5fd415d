"""Files of the system, and which file system a path is on."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
# Locks and shared memory on these hold on one machine only, or not at all.
# fmt: off
_NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "lustre", "gpfs",
    "ceph", "9p", "virtiofs", "vboxsf", "prl_fs", "beegfs", "beegfs_nodev", "afs", "coda",
    "orangefs", "pvfs2", "ocfs2", "gfs2", "glusterfs", "panfs", "wekafs", "davfs", "acfs", "vmhgfs",
})
# fmt: on
# Most FUSE file systems keep their files on another machine; this one does not.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})


def forbids_programs(folder: Path) -> bool:
    """Say whether the disk of a folder is mounted so that no code on it can be run."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)
    except OSError:  # it does not answer
        return False


def text_of(path: Path, errors: str = "surrogateescape") -> str:
    """Return the text of a file of the system; "" if it cannot be read."""
    try:
        return path.read_text(errors=errors)
    except OSError:
        return ""


def unescaped(field: str) -> str:
    """Return a path of a list of mounts, where spaces and the like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def file_system_of(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type of the file system that a file is or would be on; "" if unknown."""
    real = Path(os.path.realpath(path))
    found, depth = "", -1
    for line in text_of(mountinfo).splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mounted = Path(unescaped(fields[4]))
        # A later mount at the same place covers an earlier one.
        if real.is_relative_to(mounted) and len(mounted.parts) >= depth:
            found, depth = after.split(" ")[0], len(mounted.parts)
    return found


def is_shared_by_network(kind: str) -> bool:
    """Return whether several machines may write to a file system of a type."""
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    return kind in _NETWORK_FILE_SYSTEMS or (is_fuse and kind not in _LOCAL_FUSE)
