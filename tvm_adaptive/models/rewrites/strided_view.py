"""Where the numbers of a reshaped, transposed or cut tensor lie in the tensor that it came from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StridedAxis:
    """An axis of a source, and what a view takes of it."""

    extent: int  # of the source
    begin: int
    of_view: int | None  # the view's axis that runs along it; None for ``begin`` alone


@dataclasses.dataclass(frozen=True)
class StridedReading:
    """A tensor, and which of its axes the places of an operand run along."""

    source: Any
    axes: Sequence[StridedAxis]

    @classmethod
    def of(cls, source: Any, extents: Sequence[int]) -> StridedReading:
        """Return how all of a tensor is read."""
        return cls(source, [StridedAxis(n, 0, i) for i, n in enumerate(extents)])

    def indices(self, places: Sequence[Any]) -> tuple[Any, ...]:
        """Return where the number of a place is."""
        begins = (each.begin for each in self.axes)
        runs = (0 if each.of_view is None else places[each.of_view] for each in self.axes)
        return tuple(run + begin for begin, run in zip(begins, runs, strict=True))


@dataclasses.dataclass(frozen=True)
class StridedView:
    """Some numbers of a contiguous tensor, each axis with a constant distance between them."""

    n_numbers: int  # of the source
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # numbers of the source from one place of an axis to the next
    offset: int = 0  # of the first number

    @classmethod
    def of(cls, extents: Sequence[int]) -> StridedView:
        """Return all of a contiguous tensor."""
        return cls(math.prod(extents), tuple(extents), _contiguous(extents))

    def transposed(self, axes: Sequence[int]) -> StridedView:
        """Return the view with its axes in another order."""
        return dataclasses.replace(
            self,
            extents=tuple(self.extents[axis] for axis in axes),
            strides=tuple(self.strides[axis] for axis in axes),
        )

    def sliced(self, axis: int, begin: int, extent: int) -> StridedView:
        """Return a part of an axis."""
        extents = [*self.extents]
        extents[axis] = extent
        offset = self.offset + begin * self.strides[axis]
        return dataclasses.replace(self, extents=tuple(extents), offset=offset)

    def taken(self, axis: int, place: int) -> StridedView:
        """Return one place of an axis, without the axis."""
        kept = [i for i in range(len(self.extents)) if i != axis]
        return self.sliced(axis, place, 1).transposed(kept)

    def reshaped(self, extents: Sequence[int]) -> StridedView | None:
        """Return the view in another shape; None where strides would not be constant."""
        # The shortest runs of axes, on either side, that hold as many numbers.
        before = [each for each in zip(self.extents, self.strides, strict=True) if each[0] != 1]
        after = [n for n in extents if n != 1]
        strides: list[int] = []
        while before and after:
            n_before, n_after = 1, 1
            run, wanted = [], []
            while n_before == 1 or n_before != n_after:
                if n_before <= n_after:
                    run.append(before.pop(0))
                    n_before *= run[-1][0]
                else:
                    wanted.append(after.pop(0))
                    n_after *= wanted[-1]
            step = run[-1][1]
            is_regular = all(
                stride == next_extent * next_stride
                for (_, stride), (next_extent, next_stride) in itertools.pairwise(run)
            )
            if len(run) > 1 and not is_regular:
                return None
            strides += [step * stride for stride in _contiguous(wanted)]
        found = iter(strides)
        # An axis of one place has no distance between places.
        all_strides = tuple(next(found) if n != 1 else 1 for n in extents)
        return dataclasses.replace(self, extents=tuple(extents), strides=all_strides)

    def axes(self) -> list[StridedAxis] | None:
        """Return the axes of the source that has one for each axis of several places.

        None where the source cannot be seen so, as with overlapping places.
        """
        order = [axis for axis, n in enumerate(self.extents) if n > 1]
        order.sort(key=lambda axis: -self.strides[axis])
        found: list[StridedAxis] = []
        before, offset = self.n_numbers, self.offset
        for axis in order:
            stride, n = self.strides[axis], self.extents[axis]
            if stride < 1 or before % stride:
                return None
            extent, begin = before // stride, offset // stride
            if begin + n > extent:
                return None
            found.append(StridedAxis(extent, begin, axis))
            before, offset = stride, offset % stride
        if before > 1:
            found.append(StridedAxis(before, offset, None))
        return found


def _contiguous(extents: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(extents[axis + 1 :]) for axis in range(len(extents)))
