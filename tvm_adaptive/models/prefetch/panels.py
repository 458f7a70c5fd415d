"""In which order panels of a weight are read, and who asks for which lines. Pure.

A panel is what a kernel reads of a weight between two steps of the loops that are around
all of a sum's; a line is a cache line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Visits:
    """A regular order: groups of panels, each read several times before the next one."""

    n_panels: int  # in a group, read one after the other
    n_visits: int  # how often a group is read, all of it each time

    @property
    def period(self) -> int:
        """Steps until the next group begins."""
        return self.n_panels * self.n_visits


def visits_of(offsets: Iterable[int]) -> Visits | None:
    """Recognise the order in which panels are read."""
    read: list[int] = []
    group: set[int] = set()
    n_panels = 0
    for offset in offsets:
        is_new = offset not in group
        if is_new and n_panels:
            break  # the next group
        if not is_new and not n_panels:
            n_panels = len(read)
        group.add(offset)
        read.append(offset)
    else:
        return Visits(1, 1) if len(group) == len(read) > 1 else None
    n_visits, rest = divmod(len(read), n_panels)
    if rest or read != read[:n_panels] * n_visits:
        return None
    return Visits(n_panels, n_visits)


@dataclasses.dataclass(frozen=True)
class Bursts:
    """Where in a panel's sum lines are asked for, and how many at a time."""

    loop: int  # which of the sum's loops, counted from the outermost, asks
    n_parts: int  # each round of that loop is cut into so many parts; each begins with a burst
    n_bursts: int  # in all, while one panel is read
    n_lines: int  # of one burst


def bursts_of(extents: Sequence[int], n_lines: int, n_visits: int, at_once: int) -> Bursts:
    """Spread a panel's lines over the visits of the panel before it, and over each visit.

    As far outside as possible: what compilers make of the inner loops is worth more than
    an even spread.
    """
    share = math.ceil(n_lines / n_visits)
    wanted = math.ceil(share / at_once)
    loop, before = 0, 1
    while before * extents[loop] < wanted and loop + 1 < len(extents):
        before *= extents[loop]
        loop += 1
    enough = [n for n in _divisors(extents[loop]) if before * n >= wanted]
    n_parts = enough[0] if enough else extents[loop]
    n_bursts = before * n_parts
    return Bursts(loop, n_parts, n_bursts, math.ceil(share / n_bursts))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
