"""``task_scheduler="dynatune"`` and its like: a policy in MetaSchedule's loop."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    IRModule,
    PyMeasureCallback,
    PyTaskScheduler,
    RunnerResult,
    TaskScheduler,
    anchor_of,
    argument_bytes,
    derived_object,
    handle,
    search_hooks,
)
from tvm_adaptive.errors import check_at_least, check_share
from tvm_adaptive.measure_callback.history import TaskHistory
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.task_scheduler.arms import Arm, Policy, PriorTrials
from tvm_adaptive.task_scheduler.foresight import Foresight
from tvm_adaptive.task_scheduler.presets import check_policy_name, fresh_copy, make_policy
from tvm_adaptive.task_scheduler.slot_queue import (
    ArmTable,
    RunLimits,
    Slot,
    SlotLength,
    SlotQueue,
)
from tvm_adaptive.values.forms import FormKey
from tvm_adaptive.values.hooks import SearchHooks
from tvm_adaptive.values.trial import Trial

logger = logging.getLogger(__name__)

# TVM's own, for a run that was not started through Python and does not say its own.
_DEFAULT_BATCH = 64


@derived_object
class AdaptiveScheduler(PyTaskScheduler):  # type: ignore[misc]
    """Give each slot of tuning time to the task that a policy chooses.

    The run continues when a measure callback raises (which is reported with the task's
    name), when a task's results cannot be read (that task ends), and when the policy fails
    (the least-played task is next).

    Parameters
    ----------
    policy : Policy or str, default "default"
        ``"default"`` or ``"paper"`` (DynaTune, ICLR 2021), ``"random"``, ``"linear"``,
        ``"epsilon-greedy"``, ``"softmax"``, ``"round-robin"``, ``"gradient"``, or an
        object of your own. Each run starts with a copy of it; an object with a method
        ``reset()`` is reset instead.
    slot_rounds : int, default 1
        Batches per slot.
    slot_sec : float or None, default None
        Wall-clock seconds per slot instead; compared between batches.
    warm_up_trials : int, default 4
        Trials of a task's first slot under ``"default"``, ``"epsilon-greedy"`` and
        ``"softmax"``; others begin with a whole batch. Strategies without
        ``limit_next_batch`` give whole batches.
    patience_trials : int or None, default None
        Where the policy is given by name, a task without improvement for so many trials
        is retired; None leaves that to the policy (``"paper"``: 200, the others never).
        ``"gradient"`` retires none.
    foresee_share : float or None, default None
        Each slot is followed by one of this share of its trials, for the sibling for which the
        updated model predicts the largest gain (FamilySeer). Only searches on decisions
        predict it: ``AdaptiveSearch(proposer="surrogate")`` beside one of our cost models.
    max_waiting : int, default 1
        Batches that may be measured in the background while another task's is searched
        and built, where the runner supports it: the number of devices.
    n_lanes : int, default 1
        Slots whose first batches are searched at the same time, by strategies that can
        begin a batch in another process.
    budget_sec : float or None, default None
        Ends the run after the batch in which so many seconds are over.
    plateau_slots : int or None, default None
        Ends the run when so many slots in a row saved no more than ``plateau_share``.
    plateau_share : float, default 0.005
        Of the network's latency, in [0, 1).
    seed : int or None, default None
        Of the policy's randomness; None draws one.
    on_end : callable, default no-op
        Gets the name of each task that is given no more slots, unless its search has ended.
    journal : JournalWriter or None, default None
        Gets a ``"slot"`` event per decision, ``"slot-end"`` with its results, and
        ``"stop"`` when the scheduler ends the run.
    clock : callable, default ``time.monotonic``
        Monotonic seconds.

    Raises
    ------
    InvalidOptionError
        When an option is unknown or out of its range.
    """

    def __init__(
        self,
        policy: Policy | str = "default",
        *,
        slot_rounds: int = 1,
        slot_sec: float | None = None,
        warm_up_trials: int = 4,
        patience_trials: int | None = None,
        foresee_share: float | None = None,
        max_waiting: int = 1,
        n_lanes: int = 1,
        budget_sec: float | None = None,
        plateau_slots: int | None = None,
        plateau_share: float = 0.005,
        seed: int | None = None,
        on_end: Callable[[str], None] = lambda _name: None,
        journal: JournalWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if isinstance(policy, str):
            check_policy_name(policy)
        check_at_least("warm_up_trials", warm_up_trials, 1)
        check_at_least("patience_trials", patience_trials, 1)
        check_at_least("max_waiting", max_waiting, 1)
        check_at_least("n_lanes", n_lanes, 1)
        check_share("The share of a foresee slot", foresee_share, "(0, 1]")
        self.policy = policy
        self.length = SlotLength(slot_rounds, slot_sec)
        self.limits = RunLimits(budget_sec, plateau_slots, plateau_share)
        self.warm_up_trials = warm_up_trials
        self.patience_trials = patience_trials
        self.foresee_share = foresee_share
        self.max_waiting = max_waiting
        self.n_lanes = n_lanes
        self.seed = seed
        self.on_end = on_end
        self.journal: JournalWriter = journal or NullJournal()
        self.clock = clock
        self._earlier: Mapping[str, TaskHistory] = {}
        self._prior: Mapping[str, PriorTrials] = {}
        self._forms: Mapping[str, FormKey] = {}
        self._max_trials: float = math.inf  # unless ``tune`` was entered through Python
        self._batch: int | None = None
        self._records: list[Any] = []  # MetaSchedule's, one per task
        self._arm_table = ArmTable([], [], [])
        self._queue: SlotQueue | None = None
        self.stop_reason = ""  # why it ended the last run; empty if it did not
        # results by task that MetaSchedule has joined and the arms do not have yet
        self._arrived: dict[int, list[RunnerResult]] = {}

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The tasks at present, or at the end of the last call of ``tune``."""
        return self._arm_table.arms

    def restore(self, earlier: Mapping[str, TaskHistory]) -> None:
        """Start the next run where earlier attempts at it ended; by the names of tasks."""
        self._earlier = dict(earlier)

    def set_prior(self, prior: Mapping[str, PriorTrials]) -> None:
        """Give the next run the trials that earlier runs made; by the names of tasks."""
        self._prior = dict(prior)

    def set_forms(self, forms: Mapping[str, FormKey]) -> None:
        """Let tasks compete as forms of the same part of a network; by the names of tasks."""
        self._forms = dict(forms)

    def next_task_id(self) -> int:
        """Join the last batch and return the index of the task that runs next, or -1."""
        try:
            return self._next_task_id(self._current_queue())
        except Exception as error:
            # Raising here would lose the batches that are still to be joined.
            logger.exception("the task scheduler failed; the run ends with what was found")
            self.journal.write("error", where="scheduler", message=repr(error))
            return -1

    def begin(self, max_trials: int, batch: int) -> None:
        """Discard an earlier run; ``tune`` calls this first."""
        self._queue = None
        self.stop_reason = ""
        self._max_trials = max_trials
        self._batch = batch
        self._arm_table = ArmTable([], [], [])

    def end(self) -> None:
        """Add the last results and close all slots; ``tune`` calls this last."""
        queue, self._queue = self._queue, None
        if queue is None:
            return
        # MetaSchedule itself joins the last batches when the trials are used up.
        for index, results in list(self._arrived.items()):
            self._add_results(queue, index, results)
        if queue.current is not None:
            queue.charge(queue.current)
        for slot in queue.open_slots:
            queue.close(slot)
        self.stop_reason = queue.stop_reason
        self._records = []
        if isinstance(queue.policy, Foresight) and queue.policy.is_silent:
            logger.warning(
                "foresee_share has added no slot: no search had a forecast. Either the run was too "
                "short, or it lacks AdaptiveSearch with proposer surrogate and cost model rfei or "
                "rfei-family"
            )

    def results_in(self, index: int, results: list[RunnerResult]) -> None:
        """Keep a batch that is being joined; the callbacks' guard calls this."""
        if self._queue is not None:
            self._arrived[index] = results

    def task_name(self, index: int | None = None) -> str:
        """Return the name of a task; with None, of the one being played."""
        if index is None and self._queue is not None and self._queue.current is not None:
            index = self._queue.current.arm
        return "?" if index is None or index >= len(self.arms) else self.arms[index].name

    def report(self, index: int | None, where: str, error: Exception, consequence: str) -> None:
        """Log and journal an error with the name of its task, None for the one played."""
        name = self.task_name(index)
        logger.error("%s: %s failed; %s", name, where, consequence, exc_info=error)
        self.journal.write("error", task=name, where=where, message=repr(error))

    def _current_queue(self) -> SlotQueue:
        records = list(self._outer().tasks_)
        # Held records can't share an address with new ones.
        if self._queue is None or [*map(handle, self._records)] != [*map(handle, records)]:
            self._records, self._arrived = records, {}
            self._arm_table = self._new_arm_table()
            self._queue = SlotQueue(
                self._arm_table,
                self._new_policy(),
                np.random.default_rng(self.seed),
                limits=self.limits,
                journal=self.journal,
                clock=self.clock,
                terminate=self._terminate,
            )
        return self._queue

    def _new_arm_table(self) -> ArmTable:
        names = [str(record.ctx.task_name) for record in self._records]
        weights = [float(record.task_weight) for record in self._records]
        flops = [float(record.flop) for record in self._records]
        n_bytes = {
            name: _bytes_of(record.ctx.mod)
            for name, record in zip(names, self._records, strict=True)
        }
        arm_table = ArmTable(names, weights, flops, self._forms, n_bytes)
        for index, name in enumerate(names):
            if name in self._prior:
                arm_table.change(index, prior=self._prior[name])
            if name in self._earlier:
                played = self._earlier[name]
                arm_table.add_trials(index, played.latencies_ms)
                arm_table.change(index, n_slots=played.n_slots, spent_sec=played.spent_sec)
        return arm_table

    def _new_policy(self) -> Policy:
        slot_trials = self.length.rounds * (self._batch or _DEFAULT_BATCH)
        if isinstance(self.policy, str):
            policy = make_policy(
                self.policy,
                slot_trials=slot_trials,
                slot_sec=self.length.sec,
                warm_up_trials=self.warm_up_trials,
                patience_trials=self.patience_trials,
            )
        else:
            policy = fresh_copy(self.policy)
        if self.foresee_share is None:
            return policy
        families = [anchor_of(record.ctx.mod) for record in self._records]
        return Foresight(
            policy,
            families,
            lambda index: self._hooks(index).promise(),
            share=self.foresee_share,
        )

    def _hooks(self, index: int) -> SearchHooks:
        return search_hooks(self._records[index].ctx.search_strategy)

    def _next_task_id(self, queue: SlotQueue) -> int:
        self._join(queue)
        slot = queue.current
        if slot is not None:
            queue.charge(slot)
            is_finished = self.arms[slot.arm].finished or queue.is_budget_spent()
            if not is_finished and not slot.is_over(self.length, queue.charged_sec):
                return self._play(queue, slot)
            queue.current = None
            queue.close(slot)
        if reason := queue.reason_to_stop():
            return queue.stop(reason)
        reason = self._look_ahead(queue)
        while not queue.ahead and queue.waiting:
            self._join_waiting(queue, queue.waiting[0])
            reason = self._look_ahead(queue)
        if not queue.ahead:
            return queue.stop(reason)
        slot = next((s for s in queue.ahead if self._hooks(s.arm).is_ready()), queue.ahead[0])
        queue.ahead.remove(slot)
        slot.start_sec = queue.charged_sec  # with lanes, others were played since the decision
        queue.current = slot
        return self._play(queue, slot) if self.n_lanes == 1 else slot.arm

    def _look_ahead(self, queue: SlotQueue) -> str:
        """Decide on as many slots as there are lanes; return the policy's reason for fewer."""
        while len(queue.ahead) < self.n_lanes:
            if queue.ahead and (
                self._unplanned(queue) < 1 or all(arm.finished for arm in queue.choosable)
            ):
                break
            decision = queue.decide()
            if decision.arm is None:
                return decision.reason
            if self.n_lanes > 1:
                self._play(queue, queue.ahead[-1])
                self._begin_batch(decision.arm)
        return ""

    def _begin_batch(self, index: int) -> None:
        """Let a lane search an arm's next batch; if that fails, it is searched here."""
        try:
            self._hooks(index).begin_next_batch()
        except Exception as error:  # of the model or of the cluster, of any kind
            self.report(index, "search", error, "its batch is searched here")

    def _join(self, queue: SlotQueue) -> None:
        """Add the results of batches that were sent, and finish the arms of ended tasks."""
        if queue.current is not None:
            queue.charge(queue.current)
        for slot in list(queue.waiting):
            if self._is_measured(slot.arm):
                self._join_waiting(queue, slot)
        waiting = {slot.arm for slot in queue.waiting}
        for index, record in enumerate(self._records):
            if index in waiting:
                continue
            if not record.is_terminated and record.runner_futures is not None:
                n_trials = len(record.measure_candidates or ())
                queue.n_sent += n_trials
                if self._may_wait(queue, index, n_trials):  # while another task is searched
                    assert queue.current is not None
                    queue.waiting.append(queue.current)
                    queue.current = None
                else:
                    for slot in list(queue.waiting):  # was sent before
                        self._join_waiting(queue, slot)
                    self._join_task(queue, index)
            if record.is_terminated and not self.arms[index].finished:
                self._arm_table.finish(index)
        while queue.waiting and (
            len(queue.waiting) > self.max_waiting
            # A slot that was decided on ahead is played while the others are measured.
            or (not queue.ahead and all(arm.finished for arm in queue.choosable))
        ):
            self._join_waiting(queue, queue.waiting[0])

    def _join_waiting(self, queue: SlotQueue, slot: Slot) -> None:
        self._join_task(queue, slot.arm)
        queue.charge(slot)
        queue.waiting.remove(slot)
        queue.close(slot)

    def _may_wait(self, queue: SlotQueue, index: int, n_trials: int) -> bool:
        slot = queue.current
        if slot is None or slot.arm != index or not slot.ends_with(n_trials, self.length):
            return False
        if self._arm_table.live == [index] or queue.is_budget_spent():
            return False
        return not self._is_measured(index)

    def _is_measured(self, index: int) -> bool:
        return all(future.done() for future in self._records[index].runner_futures)

    def _join_task(self, queue: SlotQueue, index: int) -> None:
        try:
            results = self._outer().join_running_task(index)
        except Exception as error:
            # MetaSchedule can't run a task again whose results it did not take.
            self.report(index, "join", error, "this task ends")
            queue.finish(index)
        else:
            self._add_results(queue, index, results)

    def _add_results(self, queue: SlotQueue, index: int, results: Sequence[RunnerResult]) -> None:
        self._arrived.pop(index, None)
        trials = [Trial.of(result) for result in results]
        latencies_ms = [trial.seconds * 1e3 for trial in trials if not trial.is_untried]
        if queue.add_batch(index, latencies_ms, len(results)):
            logger.info("%s: nothing new to try", self.task_name(index))
            queue.finish(index)

    def _terminate(self, index: int) -> None:
        self.on_end(self.task_name(index))
        if not self._records[index].is_terminated:
            self._outer().terminate_task(index)

    def _unplanned(self, queue: SlotQueue, but: Slot | None = None) -> float:
        """Return the trials of the run that no slot has, but one that is to get some."""
        ahead = (slot for slot in queue.ahead if slot is not but)
        planned = sum(slot.n_planned or slot.left() or self._batch or 0 for slot in ahead)
        return self._max_trials - queue.n_sent - planned

    def _play(self, queue: SlotQueue, slot: Slot) -> int:
        """Set the size of the next batch, where the search has a limit, and return its task."""
        trials_left, limit = self._unplanned(queue, slot), slot.left()
        if self._batch is not None and trials_left < (limit or self._batch):
            limit = max(1, int(trials_left))
        slot.n_planned = limit or self._batch
        try:
            self._hooks(slot.arm).limit_next_batch(limit)
        except Exception as error:
            self.report(slot.arm, "search", error, "its batch is a full one")
        return slot.arm


