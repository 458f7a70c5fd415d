"""Candidates by a search on the knobs, for cost models that can score features alone.

An adapter, like :mod:`tvm_adaptive.search_strategy.strategy`; the search itself is in
:mod:`tvm_adaptive.search_strategy.surrogate_search`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import Database, Schedule, TuneContext, anchor_of
from tvm_adaptive.search_strategy.build_cost import BuildCost
from tvm_adaptive.search_strategy.exploration import expected_gain
from tvm_adaptive.search_strategy.knobs import OPEN, Point
from tvm_adaptive.search_strategy.picking import DIVERSITY_RATIO, IndexArray, pick
from tvm_adaptive.search_strategy.schedules import candidate_of, key_of, measured_schedules
from tvm_adaptive.search_strategy.sketches import Sketches
from tvm_adaptive.search_strategy.surrogate_search import (
    NEAR_RATIO,
    Pool,
    SurrogateSearchOptions,
    neighbours,
    refine,
    within,
)
from tvm_adaptive.search_strategy.transfer import KEPT_PER_TASK, TransferPool, TransferRecord
from tvm_adaptive.values.hash_set import HashSet
from tvm_adaptive.values.trial import FloatArray, Prediction
from tvm_adaptive.values.trial_log import TrialLog

# Some 4 kB each, per task of a network.
POOL_CAPACITY = 600
# Measured candidates that the search starts from, beside the best of the pool.
N_ELITES = 16
# The best of fewer trials is chance: of four random ones, handed to all of ResNet-18's
# convolutions, they began at 59 ms instead of 36.
MIN_TO_TELL = 16
# Seeds whose programs a round makes, some 10 ms each.
SEEDS_PER_ROUND = 8


def can_search_surrogate(model: Any) -> bool:
    """Say whether a cost model can score candidates again by their features."""
    return all(hasattr(model, name) for name in ("describe", "scores_of", "posterior_of"))


class SurrogateProposer:
    """One task's candidates, found on a model of the cost model."""

    def __init__(
        self,
        context: TuneContext,
        model: Any,
        *,
        diversity: str,
        n_samples: int,
        max_fail_count: int,
        rng: np.random.Generator,
        options: SurrogateSearchOptions | None = None,
        trial_log: TrialLog | None = None,
        transfer_pool: TransferPool | None = None,
    ) -> None:
        self.context = context
        self.measured = HashSet()
        self.n_population = 0
        self._model = model
        self._diversity = diversity
        self._n_samples = n_samples
        self._max_fail_count = max_fail_count
        self._rng = rng
        self._options = options or SurrogateSearchOptions()
        self._pool = Pool(POOL_CAPACITY)
        self._trial_log = trial_log
        self._relatives = transfer_pool or TransferPool()
        self._family = ""
        self._cost: Any = None
        self._sketches: Any = None
        self._elites: list[tuple[float, Point]] = []
        self._points: dict[int, Point] = {}  # of what was sent and has no result yet
        self._programs: dict[int, Schedule] = {}  # of this round
        self._randoms: IndexArray = np.zeros(0, dtype=np.intp)
        self._seeds: list[int] = []  # keys

    def start(self, max_trials: int, design_spaces: list[Schedule], database: Database) -> None:
        """Open the sketches up and read what the database knows of the task."""
        del max_trials
        self._sketches = Sketches(self.context, design_spaces)
        self._cost = BuildCost(self._sketches.space)
        self._family = anchor_of(self.context.mod)
        n_threads = max(1, int(self.context.num_threads))
        for seconds, schedule in measured_schedules(database, self.context.mod, n_threads):
            key, point = key_of(schedule), self._sketches.point_of(schedule)
            self.measured.update([key])
            self._pool.remember([], [key])
            if point is not None and math.isfinite(seconds):
                self._pool.remember([point])
                self._add_elite(seconds, point)
        self._tell_relatives()

    def end(self) -> None:
        """Let go of all programs."""
        self._programs = {}
        self._sketches = None

    def carry(self) -> dict[str, Any]:
        """Return what the search knows, in plain values: all but the task's programs."""
        return {
            "measured": self.measured,
            "n_population": self.n_population,
            "rng": self._rng,
            "pool": self._pool,
            "elites": self._elites,
            "points": self._points,
            "builds": self._cost.carry(),
        }

    def resume(self, carried: Mapping[str, Any], transfer_pool: TransferPool | None = None) -> None:
        """Go on with what another process's search of the same task knew."""
        self._relatives = transfer_pool or self._relatives
        self.measured = carried["measured"]
        self.n_population = carried["n_population"]
        self._rng, self._pool = carried["rng"], carried["pool"]
        self._elites, self._points = carried["elites"], carried["points"]
        self._cost.resume(carried["builds"])
        self._programs = {}

    def programs_of(self, keys: Sequence[int]) -> dict[int, Schedule]:
        """Make programs that were sent anew, but for those that come out otherwise."""
        known = [(key, self._points[key]) for key in keys if key in self._points]
        # Nothing is open in them: the search's own randomness stays as it is.
        rng = np.random.default_rng(0)
        again = self._sketches.replay([point for _, point in known], rng)
        return {
            key: found[1]
            for (key, _), found in zip(known, again, strict=True)
            if found is not None and key_of(found[1]) == key
        }

    @property
    def best_sec(self) -> float | None:
        """Seconds of the fastest that was measured; None before the first success."""
        return self._elites[0][0] if self._elites else None

    @property
    def n_spares(self) -> int:
        """Candidates of earlier rounds that still compete."""
        return len(self._pool)

    def sample(self, n: int | None) -> list[Schedule] | None:
        """Return up to ``n`` random candidates, unmeasured and new, in random order."""
        self._programs = {}
        wanted = self._n_samples if n is None else min(n, self._n_samples)
        n_before = len(self._pool)
        n_valid = 0
        for _ in range(self._max_fail_count):
            points = [self._sketches.space.draw(self._rng) for _ in range(wanted)]
            n_valid += sum(key is not None for key in self._look(points))
            if 2 * n_valid >= wanted:
                break
        if n_valid == 0:
            return None
        self.n_population = n_valid
        self._randoms = np.arange(n_before, len(self._pool))
        self._look_at_seeds()
        return [self._programs[self._pool.keys[i]] for i in self._cheap_first(self._randoms)]

    def _cheap_first(self, randoms: IndexArray) -> IndexArray:
        """Shuffle; of two, the one that builds in half the time comes first two times in three.

        So a share of random candidates costs what it teaches: as many as possible per
        second, and none is out of the question.
        """
        cost_sec = self._cost.seconds([self._pool.points[i] for i in randoms])
        # The smallest of exponential variables is each one in proportion to its rate.
        waits = self._rng.exponential(1.0 if cost_sec is None else cost_sec, len(randoms))
        return np.asarray(randoms[np.argsort(waits)])

    def posterior(self, n_plans: int) -> Prediction | None:
        """Return what the cost model believes of the first random candidates."""
        plans = self._randoms[:n_plans]
        prediction: Prediction | None = self._model.posterior_of(
            self.context, self._pool.rows[plans]
        )
        return prediction

    def expected_drop(self) -> float | None:
        """Return the share of its latency that the best of the pool is expected to save."""
        prediction: Prediction | None = self._model.posterior_of(self.context, self._pool.rows)
        if prediction is None or not len(prediction):
            return None
        gain = float(expected_gain(prediction).max())
        return gain / (1.0 + gain)

    def recalled(self, n: int) -> list[Schedule]:
        """Return up to ``n`` candidates that an earlier run found best for this task."""
        # Others' would have to be made into programs, too, and are not asked for here.
        self._look_at_seeds(n_own=n)
        return self._seeded(self._seeds, n)

    def seeded(self, n: int) -> list[Schedule]:
        """Return candidates that were good elsewhere, best first.

        At most half of ``n``: what is good for a relative may mislead.
        """
        return self._seeded(self._seeds, n // 2)

    def _seeded(self, keys: Iterable[int], n: int) -> list[Schedule]:
        places = {key: i for i, key in enumerate(self._pool.keys)}
        # Some were measured since, as random candidates, or forgotten.
        return self._schedules([places[key] for key in keys if key in places][:n])

    def screened(self, n: int, without: Sequence[Schedule] = ()) -> list[Schedule]:
        """Return the ``n`` candidates that the model prefers, without a search for more."""
        taken = {key_of(schedule) for schedule in without}
        others = [i for i, key in enumerate(self._pool.keys) if key not in taken]
        return self._schedules(self._best(np.array(others, dtype=np.intp), n))

    def searched(self, n: int) -> list[Schedule]:
        """Return up to ``n`` unmeasured candidates, the best that a search found."""
        if n == 0:
            return []
        elites = [point for _, point in self._elites]
        refine(
            self._pool,
            self._sketches.space,
            elites,
            value=lambda: self._scores(np.arange(len(self._pool))),
            look=self._look,
            options=self._options,
            rng=self._rng,
        )
        near = self._near(round(self._options.local_share * n))
        far = np.setdiff1d(np.arange(len(self._pool)), near)
        return self._schedules(near + self._best(far, n - len(near)))

    def _look_at_seeds(self, n_own: int | None = None) -> None:
        """Put into the pool what relatives have found since it was last asked.

        With ``n_own`` only so many that an earlier run found for this very task.
        """
        space = self._sketches.space
        seeds = self._relatives.ask(self._family, str(self.context.task_name), space, self._rng)
        if n_own is not None:
            seeds = [seed for seed in seeds if seed.is_own][:n_own]
        new = [seed.point for seed in seeds if not self._pool.knows(seed.point)][:SEEDS_PER_ROUND]
        # Some are there already, drawn at random.
        keys = dict(zip(self._pool.points, self._pool.keys, strict=True))
        looked = zip(new, self._look(new), strict=True)
        keys.update((point, key) for point, key in looked if key is not None)
        self._seeds = [keys[seed.point] for seed in seeds if seed.point in keys]

    def _near(self, n: int) -> list[int]:
        """Look around the best that were measured and return the ``n`` best found there."""
        centres = [point for _, point in self._elites[: self._options.n_centres]]
        if not centres or n == 0:
            return []
        space = self._sketches.space
        self._look(neighbours(self._pool, space, centres, NEAR_RATIO * n, self._rng))
        return self._best(within(self._pool, space, centres, self._options.radius), n)

    def sent(self, batch: Sequence[Schedule]) -> None:
        """Never propose these again, and forget the least of what does not fit."""
        keys = {key_of(schedule) for schedule in batch}
        self.measured.update(keys)
        gone = [i for i, key in enumerate(self._pool.keys) if key in keys]
        gone_keys = [self._pool.keys[i] for i in gone]
        if self._trial_log is not None:
            for key, row in zip(gone_keys, self._pool.rows[gone], strict=True):
                self._trial_log.note(key, features=row)
        self._points.update(zip(gone_keys, self._pool.take(gone), strict=True))
        if len(self._pool) > self._pool.capacity:
            self._pool.trim(self._scores(np.arange(len(self._pool))))
        self._programs = {}

    def learned(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Keep the fastest as parents; None is a failure."""
        for schedule, sec in zip(schedules, seconds, strict=True):
            key = key_of(schedule)
            point = self._points.pop(key, None)
            build_sec = None if self._trial_log is None else self._trial_log.get(key).build_sec
            if point is not None and build_sec is not None:
                self._cost.add(point, build_sec)
            if point is not None and sec is not None:
                self._add_elite(sec, point)
        self._tell_relatives()

    def _add_elite(self, seconds: float, point: Point) -> None:
        bisect.insort(self._elites, (seconds, point), key=lambda elite: elite[0])
        del self._elites[N_ELITES:]

    def _tell_relatives(self) -> None:
        if len(self.measured) < MIN_TO_TELL:
            return
        space = self._sketches.space
        transfer_records = [
            TransferRecord(
                space.names[point.sketch], space.sketches[point.sketch], point.vector, sec
            )
            for sec, point in self._elites[:KEPT_PER_TASK]
        ]
        self._relatives.tell(self._family, str(self.context.task_name), transfer_records)

    def _look(self, points: Sequence[Point]) -> list[int | None]:
        """Make the programs of points, add the new ones to the pool.

        Returns the program's key for each point, None where it has no valid program.
        """
        # What the compiler draws may come out otherwise the next time.
        self._pool.remember(point for point in points if OPEN not in point.vector)
        keys: list[int | None] = []
        new: dict[int, Point] = {}
        for found in self._sketches.replay(points, self._rng):
            if found is None:
                keys.append(None)
                continue
            point, schedule = found
            key = key_of(schedule)
            keys.append(key)
            if not self._pool.knows_key(key) and key not in new:
                new[key] = point
                self._programs[key] = schedule
        if new:
            candidates = [candidate_of(self._programs[key]) for key in new]
            rows = self._model.describe(self.context, candidates)
            self._pool.add(list(new.values()), list(new), rows)
        return keys

    def _best(self, among: IndexArray, n: int) -> list[int]:
        """Return the ``n`` best of some of the pool, as indices of the pool."""
        if n == 0 or not len(among):
            return []
        scores = self._scores(among)
        # Diversity chooses among the good ones.
        order = np.argsort(-scores, kind="stable")[: n * DIVERSITY_RATIO]
        space, points = self._sketches.space, [self._pool.points[among[i]] for i in order]
        picked = pick(
            scores[order],
            n,
            self._diversity,
            knobs=lambda: [point.vector for point in points],
            vectors=lambda: space.encode(points).astype(np.float64),
            rng=self._rng,
        )
        return [int(among[order[i]]) for i in picked]

    def _schedules(self, indices: Sequence[int]) -> list[Schedule]:
        """Return programs of the pool; those of earlier rounds are made again."""
        missing = [i for i in indices if self._pool.keys[i] not in self._programs]
        points = [self._pool.points[i] for i in missing]
        for i, again in zip(missing, self._sketches.replay(points, self._rng), strict=True):
            if again is not None and key_of(again[1]) == self._pool.keys[i]:
                self._programs[self._pool.keys[i]] = again[1]
        keys = [self._pool.keys[i] for i in indices]
        return [self._programs[key] for key in keys if key in self._programs]

    def _scores(self, among: IndexArray) -> FloatArray:
        """Return the cost model's acquisition of some of the pool, higher is better."""
        cost_sec = self._cost.seconds([self._pool.points[i] for i in among])
        scores = self._model.scores_of(self.context, self._pool.rows[among], cost_sec)
        # Before any success of the run there is nothing to tell candidates apart by.
        return self._rng.random(len(among)) if scores is None else np.asarray(scores)
