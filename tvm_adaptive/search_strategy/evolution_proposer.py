"""Candidates by MetaSchedule's own evolution, on whole programs; for any cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import Database, EvolutionarySearch, Schedule, evolve, sample_population
from tvm_adaptive.search_strategy.picking import DIVERSITY_RATIO, pick
from tvm_adaptive.search_strategy.proposer import Proposer
from tvm_adaptive.search_strategy.schedules import (
    candidate_of,
    distinct,
    key_of,
    knobs_of,
    measured_schedules,
    vectors_of,
)
from tvm_adaptive.values.hash_set import HashSet
from tvm_adaptive.values.trial import Prediction


class EvolutionProposer(Proposer):
    """One task's candidates, sampled and evolved in C++."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inner: Any = None
        self._returned = HashSet()
        self._spares: list[Schedule] = []
        self._population: list[Schedule] = []
        self._fresh: list[Schedule] = []
        self._n_elites = int(self.options.population_size * self.options.init_measured_ratio)

    def start(self, max_trials: int, design_spaces: list[Schedule], database: Database) -> None:
        """Start the native search and read what the database knows of the task."""
        self._inner = EvolutionarySearch(**self.options.of_evolution())
        self._inner._initialize_with_tune_context(self.context)
        self._inner.pre_tuning(max_trials, self.batch, design_spaces, database, self.cost_model)
        n_threads = max(1, int(self.context.num_threads))
        for seconds, schedule in measured_schedules(database, self.context.mod, n_threads):
            self._exclude({key_of(schedule)})
            self.tell([schedule], [seconds if math.isfinite(seconds) else None])

    def end(self) -> None:
        """End the native search, which owns the task in turn."""
        if self._inner is not None:
            self._inner.post_tuning()

    def tell(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Keep the fastest as parents; None is a failure."""
        pairs = zip(seconds, schedules, strict=True)
        self._elites += [(sec, schedule) for sec, schedule in pairs if sec is not None]
        self._elites.sort(key=lambda elite: elite[0])
        # One at least: the others are compared with it while they are measured.
        del self._elites[max(1, self._n_elites) :]

    def take_back(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Let candidates compete once more that the machine failed at; return those that may."""
        again = super().take_back(schedules)
        self._spares += again
        return again

    @property
    def _n_spares(self) -> int:
        return len(self._spares)

    def _sample(self, n: int | None) -> list[Schedule] | None:
        parents = [schedule for _, schedule in self._elites[: self._n_elites]]
        n_samples = max(1, self.options.population_size - len(parents))
        n_samples = n_samples if n is None else min(n, n_samples)
        randoms = self._sampled(n_samples)
        if not randoms:
            return None
        self._population = parents + randoms
        self._n_population = len(self._population)
        fresh = list(distinct(randoms, self.excluded))
        self._fresh = [fresh[i] for i in self.rng.permutation(len(fresh))]
        return self._fresh

    def _sampled(self, n: int) -> list[Schedule]:
        """Return about ``n`` valid schedules; fewer where few draws are, as on GPUs."""
        found = sample_population(self._inner, n)
        # The native sampling ends after a few draws of ``n`` without any: of cheap rounds too
        # early, as one draw of hundreds may be valid.
        for _ in range(self.options.max_fail_count):
            if len(found) >= min(self.options.init_min_unmeasured, n):
                break
            found += sample_population(self._inner, self.options.population_size)
        return found

    def _posterior(self, n_plans: int) -> Prediction | None:
        candidates = [candidate_of(plan) for plan in self._fresh[:n_plans]]
        prediction: Prediction | None = self.model.posterior(self.context, candidates)
        return prediction

    def _screened(self, n: int, without: Sequence[Schedule]) -> list[Schedule]:
        fresh = list(distinct(self._fresh, {key_of(schedule) for schedule in without}))
        if n == 0 or len(fresh) <= n:
            return fresh[:n]
        return [fresh[i] for i in self._pick(fresh, n)]

    def _searched(self, n: int) -> list[Schedule]:
        if n == 0:
            return []
        # The native search knows only what it returned itself: parents that came from
        # the random share, or from an earlier process, are among its best again.
        n_stale = sum(key_of(schedule) not in self._returned for _, schedule in self._elites)
        n_wanted = n_stale + (n if self.options.diversity == "none" else n * DIVERSITY_RATIO)
        evolved = evolve(self._inner, self._population, n_wanted)
        self._returned.update(key_of(schedule) for schedule in evolved)
        # It never returns a candidate twice, so those that are not picked for a batch are
        # kept here and compete again.
        proposals = list(distinct(self._spares + evolved, self.excluded))
        if len(proposals) <= n:
            self._spares = []
            return proposals
        picked = self._pick(proposals, n)
        chosen = set(picked)
        spares = [each for i, each in enumerate(proposals) if i not in chosen]
        self._spares = spares[: self.batch * DIVERSITY_RATIO]
        return [proposals[i] for i in picked]

    def _pick(self, proposals: list[Schedule], n: int) -> list[int]:
        candidates = [candidate_of(schedule) for schedule in proposals]
        scores = np.asarray(self.cost_model.predict(self.context, candidates), dtype=np.float64)
        return pick(
            np.clip(scores, 0.0, None),
            n,
            self.options.diversity,
            knobs=lambda: [knobs_of(schedule) for schedule in proposals],
            vectors=lambda: vectors_of(proposals),
            rng=self.rng,
        )
