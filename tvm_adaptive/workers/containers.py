"""The limits that Linux's control groups set this process: processor time and memory.

A container's limits are those of its control group and of all groups above it, in version 1
or version 2 of control groups. Elsewhere, and where the groups are hidden, there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tvm_adaptive.workers.file_system import text_of, unescaped

PROC = Path("/proc")


def cpu_limit(proc: Path = PROC) -> float | None:
    """Return how many processors' time this process may use; None for all."""
    return min(_cpu_limits(proc), default=None)


def memory_limit(proc: Path = PROC) -> int | None:
    """Return the bytes that this process and its group may use; None for all there are."""
    limit = min((limit for limit, _ in _memory_limits(proc)), default=None)
    total = _meminfo(proc, "MemTotal")
    # Version 1 writes a number near 2^63 where there is no limit.
    return None if limit is None or (total is not None and limit >= total) else limit


def available_memory(proc: Path = PROC) -> int | None:
    """Return the free bytes; cached files that were not read lately count as free."""
    found = [max(0, limit - used) for limit, used in _memory_limits(proc) if used is not None]
    of_machine = _meminfo(proc, "MemAvailable")
    return min(found if of_machine is None else [*found, of_machine], default=None)


class OomKills:
    """Counters of the processes that the system killed because memory ran out."""

    def __init__(self, proc: Path = PROC) -> None:
        self._files = [proc / "vmstat"]
        for _, group in _own_groups(proc, "memory"):
            self._files += [group / "memory.events", group / "memory.oom_control"]

    def count(self) -> tuple[int, ...]:
        """Return the present counts: of the machine and of each own group."""
        return tuple(_field(text_of(path), "oom_kill") or 0 for path in self._files)


def _cpu_limits(proc: Path) -> Iterator[float]:
    for group in _groups(proc, "cpu"):
        fields = text_of(group / "cpu.max").split()
        if len(fields) != 2:
            fields = [text_of(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if all(field.isdecimal() for field in fields) and int(fields[0]) and int(fields[1]):
            yield int(fields[0]) / int(fields[1])


def _memory_limits(proc: Path) -> Iterator[tuple[int, int | None]]:
    """Yield the limit of each group that has one, and the bytes in use."""
    for group in _groups(proc, "memory"):
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        texts = [text_of(group / name).strip() for name in names]
        limits = [int(text) for text in texts if text.isdecimal()]
        if limits:
            yield min(limits), _used(group)


def _used(group: Path) -> int | None:
    stat = text_of(group / "memory.stat")
    for name, cached in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        text = text_of(group / name).strip()
        if text.isdecimal():
            return max(0, int(text) - (_field(stat, cached) or 0))
    return None


def _groups(proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups and of all groups above them."""
    for mount, path in _own_groups(proc, controller):
        yield path
        yield from (above for above in path.parents if above.is_relative_to(mount))


def _own_groups(proc: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield where a controller's groups are mounted, and the folder of this process's group."""
    ours = {}
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        ours.update(dict.fromkeys(controllers.split(","), path))  # "" for version 2
    for line in text_of(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        root, point = (unescaped(field) for field in before.split()[3:5])
        kind, _, options = after.split(" ")[:3]  # the source may be empty
        wanted = "" if kind == "cgroup2" else controller
        if kind not in ("cgroup", "cgroup2") or wanted not in ours:
            continue
        if wanted and wanted not in options.split(","):
            continue
        mount = Path(point)
        inside = Path(ours[wanted])
        # A container sees its own group mounted as if it were the topmost.
        if root != "/" and inside.is_relative_to(root):
            inside = Path("/") / inside.relative_to(root)
        folder = mount / inside.relative_to("/")
        yield mount, folder if ".." not in inside.parts and folder.is_dir() else mount


def _meminfo(proc: Path, name: str) -> int | None:
    kilobytes = _field(text_of(proc / "meminfo"), f"{name}:")
    return None if kilobytes is None else kilobytes << 10


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^[ \t]*{re.escape(name)}[ \t]+(\d+)(?=\s|$)", text, re.MULTILINE)
    return None if found is None else int(found[1])
