"""Decisions that were good for one task, fitted to another of its family.

Tasks of a network are often one operator in several sizes. Inner tiles fill registers and
caches, whose sizes are the machine's; so these are kept as far as the other extents allow, and
the outermost part takes the rest. Reuse of schedules among similar subgraphs: TVM's
anchor-trace tuning; Bayesian Code Diffusion (OSDI 2025). Snapping to divisors is ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.search_strategy.knobs import (
    Choice,
    Knob,
    KnobSpace,
    Point,
    Tile,
    Undrawn,
    Vector,
    as_ints,
    divisors,
    knob_of,
    sketch_name,
    slices_of,
)
from tvm_adaptive.values.trace_json import choices_of

# Records of one task that others may use: its neighbours add little to the best.
KEPT_PER_TASK = 4
# The best of fewer trials is chance: of four random ones, given to all of ResNet-18's
# convolutions, they began at 59 ms instead of 36.
MIN_TO_TELL = 16
# TVM's extents have 32 bits in most programs, and no loop runs longer.
_MOST_EXTENT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TransferRecord:
    """Decisions that were measured for a task."""

    sketch: str  # name of its sketch, see :class:`~tvm_adaptive.search_strategy.knobs.KnobSpace`
    knobs: tuple[Knob, ...]  # of that sketch
    vector: Vector  # the decisions
    seconds: float  # of one run, lower is better
    is_here: bool = True  # whether this machine has measured it
    is_of_few: bool = False  # whether it is the best of fewer than ``MIN_TO_TELL`` trials


@dataclasses.dataclass(frozen=True)
class Seed:
    """A point of a task's space, made of a record of its family."""

    point: Point
    is_own: bool = False  # whether the record is of this very task, by an earlier run
    is_of_equal_task: bool = False  # whether it is of this or an equal task, on this machine
    is_of_few: bool = False  # whether the record is the best of a few trials


class TransferPool:
    """The best records of a run's tasks, which its searches share, by family."""

    def __init__(self) -> None:
        self._now: dict[str, dict[str, tuple[TransferRecord, ...]]] = {}
        self._before: dict[str, dict[str, tuple[TransferRecord, ...]]] = {}
        self._hints: dict[str, dict[str, tuple[TransferRecord, ...]]] = {}

    def tell(
        self, family: str, task: str, records: Sequence[TransferRecord], *, is_new: bool = False
    ) -> None:
        """Set a task's best records of this run; a new task's are for its equals only.

        Equals have the same extents and another epilogue. For other relatives, the best of a
        few trials is chance.
        """
        best = [dataclasses.replace(each, is_of_few=is_new) for each in records[:KEPT_PER_TASK]]
        self._now.setdefault(family, {})[task] = tuple(best)

    def remember(self, family: str, task: str, records: Sequence[TransferRecord]) -> None:
        """Add a task's records of an earlier run, whose times do not compare with this one's.

        Those of a few trials are for the task and its equals only.
        """
        known = self._before.setdefault(family, {})
        known[task] = (*records[:KEPT_PER_TASK], *known.get(task, ()))

    def hint(self, family: str, task: str, records: Sequence[TransferRecord]) -> None:
        """Set a task's records of another machine; even its own are no more than seeds."""
        self._hints.setdefault(family, {})[task] = tuple(records[:KEPT_PER_TASK])

    def ask(self, family: str, task: str, space: KnobSpace, rng: np.random.Generator) -> list[Seed]:
        """Return the family's records as points of a task's own space, each point once."""
        before, hints = self._before.get(family, {}), self._hints.get(family, {})
        own = [(record, True) for record in before.get(task, ())]
        own += [(record, False) for record in hints.get(task, ())]
        seeds: dict[Point, Seed] = {}
        for record, is_own in own:
            point = fit(record, space, rng)
            if point is not None:
                is_own_here = is_own and record.is_here
                seeds.setdefault(point, Seed(point, is_own, is_own_here, record.is_of_few))
        now = self._now.get(family, {})
        of_many = _those(now, is_of_few=False)
        settled = {**_those(before, is_of_few=False), **of_many}
        # In the order of arrival, which does not change from process to process as hashes do.
        new = {**_those(before, is_of_few=True), **_those(now, is_of_few=True)}
        new = {name: records for name, records in new.items() if name not in of_many}
        sure, few = (_those(hints, is_of_few=each) for each in (False, True))
        groups = [(settled, True, False), (new, True, True), (sure, False, False)]
        groups.append((few, False, True))
        relatives = [
            _Relative(_extent_distance(records[0], space), is_here, is_new, records)
            for group, is_here, is_new in groups
            for name, records in group.items()
            if records and name != task
        ]
        # Of those that are equally near, this machine's come first.
        ranked = sorted((each for each in relatives if each.is_useful), key=lambda r: r.distance)
        # The best of each task, the nearest first, then the second best.
        for row in itertools.zip_longest(*(relative.records for relative in ranked)):
            for record, relative in zip(row, ranked, strict=True):
                point = None if record is None else fit(record, space, rng)
                if point is not None:
                    is_equal = relative.is_equal and record.is_here
                    seed = Seed(point, is_of_equal_task=is_equal, is_of_few=record.is_of_few)
                    seeds.setdefault(point, seed)
        return list(seeds.values())


