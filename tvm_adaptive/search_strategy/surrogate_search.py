"""Find good candidates by a model of the cost model, which is cheap to evaluate.

The cost model judges a candidate by features of its program, which takes milliseconds. A
forest on the knobs alone takes microseconds. It learns the cost model's values (its
acquisition, higher is better) of all candidates in the pool, and a genetic search on it finds
the few that the cost model should judge next: multi-fidelity optimisation (Kandasamy et al.,
NeurIPS 2016) by distillation (Hinton et al., 2015).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.search_strategy.knobs import Encoded, KnobSpace, Point
from tvm_adaptive.search_strategy.picking import IndexArray, pick_best
from tvm_adaptive.values.hash_set import HashSet
from tvm_adaptive.values.hooks import Rows
from tvm_adaptive.values.ranks import average_ranks
from tvm_adaptive.values.trial import FloatArray

# Trees of the model of knobs: only their mean is wanted.
_N_TREES = 32
# Trees that pick a candidate together: one alone is mostly noise, all always agree.
_N_VOTERS = 4
# In a neighbourhood that is nearly all known, variations to try for each neighbour wanted.
_TRIES_PER_NEIGHBOUR = 4
# Neighbours that are scored for each that is picked.
NEAR_RATIO = 3
# Forecasts from fewer candidates rank no better than chance.
MIN_TO_LEARN = 8
# How often a round scores new candidates and learns from the scores, and new ones of each step. On
# hardware 40 found nothing better than 24, and they are the largest cost of a round.
N_STEPS = 2
N_PER_STEP = 24
# Of the genetic search on the forest: points that a generation descends from, points of one, and
# the chance that a child has two parents.
_N_GENERATIONS = 5
_N_PARENTS = 48
_N_CHILDREN = 256
_CROSSOVER = 0.3
# Share of a batch that is picked near the best that were measured. Forecasts of a forest hardly
# differ between neighbours, and its acquisition then prefers what is far away and uncertain; that
# neighbours of a good program are good is knowledge of its own (the trust regions of TuRBO,
# Eriksson et al., NeurIPS 2019).
LOCAL_SHARE = 0.5
# How many of the best have such a neighbourhood, and in how many knobs a neighbour differs.
N_CENTRES = 4
RADIUS = 2
# Proposing, loading and measuring one candidate: 0.06 s for GMM, 0.11 s for T2D.
OTHER_SEC = 0.1
# Fewer builds give no forecast.
_MIN_BUILDS = 8
# Only the latest builds count: the forest is grown anew after every batch, in half a second of
# CPU time from so many, and the latest are where the search is now.
_MAX_BUILDS = 4096
_N_COST_TREES = 16


class Pool:
    """Candidates that were scored but not measured yet, and all that were ever seen."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.points: list[Point] = []
        self.keys: list[int] = []
        self._blocks: list[Rows] = []
        self._known = HashSet()  # of points: too many to keep whole
        self._known_keys = HashSet()

    def __len__(self) -> int:
        return len(self.points)

    @property
    def rows(self) -> Rows:
        """Features, of shape (n, d)."""
        if not self._blocks:
            return np.zeros((0, 0), dtype=np.float32)
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0]

    def knows(self, point: Point) -> bool:
        """Say whether a point, or its program, is or was in the pool."""
        return _hash_of(point) in self._known

    def knows_key(self, key: int) -> bool:
        """Say whether a program is or was in the pool."""
        return key in self._known_keys

    def remember(self, points: Iterable[Point], keys: Iterable[int] = ()) -> None:
        """Count points and programs as known, without adding them."""
        self._known.update(_hash_of(point) for point in points)
        self._known_keys.update(keys)

    def add(self, points: Sequence[Point], keys: Sequence[int], rows: Rows) -> None:
        """Add candidates."""
        if not len(points):
            return
        self.remember(points, keys)
        self.points.extend(points)
        self.keys.extend(keys)
        self._blocks.append(np.asarray(rows, dtype=np.float32))

    def take(self, picked: Sequence[int]) -> list[Point]:
        """Remove candidates by their indices and return their points in that order."""
        taken = [self.points[i] for i in picked]
        self._keep(np.setdiff1d(np.arange(len(self)), np.asarray(picked, dtype=np.intp)))
        return taken

    def trim(self, values: FloatArray) -> None:
        """Keep the best where there are more than fit."""
        if len(self) > self.capacity:
            self._keep(np.sort(pick_best(values, self.capacity)))

    def _keep(self, kept: IndexArray) -> None:
        if not len(self):
            return
        self._blocks = [self.rows[kept]]
        self.points = [self.points[i] for i in kept]
        self.keys = [self.keys[i] for i in kept]


def _hash_of(point: Point) -> int:
    """Return 64 bits that are the same in every process."""
    # Doubled, because Python hashes -1 as -2, and both are decisions.
    return hash((point.sketch, *[2 * value for value in point.vector]))


