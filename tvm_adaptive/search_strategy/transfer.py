"""Decisions that were good for one task, taken over by another of its family.

Tasks of a network are often one operator in several sizes: their sketches have the same
knobs with other extents. Inner tiles fill registers and caches, whose sizes are the
machine's; so these are kept as far as the other extents allow, and the outermost part
takes the rest.

========  ====================================================================
term      meaning
========  ====================================================================
finding   decisions that were measured for a task, and what they took
relative  a task whose sketches have the same knobs but for extents
seed      a point of a task's own space, made of a relative's finding
========  ====================================================================

References
----------
Reuse of schedules among similar subgraphs: TVM's anchor-trace tuning; Bayesian Code
Diffusion (OSDI 2025) reports up to 3.3 x from it. Snapping to divisors is ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.search_strategy.knobs import (
    Choice,
    Knob,
    KnobSpace,
    Point,
    Tile,
    Undrawn,
    Vector,
    divisors,
    slices_of,
)

# Findings of one task that others may ask for: its neighbours add little to the best.
KEPT_PER_TASK = 4


@dataclasses.dataclass(frozen=True)
class TransferRecord:
    """Decisions that were measured."""

    sketch: str  # name of its sketch, see :class:`~tvm_adaptive.search_strategy.knobs.KnobSpace`
    knobs: tuple[Knob, ...]  # of that sketch
    vector: Vector  # the decisions
    seconds: float  # of one run, lower is better


@dataclasses.dataclass(frozen=True)
class Seed:
    """A point worth a look on the strength of what others found."""

    point: Point
    is_own: bool = False  # whether it was found for this very task, by an earlier run


class TransferPool:
    """What the tasks of a run have found, for those of the same family.

    One is shared by the searches of one run.
    """

    def __init__(self) -> None:
        self._now: dict[str, dict[str, tuple[TransferRecord, ...]]] = {}
        self._before: dict[str, dict[str, tuple[TransferRecord, ...]]] = {}

    def tell(self, family: str, task: str, transfer_records: Sequence[TransferRecord]) -> None:
        """Say what is the best of a task now."""
        self._now.setdefault(family, {})[task] = tuple(transfer_records[:KEPT_PER_TASK])

    def remember(self, family: str, task: str, transfer_records: Sequence[TransferRecord]) -> None:
        """Say what an earlier run found; its times are not comparable with this one's."""
        self._before.setdefault(family, {})[task] = tuple(transfer_records[:KEPT_PER_TASK])

    def ask(self, family: str, task: str, space: KnobSpace, rng: np.random.Generator) -> list[Seed]:
        """Return what the family's findings come to in a task's own space."""
        own = [
            Seed(point, is_own=True)
            for finding in self._before.get(family, {}).get(task, ())
            if (point := fit(finding, space, rng)) is not None
        ]
        ranked = sorted(
            (_extent_distance(transfer_records[0], space), number, transfer_records)
            for number, transfer_records in enumerate(self._others(family, task))
            if transfer_records
        )
        columns = [
            transfer_records for farness, _, transfer_records in ranked if math.isfinite(farness)
        ]
        others = [
            Seed(point)
            for rank in itertools.zip_longest(*columns)
            for finding in rank
            if finding is not None and (point := fit(finding, space, rng)) is not None
        ]
        different: dict[Point, Seed] = {}
        for seed in [*own, *others]:
            different.setdefault(seed.point, seed)
        return list(different.values())

    def _others(self, family: str, task: str) -> list[tuple[TransferRecord, ...]]:
        now, before = self._now.get(family, {}), self._before.get(family, {})
        known = {**before, **now}
        return [transfer_records for name, transfer_records in known.items() if name != task]


def fit(finding: TransferRecord, space: KnobSpace, rng: np.random.Generator) -> Point | None:
    """Return the point of a space that is most like a finding of another."""
    fitting = [i for i, knobs in enumerate(space.sketches) if _splits_alike(finding.knobs, knobs)]
    if not fitting:
        return None
    sketch = next((i for i in fitting if space.names[i] == finding.sketch), fitting[0])
    return Point(sketch, _fit_vector(finding, space.sketches[sketch], rng))


def fit_split(tile: Tile, parts: Sequence[int]) -> Vector:
    """Return the split whose inner parts are nearest to some others, as ratios."""
    left = tile.extent
    fitted = []
    for level in range(tile.n_parts - 1, 0, -1):
        bound = tile.max_innermost if level == tile.n_parts - 1 else -1
        possible = [each for each in divisors(left) if bound < 0 or each <= bound]
        part = _nearest(possible, parts[level])
        fitted.append(part)
        left //= part
    return (left, *reversed(fitted))


def _nearest(possible: Sequence[int], wanted: int) -> int:
    """Return the nearest as a ratio, of two the smaller."""
    return min(possible, key=lambda each: (abs(math.log(each / wanted)), each))


def _fit_vector(finding: TransferRecord, knobs: Sequence[Knob], rng: np.random.Generator) -> Vector:
    stock: dict[tuple[str, int], list[Vector]] = {}
    for knob, where in zip(finding.knobs, slices_of(finding.knobs), strict=True):
        stock.setdefault(_kind(knob), []).append(finding.vector[where])
    vector: list[int] = []
    for knob in knobs:
        given = stock.get(_kind(knob))
        if not given:
            vector.extend(knob.draw(rng))
        elif isinstance(knob, Tile):
            vector.extend(fit_split(knob, given.pop(0)))
        else:
            vector.extend(given.pop(0))
    return tuple(vector)


def _kind(knob: Knob) -> tuple[str, int]:
    """Return what two knobs share if a decision of one can be one of the other."""
    if isinstance(knob, Choice):
        return "choice", len(knob.weights)
    return ("undrawn" if isinstance(knob, Undrawn) else "tile"), knob.width


def _splits_alike(one: Sequence[Knob], other: Sequence[Knob]) -> bool:
    mine, theirs = _tiles(one), _tiles(other)
    if not mine and not theirs:  # nothing tells them apart but their other knobs
        return [_kind(knob) for knob in one] == [_kind(knob) for knob in other]
    return [tile.n_parts for tile in mine] == [tile.n_parts for tile in theirs]


def _extent_distance(finding: TransferRecord, space: KnobSpace) -> float:
    """Return by how many octaves the extents differ, all in all; infinite if nothing fits."""
    return min(
        (
            sum(
                abs(math.log2(mine.extent / theirs.extent))
                for mine, theirs in zip(_tiles(knobs), _tiles(finding.knobs), strict=True)
            )
            for knobs in space.sketches
            if _splits_alike(finding.knobs, knobs)
        ),
        default=math.inf,
    )


def _tiles(knobs: Sequence[Knob]) -> list[Tile]:
    return [knob for knob in knobs if isinstance(knob, Tile)]
