"""``strategy="adaptive"``: native evolutionary search, epsilon from the posterior.

The heavy half of a round (sampling, mutation, trace replay) stays in TVM's C++; what is
decided here is how much of the batch is drawn at random, which of the evolved
candidates fill the rest, and that nothing is measured twice.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    EvolutionarySearch,
    MeasureCandidate,
    PySearchStrategy,
    RunnerResult,
    Schedule,
    TuneContext,
    derived_object,
    evolve,
    python_side,
    sample_population,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.records import Exploration, FloatArray, Prediction
from tvm_adaptive.search_strategy.exploration import (
    FALLBACK_EPSILON,
    N_PLANS,
    n_random,
    posterior_epsilon,
)
from tvm_adaptive.search_strategy.options import check_options
from tvm_adaptive.search_strategy.picking import pick_best, pick_diverse, pick_medoids
from tvm_adaptive.search_strategy.schedules import (
    candidate_of,
    distinct,
    key_of,
    knobs_of,
    measured_schedules,
    mix,
    vectors_of,
)

logger = logging.getLogger(__name__)

# Stock TVM ends a task after as many rounds that brought nothing new.
MAX_EMPTY_ROUNDS = 5
# Evolved candidates per place in the batch where some will be dropped. Evolution costs
# the same for any number, and what is not used competes again in the next round.
DIVERSITY_RATIO = 3
# Of a task's initial trials: half teach the model of the whole space, half follow it.
INITIAL_EPSILON = 0.5
# Random schedules per place, where the model chooses among them without evolution.
CHEAP_SAMPLES_PER_TRIAL = 3


@dataclasses.dataclass
class _State:
    """What a task's search knows between its rounds."""

    inner: Any
    cost_model: Any
    model: Any  # the cost model's Python side, None for a stock one
    max_trials: int
    batch: int
    rng: np.random.Generator
    measured: set[int]
    elites: list[tuple[float, Schedule]]
    returned: set[int] = dataclasses.field(default_factory=set)
    spares: list[Schedule] = dataclasses.field(default_factory=list)
    n_sent: int = 0
    n_rounds: int = 0
    n_empty: int = 0


