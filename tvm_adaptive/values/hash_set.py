"""A set of 64-bit hashes in some 12 bytes each; a Python set takes a hundred."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np

_MASK = 0xFFFF_FFFF_FFFF_FFFF
# New members wait in a plain set until they exceed this share of all, which limits the
# passes over each member, and this number, which a plain set holds cheaply.
_WAITING_SHARE = 1 / 32
_MIN_WAITING = 1024


class HashSet:
    """A growing set of integers of 64 bits, signed or unsigned."""

    def __init__(self) -> None:
        self._sorted = array("Q")
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._waiting)

    def __iter__(self) -> Iterator[int]:
        """Yield the members, unsigned."""
        yield from self._sorted
        yield from self._waiting

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        value &= _MASK
        if value in self._waiting:
            return True
        place = bisect_left(self._sorted, value)
        return place < len(self._sorted) and self._sorted[place] == value

    def discard(self, value: int) -> None:
        """Remove a member, if it is one."""
        value &= _MASK
        self._waiting.discard(value)
        place = bisect_left(self._sorted, value)
        if place < len(self._sorted) and self._sorted[place] == value:
            self._sorted.pop(place)

    def update(self, values: Iterable[int]) -> None:
        """Add members."""
        self._waiting.update(value & _MASK for value in values if value not in self)
        if len(self._waiting) > max(_MIN_WAITING, _WAITING_SHARE * len(self._sorted)):
            new = np.fromiter(self._waiting, dtype=np.uint64, count=len(self._waiting))
            both = np.sort(np.concatenate([np.frombuffer(self._sorted, dtype=np.uint64), new]))
            self._sorted = array("Q", both.tobytes())
            self._waiting = set()
