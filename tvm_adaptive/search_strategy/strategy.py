"""``strategy="adaptive"``: batches of random candidates and of the best that a search found."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from collections.abc import Sequence
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
    model_hooks,
    register_error,
)
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.errors import InvalidOptionError, is_machine_failure
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.search_strategy.evolution_proposer import EvolutionProposer
from tvm_adaptive.search_strategy.options import SearchOptions
from tvm_adaptive.search_strategy.proposer import Proposer
from tvm_adaptive.search_strategy.schedules import candidate_of, floor_sec_of
from tvm_adaptive.search_strategy.surrogate_proposer import SurrogateProposer
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.values.hooks import NoSearchHooks
from tvm_adaptive.values.trial import Promise, Trial
from tvm_adaptive.values.trial_log import TrialLog

logger = logging.getLogger(__name__)

# Stock TVM ends a task after as many rounds that found nothing new.
MAX_EMPTY_ROUNDS = 5

# Calls pass through C++, which turns errors that it does not know into RuntimeError.
register_error(InvalidOptionError.__name__, InvalidOptionError)


@dataclasses.dataclass
class _State:
    """The state of a task's search between its rounds."""

    proposer: Proposer
    max_trials: int
    floor_sec: float
    weights: tuple[int, ...]
    n_sent: int = 0
    n_empty: int = 0


