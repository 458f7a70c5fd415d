"""The decisions that a task's sketches leave open, as vectors: draw, vary, cross, encode.

A task has one to a few sketches; a knob is one decision of a sketch, how to split a loop or
which of some values to take; a vector has all decisions, knob after knob.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Vector = tuple[int, ...]
Encoded = npt.NDArray[np.float32]

# The decision of a knob that only the compiler can draw. TVM's own values are -2 (inline), -1
# (at the root) and numbers of loops.
OPEN = -(10**6)
# Chance of each further change in a variation: a single changed knob keeps most of what was
# good, and cannot leave a valley.
_MORE_CHANGES = 0.4
# Tries for a point within the limits: of GPUs' convolutions, one of 20 to 200 is.
_MOST_DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class Tile:
    """Split a loop of ``extent`` into ``n_parts`` without remainder, the outermost first."""

    extent: int  # at least 1
    n_parts: int  # at least 2
    max_innermost: int = -1  # bound of the last part; -1 for none

    @property
    def width(self) -> int:
        """Places in a vector: one per part."""
        return self.n_parts

    def draw(self, rng: np.random.Generator) -> Vector:
        """Give each prime factor of the extent to a random part that may take it."""
        parts = [1] * self.n_parts
        for prime in prime_factors(self.extent):
            y = int(rng.integers(self.n_parts if self._takes(parts, prime) else self.n_parts - 1))
            parts[y] *= prime
        return tuple(parts)

    def vary(self, decision: Vector, rng: np.random.Generator) -> Vector:
        """Move a factor from one part to another, as MetaSchedule's own mutation does."""
        parts = list(decision)
        movable = [x for x, part in enumerate(parts) if part > 1]
        # An innermost part that is full leaves some moves impossible: try another.
        for _ in range(2 * self.n_parts):
            if not movable:
                break
            x = movable[int(rng.integers(len(movable)))]
            y = int(rng.integers(self.n_parts - 1))
            y += y >= x
            factors = [
                f for f in divisors(parts[x])[1:] if y < len(parts) - 1 or self._takes(parts, f)
            ]
            if factors:
                factor = factors[int(rng.integers(len(factors)))]
                parts[x] //= factor
                parts[y] *= factor
                break
        return tuple(parts)

    def decisions(self) -> Iterator[Vector]:
        """Yield every decision once."""
        for outer in itertools.product(divisors(self.extent), repeat=self.n_parts - 1):
            innermost, rest = divmod(self.extent, math.prod(outer))
            if rest == 0 and self._takes([1], innermost):
                yield (*outer, innermost)

    def _takes(self, parts: Sequence[int], factor: int) -> bool:
        return self.max_innermost < 0 or parts[-1] * factor <= self.max_innermost


@dataclasses.dataclass(frozen=True)
class Choice:
    """Take one of some values; the decision is its index."""

    weights: tuple[float, ...]  # chances of the values in a random draw; one per value
    width: ClassVar[int] = 1  # the index

    def draw(self, rng: np.random.Generator) -> Vector:
        """Draw by the weights."""
        weights = np.asarray(self.weights)
        return (int(rng.choice(len(weights), p=weights / weights.sum())),)

    def vary(self, decision: Vector, rng: np.random.Generator) -> Vector:
        """Return any other value."""
        if len(self.weights) < 2:
            return decision
        other = int(rng.integers(len(self.weights) - 1))
        return (other + (other >= decision[0]),)

    def decisions(self) -> Iterator[Vector]:
        """Yield every decision once."""
        yield from ((index,) for index in range(len(self.weights)))


@dataclasses.dataclass(frozen=True)
class Undrawn:
    """A decision that the compiler draws, because its values depend on other decisions."""

    width: int = 1  # places in a vector

    def draw(self, rng: np.random.Generator) -> Vector:
        """Return an open decision."""
        del rng
        return (OPEN,) * self.width

    def vary(self, decision: Vector, rng: np.random.Generator) -> Vector:
        """Return an open decision, which the compiler draws anew."""
        del decision, rng
        return (OPEN,) * self.width

    def decisions(self) -> Iterator[Vector]:
        """Yield the open decision, the only one that is known."""
        yield (OPEN,) * self.width


# One decision of a sketch, which takes ``width`` places of a vector: ``draw`` returns a random
# one, ``vary`` another one near it, or the same if there is no other, ``decisions`` yields all.
Knob = Tile | Choice | Undrawn


@dataclasses.dataclass(frozen=True)
class Point:
    """A candidate: which sketch, and its decisions."""

    sketch: int
    vector: Vector


