"""One task's unmeasured candidates: their programs, features, scores and build costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import Schedule, TuneContext
from tvm_adaptive.search_strategy.knobs import OPEN, Point
from tvm_adaptive.search_strategy.picking import DIVERSITY_RATIO, IndexArray, pick, pick_best
from tvm_adaptive.search_strategy.schedules import candidate_of, key_of
from tvm_adaptive.search_strategy.sketches import Sketches
from tvm_adaptive.search_strategy.surrogate_search import BuildCost, Pool
from tvm_adaptive.values.hooks import ModelHooks
from tvm_adaptive.values.trial import FloatArray, Prediction
from tvm_adaptive.values.trial_log import TrialLog

# Some 4 kB each, per task of a network.
POOL_CAPACITY = 600


class CandidatePool:
    """A pool of points with the compiler and the cost model that judge them."""

    def __init__(
        self,
        context: TuneContext,
        design_spaces: Sequence[Schedule],
        model: ModelHooks,
        diversity: str,
        rng: np.random.Generator,
    ) -> None:
        self.sketches = Sketches(context, design_spaces)
        self.space = self.sketches.space
        self.pool = Pool(POOL_CAPACITY)
        self.build_cost = BuildCost(self.space)
        self.sent: dict[int, Point] = {}  # by key: points that have no result yet
        self.rng = rng
        self._context = context
        self._model = model
        self._diversity = diversity
        self._programs: dict[int, Schedule] = {}  # by key: those of this round
        # By key: points of this round's programs that prefetch weights, and their features.
        self._prefetching: dict[int, tuple[Point, FloatArray]] = {}

    def carry(self) -> dict[str, Any]:
        """Return the pool in plain values, all but the programs, for :meth:`resume`."""
        return {
            "rng": self.rng,
            "pool": self.pool,
            "points": self.sent,
            "builds": self.build_cost.carry(),
            "drawn": self.space.drawn,
        }

    def resume(self, carried: Mapping[str, Any]) -> None:
        """Continue from the state of another process's pool of the same task."""
        self.rng, self.pool, self.sent = carried["rng"], carried["pool"], carried["points"]
        self.build_cost.resume(carried["builds"])
        self.space.drawn = carried["drawn"]
        self.forget_programs()

    def forget_programs(self) -> None:
        """Release the programs; they are made again where they are needed."""
        self._programs = {}

    def add(self, points: Sequence[Point]) -> list[int | None]:
        """Add the new programs of points to the pool; return each key, None without a program."""
        # The compiler may decide otherwise the next time.
        self.pool.remember(point for point in points if OPEN not in point.vector)
        keys: list[int | None] = []
        new: dict[int, Point] = {}
        for found in self.sketches.replay(points, self.rng):
            if found is None:
                keys.append(None)
                continue
            point, schedule = found
            self.space.note_drawn(point)
            key = key_of(schedule)
            keys.append(key)
            if not self.pool.knows_key(key) and key not in new:
                new[key] = point
                self._programs[key] = schedule
        if new:
            candidates = [candidate_of(self._programs[key]) for key in new]
            rows = self._model.describe(self._context, candidates)
            self.pool.add(list(new.values()), list(new), rows)
        return keys

    def schedules(self, indices: Sequence[int]) -> list[Schedule]:
        """Return programs of the pool, without those that come out otherwise this time."""
        pairs = [(self.pool.keys[i], self.pool.points[i]) for i in indices]
        missing = [(key, point) for key, point in pairs if key not in self._programs]
        self._programs |= self._replayed(missing, self.rng)
        return [self._programs[key] for key, _ in pairs if key in self._programs]

    def prefetching(self, point: Point) -> list[Schedule]:
        """Return variants of a point's program that prefetch its weights, for this batch."""
        (found,) = self.sketches.replay([point], self.rng)
        variants = [] if found is None else self.sketches.prefetching(found[1])
        if variants:
            rows = self._model.describe(self._context, [candidate_of(each) for each in variants])
            self._prefetching = {
                key_of(each): (point, row) for each, row in zip(variants, rows, strict=True)
            }
        return variants

    def sent_programs(self, keys: Sequence[int]) -> dict[int, Schedule]:
        """Make programs that were sent again, without those that come out otherwise."""
        known = [(key, self.sent[key]) for key in keys if key in self.sent]
        # Nothing is open in them: the search's own randomness stays as it is.
        return self._replayed(known, np.random.default_rng(0))

    def send(self, keys: set[int], trial_log: TrialLog | None) -> None:
        """Take a batch out of the pool, and drop the worst of what does not fit."""
        taken = [i for i, key in enumerate(self.pool.keys) if key in keys]
        taken_keys = [self.pool.keys[i] for i in taken]
        if trial_log is not None:
            for key, row in zip(taken_keys, self.pool.rows[taken], strict=True):
                trial_log.note(key, features=row)
        self.sent.update(zip(taken_keys, self.pool.take(taken), strict=True))
        for key in keys & self._prefetching.keys():
            self.sent[key], row = self._prefetching[key]
            if trial_log is not None:
                trial_log.note(key, features=row)
        self._prefetching = {}
        if len(self.pool) > self.pool.capacity:
            self.pool.trim(self.scores())
        self.forget_programs()

    def take_back(self, schedules: Sequence[Schedule]) -> None:
        """Put programs back that the machine failed at."""
        sent = {key: each for each in schedules if (key := key_of(each)) in self.sent}
        if sent:
            rows = self._model.describe(self._context, [candidate_of(s) for s in sent.values()])
            self.pool.add([self.sent.pop(key) for key in sent], list(sent), rows)

    def build_secs(self, among: IndexArray) -> FloatArray | None:
        """Return the forecast cost of candidates in seconds; None while unknown."""
        return self.build_cost.seconds([self.pool.points[i] for i in among])

    def posterior(self, among: IndexArray | None = None) -> Prediction | None:
        """Return the cost model's posterior of some of the pool, or of all."""
        rows = self.pool.rows if among is None else self.pool.rows[among]
        return self._model.posterior_of(self._context, rows)

    def scores(self, among: IndexArray | None = None) -> FloatArray:
        """Return the cost model's acquisition of some of the pool, higher is better."""
        among = np.arange(len(self.pool)) if among is None else among
        scores = self._model.scores_of(self._context, self.pool.rows[among], self.build_secs(among))
        # Before any success of the run all candidates are alike.
        return self.rng.random(len(among)) if scores is None else np.asarray(scores)

    def best(self, among: IndexArray, n: int) -> list[int]:
        """Return the ``n`` best of some of the pool, as indices of the pool."""
        if n == 0 or not len(among):
            return []
        scores = self.scores(among)
        # Diversity chooses among the good ones.
        order = pick_best(scores, n * DIVERSITY_RATIO)
        points = [self.pool.points[among[i]] for i in order]
        picked = pick(
            scores[order],
            n,
            self._diversity,
            knobs=lambda: [point.vector for point in points],
            vectors=lambda: self.space.encode(points).astype(np.float64),
            rng=self.rng,
        )
        return [int(among[order[i]]) for i in picked]

    def _replayed(
        self, points: Sequence[tuple[int, Point]], rng: np.random.Generator
    ) -> dict[int, Schedule]:
        """Make the programs of points again, by their keys."""
        found = self.sketches.replay([point for _, point in points], rng)
        again = {}
        for (key, _), program in zip(points, found, strict=True):
            if program is not None:
                variants = self._with_prefetching(program[1])
                again[key] = next((each for each in variants if key_of(each) == key), None)
        return {key: schedule for key, schedule in again.items() if schedule is not None}

    def _with_prefetching(self, schedule: Schedule) -> Iterator[Schedule]:
        """Yield a program, then its variants that prefetch weights."""
        yield schedule
        yield from self.sketches.prefetching(schedule)