@derived_object
class CallbackGuard(PyMeasureCallback):  # type: ignore[misc]
    """Calls other callbacks in turn; one that raises is reported and the rest still called."""

    def __init__(self, callbacks: Sequence[Any], scheduler: AdaptiveScheduler) -> None:
        super().__init__()
        self.callbacks = list(callbacks)
        self.scheduler = scheduler

    def apply(self, task_scheduler: Any, task_id: int, *batch: Any) -> None:
        """Pass one batch on: candidates, builder results, and runner results."""
        self.scheduler.results_in(int(task_id), list(batch[-1]))
        for callback in self.callbacks:
            try:
                callback.apply(task_scheduler, task_id, *batch)
            except Exception as error:
                # MetaSchedule would end the run without counting the batch.
                kind = type(getattr(callback, "_inst", callback)).__name__
                self.scheduler.report(int(task_id), "callback", error, f"{kind} missed this batch")


_SIGNATURE = inspect.signature(TaskScheduler.tune)


def tune_guarded(self: Any, *args: Any, **options: Any) -> None:
    """Tune, as TVM's own ``TaskScheduler.tune``; the same object can be used again."""
    scheduler = self._inst
    call = _SIGNATURE.bind(self, *args, **options)
    given = call.arguments
    given["measure_callbacks"] = [CallbackGuard(given["measure_callbacks"], scheduler)]
    scheduler.begin(given["max_trials_global"], given["num_trials_per_iter"])
    try:
        TaskScheduler.tune(*call.args, **call.kwargs)
    except Exception as error:
        scheduler.report(None, "tuning", error, "the run ends")
        raise
    finally:
        scheduler.end()


# On the object that Python calls, not among the methods passed to C++: an override there is
# called by its own base, without end.
AdaptiveScheduler.tune = tune_guarded


def _bytes_of(mod: IRModule) -> float:
    """Return the bytes that a run of a task reads and writes; 0 where that is not known."""
    try:
        return float(argument_bytes(mod))
    except Exception:  # open extents, arguments that are no buffers: it is only a guess
        return 0.0