# Places in a vector, the product of whose numbers is an extent; extents that add up along one
# dimension, as of a window and its steps; and dimensions.
Extent = tuple[int, ...]
Dimension = tuple[Extent, ...]


@dataclasses.dataclass(frozen=True)
class Limit:
    """Bounds of a sum of sizes, outside of which there is no valid program.

    A size is the product of its dimensions. One that two extents m and n lead through has
    m + n - 1 places.
    """

    sizes: tuple[tuple[Dimension, ...], ...]
    least: int
    most: int

    def allows(self, vector: Vector) -> bool:
        """Say whether a vector keeps to the bounds; decisions that are left open count as 1."""
        numbers = [max(1, value) for value in vector]
        total = sum(math.prod(_length(each, numbers) for each in size) for size in self.sizes)
        return self.least <= total <= self.most


def _length(dimension: Dimension, numbers: Sequence[int]) -> int:
    extents = [math.prod(numbers[place] for place in extent) for extent in dimension]
    return sum(extents) - len(extents) + 1


class KnobSpace:
    """All sketches of a task, with the limits of each one's decisions."""

    def __init__(
        self,
        sketches: Sequence[Sequence[Knob]],
        names: Sequence[str] = (),
        limits: Sequence[Sequence[Limit]] = (),
    ) -> None:
        self.sketches = [tuple(knobs) for knobs in sketches]
        self._limits = [tuple(each) for each in limits] or [()] * len(self.sketches)
        self.names = list(names) or [str(i) for i in range(len(sketches))]
        self._slices = [slices_of(knobs) for knobs in self.sketches]
        self._levels = [_levels(knobs) for knobs in self.sketches]
        self._width = max((sum(k.width for k in knobs) for knobs in self.sketches), default=0)
        # MetaSchedule's sketches often differ in where one buffer is written and have all
        # knobs in common: what is good in one is mostly good in the others.
        self._alike = [
            [i for i, other in enumerate(self.sketches) if other == knobs]
            for knobs in self.sketches
        ]
        # Compute locations that the compiler has drawn, by the first of alike sketches and the
        # knob's number.
        self.drawn: dict[tuple[int, int], list[Vector]] = {}

    def note_drawn(self, point: Point) -> None:
        """Remember where the compiler computes blocks: variations choose among these places."""
        first, knobs = self._alike[point.sketch][0], self.sketches[point.sketch]
        for j, (knob, part) in enumerate(zip(knobs, self.parts_of(point), strict=True)):
            if isinstance(knob, Undrawn) and knob.width == 1 and OPEN not in part:
                known = self.drawn.setdefault((first, j), [])
                if part not in known:
                    known.append(part)

    def draw(self, rng: np.random.Generator) -> Point:
        """Draw a sketch, and every knob of it, until the limits allow what is drawn."""
        for _ in range(_MOST_DRAWS):
            sketch = int(rng.integers(len(self.sketches)))
            parts = [knob.draw(rng) for knob in self.sketches[sketch]]
            point = Point(sketch, tuple(value for part in parts for value in part))
            if self.allows(point):
                break
        return point

    def all_points(self, most: int) -> list[Point]:
        """Return all points, compute locations left open; none if there are more than ``most``."""
        found: list[Point] = []
        for sketch, knobs in enumerate(self.sketches):
            decisions = [list(itertools.islice(knob.decisions(), most + 1)) for knob in knobs]
            if len(found) + math.prod(map(len, decisions)) > most:
                return []
            vectors = map(itertools.chain.from_iterable, itertools.product(*decisions))
            points = (Point(sketch, tuple(vector)) for vector in vectors)
            found += [point for point in points if self.allows(point)]
        return found

    def allows(self, point: Point) -> bool:
        """Say whether a point keeps to its sketch's limits: others have no valid program."""
        return all(limit.allows(point.vector) for limit in self._limits[point.sketch])

    def vary(self, point: Point, rng: np.random.Generator) -> Point:
        """Change one knob, which may be the sketch, and with a falling chance more of them."""
        knobs, slices = self.sketches[point.sketch], self._slices[point.sketch]
        if not knobs:
            return point
        sketch, vector = point.sketch, list(point.vector)
        others = [other for other in self._alike[sketch] if other != sketch]
        while True:
            j = int(rng.integers(len(knobs) + bool(others)))
            if j == len(knobs):
                sketch = others[int(rng.integers(len(others)))]
            else:
                vector[slices[j]] = self._varied(point.sketch, j, tuple(vector[slices[j]]), rng)
            if rng.random() >= _MORE_CHANGES:
                return Point(sketch, tuple(vector))

    def _varied(self, sketch: int, j: int, decision: Vector, rng: np.random.Generator) -> Vector:
        """Change one knob; a location of the compiler's to another that it has drawn.

        The forest on the knobs knows these, and can only guess what an open one comes to.
        """
        drawn = self.drawn.get((self._alike[sketch][0], j), ())
        others = [each for each in drawn if each != decision]
        if others:
            return others[int(rng.integers(len(others)))]
        return self.sketches[sketch][j].vary(decision, rng)

    def distance(self, one: Point, other: Point) -> int:
        """Return how many knobs differ, all in other kinds of sketches, plus 1 if sketches do."""
        slices = self._slices[one.sketch]
        if other.sketch not in self._alike[one.sketch]:
            return max(len(slices), len(self._slices[other.sketch])) + 1
        n_different = sum(one.vector[where] != other.vector[where] for where in slices)
        return n_different + (one.sketch != other.sketch)

    def cross(self, one: Point, other: Point, rng: np.random.Generator) -> Point:
        """Take each knob from either of two points; all from the first if they do not fit."""
        if other.sketch not in self._alike[one.sketch]:
            return one
        vector = list(one.vector)
        for where in self._slices[one.sketch]:
            if rng.random() < 0.5:
                vector[where] = other.vector[where]
        sketch = one.sketch if rng.random() < 0.5 else other.sketch
        return Point(sketch, tuple(vector))

    def parts_of(self, point: Point) -> tuple[Vector, ...]:
        """Return the decision of each knob."""
        return tuple(point.vector[where] for where in self._slices[point.sketch])

    def encode(self, points: Sequence[Point]) -> Encoded:
        """Describe points by numbers that a tree can split on."""
        levels = sorted({key for members in self._levels for key in members})
        encoded = np.zeros((len(points), 1 + self._width + len(levels)), dtype=np.float32)
        by_sketch: dict[int, list[int]] = {}
        for i, point in enumerate(points):
            by_sketch.setdefault(point.sketch, []).append(i)
        for sketch, rows in by_sketch.items():
            values = np.array([points[i].vector for i in rows], dtype=np.float64)
            knobs = self.sketches[sketch]
            is_part = [isinstance(knob, Tile) for knob in knobs for _ in range(knob.width)]
            logs = np.where(np.array(is_part, bool), np.log2(np.maximum(values, 1.0)), values)
            logs[values == OPEN] = 0.0
            encoded[rows, 0] = sketch
            encoded[rows, 1 : 1 + values.shape[1]] = logs
            for key, members in self._levels[sketch].items():
                column = 1 + self._width + levels.index(key)
                encoded[rows, column] = logs[:, members].sum(axis=1)
        return encoded


