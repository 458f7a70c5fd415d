"""What a batch is put together of, and the journal's entry of it.

An adapter, like :mod:`tvm_adaptive.search_strategy.strategy`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import Schedule
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.search_strategy.exploration import (
    FALLBACK_EPSILON,
    n_random,
    posterior_epsilon,
)
from tvm_adaptive.search_strategy.proposer import Proposer
from tvm_adaptive.search_strategy.schedules import mix
from tvm_adaptive.values.trial import N_VERIFIED, Exploration

logger = logging.getLogger(__name__)

# Of a task's initial trials: half teach the model of the whole space, half follow it.
INITIAL_EPSILON = 0.5
# Random schedules per place, where the model chooses among them without evolution.
CHEAP_SAMPLES_PER_TRIAL = 3


class Batches:
    """One task's batches, from what its proposer brings."""

    def __init__(
        self,
        proposer: Proposer,
        model: Any,
        *,
        task_name: str,
        epsilon: float | None,
        n_plans: int,
        least_random: int,
        journal: JournalWriter,
    ) -> None:
        self._proposer = proposer
        self._model = model
        self._task_name = task_name
        self._epsilon = epsilon
        self._n_plans = n_plans
        self._least_random = least_random
        self._journal = journal
        self.n_rounds = 0

    def recalled(self, size: int) -> list[Schedule]:
        """Return what an earlier run found for the task, which only has to be verified.

        Empty if there is nothing.
        """
        start_sec = time.perf_counter()
        batch = self._proposer.recalled(min(size, N_VERIFIED))
        if batch:
            seconds = (time.perf_counter() - start_sec, 0.0, 0.0)
            exploration = Exploration(0.0, "recalled")
            self._send(batch, exploration, n_seeded=len(batch), seconds=seconds)
        return batch

    def make(self, size: int, *, cheap: bool) -> list[Schedule] | None:
        """Return a batch; None if the space has no valid candidate left."""
        clock = [time.perf_counter()]
        proposer = self._proposer
        n_samples = max(self._least_random, CHEAP_SAMPLES_PER_TRIAL * size)
        randoms = proposer.sample(n_samples if cheap else None)
        if randoms is None:
            logger.info("%s: the space is exhausted", self._task_name)
            return None
        clock.append(time.perf_counter())
        exploration = self._exploration(cheap=cheap)
        clock.append(time.perf_counter())
        seeds = proposer.seeded(size) if cheap else []
        explore = min(n_random(exploration.epsilon, size - len(seeds)), len(randoms))
        wanted = size - explore - len(seeds)
        found = proposer.screened(wanted, seeds) if cheap else proposer.searched(wanted)
        exploit = seeds + found
        clock.append(time.perf_counter())
        batch = mix(exploit, randoms, explore, size)
        self._send(
            batch,
            exploration,
            n_random=len(batch) - min(len(exploit), size - explore),
            n_seeded=len(seeds),
            is_evolved=not cheap,
            seconds=np.diff(clock).tolist(),
        )
        return batch

    def _send(
        self,
        batch: list[Schedule],
        exploration: Exploration,
        *,
        n_random: int = 0,
        n_seeded: int = 0,
        is_evolved: bool = False,
        seconds: Sequence[float],
    ) -> None:
        self._proposer.sent(batch)
        self.n_rounds += 1
        sample_sec, posterior_sec, search_sec = seconds
        self._journal.write(
            "round",
            task=self._task_name,
            round=self.n_rounds,
            n_candidates=len(batch),
            n_random=n_random,
            n_seeded=n_seeded,
            **dataclasses.asdict(exploration),
            n_population=self._proposer.n_population,
            is_evolved=is_evolved,
            n_spares=self._proposer.n_spares,
            sample_sec=sample_sec,
            posterior_sec=posterior_sec,
            evolve_sec=search_sec,
        )

    def _exploration(self, *, cheap: bool) -> Exploration:
        if self._epsilon is not None:
            return Exploration(self._epsilon, "fixed")
        if not hasattr(self._model, "posterior"):
            if self.n_rounds == 0:
                logger.warning(
                    "%s: the cost model states no variance; epsilon is fixed at %g",
                    self._task_name,
                    FALLBACK_EPSILON,
                )
            return Exploration(FALLBACK_EPSILON, "no-variance")
        if not getattr(self._model, "is_trained", True):
            # Scores of an untrained model rank nothing: a search would cost its price
            # and bring random candidates all the same.
            return Exploration(1.0, "untrained")
        if cheap:
            return Exploration(INITIAL_EPSILON, "initial")
        prediction = self._proposer.posterior(self._n_plans)
        if prediction is None or len(prediction) == 0:
            return Exploration(FALLBACK_EPSILON, "no-success-yet")
        return posterior_epsilon(prediction)
