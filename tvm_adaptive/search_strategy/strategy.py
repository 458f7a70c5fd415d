"""``strategy="adaptive"``: what of a batch is searched, what is random, and how much of each.

Where candidates come from is a proposer's business: a search on the knobs
(:mod:`tvm_adaptive.search_strategy.surrogate_proposer`) or MetaSchedule's native evolution
(:mod:`tvm_adaptive.search_strategy.evolution_proposer`). What is decided here is how much of
the batch is drawn at random, and that nothing is measured twice.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    MeasureCandidate,
    PySearchStrategy,
    RunnerResult,
    Schedule,
    TuneContext,
    derived_object,
    python_side,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.search_strategy.batches import Batches
from tvm_adaptive.search_strategy.evolution_proposer import EvolutionProposer
from tvm_adaptive.search_strategy.exploration import N_PLANS
from tvm_adaptive.search_strategy.options import check_options
from tvm_adaptive.search_strategy.proposer import Proposer
from tvm_adaptive.search_strategy.schedules import candidate_of, floor_sec_of
from tvm_adaptive.search_strategy.surrogate_proposer import SurrogateProposer, can_search_surrogate
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.values.trial import Promise, Trial
from tvm_adaptive.values.trial_log import TrialLog

logger = logging.getLogger(__name__)

# Stock TVM ends a task after as many rounds that brought nothing new.
MAX_EMPTY_ROUNDS = 5


@dataclasses.dataclass
class _State:
    """What a task's search knows between its rounds."""

    proposer: Proposer
    batches: Batches
    model: Any  # the cost model's Python side, None for a stock one
    max_trials: int
    batch: int
    floor_sec: float
    n_sent: int = 0
    n_empty: int = 0


