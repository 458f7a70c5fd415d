"""What proposers have in common: how a batch is put together."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_adaptive._tvm import Database, Schedule, TuneContext, model_hooks
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.search_strategy.exploration import FALLBACK_EPSILON, n_random, posterior_epsilon
from tvm_adaptive.search_strategy.options import SearchOptions
from tvm_adaptive.search_strategy.schedules import distinct, key_of
from tvm_adaptive.values.hash_set import HashSet
from tvm_adaptive.values.trial import N_VERIFIED, Exploration, Prediction, Promise

logger = logging.getLogger(__name__)

# Of a task's initial trials: half teach the model of the whole space, half follow it.
INITIAL_EPSILON = 0.5
# Random schedules per candidate of a batch, where the model chooses among them without a search.
CHEAP_SAMPLES_PER_TRIAL = 3


class Given(NamedTuple):
    """Candidates of a batch that neither a model nor chance has chosen."""

    seeds: Sequence[Schedule] = ()  # good for tasks of the family, or for this one in earlier runs
    drafts: Sequence[Schedule] = ()  # that suit the processor
    prefetching: Sequence[Schedule] = ()  # variants that prefetch weights

    @property
    def all(self) -> list[Schedule]:
        """All of them, in the order in which they are measured."""
        return [*self.seeds, *self.drafts, *self.prefetching]


@dataclasses.dataclass(eq=False)
class Proposer(abc.ABC):
    """The source of one task's candidates: ``propose`` returns a batch, ``tell`` learns times."""

    context: TuneContext
    cost_model: Any
    options: SearchOptions
    batch: int  # candidates of a full batch
    rng: np.random.Generator
    journal: JournalWriter

    def __post_init__(self) -> None:
        self.excluded = HashSet()  # programs that were sent, or measured by earlier runs
        self._taken_back = HashSet()
        self.n_rounds = 0
        self._n_population = 0  # programs of the round before its search
        self.model: Any = model_hooks(self.cost_model)
        self._elites: list[tuple[float, Any]] = []  # the fastest that were measured

    @property
    def best_sec(self) -> float | None:
        """Seconds of the fastest that was measured; None before the first success."""
        return self._elites[0][0] if self._elites else None

    @abc.abstractmethod
    def start(self, max_trials: int, design_spaces: list[Schedule], database: Database) -> None:
        """Prepare the search, and read what the database knows of the task."""

    @abc.abstractmethod
    def end(self) -> None:
        """Release the task's programs."""

    @abc.abstractmethod
    def tell(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Learn the times of candidates; None is a failure."""

    def take_back(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Let candidates compete once more that the machine failed at; return those that may."""
        # One that always takes more memory than there is would end the run.
        again = [each for each in schedules if key_of(each) not in self._taken_back]
        for schedule in again:
            self.excluded.discard(key_of(schedule))
            self._taken_back.update([key_of(schedule)])
        return again

    def promise(self) -> Promise | None:
        """Return the model's forecast for candidates that wait for a later round, if any do."""
        return None

    def propose(self, size: int, *, cheap: bool) -> list[Schedule] | None:
        """Return the next batch, a cheap one without a search; None if the space is exhausted."""
        start_sec, given = time.perf_counter(), Given()
        if not len(self.excluded):
            # An earlier run's best need no more than a verification.
            if recalled := self._recalled(min(size, N_VERIFIED)):
                seconds = (time.perf_counter() - start_sec, 0.0, 0.0)
                why = Exploration(0.0, "recalled")
                return self._send(recalled, why, Given(recalled), seconds=seconds)
            given = self._started(size) if cheap else given
            if 0 < size <= len(given.all):  # random candidates would be made for nothing
                seconds = (0.0, 0.0, time.perf_counter() - start_sec)
                why = Exploration(0.0, "analytical")
                return self._send(given.all, why, given, seconds=seconds)
        return self._mixed(size, given, start_sec, cheap=cheap)

    def _mixed(
        self, size: int, given: Given, start_sec: float, *, cheap: bool
    ) -> list[Schedule] | None:
        """Return a batch with random candidates, and those that the model prefers.

        Of what is given, seeds are chosen again, for the places that are left.
        """
        n_samples = max(self.options.init_min_unmeasured, CHEAP_SAMPLES_PER_TRIAL * size)
        randoms = self._sample(n_samples if cheap else None)
        if randoms is None:
            logger.info("%s: the space is exhausted", self.context.task_name)
            return None
        clock = [start_sec, time.perf_counter()]
        exploration = self._exploration(cheap=cheap)
        clock.append(time.perf_counter())
        drafts, prefetching = given.drafts, given.prefetching
        prefetching = prefetching or self._prefetching(max(1, size // 2))
        seeds = self._seeded(size - len(drafts) - len(prefetching)) if cheap else []
        # The best of relatives may be what suits the processor.
        seeds = list(distinct(seeds, {key_of(each) for each in (*drafts, *prefetching)}))
        n_free = size - len(seeds) - len(drafts) - len(prefetching)
        explore = min(n_random(exploration.epsilon, n_free), len(randoms))
        if cheap and not drafts:
            drafts = self._drafts_left(n_free - explore)
        given = Given(seeds, drafts, prefetching)
        wanted = size - explore - len(given.all)
        exploit = given.all
        exploit += self._screened(wanted, exploit) if cheap else self._searched(wanted)
        clock.append(time.perf_counter())
        batch = exploit[: size - explore]
        others = distinct(randoms, {key_of(schedule) for schedule in batch})
        batch += itertools.islice(others, size - len(batch))
        return self._send(
            batch,
            exploration,
            given,
            n_random=len(batch) - min(len(exploit), size - explore),
            is_evolved=not cheap,
            seconds=np.diff(clock).tolist(),
        )

    @property
    @abc.abstractmethod
    def _n_spares(self) -> int:
        """Candidates of earlier rounds that still compete."""

    @abc.abstractmethod
    def _sample(self, n: int | None) -> list[Schedule] | None:
        """Begin a round: return ``n`` or a full round's random candidates; None without any."""

    @abc.abstractmethod
    def _posterior(self, n_plans: int) -> Prediction | None:
        """Return the cost model's posterior of the first random candidates."""

    def _recalled(self, n: int) -> list[Schedule]:
        """Return up to ``n`` candidates that were the best of this task in an earlier run."""
        del n
        return []

    def _seeded(self, n: int) -> list[Schedule]:
        """Return candidates that were good for tasks of the same family; some of ``n``."""
        del n
        return []

    def _started(self, n: int) -> Given:
        """Return a task's first candidates, ``n`` at most; of drafts, the first may prefetch."""
        del n
        return Given()

    def _drafts_left(self, n: int) -> list[Schedule]:
        """Return up to ``n`` that suit the processor and had no place in the first batch."""
        del n
        return []

    def _prefetching(self, n: int) -> list[Schedule]:
        """Return up to ``n`` variants of the fastest candidate that prefetch its weights."""
        del n
        return []

    @abc.abstractmethod
    def _screened(self, n: int, without: Sequence[Schedule]) -> list[Schedule]:
        """Return the ``n`` other candidates that the model prefers, without a search for more."""

    @abc.abstractmethod
    def _searched(self, n: int) -> list[Schedule]:
        """Return up to ``n`` unmeasured candidates, the best that a search found."""

    def _send(
        self,
        batch: list[Schedule],
        exploration: Exploration,
        given: Given,
        *,
        n_random: int = 0,
        is_evolved: bool = False,
        seconds: Sequence[float],
    ) -> list[Schedule]:
        self._exclude({key_of(schedule) for schedule in batch})
        self.n_rounds += 1
        sample_sec, posterior_sec, search_sec = seconds
        self.journal.write(
            "round",
            task=str(self.context.task_name),
            round=self.n_rounds,
            n_candidates=len(batch),
            n_random=n_random,
            n_seeded=len(given.seeds),
            n_analytical=len(given.drafts),
            n_prefetching=len(given.prefetching),
            **dataclasses.asdict(exploration),
            n_population=self._n_population,
            is_evolved=is_evolved,
            n_spares=self._n_spares,
            decisions=self._decisions(batch),
            sample_sec=sample_sec,
            posterior_sec=posterior_sec,
            evolve_sec=search_sec,
        )
        return batch

    def _decisions(self, batch: Sequence[Schedule]) -> list[Any] | None:
        """Return the sketch and the decisions of each candidate; None where they are not known."""
        del batch
        return None

    def _exclude(self, keys: set[int]) -> None:
        """Never propose these programs again."""
        self.excluded.update(keys)

    def _exploration(self, *, cheap: bool) -> Exploration:
        if self.options.epsilon is not None:
            return Exploration(self.options.epsilon, "fixed")
        if self.model is None:
            if self.n_rounds == 0:
                logger.warning(
                    "%s: the cost model states no variance; epsilon is fixed at %g",
                    self.context.task_name,
                    FALLBACK_EPSILON,
                )
            return Exploration(FALLBACK_EPSILON, "no-variance")
        if not self.model.is_trained:
            # Scores of an untrained model rank nothing: a search would cost its price
            # and find random candidates all the same.
            return Exploration(1.0, "untrained")
        if cheap and len(self.excluded) < self.options.n_initial:
            return Exploration(INITIAL_EPSILON, "initial")
        prediction = self._posterior(self.options.n_plans)
        if prediction is None:
            reason = "no-success-yet" if self.best_sec is None else "nothing-random"
            return Exploration(FALLBACK_EPSILON, reason)
        return posterior_epsilon(prediction)