@dataclasses.dataclass(frozen=True)
class _Relative:
    """The records of another task of the family."""

    distance: float  # of its extents
    is_here: bool  # measured on this machine
    is_new: bool  # the best of a few trials
    records: tuple[TransferRecord, ...]

    @property
    def is_equal(self) -> bool:
        return self.distance == 0.0 and self.is_here

    @property
    def is_useful(self) -> bool:
        return math.isfinite(self.distance) and (self.distance == 0.0 or not self.is_new)


def _those(
    tasks: Mapping[str, Sequence[TransferRecord]], *, is_of_few: bool
) -> dict[str, tuple[TransferRecord, ...]]:
    """Return the records of tasks that are, or are not, the best of a few trials."""
    found = {
        name: tuple(each for each in records if each.is_of_few == is_of_few)
        for name, records in tasks.items()
    }
    return {name: records for name, records in found.items() if records}


def transfer_record_of(record: Any, seconds: float) -> TransferRecord | None:
    """Return the decisions of a tuning record in JSON; None if they cannot be read."""
    try:
        instructions, decisions = choices_of(record[0])
        knobs: list[Knob] = []
        vector: list[int] = []
        for number, decision in decisions:
            kind, _, attributes, _ = instructions[number]
            knob = knob_of(str(kind), attributes, decision)
            parts = as_ints(decision)
            if not _is_possible(knob, parts):
                return None
            knobs.append(knob)
            vector.extend(parts)
        name = sketch_name(instructions)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return None
    return TransferRecord(name, tuple(knobs), tuple(vector), seconds)


def fit(record: TransferRecord, space: KnobSpace, rng: np.random.Generator) -> Point | None:
    """Return the point of a space that is most like another task's record."""
    fitting = [i for i, knobs in enumerate(space.sketches) if _splits_alike(record.knobs, knobs)]
    if not fitting:
        return None
    sketch = next((i for i in fitting if space.names[i] == record.sketch), fitting[0])
    given: dict[tuple[str, int], list[Vector]] = {}
    for knob, where in zip(record.knobs, slices_of(record.knobs), strict=True):
        given.setdefault(_kind(knob), []).append(record.vector[where])
    vector: list[int] = []
    for knob in space.sketches[sketch]:
        of_kind = given.get(_kind(knob))
        if not of_kind:
            vector.extend(knob.draw(rng))
        else:
            decision = of_kind.pop(0)
            vector.extend(fit_split(knob, decision) if isinstance(knob, Tile) else decision)
    return Point(sketch, tuple(vector))


def fit_split(tile: Tile, parts: Sequence[int]) -> Vector:
    """Return the split whose inner parts are nearest to some others, as ratios."""
    left = tile.extent
    fitted = []
    for level in range(tile.n_parts - 1, 0, -1):
        bound = tile.max_innermost if level == tile.n_parts - 1 else -1
        possible = [each for each in divisors(left) if bound < 0 or each <= bound]
        # Of two that are equally near, the smaller.
        part = min(possible, key=lambda each: (abs(math.log(each / parts[level])), each))
        fitted.append(part)
        left //= part
    return (left, *reversed(fitted))


def _is_possible(knob: Knob, decision: Sequence[int]) -> bool:
    """Say whether a knob has the decision of a record."""
    if isinstance(knob, Tile):
        return min(decision) >= 1 and knob.extent <= _MOST_EXTENT
    return not isinstance(knob, Choice) or 0 <= decision[0] < len(knob.weights)


def _kind(knob: Knob) -> tuple[str, int]:
    """Return a key that knobs share if a decision of one can be one of the other."""
    if isinstance(knob, Choice):
        return "choice", len(knob.weights)
    return ("undrawn" if isinstance(knob, Undrawn) else "tile"), knob.width


def _tiles(knobs: Sequence[Knob]) -> list[Tile]:
    return [knob for knob in knobs if isinstance(knob, Tile)]


def _splits_alike(one: Sequence[Knob], other: Sequence[Knob]) -> bool:
    mine, theirs = _tiles(one), _tiles(other)
    if not mine and not theirs:  # only their other knobs tell them apart
        return [_kind(knob) for knob in one] == [_kind(knob) for knob in other]
    return [tile.n_parts for tile in mine] == [tile.n_parts for tile in theirs]


def _extent_distance(record: TransferRecord, space: KnobSpace) -> float:
    """Return by how many octaves the extents differ in total; infinite if nothing fits."""
    theirs = _tiles(record.knobs)
    distances = (
        sum(abs(math.log2(a.extent / b.extent)) for a, b in zip(_tiles(knobs), theirs, strict=True))
        for knobs in space.sketches
        if _splits_alike(record.knobs, knobs)
    )
    return min(distances, default=math.inf)
