"""File systems that several machines may write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_adaptive.workers.file_system import file_system_of, is_shared_by_network


def mounts(path: Path, *lines: tuple[str, str]) -> Path:
    """Write what Linux would say of mounted file systems."""
    text = "".join(
        f"{number} 1 0:{number} / {place} rw,relatime shared:1 - {kind} source rw\n"
        for number, (place, kind) in enumerate(lines, start=20)
    )
    path.write_text(text)
    return path


def test_the_file_system_of_a_path_is_the_innermost(tmp_path: Path) -> None:
    table = mounts(
        tmp_path / "mountinfo",
        ("/", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/fast", "xfs"),
        (r"/mnt/two\040words", "fuse.sshfs"),
        ("/over", "ext4"),
        ("/over", "lustre"),
    )
    found = {
        place: file_system_of(Path(place), table)
        for place in (
            "/homes/me",
            "/home/me/new folder/records.db",
            "/home/me/fast/records.db",
            "/mnt/two words/x",
            "/over/x",
        )
    }
    assert list(found.values()) == ["ext4", "nfs4", "xfs", "fuse.sshfs", "lustre"]
    assert file_system_of(Path("/home"), tmp_path / "missing") == ""
    (tmp_path / "odd").write_text("no\nsuch table - \n\n1 2 3 - x")
    assert file_system_of(Path("/home"), tmp_path / "odd") == ""


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph")),
        *((kind, True) for kind in ("9p", "beegfs", "afs", "fuse.sshfs", "fuse.glusterfs")),
        *((kind, False) for kind in ("ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "")),
        *((kind, False) for kind in ("fuseblk", "fuse.fuse-overlayfs")),
    ],
)
def test_which_file_systems_lie_on_other_machines(kind: str, is_shared: bool) -> None:
    assert is_shared_by_network(kind) is is_shared