@derived_object
class AdaptiveSearch(PySearchStrategy):  # type: ignore[misc]
    """Evolutionary search whose exploration rate follows the posterior's uncertainty.

    Every round ``round(epsilon * batch)`` candidates are random plans and the rest the
    best evolved ones; epsilon is the mean posterior standard deviation of ``n_plans``
    random plans over the incumbent's throughput (AdaTune, NeurIPS 2020, Eq. 3). With a
    cost model that states no variance epsilon stays at TVM's 0.05, which is logged once.

    Parameters
    ----------
    population_size : int, default 256
        Schedules per generation. Half of TVM's: mutation and features are the largest
        share of a small batch's price, and grow with it.
    genetic_num_iters : int, default 3
        Generations per round.
    init_measured_ratio : float, default 0.2
        Share of the first generation that are the best measured schedules.
    init_min_unmeasured : int, default 50
        Fewer random schedules than this and the task ends: its space is exhausted.
    max_fail_count : int, default 5
        Rounds of sampling without a valid schedule before it gives up.
    genetic_mutate_prob : float, default 0.85
    genetic_max_fail_count : int, default 10
    epsilon : float or None, default None
        Fixed share of random candidates in [0, 1]; None lets the posterior decide.
    n_initial : int, default 16
        Trials of a task before its candidates are evolved. Until then half of a batch
        is random, and half are those of some 50 random schedules that the model, which
        may know other tasks, prefers; a fixed epsilon stays as it is. Evolution costs
        more than building and measuring a batch, and before a task's first results its
        scores are hardly worth that.
    n_plans : int, default 20
        Random plans that the posterior's standard deviation is averaged over.
    diversity : {"none", "knobs", "medoids"}, default "none"
        ``"knobs"`` trades score against unseen knob values (AutoTVM's objective with
        normalised scores), ``"medoids"`` takes the best of each k-means cluster
        (Chameleon).
    journal : JournalWriter or None, default None
        Gets one ``"round"`` event per round.
    should_stop : callable or None, default None
        Asked before each round; True ends the task.

    Raises
    ------
    InvalidOptionError
        When an option is out of its range.
    """

    def __init__(
        self,
        *,
        population_size: int = 256,
        genetic_num_iters: int = 3,
        init_measured_ratio: float = 0.2,
        init_min_unmeasured: int = 50,
        max_fail_count: int = 5,
        genetic_mutate_prob: float = 0.85,
        genetic_max_fail_count: int = 10,
        epsilon: float | None = None,
        n_initial: int = 16,
        n_plans: int = N_PLANS,
        diversity: str = "none",
        journal: JournalWriter | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "population_size": population_size,
            "genetic_num_iters": genetic_num_iters,
            "init_measured_ratio": init_measured_ratio,
            "init_min_unmeasured": init_min_unmeasured,
            "max_fail_count": max_fail_count,
            "genetic_mutate_prob": genetic_mutate_prob,
            "genetic_max_fail_count": genetic_max_fail_count,
        }
        check_options(self.options, epsilon, n_initial, n_plans, diversity)
        self.epsilon = epsilon
        self.n_initial = n_initial
        self.n_plans = n_plans
        self.diversity = diversity
        self.journal: JournalWriter = journal or NullJournal()
        self.should_stop = should_stop
        self.context: TuneContext | None = None
        self.state: _State | None = None
        self._limit: int | None = None

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        """Remember the task; TVM calls this whenever a context takes the strategy in."""
        self.context = context
        self.state = None

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[Schedule],
        database: Database | None = None,
        cost_model: Any = None,
    ) -> None:
        """Start the native search and read what the database knows of the task."""
        if self.context is None or database is None or cost_model is None:
            raise InvalidOptionError(
                "AdaptiveSearch needs a tune context, a database and a cost model; pass "
                "database=ms.database.MemoryDatabase() if nothing is to be kept."
            )
        # numpy wants no negative seed; TVM writes -1 for "any".
        seed = self.context.rand_state
        inner = EvolutionarySearch(**self.options)
        inner._initialize_with_tune_context(self.context)
        inner.pre_tuning(max_trials, num_trials_per_iter, design_spaces, database, cost_model)
        measured, elites = measured_schedules(database, self.context.mod)
        self.state = _State(
            inner=inner,
            cost_model=cost_model,
            model=python_side(cost_model),
            max_trials=max_trials,
            batch=num_trials_per_iter,
            rng=np.random.default_rng(seed if seed >= 0 else None),
            measured=measured,
            elites=elites,
        )

    def post_tuning(self) -> None:
        """End the search and let go of the task, which owns this object in turn."""
        if self.state is not None:
            self.state.inner.post_tuning()
        self.state = None
        self.context = None

    def clone(self) -> Any:
        """Return a strategy of the same options for another task."""
        return AdaptiveSearch(
            **self.options,
            epsilon=self.epsilon,
            n_initial=self.n_initial,
            n_plans=self.n_plans,
            diversity=self.diversity,
            journal=self.journal,
            should_stop=self.should_stop,
        )

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Let the next batch, and only that, have at most ``n_trials`` candidates.

        A limit of at most half a batch makes the round cheap, too: like a task's initial
        ones it does without evolution, whose price does not fall with their number.

        Parameters
        ----------
        n_trials : int or None
            At least 1; None for a full batch.
        """
        self._limit = None if n_trials is None else max(1, n_trials)

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the next batch; None ends the task.

        An exception costs the round, not the run: it is logged and journalled, and
        after ``MAX_EMPTY_ROUNDS`` such rounds the task ends.
        """
        state = self._live_state()
        limit, self._limit = self._limit, None
        if state.n_sent >= state.max_trials or (self.should_stop and self.should_stop()):
            return None
        try:
            size = min(state.batch, state.max_trials - state.n_sent, limit or state.batch)
            small = limit is not None and 2 * limit <= state.batch
            initial = len(state.measured) < self.n_initial
            batch = self._next_batch(state, size, cheap=small or initial)
        except Exception as error:
            logger.exception("%s: a search round failed and is skipped", self._task_name())
            self.journal.write("error", task=self._task_name(), where="search", message=repr(error))
            batch = []
        if batch is None:
            return None
        state.n_empty = 0 if batch else state.n_empty + 1
        if state.n_empty >= MAX_EMPTY_ROUNDS:
            return None
        return [candidate_of(schedule) for schedule in batch]

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Count the trials and keep the fastest as parents."""
        state = self._live_state()
        state.n_sent += len(results)
        for candidate, result in zip(measure_candidates, results, strict=True):
            seconds = [float(sec) for sec in result.run_secs or ()]
            if seconds and np.isfinite(seconds).all():
                state.elites.append((float(np.median(seconds)), candidate.sch))
        state.elites.sort(key=lambda elite: elite[0])
        del state.elites[self._n_elites() :]

    def _live_state(self) -> _State:
        if self.state is None:
            raise InvalidOptionError("AdaptiveSearch: call pre_tuning() before a round.")
        return self.state

    def _task_name(self) -> str:
        return str(self.context.task_name) if self.context is not None else "?"

    def _n_elites(self) -> int:
        return int(self.options["population_size"] * self.options["init_measured_ratio"])

    def _next_batch(
        self, state: _State, size: int, *, cheap: bool = False
    ) -> list[Schedule] | None:
        clock = [time.perf_counter()]
        parents = [schedule for _, schedule in state.elites[: self._n_elites()]]
        n_samples = int(self.options["population_size"]) - len(parents)
        if cheap:
            enough = max(int(self.options["init_min_unmeasured"]), CHEAP_SAMPLES_PER_TRIAL * size)
            n_samples = min(n_samples, enough)
        randoms = sample_population(state.inner, n_samples)
        if len(randoms) < self.options["init_min_unmeasured"]:
            logger.info("%s: the space is exhausted", self._task_name())
            return None
        fresh = distinct(randoms, state.measured)
        order = state.rng.permutation(len(fresh))
        clock.append(time.perf_counter())
        shuffled = [fresh[i] for i in order]
        exploration = self._exploration(state, shuffled[: self.n_plans], cheap=cheap)
        clock.append(time.perf_counter())
        explore = min(n_random(exploration.epsilon, size), len(fresh))
        if cheap:
            exploit = self._screened(state, shuffled, size - explore)
        else:
            exploit = self._evolved(state, parents + randoms, size - explore)
        clock.append(time.perf_counter())
        batch = mix(exploit, shuffled, explore, size)
        state.measured.update(key_of(schedule) for schedule in batch)
        state.n_rounds += 1
        sample_sec, posterior_sec, evolve_sec = np.diff(clock).tolist()
        self.journal.write(
            "round",
            task=self._task_name(),
            round=state.n_rounds,
            n_candidates=len(batch),
            n_random=len(batch) - min(len(exploit), size - explore),
            **dataclasses.asdict(exploration),
            n_population=len(parents) + len(randoms),
            is_evolved=not cheap,
            n_spares=len(state.spares),
            sample_sec=sample_sec,
            posterior_sec=posterior_sec,
            evolve_sec=evolve_sec,
        )
        return batch

    def _exploration(self, state: _State, plans: Sequence[Schedule], *, cheap: bool) -> Exploration:
        if self.epsilon is not None:
            return Exploration(self.epsilon, "fixed")
        if not hasattr(state.model, "posterior"):
            if state.n_rounds == 0:
                logger.warning(
                    "%s: the cost model states no variance; epsilon is fixed at %g",
                    self._task_name(),
                    FALLBACK_EPSILON,
                )
            return Exploration(FALLBACK_EPSILON, "no-variance")
        if not getattr(state.model, "is_trained", True):
            # Scores of an untrained model rank nothing: evolving them would cost a
            # search and bring random candidates all the same.
            return Exploration(1.0, "untrained")
        if cheap:
            return Exploration(INITIAL_EPSILON, "initial")
        prediction: Prediction | None = state.model.posterior(
            self.context, [candidate_of(plan) for plan in plans]
        )
        if prediction is None or len(prediction) == 0:
            return Exploration(FALLBACK_EPSILON, "no-success-yet")
        return posterior_epsilon(prediction)

    def _screened(self, state: _State, randoms: list[Schedule], n: int) -> list[Schedule]:
        """Return the ``n`` random candidates that the model prefers."""
        if n == 0 or len(randoms) <= n:
            return randoms[:n]
        picked = self._pick(randoms, self._scores(state, randoms), n, state.rng)
        return [randoms[i] for i in picked]

    def _evolved(self, state: _State, population: list[Schedule], n: int) -> list[Schedule]:
        """Return up to ``n`` unmeasured candidates, the ones to exploit."""
        if n == 0:
            return []
        # The native search knows only what it returned itself: parents that came from
        # the random share, or from an earlier process, are among its best again.
        n_stale = sum(key_of(schedule) not in state.returned for _, schedule in state.elites)
        n_wanted = n_stale + (n if self.diversity == "none" else n * DIVERSITY_RATIO)
        evolved = evolve(state.inner, population, n_wanted)
        state.returned.update(key_of(schedule) for schedule in evolved)
        # It never returns a candidate twice, so those that did not make
        # it into a batch are kept here and compete again.
        proposals = distinct(state.spares + evolved, state.measured)
        if len(proposals) <= n:
            state.spares = []
            return proposals
        picked = self._pick(proposals, self._scores(state, proposals), n, state.rng)
        chosen = set(picked.tolist())
        spares = [proposals[i] for i in range(len(proposals)) if i not in chosen]
        state.spares = spares[: state.batch * DIVERSITY_RATIO]
        return [proposals[i] for i in picked]

    def _pick(
        self, proposals: list[Schedule], scores: FloatArray, n: int, rng: np.random.Generator
    ) -> Any:
        if self.diversity == "knobs":
            return pick_diverse(scores, [knobs_of(schedule) for schedule in proposals], n)
        if self.diversity == "medoids":
            return pick_medoids(scores, vectors_of(proposals), n, rng)
        return pick_best(scores, n)

    def _scores(self, state: _State, schedules: list[Schedule]) -> FloatArray:
        candidates = [candidate_of(schedule) for schedule in schedules]
        scores = np.asarray(state.cost_model.predict(self.context, candidates), dtype=np.float64)
        return np.clip(scores, 0.0, None)