@derived_object
class AdaptiveSearch(PySearchStrategy):  # type: ignore[misc]
    """A search whose exploration rate follows the posterior's uncertainty.

    Every round ``round(epsilon * batch)`` candidates are random plans and the rest the
    best that were found; epsilon is the mean posterior standard deviation of ``n_plans``
    random plans over the incumbent's throughput (AdaTune, NeurIPS 2020, Eq. 3). With a
    cost model that states no variance epsilon stays at TVM's 0.05, which is logged once.

    Parameters
    ----------
    proposer : {"distilled", "evolution"}, default "distilled"
        ``"distilled"`` searches the decisions that sketches leave open on a forest that
        learns, round by round, what the cost model says of programs, and so has some
        hundred programs to make per round; ``"evolution"`` is MetaSchedule's own, which
        makes a thousand. A cost model that cannot score features alone, as all of
        stock's, is always asked by evolution.
    n_samples : int, default 24
        Random candidates that a round of ``"distilled"`` looks at, those of earlier
        rounds compete on. At least one and a half per place of a batch.
    population_size : int, default 256
        Schedules per generation of the evolution. Half of TVM's: mutation and features
        are the largest share of a small batch's price, and grow with it.
    genetic_num_iters : int, default 3
        Generations per round of the evolution.
    init_measured_ratio : float, default 0.2
        Share of the first generation that are the best measured schedules.
    init_min_unmeasured : int, default 50
        Fewer random schedules than this and the evolution ends: its space is exhausted.
    max_fail_count : int, default 5
        Rounds of sampling without a valid schedule before it gives up.
    genetic_mutate_prob : float, default 0.85
    genetic_max_fail_count : int, default 10
    epsilon : float or None, default None
        Fixed share of random candidates in [0, 1]; None lets the posterior decide.
    n_initial : int, default 16
        Trials of a task before its candidates are searched for. Until then half of a batch
        is random, and half are those of some 25 random schedules that the model, which
        may know other tasks, prefers; a fixed epsilon stays as it is. Before a task's
        first results scores are hardly worth a search.
    n_plans : int, default 20
        Random plans that the posterior's standard deviation is averaged over.
    diversity : {"none", "knobs", "medoids"}, default "medoids"
        ``"knobs"`` trades score against unseen knob values (AutoTVM's objective with
        normalised scores), ``"medoids"`` takes the best of each k-means cluster
        (Chameleon).
    trial_log : TrialLog or None, default None
        Has build times if the builder notes them: candidates are then worth their expected
        improvement per second. Gets features of candidates, for the cost model, and the
        task's incumbent at each batch, for a runner that races. Only ``"distilled"`` uses
        build times and notes features.
    transfer_pool : TransferPool or None, default None
        What tasks of the same family have found: a task's initial trials then begin with
        their best decisions, fitted to its own extents. Used by ``"distilled"`` only.
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
        proposer: str = "distilled",
        n_samples: int = 24,
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
        diversity: str = "medoids",
        trial_log: TrialLog | None = None,
        transfer_pool: TransferPool | None = None,
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
        check_options(
            self.options,
            proposer=proposer,
            n_samples=n_samples,
            epsilon=epsilon,
            n_initial=n_initial,
            n_plans=n_plans,
            diversity=diversity,
        )
        self.proposer = proposer
        self.n_samples = n_samples
        self.epsilon = epsilon
        self.n_initial = n_initial
        self.n_plans = n_plans
        self.diversity = diversity
        self.trial_log = trial_log
        self.transfer_pool = transfer_pool
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
        """Read what the database knows of the task."""
        if self.context is None or database is None or cost_model is None:
            raise InvalidOptionError(
                "AdaptiveSearch needs a tune context, a database and a cost model; pass "
                "database=ms.database.MemoryDatabase() if nothing is to be kept."
            )
        model = python_side(cost_model)
        proposer = self._new_proposer(self.context, cost_model, model, num_trials_per_iter)
        proposer.start(max_trials, list(design_spaces), database)
        batches = Batches(
            proposer,
            model,
            task_name=self._task_name(),
            epsilon=self.epsilon,
            n_plans=self.n_plans,
            least_random=int(self.options["init_min_unmeasured"]),
            journal=self.journal,
        )
        floor_sec = floor_sec_of(self.context)
        self.state = _State(proposer, batches, model, max_trials, num_trials_per_iter, floor_sec)

    def post_tuning(self) -> None:
        """End the search and let go of the task, which owns this object in turn."""
        if self.state is not None:
            self.state.proposer.end()
        self.state = None
        self.context = None

    def clone(self) -> Any:
        """Return a strategy of the same options for another task."""
        return AdaptiveSearch(
            **self.plain_options(),
            trial_log=self.trial_log,
            transfer_pool=self.transfer_pool,
            journal=self.journal,
            should_stop=self.should_stop,
        )

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Let the next batch, and only that, have at most ``n_trials`` candidates.

        A limit of at most half a batch makes the round cheap, too: like a task's initial
        ones it does without a search, whose price does not fall with their number.

        Parameters
        ----------
        n_trials : int or None
            At least 1; None for a full batch.
        """
        self._limit = None if n_trials is None else max(1, n_trials)

    def carry(self) -> bytes:
        """Return what the search knows of its task, for :meth:`resume` in another process.

        Between processes of one run only: it is a pickle.
        """
        state = self._live_state()
        known = _portable(state.proposer).carry()
        return pickle.dumps((known, state.batches.n_rounds, state.n_empty))

    def resume(self, carried: bytes, transfer_pool: TransferPool | None) -> None:
        """Go on with what another process's search of the same task knew."""
        state = self._live_state()
        known, state.batches.n_rounds, state.n_empty = pickle.loads(carried)
        _portable(state.proposer).resume(known, transfer_pool)

    def take_over(self, carried: bytes, keys: Sequence[int]) -> dict[int, Schedule]:
        """Go on with what a round elsewhere left, and return the programs that it chose.

        Parameters
        ----------
        carried : bytes
            From :meth:`carry`, of the process that searched.
        keys : sequence of int
            Of the programs.

        Returns
        -------
        dict of int to Schedule
            Without programs that come out otherwise here.
        """
        self.resume(carried, None)
        state = self._live_state()
        self._set_incumbent(state)
        return _portable(state.proposer).programs_of(keys)

    def note_build(self, key: int, build_sec: float | None) -> None:
        """Note what building a program took elsewhere."""
        if self.trial_log is not None and build_sec is not None:
            self.trial_log.note(key, build_sec=build_sec)

    def plain_options(self) -> dict[str, Any]:
        """Return the options that are plain values."""
        return {
            **self.options,
            "proposer": self.proposer,
            "n_samples": self.n_samples,
            "epsilon": self.epsilon,
            "n_initial": self.n_initial,
            "n_plans": self.n_plans,
            "diversity": self.diversity,
        }

    @property
    def is_spent(self) -> bool:
        """Whether the task has had all its trials."""
        state = self._live_state()
        return state.n_sent >= state.max_trials

    def promise(self) -> Promise | None:
        """Return what the model says of the task's next candidates; None if it says nothing."""
        state = self.state
        if state is None or self.context is None or not hasattr(state.model, "accuracy_of"):
            return None
        expected_drop = state.proposer.expected_drop()
        if expected_drop is None:
            return None
        return Promise(expected_drop, state.model.accuracy_of(self.context))

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the next batch; None ends the task.

        An exception costs the round, not the run: it is logged and journalled, and
        after ``MAX_EMPTY_ROUNDS`` such rounds the task ends.
        """
        state = self._live_state()
        limit, self._limit = self._limit, None
        if self.is_spent or (self.should_stop and self.should_stop()):
            return None
        batch: list[Schedule] | None
        try:
            size = min(state.batch, state.max_trials - state.n_sent, limit or state.batch)
            small = limit is not None and 2 * limit <= state.batch
            n_measured = len(state.proposer.measured)
            initial = n_measured < self.n_initial
            if initial and n_measured:  # a warm-up began them: no more than are missing
                size = min(size, self.n_initial - n_measured)
            batch = [] if n_measured else state.batches.recalled(size)
            batch = batch or state.batches.make(size, cheap=small or initial)
        except Exception as error:
            logger.exception("%s: a search round failed and is skipped", self._task_name())
            self.journal.write("error", task=self._task_name(), where="search", message=repr(error))
            batch = []
        if batch is None:
            return None
        self._set_incumbent(state)
        state.n_empty = 0 if batch else state.n_empty + 1
        if state.n_empty >= MAX_EMPTY_ROUNDS:
            return None
        return [candidate_of(schedule) for schedule in batch]

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Count the trials and learn what they took."""
        state = self._live_state()
        # Of what was not tried nothing is known.
        trials = [Trial.of(result) for result in results]
        known = [
            (candidate.sch, trial.seconds)
            for candidate, trial in zip(measure_candidates, trials, strict=True)
            if not trial.is_untried
        ]
        state.n_sent += len(known)
        schedules = [schedule for schedule, _ in known]
        times_sec = [seconds for _, seconds in known]
        state.proposer.learned(schedules, [t if math.isfinite(t) else None for t in times_sec])

    def _set_incumbent(self, state: _State) -> None:
        if self.trial_log is not None:
            self.trial_log.incumbent.seconds = state.proposer.best_sec
            self.trial_log.incumbent.floor_sec = state.floor_sec

    def _live_state(self) -> _State:
        if self.state is None:
            raise InvalidOptionError("AdaptiveSearch: call pre_tuning() before a round.")
        return self.state

    def _task_name(self) -> str:
        return str(self.context.task_name) if self.context is not None else "?"

    def _new_proposer(
        self, context: TuneContext, cost_model: Any, model: Any, batch: int
    ) -> Proposer:
        # numpy wants no negative seed; TVM writes -1 for "any".
        seed = int(context.rand_state)
        rng = np.random.default_rng(seed if seed >= 0 else None)
        if self.proposer == "distilled" and can_search_surrogate(model):
            return SurrogateProposer(
                context,
                model,
                diversity=self.diversity,
                # Enough for a batch of nothing but random candidates, some of which fail.
                n_samples=max(self.n_samples, batch + batch // 2),
                max_fail_count=int(self.options["max_fail_count"]),
                rng=rng,
                trial_log=self.trial_log,
                transfer_pool=self.transfer_pool,
            )
        return EvolutionProposer(context, cost_model, self.options, self.diversity, batch, rng)


def _portable(proposer: Proposer) -> SurrogateProposer:
    if not isinstance(proposer, SurrogateProposer):
        raise InvalidOptionError("Only the proposer distilled can search in another process.")
    return proposer