@derived_object
class AdaptiveSearch(PySearchStrategy, NoSearchHooks):  # type: ignore[misc]
    """A search whose exploration rate follows the posterior's uncertainty.

    Every round ``round(epsilon * batch)`` candidates are random plans and the rest the
    best that were found; epsilon is the mean posterior standard deviation of ``n_plans``
    random plans over the incumbent's throughput (AdaTune, NeurIPS 2020, Eq. 3). With a
    cost model that states no variance epsilon stays at TVM's 0.05, which is logged once.

    Parameters
    ----------
    trial_log : TrialLog or None, default None
        Has build times if the builder notes them: candidates of ``"surrogate"`` are then worth
        their expected improvement per second, and their features are noted for the cost model.
        Gets what a runner needs to know of the task at each batch.
    transfer_pool : TransferPool or None, default None
        The best decisions of tasks of the same family: a task's initial trials then begin
        with them, fitted to its own extents. Used by ``"surrogate"`` only.
    journal : JournalWriter or None, default None
        Gets one ``"round"`` event per round.
    **options : Any
        Fields of :class:`~tvm_adaptive.search_strategy.options.SearchOptions`.

    Raises
    ------
    InvalidOptionError
        When an option is out of its range.
    """

    def __init__(
        self,
        *,
        trial_log: TrialLog | None = None,
        transfer_pool: TransferPool | None = None,
        journal: JournalWriter | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = SearchOptions(**options)
        self.trial_log = trial_log
        self.transfer_pool = transfer_pool
        self.journal: JournalWriter = journal or NullJournal()
        self.context: TuneContext | None = None
        self.state: _State | None = None
        self._is_over = False  # the search of the task it was given last
        self._limit: int | None = None

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        """Keep the task; TVM calls this for each context that the strategy is given to."""
        self.context = context
        self.state = None
        self._is_over = False

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[Schedule],
        database: Database | None = None,
        cost_model: Any = None,
    ) -> None:
        """Read what the database knows of the task."""
        if self._is_over:
            raise InvalidOptionError(
                "AdaptiveSearch: this task was tuned to its end, and released. Give tune_tasks "
                "clones to tune again: tasks=[context.clone() for context in contexts]."
            )
        if self.context is None or database is None or cost_model is None:
            raise InvalidOptionError(
                "AdaptiveSearch needs a tune context, a database and a cost model; pass "
                "database=ms.database.MemoryDatabase() if nothing is to be kept."
            )
        proposer = self._new_proposer(self.context, cost_model, num_trials_per_iter)
        proposer.start(max_trials, list(design_spaces), database)
        weights = weights_of(self.context.mod)
        self.state = _State(proposer, max_trials, floor_sec_of(self.context), weights)

    def post_tuning(self) -> None:
        """End the search and release the task."""
        if self.state is not None:
            self.state.proposer.end()
        self.forget_task()
        self._is_over = True

    def forget_task(self) -> None:
        """Release the task, which owns this object in turn: Python does not see that cycle."""
        self.context = self.state = None

    def clone(self) -> Any:
        """Return a strategy of the same options for another task."""
        return AdaptiveSearch(
            **dataclasses.asdict(self.options),
            trial_log=self.trial_log,
            transfer_pool=self.transfer_pool,
            journal=self.journal,
        )

    def limit_next_batch(self, n_trials: int | None) -> None:
        """Let the next batch, and only that, have at most so many candidates; None for a full one.

        A limit of at most half a batch makes the round cheap, too: like a task's initial
        ones it is made without a search, whose price does not fall with their number.
        """
        self._limit = None if n_trials is None else max(1, n_trials)

    def carry(self) -> bytes:
        """Return a pickle of the state, for :meth:`resume` in another process of the run."""
        state = self._live_state()
        return pickle.dumps((_portable(state.proposer).carry(), state.n_empty))

    def resume(self, carried: bytes, transfer_pool: TransferPool | None) -> None:
        """Continue from the state of another process's search of the same task."""
        state = self._live_state()
        known, state.n_empty = pickle.loads(carried)
        _portable(state.proposer).resume(known, transfer_pool)

    def take_over(self, carried: bytes, keys: Sequence[int]) -> dict[int, Schedule]:
        """Continue from another process's round; return its programs that come out alike here."""
        self.resume(carried, None)
        state = self._live_state()
        self._set_facts(state)
        return _portable(state.proposer).candidates.sent_programs(keys)

    def note_build(self, key: int, build_sec: float | None) -> None:
        """Note the seconds of a build in another process."""
        if self.trial_log is not None and build_sec is not None:
            self.trial_log.note(key, build_sec=build_sec)

    @property
    def is_spent(self) -> bool:
        """Whether the task has had all its trials."""
        state = self._live_state()
        return state.n_sent >= state.max_trials

    def promise(self) -> Promise | None:
        """Return the model's forecast for the task's next candidates; None if there is none."""
        return None if self.state is None else self.state.proposer.promise()

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """Return the next batch; None ends the task.

        An exception costs the round, not the run: it is logged and journalled, and
        after ``MAX_EMPTY_ROUNDS`` such rounds the task ends.
        """
        state = self._live_state()
        limit, self._limit = self._limit, None
        if self.is_spent:
            return None
        batch: list[Schedule] | None
        try:
            batch_size = state.proposer.batch
            size = min(batch_size, state.max_trials - state.n_sent, limit or batch_size)
            small = limit is not None and 2 * limit <= batch_size
            n_known = len(state.proposer.excluded)
            initial = n_known < self.options.n_initial
            if initial and n_known:  # a warm-up began them: no more than are missing
                size = min(size, self.options.n_initial - n_known)
            batch = state.proposer.propose(size, cheap=small or initial)
        except Exception as error:
            task = str(state.proposer.context.task_name)
            logger.exception("%s: a search round failed and is skipped", task)
            self.journal.write("error", task=task, where="search", message=repr(error))
            batch = []
        if batch is None:
            return None
        self._set_facts(state)
        state.n_empty = 0 if batch else state.n_empty + 1
        if state.n_empty >= MAX_EMPTY_ROUNDS:
            return None
        return [candidate_of(schedule) for schedule in batch]

    def notify_runner_results(
        self, measure_candidates: list[MeasureCandidate], results: list[RunnerResult]
    ) -> None:
        """Count the trials and learn what they took."""
        state = self._live_state()
        schedules: list[Schedule] = []
        times_sec: list[float | None] = []
        failed: list[Schedule] = []  # by the machine: nothing is known of them
        for candidate, trial in zip(measure_candidates, map(Trial.of, results), strict=True):
            if is_machine_failure(trial.failure):
                failed.append(candidate.sch)
            elif not trial.is_untried:
                schedules.append(candidate.sch)
                times_sec.append(trial.seconds if math.isfinite(trial.seconds) else None)
        state.n_sent += len(schedules)
        state.proposer.tell(schedules, times_sec)
        state.proposer.take_back(failed)

    def _set_facts(self, state: _State) -> None:
        if self.trial_log is not None:
            facts = self.trial_log.batch_facts
            facts.incumbent_sec = state.proposer.best_sec
            facts.floor_sec, facts.weights = state.floor_sec, state.weights
            facts.task = str(state.proposer.context.task_name)

    def _live_state(self) -> _State:
        if self.state is None:
            raise InvalidOptionError("AdaptiveSearch: call pre_tuning() before a round.")
        return self.state

    def _new_proposer(self, context: TuneContext, cost_model: Any, batch: int) -> Proposer:
        # numpy wants no negative seed; TVM writes -1 for "any".
        seed = int(context.rand_state)
        rng = np.random.default_rng(seed if seed >= 0 else None)
        common = (context, cost_model, self.options, batch, rng, self.journal)
        if not searches_decisions(self.options.proposer, cost_model):
            return EvolutionProposer(*common)
        return SurrogateProposer(
            *common,
            trial_log=self.trial_log,
            transfer_pool=self.transfer_pool or TransferPool(),
        )


def searches_decisions(proposer: str, cost_model: Any) -> bool:
    """Say whether a search is one on decisions, which takes seeds and states forecasts."""
    # Other models cannot score features alone.
    return proposer == "surrogate" and model_hooks(cost_model) is not None


def _portable(proposer: Proposer) -> SurrogateProposer:
    if not isinstance(proposer, SurrogateProposer):
        raise InvalidOptionError("Only the proposer surrogate can search in another process.")
    return proposer
