"""Candidates by MetaSchedule's own evolution, on whole programs; for any cost model.

An adapter, like :mod:`tvm_adaptive.search_strategy.strategy`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    EvolutionarySearch,
    Schedule,
    TuneContext,
    evolve,
    python_side,
    sample_population,
)
from tvm_adaptive.search_strategy.picking import DIVERSITY_RATIO, pick
from tvm_adaptive.search_strategy.schedules import (
    candidate_of,
    distinct,
    key_of,
    knobs_of,
    measured_schedules,
    vectors_of,
)
from tvm_adaptive.values.hash_set import HashSet
from tvm_adaptive.values.trial import FloatArray, Prediction


@dataclasses.dataclass
class EvolutionProposer:
    """One task's candidates, sampled and evolved in C++."""

    context: TuneContext
    cost_model: Any
    options: Mapping[str, Any]  # of MetaSchedule's evolutionary search
    diversity: str
    batch: int  # candidates per round
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.measured = HashSet()
        self._inner: Any = None
        self._model: Any = python_side(self.cost_model)
        self._elites: list[tuple[float, Schedule]] = []
        self._returned = HashSet()
        self._spares: list[Schedule] = []
        self._population: list[Schedule] = []
        self._fresh: list[Schedule] = []

    def start(self, max_trials: int, design_spaces: list[Schedule], database: Database) -> None:
        """Start the native search and read what the database knows of the task."""
        self._inner = EvolutionarySearch(**self.options)
        self._inner._initialize_with_tune_context(self.context)
        self._inner.pre_tuning(max_trials, self.batch, design_spaces, database, self.cost_model)
        n_threads = max(1, int(self.context.num_threads))
        for seconds, schedule in measured_schedules(database, self.context.mod, n_threads):
            self.sent([schedule])
            self.learned([schedule], [seconds if math.isfinite(seconds) else None])

    def end(self) -> None:
        """End the native search, which owns the task in turn."""
        if self._inner is not None:
            self._inner.post_tuning()

    @property
    def n_population(self) -> int:
        """Programs that the round looked at before its search."""
        return len(self._population)

    @property
    def best_sec(self) -> float | None:
        """Seconds of the fastest that was measured; None before the first success."""
        return self._elites[0][0] if self._elites else None

    @property
    def n_spares(self) -> int:
        """Proposals of earlier rounds that still compete."""
        return len(self._spares)

    def sample(self, n: int | None) -> list[Schedule] | None:
        """Return about ``n`` random candidates, unmeasured, in random order."""
        parents = [schedule for _, schedule in self._elites[: self._n_elites()]]
        n_samples = int(self.options["population_size"]) - len(parents)
        randoms = sample_population(self._inner, n_samples if n is None else min(n, n_samples))
        if len(randoms) < self.options["init_min_unmeasured"]:
            return None
        self._population = parents + randoms
        fresh = distinct(randoms, self.measured)
        self._fresh = [fresh[i] for i in self.rng.permutation(len(fresh))]
        return self._fresh

    def posterior(self, n_plans: int) -> Prediction | None:
        """Return what the cost model believes of the first random candidates."""
        candidates = [candidate_of(plan) for plan in self._fresh[:n_plans]]
        prediction: Prediction | None = self._model.posterior(self.context, candidates)
        return prediction

    def expected_drop(self) -> float | None:
        """Return None: candidates are made and judged within a round."""
        return None

    def recalled(self, n: int) -> list[Schedule]:
        """Return nothing: what a store holds of the task is not known here."""
        del n
        return []

    def seeded(self, n: int) -> list[Schedule]:
        """Return nothing: decisions of other tasks are not known here."""
        del n
        return []

    def screened(self, n: int, without: Sequence[Schedule] = ()) -> list[Schedule]:
        """Return the ``n`` random candidates that the model prefers."""
        fresh = distinct(self._fresh, {key_of(schedule) for schedule in without})
        if n == 0 or len(fresh) <= n:
            return fresh[:n]
        return [fresh[i] for i in self._pick(fresh, n)]

    def searched(self, n: int) -> list[Schedule]:
        """Return up to ``n`` unmeasured candidates, evolved."""
        if n == 0:
            return []
        # The native search knows only what it returned itself: parents that came from
        # the random share, or from an earlier process, are among its best again.
        n_stale = sum(key_of(schedule) not in self._returned for _, schedule in self._elites)
        n_wanted = n_stale + (n if self.diversity == "none" else n * DIVERSITY_RATIO)
        evolved = evolve(self._inner, self._population, n_wanted)
        self._returned.update(key_of(schedule) for schedule in evolved)
        # It never returns a candidate twice, so those that did not make
        # it into a batch are kept here and compete again.
        proposals = distinct(self._spares + evolved, self.measured)
        if len(proposals) <= n:
            self._spares = []
            return proposals
        picked = self._pick(proposals, n)
        chosen = set(picked)
        spares = [proposals[i] for i in range(len(proposals)) if i not in chosen]
        self._spares = spares[: self.batch * DIVERSITY_RATIO]
        return [proposals[i] for i in picked]

    def sent(self, batch: Sequence[Schedule]) -> None:
        """Never propose these again."""
        self.measured.update(key_of(schedule) for schedule in batch)

    def learned(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Keep the fastest as parents; None is a failure."""
        pairs = zip(seconds, schedules, strict=True)
        self._elites += [(sec, schedule) for sec, schedule in pairs if sec is not None]
        self._elites.sort(key=lambda elite: elite[0])
        del self._elites[self._n_elites() :]

    def _n_elites(self) -> int:
        return int(self.options["population_size"] * self.options["init_measured_ratio"])

    def _pick(self, proposals: list[Schedule], n: int) -> list[int]:
        return pick(
            self._scores(proposals),
            n,
            self.diversity,
            knobs=lambda: [knobs_of(schedule) for schedule in proposals],
            vectors=lambda: vectors_of(proposals),
            rng=self.rng,
        )

    def _scores(self, schedules: list[Schedule]) -> FloatArray:
        candidates = [candidate_of(schedule) for schedule in schedules]
        scores = np.asarray(self.cost_model.predict(self.context, candidates), dtype=np.float64)
        return np.clip(scores, 0.0, None)