def descendants(
    pool: Pool,
    space: KnobSpace,
    elites: Sequence[Point],
    values: FloatArray,
    rng: np.random.Generator,
) -> list[Point]:
    """Return new points that a model of the pool's values forecasts to be the best."""
    seed = int(rng.integers(2**31))
    forest = _forest(space.encode(pool.points), spread_ranks(values), _N_TREES, seed)
    best = pick_best(values, _N_PARENTS)
    parents = list(dict.fromkeys([*elites, *(pool.points[i] for i in best)]))
    trees = forest.estimators_
    found: dict[Point, FloatArray] = {}  # forecast of each tree
    for _ in range(_N_GENERATIONS):
        children = _children(parents, space, rng)
        new = [each for each in children if each not in found and not pool.knows(each)]
        if new:
            encoded = space.encode(new)
            forecasts = np.stack([tree.tree_.predict(encoded)[:, 0] for tree in trees], axis=1)
            found.update(zip(new, forecasts, strict=True))
        ranked = sorted(found, key=lambda point: -float(found[point].mean()))
        # The first parents stay: the forest may be wrong about all that came after.
        parents = [*parents[: _N_PARENTS // 2], *ranked[: _N_PARENTS // 2]]
    points = list(found)
    if not points:
        return []
    picked = pick_by_trees(np.stack(list(found.values())), N_PER_STEP, rng)
    return [points[i] for i in picked]


def neighbours(
    pool: Pool, space: KnobSpace, centres: Sequence[Point], n: int, rng: np.random.Generator
) -> list[Point]:
    """Return up to ``n`` points that the pool does not know, one variation from a centre."""
    found: dict[Point, None] = {}
    for _ in range(_TRIES_PER_NEIGHBOUR * n):
        if len(found) >= n:
            break
        point = space.vary(centres[int(rng.integers(len(centres)))], rng)
        if not pool.knows(point) and space.allows(point):
            found[point] = None
    return list(found)


def within(pool: Pool, space: KnobSpace, centres: Sequence[Point], radius: int) -> IndexArray:
    """Return the indices of a pool's candidates within a number of knobs of any centre."""
    close = [
        any(space.distance(point, centre) <= radius for centre in centres) for point in pool.points
    ]
    return np.flatnonzero(close)


def pick_by_trees(forecasts: FloatArray, n: int, rng: np.random.Generator) -> list[int]:
    """Pick rows, each the best by the mean of a few random trees: Thompson sampling."""
    open_ = np.ones(len(forecasts), dtype=bool)
    picked: list[int] = []
    for _ in range(min(n, len(forecasts))):
        some = rng.choice(forecasts.shape[1], size=min(_N_VOTERS, forecasts.shape[1]))
        votes = np.where(open_, forecasts[:, some].mean(axis=1), -np.inf)
        best = int(votes.argmax())
        open_[best] = False
        picked.append(best)
    return picked


def spread_ranks(values: FloatArray) -> FloatArray:
    """Map values to exponential scores of their ranks, among which the best stand out."""
    # Acquisitions span hundreds of orders of magnitude, of which a mean shows the worst only.
    share = (average_ranks(np.where(np.isnan(values), -np.inf, values)) - 1.0) / len(values)
    return np.asarray(-np.log1p(-share))


def _children(parents: Sequence[Point], space: KnobSpace, rng: np.random.Generator) -> list[Point]:
    mothers = rng.integers(len(parents), size=_N_CHILDREN)
    fathers = rng.integers(len(parents), size=_N_CHILDREN)
    crossed = rng.random(_N_CHILDREN) < _CROSSOVER
    children = []
    for mother, father, is_crossed in zip(mothers, fathers, crossed, strict=True):
        child = parents[mother]
        if is_crossed:
            child = space.cross(child, parents[father], rng)
        # A cross of a point with itself is that point: only a change makes it new.
        if not is_crossed or rng.random() < 0.5:
            child = space.vary(child, rng)
        if space.allows(child):
            children.append(child)
    return list(dict.fromkeys(children))


def _forest(encoded: Encoded, y: FloatArray, n_trees: int, seed: int) -> Any:
    from sklearn.ensemble import ExtraTreesRegressor  # takes a second to import

    return ExtraTreesRegressor(n_trees, min_samples_leaf=2, random_state=seed).fit(encoded, y)


class BuildCost:
    """A forecast of one task's seconds per candidate, from its decisions.

    Those that unroll much take longest to build. The search maximises expected improvement
    per second (Snoek et al., "Practical Bayesian Optimization", NeurIPS 2012, section 3.2).
    """

    def __init__(self, space: KnobSpace) -> None:
        self._space = space
        self._points: deque[Point] = deque(maxlen=_MAX_BUILDS)
        self._seconds: deque[float] = deque(maxlen=_MAX_BUILDS)
        self._forest: Any = None

    def add(self, point: Point, seconds: float) -> None:
        """Learn a build's share of its batch's seconds."""
        self._points.append(point)
        self._seconds.append(seconds)
        self._forest = None

    def carry(self) -> tuple[list[Point], list[float]]:
        """Return the builds that were learned, for :meth:`resume`."""
        return list(self._points), list(self._seconds)

    def resume(self, carried: tuple[list[Point], list[float]]) -> None:
        """Continue with the builds that another process learned."""
        points, seconds = carried
        if seconds != list(self._seconds):
            self._forest = None
        self._points, self._seconds = deque(points, _MAX_BUILDS), deque(seconds, _MAX_BUILDS)

    def seconds(self, points: Sequence[Point]) -> FloatArray | None:
        """Return the expected total cost of candidates; None while unknown."""
        if len(self._seconds) < _MIN_BUILDS or not len(points):
            return None
        if self._forest is None:
            # Fixed: what a build costs is no random choice of the search.
            encoded = self._space.encode(self._points)
            self._forest = _forest(encoded, np.log(self._seconds), _N_COST_TREES, 0)
        return np.asarray(OTHER_SEC + np.exp(self._forest.predict(self._space.encode(points))))
