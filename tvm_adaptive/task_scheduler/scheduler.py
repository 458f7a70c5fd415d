"""``task_scheduler="dynatune"`` and its like: a policy in MetaSchedule's loop.

MetaSchedule asks for the next task between two batches. There the batch that ran is
joined and charged to its arm, and, when its slot is over, a :class:`Policy` decides.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    PyTaskScheduler,
    RunnerResult,
    derived_object,
    handle,
)
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.task_scheduler.arms import Arm, Decision, Played, Policy, PriorTrials
from tvm_adaptive.task_scheduler.callback_guard import tune_guarded
from tvm_adaptive.task_scheduler.decisions import (
    check_decision,
    decision_fields,
    slot_fields,
)
from tvm_adaptive.task_scheduler.presets import check_limits, check_policy_name
from tvm_adaptive.task_scheduler.run_state import RunState, arm_table_of, least_played, policy_of
from tvm_adaptive.task_scheduler.search_hooks import is_ready, limit_next_batch, prefetch
from tvm_adaptive.task_scheduler.siblings import with_foresight
from tvm_adaptive.task_scheduler.slots import Plateau, Slot, SlotLength
from tvm_adaptive.values.trial import Trial

logger = logging.getLogger(__name__)


@derived_object
class AdaptiveScheduler(PyTaskScheduler):  # type: ignore[misc]
    """Give each slot of tuning time to the task that a policy chooses.

    The policy sees each task as an :class:`Arm`: latencies in the order measured and
    the wall-clock seconds they cost, search and this scheduler's own thinking included.
    An exception in a measure callback is reported with the task's name and the run goes
    on; so it does without a task whose results can't be taken in, or when the policy
    itself fails (then the least-played task is next).

    Parameters
    ----------
    policy : Policy or str, default "default"
        ``"default"`` or ``"paper"`` (DynaTune, ICLR 2021), ``"random"``, ``"linear"``,
        ``"epsilon-greedy"``, ``"softmax"``, ``"round-robin"``, or an object of your own.
        Each run has a copy of it, to start from the same state; one that has a method
        ``reset()`` is not copied, but reset.
    slot_rounds : int, default 1
        Batches per slot.
    slot_sec : float or None, default None
        Wall-clock seconds per slot instead; looked at between batches.
    warm_up_trials : int, default 4
        Trials per task and attempt before the first valid result, where a policy by name
        warms up. Strategies that have no ``limit_next_batch`` give whole batches.
    patience_trials : int or None, default None
        Where the policy is given by name, a task without improvement for so many trials
        is retired; None leaves that to the policy (``"paper"``: 200, the others never).
    foresee_share : float or None, default None
        After each slot, so much of one for the sibling that the updated model makes most
        promising (FamilySeer); see :mod:`tvm_adaptive.task_scheduler.foresight`.
    max_waiting : int, default 1
        Batches that may be measured in the background while another task's is searched
        and built, where the runner does that: the number of devices.
    n_lanes : int, default 1
        Slots whose first batches are searched at the same time, where strategies can do
        that (``prefetch``): see :mod:`tvm_adaptive.tuning.lanes`.
    budget_sec : float or None, default None
        Ends the run after as many seconds, to the batch that is running then.
    plateau_slots : int or None, default None
        Ends the run when as many slots in a row saved no more than ``plateau_share``.
    plateau_share : float, default 0.005
        Of the network's latency, in [0, 1).
    seed : int or None, default None
        Of the policy's randomness; None draws one.
    journal : JournalWriter or None, default None
        Gets a ``"slot"`` event per decision, ``"slot-end"`` with what it brought, and
        ``"stop"`` when the scheduler ends the run.
    clock : callable, default ``time.monotonic``
        Monotonic seconds.

    Attributes
    ----------
    arms : tuple of Arm
        The tasks after the last call of ``tune``, or up to now during one.

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
        journal: JournalWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if isinstance(policy, str):
            check_policy_name(policy)
        check_limits(budget_sec, warm_up_trials, patience_trials, foresee_share, max_waiting)
        Plateau(plateau_slots, plateau_share)
        self.policy = policy
        self.length = SlotLength(slot_rounds, slot_sec)
        self.warm_up_trials = warm_up_trials
        self.patience_trials = patience_trials
        self.foresee_share = foresee_share
        self.max_waiting = max_waiting
        self.n_lanes = n_lanes
        self.budget_sec = budget_sec
        self.plateau = plateau_slots, plateau_share
        self.seed = seed
        self.journal: JournalWriter = journal or NullJournal()
        self.clock = clock
        self.arms: tuple[Arm, ...] = ()
        self._earlier: Mapping[str, Played] = {}
        self._remembered: Mapping[str, PriorTrials] = {}
        self._max_trials: float = math.inf  # unless ``tune`` was entered through Python
        self._batch: int | None = None
        self._run: RunState | None = None

    def restore(self, earlier: Mapping[str, Played]) -> None:
        """Begin the next run where earlier sittings of it ended; by the names of tasks."""
        self._earlier = dict(earlier)

    def remember(self, remembered: Mapping[str, PriorTrials]) -> None:
        """Tell the next run what earlier ones know of its tasks; by the names of tasks."""
        self._remembered = dict(remembered)

    def next_task_id(self) -> int:
        """Take in what ran and return the index of the task that runs next, or -1."""
        try:
            return self._next_task_id(self._current_run())
        except Exception as error:
            # Raising here would lose the batches that are still to be joined.
            logger.exception("the task scheduler failed; the run ends with what was found")
            self.journal.write("error", where="scheduler", message=repr(error))
            return -1

    def begin(self, max_trials: int, batch: int) -> None:
        """Forget an earlier run; ``tune`` calls this first."""
        self._run = None
        self._max_trials = max_trials
        self._batch = batch
        self.arms = ()

    def end(self) -> None:
        """Close the books; ``tune`` calls this last."""
        run, self._run = self._run, None
        if run is None:
            return
        # MetaSchedule itself joins the last batches when the trials are used up.
        for index, results in list(run.arrived.items()):
            self._take(run, index, results)
        if run.slot is not None:
            self._charge(run, run.slot)
        for slot in run.open_slots():
            self._close_slot(run, slot)

    def results_in(self, index: int, results: list[RunnerResult]) -> None:
        """Remember a batch that is being joined; the callbacks' guard calls this."""
        if self._run is not None:
            self._run.arrived[index] = results

    def task_name(self, index: int | None = None) -> str:
        """Return the name of a task; with None, of the one being played."""
        if index is None and self._run is not None and self._run.slot is not None:
            index = self._run.slot.arm
        return "?" if index is None or index >= len(self.arms) else self.arms[index].name

    def _current_run(self) -> RunState:
        records = list(self._outer().tasks_)
        # Held records can't share an address with new ones.
        run = self._run
        if run is None or [*map(handle, run.records)] != [*map(handle, records)]:
            run = self._run = self._new_run(records)
            self.arms = run.arm_table.arms
        return run

    def _new_run(self, records: list[Any]) -> RunState:
        options = (self._batch, self.length, self.warm_up_trials, self.patience_trials)
        policy = with_foresight(
            policy_of(self.policy, *options),
            records,
            self.foresee_share,
            self._batch,
            self.length.rounds,
        )
        arm_table = arm_table_of(records, self._earlier, self._remembered)
        rng = np.random.default_rng(self.seed)
        now = self.clock()
        return RunState(records, arm_table, policy, Plateau(*self.plateau), rng, now, now)

    def _next_task_id(self, run: RunState) -> int:
        self._join(run)
        slot = run.slot
        if slot is not None:
            self._charge(run, slot)
            is_finished = run.arm_table.arms[slot.arm].finished or self._is_budget_spent(run)
            if not is_finished and not slot.is_over(self.length, run.mark_sec):
                return self._play(run, slot)
            run.slot = None
            self._close_slot(run, slot)
        if reason := self._reason_to_stop(run):
            return self._stop(run, reason)
        reason = self._look_ahead(run)
        while not run.ahead and run.waiting:
            self._join_waiting(run, run.waiting[0])
            reason = self._look_ahead(run)
        if not run.ahead:
            return self._stop(run, reason)
        run.slot = next(
            (slot for slot in run.ahead if is_ready(run.records[slot.arm])), run.ahead[0]
        )
        run.ahead.remove(run.slot)
        return self._play(run, run.slot) if self.n_lanes == 1 else run.slot.arm

    def _look_ahead(self, run: RunState) -> str:
        """Decide on as many slots as there are lanes; why not on more, if on fewer."""
        while len(run.ahead) < self.n_lanes:
            if run.ahead and all(arm.finished for arm in run.choosable):
                break
            decision = self._decide(run)
            if decision.arm is None:
                return decision.reason
            slot = Slot(decision.arm, run.mark_sec, decision.n_trials, decision.until_success)
            run.arm_table.open_slot(decision.arm)
            run.ahead.append(slot)
            if self.n_lanes > 1:
                self._play(run, slot)
                prefetch(run.records[slot.arm])
        return ""

    def _join(self, run: RunState) -> None:
        """Take in the results of batches that were sent, and see which tasks ended.

        Where the runner does not wait for them either, those of the last batches are left
        to come while another task's batch is searched and built.
        """
        if run.slot is not None:
            self._charge(run, run.slot)
        for slot in list(run.waiting):
            if run.is_measured(slot.arm):
                self._join_waiting(run, slot)
        are_waiting = {slot.arm for slot in run.waiting}
        for index, record in enumerate(run.records):
            if index in are_waiting:
                continue
            if not record.is_terminated and record.runner_futures is not None:
                n_trials = len(record.measure_candidates or ())
                run.n_sent += n_trials
                if self._may_wait(run, index, n_trials):
                    assert run.slot is not None
                    run.waiting.append(run.slot)
                    run.slot = None
                else:
                    for slot in list(run.waiting):  # was sent before
                        self._join_waiting(run, slot)
                    self._join_task(run, index)
            if record.is_terminated and not run.arm_table.arms[index].finished:
                run.arm_table.finish(index)
        while run.waiting and (
            len(run.waiting) > self.max_waiting or all(arm.finished for arm in run.choosable)
        ):
            self._join_waiting(run, run.waiting[0])

    def _join_waiting(self, run: RunState, slot: Slot) -> None:
        self._join_task(run, slot.arm)
        self._charge(run, slot)
        run.waiting.remove(slot)
        self._close_slot(run, slot)

    def _may_wait(self, run: RunState, index: int, n_trials: int) -> bool:
        slot = run.slot
        if slot is None or slot.arm != index or not slot.ends_with(n_trials, self.length):
            return False
        if run.arm_table.live == [index] or self._is_budget_spent(run):
            return False
        return not run.is_measured(index)

    def _join_task(self, run: RunState, index: int) -> None:
        try:
            results = self._outer().join_running_task(index)
        except Exception as error:
            # MetaSchedule can't run a task again whose results it did not take.
            self.report(index, "join", error, "this task ends")
            self._terminate(run, index)
        else:
            self._take(run, index, results)

    def _take(self, run: RunState, index: int, results: Sequence[RunnerResult]) -> None:
        run.arrived.pop(index, None)
        trials = [Trial.of(result) for result in results]
        latencies_ms = [trial.seconds * 1e3 for trial in trials if not trial.is_untried]
        run.arm_table.add_trials(index, latencies_ms)
        for slot in run.open_slots():
            if slot.arm == index:
                slot.add_round(len(results), has_success=any(map(math.isfinite, latencies_ms)))
        if run.is_empty_again(index, len(results)):
            logger.info("%s: nothing new to try", self.task_name(index))
            self._terminate(run, index)

    def _terminate(self, run: RunState, index: int) -> None:
        if not run.records[index].is_terminated:
            self._outer().terminate_task(index)
        run.arm_table.finish(index)

    def _charge(self, run: RunState, slot: Slot) -> None:
        now = self.clock()
        run.arm_table.charge(slot.arm, now - run.mark_sec)
        run.mark_sec = now
        self.arms = run.arm_table.arms

    def _close_slot(self, run: RunState, slot: Slot) -> None:
        run.plateau.add(run.arm_table.weighted_ms)
        fields = slot_fields(slot, run.arm_table.arms, run.mark_sec, run.arm_table.weighted_ms)
        self.journal.write("slot-end", **fields)

    def _is_budget_spent(self, run: RunState) -> bool:
        return self.budget_sec is not None and run.mark_sec - run.start_sec >= self.budget_sec

    def _reason_to_stop(self, run: RunState) -> str:
        if not run.arm_table.live:
            return "all-finished"
        if self._is_budget_spent(run):
            return "budget"
        return "plateau" if run.plateau.is_reached() else ""

    def _stop(self, run: RunState, reason: str) -> int:
        logger.info("the task scheduler ends the run: %s", reason)
        self.journal.write(
            "stop", reason=reason, n_trials=run.n_sent, weighted_ms=run.arm_table.weighted_ms
        )
        return -1

    def _decide(self, run: RunState) -> Decision:
        start_sec = self.clock()
        arms = run.choosable
        try:
            decision = run.policy.choose(arms, run.rng)
            check_decision(decision, arms)
        except Exception as error:
            logger.exception("the policy failed; the least-played task is next")
            self.journal.write("error", where="policy", message=repr(error))
            decision = Decision(least_played(arms), "policy-failed")
        for index in decision.retired:
            if not arms[index].finished:
                self._terminate(run, index)
        self.arms = run.arm_table.arms
        self.journal.write(
            "slot", **decision_fields(decision, arms), decide_sec=self.clock() - start_sec
        )
        return decision

    def _play(self, run: RunState, slot: Slot) -> int:
        """Ask the search for a batch of the right size, as far as it can be asked."""
        planned = sum(each.left() or self._batch or 0 for each in run.ahead if each is not slot)
        trials_left = self._max_trials - run.n_sent - planned
        limit = slot.left()
        if self._batch is not None and trials_left < (limit or self._batch):
            limit = max(1, int(trials_left))
        try:
            limit_next_batch(run.records[slot.arm], limit)
        except Exception as error:
            self.report(slot.arm, "search", error, "its batch is a full one")
        return slot.arm

    def report(self, index: int | None, where: str, error: Exception, consequence: str) -> None:
        """Log and journal an error with the name of its task, None for the one played."""
        name = self.task_name(index)
        logger.error("%s: %s failed; %s", name, where, consequence, exc_info=error)
        self.journal.write("error", task=name, where=where, message=repr(error))


# On the object that Python's doors call, not among the methods handed to C++: an override
# there is called by its own base, without end.
AdaptiveScheduler.tune = tune_guarded
