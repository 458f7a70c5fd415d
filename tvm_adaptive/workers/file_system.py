"""Which file system a path is on, and whether several machines may write to it."""

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


def file_system_of(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type of the file system that a file is or would be on; "" if unknown."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real = Path(os.path.realpath(path))
    found, depth = "", -1
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        # A later mount at the same place covers an earlier one.
        if real.is_relative_to(mounted) and len(mounted.parts) >= depth:
            found, depth = after.split(" ")[0], len(mounted.parts)
    return found


def is_shared_by_network(kind: str) -> bool:
    """Return whether several machines may write to a file system of a type."""
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    return kind in _NETWORK_FILE_SYSTEMS or (is_fuse and kind not in _LOCAL_FUSE)