@functools.lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of a positive integer, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


@functools.lru_cache(maxsize=4096)
def prime_factors(n: int) -> tuple[int, ...]:
    """Return the prime factors of a positive integer, ascending, each as often as it is one."""
    found = []
    factor = 2
    while factor * factor <= n:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return (*found, n) if n > 1 else tuple(found)


def slices_of(knobs: Sequence[Knob]) -> list[slice]:
    """Return where each knob's decision lies in a vector."""
    ends = itertools.accumulate((knob.width for knob in knobs), initial=0)
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def knob_of(kind: str, attributes: Sequence[Any], decision: Any) -> Knob:
    """Return the knob of a sampling instruction, with the extents of its decision."""
    if kind == "SamplePerfectTile":
        parts = as_ints(decision)
        return Tile(math.prod(parts), len(parts), int(attributes[1]))
    if kind == "SampleCategorical":
        weights = attributes[1]
        # TVM's constants hold their number in an attribute.
        return Choice(tuple(float(getattr(weight, "value", weight)) for weight in weights))
    return Undrawn(len(as_ints(decision)))


def sketch_name(instructions: Sequence[Any]) -> str:
    """Return a short name that sketches share if and only if their instructions are equal."""
    return hashlib.sha256(json.dumps(instructions).encode()).hexdigest()[:16]


def as_ints(decision: Any) -> tuple[int, ...]:
    """Flatten a decision: perfect tiles are lists, others are single numbers."""
    try:
        return tuple(int(part) for part in decision)
    except TypeError:
        return (int(decision),)


def _levels(knobs: Sequence[Knob]) -> dict[tuple[int, int], list[int]]:
    """Return the places of all parts at a level or further in, by (parts of split, level)."""
    found: dict[tuple[int, int], list[int]] = {}
    for knob, where in zip(knobs, slices_of(knobs), strict=True):
        if isinstance(knob, Tile):
            for level in range(1, knob.n_parts):
                inner = range(where.start + level, where.stop)
                found.setdefault((knob.n_parts, level), []).extend(inner)
    return found
