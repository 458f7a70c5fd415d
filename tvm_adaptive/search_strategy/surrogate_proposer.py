"""Candidates by a search on the knobs, for cost models that can score features alone."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    Schedule,
    TuneContext,
    TuningRecord,
    Workload,
    anchor_of,
    args_info_of,
)
from tvm_adaptive._tvm.operands import reads_with_gaps
from tvm_adaptive.search_strategy.candidate_pool import CandidatePool
from tvm_adaptive.search_strategy.knobs import Point
from tvm_adaptive.search_strategy.picking import IndexArray
from tvm_adaptive.search_strategy.proposer import Given, Proposer
from tvm_adaptive.search_strategy.schedules import key_of, measured_schedules, processor_of
from tvm_adaptive.search_strategy.sketches import Sketches
from tvm_adaptive.search_strategy.surrogate_search import (
    LOCAL_SHARE,
    MIN_TO_LEARN,
    N_CENTRES,
    N_STEPS,
    NEAR_RATIO,
    RADIUS,
    descendants,
    neighbours,
    within,
)
from tvm_adaptive.search_strategy.transfer import (
    KEPT_PER_TASK,
    MIN_TO_TELL,
    Seed,
    TransferPool,
    TransferRecord,
)
from tvm_adaptive.values.improvement import expected_improvement
from tvm_adaptive.values.trial import Prediction, Promise
from tvm_adaptive.values.trial_log import TrialLog

logger = logging.getLogger(__name__)

# Measured candidates that the search starts from, beside the best of the pool.
N_ELITES = 16
# Seeds whose programs a round makes, some 10 ms each.
SEEDS_PER_ROUND = 8
# One of so many of a task's first candidates is a seed, if there is one.
_SEEDS_AMONG_FIRST = 4
# Of the draws of a round of sampling. All are made before the first is tried.
_MOST_DOUBLINGS = 4
# Forms that prefetch weights are tried again of a program that is this much faster: they take 0.9
# of its time, hardly ever less.
_PREFETCHED_AGAIN = 0.95
# Where reads depend on remainders, which the model of the processor knows nothing of. With eight
# drafts, the best of 32 trials of TVM's T2D took 1.7 times as long as without any.
_DRAFTS_WITH_GAPS = 1
# Programs of a whole space that take a few seconds to make.
_FEW_POINTS = 256
# Decisions may have no valid program: one of a few has.
_N_TRIED = 4


@dataclasses.dataclass(eq=False)
class SurrogateProposer(Proposer):
    """One task's candidates, found on a model of the cost model."""

    candidates: CandidatePool = dataclasses.field(init=False)
    trial_log: TrialLog | None = None
    transfer_pool: TransferPool = dataclasses.field(default_factory=TransferPool)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.family = ""
        self._elites: list[tuple[float, Point]] = []
        self._randoms: IndexArray = np.zeros(0, dtype=np.intp)
        self._seeds: list[int] = []  # keys, the best first
        # Keys of seeds by the points that were asked for, which the compiler may have changed or
        # completed; None without a program.
        self._seed_keys: dict[Point, int | None] = {}
        # The fastest without prefetching whose variants with it were tried, and its seconds.
        self._prefetched: tuple[float, Point] | None = None
        self._points_left: list[Point] = []  # that suit the processor, and were not needed yet

    def start(self, max_trials: int, design_spaces: list[Schedule], database: Database) -> None:
        """Open the sketches, and read what the database knows of the task."""
        del max_trials
        self.candidates = CandidatePool(
            self.context, design_spaces, self.model, self.options.diversity, self.rng
        )
        self.family = anchor_of(self.context.mod)
        pool = self.candidates.pool
        n_threads = max(1, int(self.context.num_threads))
        for seconds, schedule in measured_schedules(database, self.context.mod, n_threads):
            key, point = key_of(schedule), self.candidates.sketches.point_of(schedule)
            self.excluded.update([key])
            pool.remember([], [key])
            if point is not None and math.isfinite(seconds):
                pool.remember([point])
                self.candidates.space.note_drawn(point)
                self._add_elite(seconds, point)
        self._share_elites()
        if 0 < len(self.excluded) < self.options.n_initial:  # an earlier attempt began with some
            self._keep_drafts()

    def end(self) -> None:
        """Release all programs."""
        self.candidates.forget_programs()

    def carry(self) -> dict[str, Any]:
        """Return the state of the search in plain values: all but the task's programs."""
        return {
            "excluded": self.excluded,
            "taken_back": self._taken_back,
            "n_rounds": self.n_rounds,
            "n_population": self._n_population,
            "elites": self._elites,
            "prefetched": self._prefetched,
            "points_left": self._points_left,
            "seed_keys": self._seed_keys,
            **self.candidates.carry(),
        }

    def resume(self, carried: Mapping[str, Any], transfer_pool: TransferPool | None = None) -> None:
        """Continue from the state of another process's search of the same task."""
        self.transfer_pool = transfer_pool or self.transfer_pool
        self.excluded, self.n_rounds = carried["excluded"], carried["n_rounds"]
        self._taken_back = carried["taken_back"]
        self._n_population, self._elites = carried["n_population"], carried["elites"]
        self._prefetched = carried["prefetched"]
        self.rng, self._points_left = carried["rng"], carried["points_left"]
        self._seed_keys = carried["seed_keys"]
        self.candidates.resume(carried)

    def tell(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Keep the fastest as parents; None is a failure."""
        for schedule, sec in zip(schedules, seconds, strict=True):
            key = key_of(schedule)
            point = self.candidates.sent.pop(key, None)
            build_sec = None if self.trial_log is None else self.trial_log.get(key).build_sec
            if point is not None and build_sec is not None:
                self.candidates.build_cost.add(point, build_sec)
            if point is not None and sec is not None:
                self._add_elite(sec, point)
        self._share_elites()

    def take_back(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Let candidates compete once more that the machine failed at; return those that may."""
        again = super().take_back(schedules)
        self.candidates.take_back(again)
        for schedule in schedules:  # the others never have a result
            self.candidates.sent.pop(key_of(schedule), None)
        return again

    def promise(self) -> Promise | None:
        """Return the share of its latency that the best of the pool is expected to save."""
        prediction = self.candidates.posterior()
        if prediction is None or not len(prediction):
            return None
        # In multiples of the incumbent's throughput, which is 1.
        gain = float(expected_improvement(prediction.mean, prediction.std, 1.0).max())
        return Promise(gain / (1.0 + gain), self.model.accuracy_of(self.context))

    def elite_records(self) -> list[TransferRecord]:
        """Return the best measured decisions, for tasks of the same family."""
        space = self.candidates.space
        return [
            TransferRecord(
                space.names[point.sketch], space.sketches[point.sketch], point.vector, sec
            )
            for sec, point in self._elites[:KEPT_PER_TASK]
        ]

    @property
    def _n_spares(self) -> int:
        return len(self.candidates.pool)

    def _sample(self, n: int | None) -> list[Schedule] | None:
        candidates, pool = self.candidates, self.candidates.pool
        candidates.forget_programs()
        if n is None and self._points_left:  # the search compares them with what it finds
            candidates.add(self._points_left)
            self._points_left = []
        # Enough for a batch of nothing but random candidates, some of which fail.
        n_samples = max(self.options.n_samples, self.batch + self.batch // 2)
        wanted = n_samples if n is None else min(n, n_samples)
        n_before = len(pool)
        n_valid, n_fruitless = 0, 0
        while 2 * n_valid < wanted and n_fruitless < self.options.max_fail_count:
            # Twice as many after each round without any: on GPUs, one of hundreds may be valid.
            points: list[Point] = []
            for _ in range(wanted << min(n_fruitless, _MOST_DOUBLINGS)):
                point = candidates.space.draw(self.rng)
                if not candidates.space.allows(point):
                    break  # thousands of tries have found none
                points.append(point)
            n_found = sum(key is not None for key in candidates.add(points))
            n_fruitless = 0 if n_found else n_fruitless + 1
            n_valid += n_found
        if not len(pool):  # of a small space, draws miss the last few
            left = [p for p in candidates.space.all_points(_FEW_POINTS) if not pool.knows(p)]
            n_valid += sum(key is not None for key in candidates.add(left))
        if not (n_valid or len(pool)):
            return None
        self._n_population = n_valid
        self._randoms = np.arange(n_before, len(pool))
        self._add_seeds()
        return candidates.schedules(self._cheap_first(self._randoms))

    def _cheap_first(self, randoms: IndexArray) -> list[int]:
        """Shuffle; of two, the one that builds in half the time comes first two times in three."""
        cost_sec = self.candidates.build_secs(randoms)
        # The smallest of exponential variables is each one in proportion to its rate.
        scale = 1.0 if cost_sec is None else cost_sec
        waits = self.rng.exponential(scale, len(randoms))
        return [int(i) for i in randoms[np.argsort(waits)]]

    def _posterior(self, n_plans: int) -> Prediction | None:
        return self.candidates.posterior(self._randoms[:n_plans])

    def _recalled(self, n: int) -> list[Schedule]:
        # Seeds of other tasks are not needed here, and each would cost a program.
        seeds = self._add_seeds(n_own=n)
        recalled = self._first_seeds(n)
        # Those of another machine, or of a few trials, may be worse than what suits this one.
        if recalled and not any(each.is_of_equal_task and not each.is_of_few for each in seeds):
            self._keep_drafts()
        return recalled

    def _seeded(self, n: int) -> list[Schedule]:
        # At most half: what is good for a task of the family may mislead.
        return self._first_seeds(n // 2)

    def _first_seeds(self, n: int) -> list[Schedule]:
        # Some were measured since, as random candidates, or dropped from the pool.
        return self.candidates.schedules(self._places_of(self._seeds)[:n])

    def _started(self, n: int) -> Given:
        if processor_of(self.context.target) is None or not self.options.n_analytical:
            return Given()
        candidates = self.candidates
        candidates.forget_programs()
        self._add_seeds()
        # Of a detector's 75 tasks, the best of one seed of starter records and three of these was
        # 3 % faster than that of two and two, and than that of four seeds 29 %.
        seeds = self._first_seeds(n // _SEEDS_AMONG_FIRST)
        # In this order: it ranks them better than a model that knows only other tasks.
        self._points_left = self._promising()
        places = self._drafted(n - len(seeds))
        variants: list[Schedule] = []
        if len(places) > 1 and self.options.prefetch and candidates.sketches.has_far_weights:
            first = candidates.pool.points[places[0]]
            self._prefetched = math.inf, first
            variants = candidates.prefetching(first)[:1]
        drafts = candidates.schedules(places[: n - len(seeds) - len(variants)])
        return Given(seeds, drafts, variants)

    def _promising(self) -> list[Point]:
        """Return points that suit the processor, the best first; none for GPUs."""
        processor, n_drafts = processor_of(self.context.target), self.options.n_analytical
        if processor is None or not n_drafts:
            return []
        if reads_with_gaps(self.context.mod):
            n_drafts = min(n_drafts, _DRAFTS_WITH_GAPS)
        return self.candidates.sketches.promising(processor, n_drafts, self.rng)

    def _keep_drafts(self) -> None:
        """Keep what suits the processor for later batches."""
        try:
            self._points_left = self._promising()
        except Exception:  # they are a help, and no condition
            logger.exception("%s: no candidates for the processor", self.context.task_name)

    def _drafted(self, n: int) -> list[int]:
        """Add what suits the processor until ``n`` have a program; return places in the pool."""
        keys: list[int] = []
        while self._points_left and len(keys) < n:
            n_missing = n - len(keys)
            some, self._points_left = self._points_left[:n_missing], self._points_left[n_missing:]
            found = self.candidates.add(some)
            known = {*self._seeds, *keys}
            keys += [
                key
                for key in dict.fromkeys(found)
                if key is not None and key not in known and key not in self.excluded
            ]
        return self._places_of(keys)

    def _drafts_left(self, n: int) -> list[Schedule]:
        # Of 632 tasks, the fourth draft was faster than all before by 2 % in 17 of 100 cases; what
        # a model prefers that knows a batch, in 3.
        return self.candidates.schedules(self._drafted(n))

    def _places_of(self, keys: Sequence[int]) -> list[int]:
        """Return where programs are in the pool, without those that have left it."""
        places = {key: i for i, key in enumerate(self.candidates.pool.keys)}
        return [places[key] for key in keys if key in places]

    def _prefetching(self, n: int) -> list[Schedule]:
        is_possible = self.options.prefetch and processor_of(self.context.target) is not None
        if n < 1 or not is_possible or not self._elites:
            return []
        seconds, best = self._elites[0]
        if self._prefetched is not None:
            tried_sec, tried = self._prefetched
            if best == tried or seconds > _PREFETCHED_AGAIN * tried_sec:
                return []
        self._prefetched = seconds, best
        variants = self.candidates.prefetching(best)
        return [each for each in variants if key_of(each) not in self.excluded][:n]

    def _screened(self, n: int, without: Sequence[Schedule]) -> list[Schedule]:
        taken = {key_of(schedule) for schedule in without}
        others = [i for i, key in enumerate(self.candidates.pool.keys) if key not in taken]
        best = self.candidates.best(np.array(others, dtype=np.intp), n)
        return self.candidates.schedules(best)

    def _searched(self, n: int) -> list[Schedule]:
        if n == 0:
            return []
        candidates, pool = self.candidates, self.candidates.pool
        elites = [point for _, point in self._elites]
        for _ in range(N_STEPS):
            if len(pool) < MIN_TO_LEARN:
                break
            points = descendants(pool, candidates.space, elites, candidates.scores(), self.rng)
            if not points:
                break
            candidates.add(points)
        near = self._near(round(LOCAL_SHARE * n))
        far = np.setdiff1d(np.arange(len(pool)), near)
        return candidates.schedules(near + candidates.best(far, n - len(near)))

    def _near(self, n: int) -> list[int]:
        """Search the neighbourhood of the best measured points, and return its ``n`` best."""
        centres = [point for _, point in self._elites[:N_CENTRES]]
        if not centres or n == 0:
            return []
        pool, space = self.candidates.pool, self.candidates.space
        self.candidates.add(neighbours(pool, space, centres, NEAR_RATIO * n, self.rng))
        return self.candidates.best(within(pool, space, centres, RADIUS), n)

    def _add_seeds(self, n_own: int | None = None) -> list[Seed]:
        """Add records of the family, or ``n_own`` of this task, to the pool; return all of them."""
        pool, name = self.candidates.pool, str(self.context.task_name)
        seeds = self.transfer_pool.ask(self.family, name, self.candidates.space, self.rng)
        if n_own is not None:
            seeds = [seed for seed in seeds if seed.is_own][:n_own]
        points = [seed.point for seed in seeds]
        new = [each for each in points if each not in self._seed_keys and not pool.knows(each)]
        new = new[:SEEDS_PER_ROUND]
        self._seed_keys.update(zip(new, self.candidates.add(new), strict=True))
        # Some were there already, drawn at random.
        keys = {**self._seed_keys, **dict(zip(pool.points, pool.keys, strict=True))}
        # Different decisions may lead to the same program.
        found = dict.fromkeys(keys.get(each) for each in points)
        self._seeds = [key for key in found if key is not None]
        return seeds

    def _exclude(self, keys: set[int]) -> None:
        super()._exclude(keys)
        self.candidates.send(keys, self.trial_log)

    def _decisions(self, batch: Sequence[Schedule]) -> list[Any] | None:
        points = [self.candidates.sent.get(key_of(schedule)) for schedule in batch]
        parts_of = self.candidates.space.parts_of
        return [None if point is None else [point.sketch, parts_of(point)] for point in points]

    def _add_elite(self, seconds: float, point: Point) -> None:
        known = next((each for each in self._elites if each[1] == point), None)
        if known is not None:  # the same decisions, but it prefetches
            if known[0] <= seconds:
                return
            self._elites.remove(known)
        bisect.insort(self._elites, (seconds, point), key=lambda elite: elite[0])
        del self._elites[N_ELITES:]

    def _share_elites(self) -> None:
        name, is_new = str(self.context.task_name), len(self.excluded) < MIN_TO_TELL
        if self._elites:
            self.transfer_pool.tell(self.family, name, self.elite_records(), is_new=is_new)


def draft_of(
    context: TuneContext,
    rng: np.random.Generator,
    transfer_pool: TransferPool,
    *,
    prefetch: bool = True,
) -> TuningRecord | None:
    """Return the most promising candidate of a task without trials, as a record without times.

    That is this task's best of an earlier run, that of a task with the same extents, or what
    suits the processor best, with its weights prefetched where no core's own cache keeps them.
    None where the processor is not known, as of GPUs, or no candidate is valid.

    Of 75 drafts of a detector, the first for the processor took 1.38 times as long as the best
    of six candidates (geometric mean), the nearest relative's best of starter records 1.62, and
    what a model preferred that had learned those records 1.44.
    """
    processor, name = processor_of(context.target), str(context.task_name)
    if processor is None:
        return None
    try:
        sketches = Sketches(context, context.space_generator.generate_design_space(context.mod))
        seeds = transfer_pool.ask(anchor_of(context.mod), name, sketches.space, rng)
        points = [seed.point for seed in seeds if seed.is_of_equal_task][:1]
        points += sketches.promising(processor, _N_TRIED, rng)
        found = (sketches.replay([point], rng)[0] for point in points)
        schedule = next((each[1] for each in found if each is not None), None)
        if schedule is not None and prefetch and sketches.has_far_weights:
            schedule = next(iter(sketches.prefetching(schedule)), schedule)
    except Exception:
        logger.warning("%s: no schedule could be drafted", name, exc_info=True)
        return None
    if schedule is None:
        return None
    workload, args_info = Workload(context.mod), args_info_of(context.mod)
    return TuningRecord(schedule.trace, workload, None, context.target, args_info)
