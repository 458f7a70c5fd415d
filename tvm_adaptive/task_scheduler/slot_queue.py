"""The arms and slots of a run: decided on, played, measured, and when there are no more."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tvm_adaptive.errors import InvalidOptionError, check_at_least, check_positive, check_share
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.task_scheduler.arms import Arm, Decision, Policy
from tvm_adaptive.values.forms import NO_FORM, FormKey, in_use

logger = logging.getLogger(__name__)

# Twice what TVM's own search allows itself: a strategy that returns empty batches without
# end would never use up a trial, and its task would never finish.
MAX_EMPTY_BATCHES = 10


class ArmTable:
    """One :class:`Arm` per task, replaced whenever something is measured or charged."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        flops: Sequence[float],
        keys: Mapping[str, FormKey] = MappingProxyType({}),
        n_bytes: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._arms = [
            Arm(
                str(name),
                float(weight),
                max(1.0, float(flop)),
                np.empty(0),
                0,
                0.0,
                key=keys.get(str(name), NO_FORM),
                n_bytes=n_bytes.get(str(name), 0.0),
            )
            for name, weight, flop in zip(names, weights, flops, strict=True)
        ]

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, in the order of the tasks."""
        return tuple(self._arms)

    @property
    def live(self) -> list[int]:
        """Indices of the arms that can still be played."""
        return [index for index, arm in enumerate(self._arms) if not arm.finished]

    @property
    def weighted_ms(self) -> float:
        """Milliseconds of the forms in use, without arms that finished without a valid result."""
        used = in_use([arm.key for arm in self._arms], [arm.share_ms for arm in self._arms])
        counted = [
            arm.share_ms
            for arm, is_used in zip(self._arms, used, strict=True)
            if is_used and not (arm.finished and math.isinf(arm.best_ms))
        ]
        return math.fsum(counted) if counted else math.inf

    def change(self, index: int, **changes: object) -> None:
        """Replace fields of an arm."""
        self._arms[index] = dataclasses.replace(self._arms[index], **changes)  # type: ignore[arg-type]

    def open_slot(self, index: int) -> None:
        """Count a slot that begins."""
        self.change(index, n_slots=self._arms[index].n_slots + 1)

    def charge(self, index: int, seconds: float) -> None:
        """Add wall-clock seconds to what an arm has cost."""
        self.change(index, spent_sec=self._arms[index].spent_sec + seconds)

    def add_trials(self, index: int, latencies_ms: Iterable[float]) -> None:
        """Append trials in the order measured; ``nan`` for one that failed."""
        added = np.fromiter(latencies_ms, dtype=np.float64)
        self.change(index, latencies_ms=np.concatenate([self._arms[index].latencies_ms, added]))

    def finish(self, index: int) -> None:
        """Exclude an arm from all further decisions."""
        self.change(index, finished=True)


@dataclasses.dataclass(frozen=True)
class SlotLength:
    """How long a slot lasts unless the policy asks for a number of trials."""

    rounds: int = 1  # batches of the search; not used when ``sec`` is given
    # wall-clock seconds, compared between batches: the slot ends with the batch during which
    # they run out, and the arm is charged what the slot really took
    sec: float | None = None

    def __post_init__(self) -> None:
        check_at_least("slot_rounds", self.rounds, 1)
        check_positive("slot_sec", self.sec)


@dataclasses.dataclass(frozen=True)
class RunLimits:
    """When the scheduler ends a run that has trials left; None for no limit."""

    budget_sec: float | None = None
    plateau_slots: int | None = None
    plateau_share: float = 0.005  # of the network's latency

    def __post_init__(self) -> None:
        check_positive("budget_sec", self.budget_sec)
        check_at_least("plateau_slots", self.plateau_slots, 1)
        check_share("plateau_share", self.plateau_share)

    def is_plateau(self, totals_ms: Sequence[float]) -> bool:
        """Say whether the last ``plateau_slots`` of the network's latencies saved too little."""
        if self.plateau_slots is None or len(totals_ms) <= self.plateau_slots:
            return False
        before_ms = totals_ms[-1 - self.plateau_slots]
        return before_ms - totals_ms[-1] <= self.plateau_share * before_ms


@dataclasses.dataclass
class Slot:
    """One slot of an arm, from the decision to its last result."""

    arm: int
    start_sec: float  # monotonic; when it was decided on, with lanes when its turn came
    n_asked: int | None = None  # trials of the decision; None for a SlotLength
    until_success: bool = False  # whether the first batch with a success ends it
    spent_sec: float = 0.0  # charged to it; slots that overlap share no second
    n_rounds: int = 0
    n_trials: int = 0
    is_dry: bool = False  # whether the last batch was empty
    has_success: bool = False
    n_planned: int | None = None  # trials of the batch that a lane searches; None without one

    def add_round(self, n_trials: int, *, has_success: bool = False) -> None:
        """Count a batch that was measured."""
        self.n_rounds += 1
        self.n_trials += n_trials
        self.is_dry = n_trials == 0
        self.has_success |= has_success

    def left(self) -> int | None:
        """Return how many of ``n_asked`` trials are missing; None without a number."""
        return None if self.n_asked is None else max(1, self.n_asked - self.n_trials)

    def ends_with(self, n_trials: int, length: SlotLength) -> bool:
        """Say whether a batch that was sent is the last, whatever its results will be."""
        if self.n_asked is not None:
            return self.n_trials + n_trials >= self.n_asked
        return length.sec is None and self.n_rounds + 1 >= length.rounds

    def is_over(self, length: SlotLength, now_sec: float) -> bool:
        """Say whether the slot has had its trials, seconds or batches."""
        if self.until_success and self.has_success:
            return True
        if self.n_asked is not None:
            # A search that has returned nothing would return nothing again.
            return self.is_dry or self.n_trials >= self.n_asked
        if length.sec is not None:
            return now_sec - self.start_sec >= length.sec
        return self.n_rounds >= length.rounds


@dataclasses.dataclass(eq=False)
class SlotQueue:
    """The slots of one run: opens them by the policy's decisions, charges and closes them."""

    arm_table: ArmTable
    policy: Policy
    rng: np.random.Generator
    limits: RunLimits
    journal: JournalWriter
    clock: Callable[[], float]
    terminate: Callable[[int], None]  # ends a task for MetaSchedule

    def __post_init__(self) -> None:
        self.start_sec = self.charged_sec = self.clock()  # seconds are charged up to the second
        self.current: Slot | None = None
        # decided on, the oldest first: their first batches are being searched elsewhere
        self.ahead: list[Slot] = []
        # sent completely, the oldest first: they are measured while another task is searched
        self.waiting: list[Slot] = []
        self.n_sent = 0  # trials, measured or not
        self._n_empty: Counter[int] = Counter()  # empty batches in a row, by arm
        # the network's milliseconds after each slot, from when every task has a result
        self._totals_ms: list[float] = []
        self.stop_reason = ""  # why it ended the run; empty if it has not

    @property
    def choosable(self) -> tuple[Arm, ...]:
        """All arms; those with a batch under way count as finished for now."""
        arms = list(self.arm_table.arms)
        for slot in (*self.waiting, *self.ahead):
            arms[slot.arm] = dataclasses.replace(arms[slot.arm], finished=True, is_under_way=True)
        return tuple(arms)

    @property
    def open_slots(self) -> list[Slot]:
        """The slots that are not closed, in the order in which they began."""
        return [*self.waiting, *([] if self.current is None else [self.current]), *self.ahead]

    def decide(self) -> Decision:
        """Ask the policy, retire arms and open the slot that it decides on."""
        start_sec = self.clock()
        arms = self.choosable
        try:
            decision = self.policy.choose(arms, self.rng)
            check_decision(decision, arms)
        except Exception as error:
            logger.exception("the policy failed; the least-played task is next")
            self.journal.write("error", where="policy", message=repr(error))
            decision = Decision(least_played(arms), "policy-failed")
        for index in decision.retired:
            if not arms[index].finished:
                self.finish(index)
        seconds = self.clock() - start_sec
        self.journal.write("slot", **decision_fields(decision, arms), decide_sec=seconds)
        if decision.arm is not None:
            self.arm_table.open_slot(decision.arm)
            self.ahead.append(
                Slot(decision.arm, self.charged_sec, decision.n_trials, decision.until_success)
            )
        return decision

    def add_batch(self, index: int, latencies_ms: Sequence[float], n_results: int) -> bool:
        """Add a measured batch to its arm and slots; say whether too many were empty."""
        self.arm_table.add_trials(index, latencies_ms)
        has_success = any(map(math.isfinite, latencies_ms))
        for slot in self.open_slots:
            if slot.arm == index:
                slot.add_round(n_results, has_success=has_success)
        self._n_empty[index] = 0 if n_results else self._n_empty[index] + 1
        return self._n_empty[index] >= MAX_EMPTY_BATCHES

    def charge(self, slot: Slot) -> None:
        """Charge the seconds since the last charge to a slot's arm."""
        now_sec = self.clock()
        seconds = now_sec - self.charged_sec
        self.arm_table.charge(slot.arm, seconds)
        slot.spent_sec += seconds
        self.charged_sec = now_sec

    def close(self, slot: Slot) -> None:
        """Write a slot that is over to the journal."""
        arm, weighted_ms = self.arm_table.arms[slot.arm], self.arm_table.weighted_ms
        if math.isfinite(weighted_ms):
            self._totals_ms.append(weighted_ms)
        self.journal.write(
            "slot-end",
            task=arm.name,
            task_id=slot.arm,
            n_rounds=slot.n_rounds,
            n_trials=slot.n_trials,
            seconds=slot.spent_sec,
            best_ms=arm.best_ms,
            weighted_ms=weighted_ms,
            finished=arm.finished,
        )

    def finish(self, index: int) -> None:
        """Exclude an arm from all further slots."""
        self.terminate(index)
        self.arm_table.finish(index)

    def is_budget_spent(self) -> bool:
        """Say whether the seconds of the run are used up."""
        budget_sec = self.limits.budget_sec
        return budget_sec is not None and self.charged_sec - self.start_sec >= budget_sec

    def reason_to_stop(self) -> str:
        """Return why no slot may follow; empty if one may."""
        if not self.arm_table.live:
            return "all-finished"
        if self.is_budget_spent():
            return "budget"
        return "plateau" if self.limits.is_plateau(self._totals_ms) else ""

    def stop(self, reason: str) -> int:
        """Write to log and journal why the run ends; return MetaSchedule's index for no task."""
        logger.info("the task scheduler ends the run: %s", reason)
        self.stop_reason = reason
        weighted_ms = self.arm_table.weighted_ms
        self.journal.write("stop", reason=reason, n_trials=self.n_sent, weighted_ms=weighted_ms)
        return -1


def least_played(arms: Sequence[Arm]) -> int:
    """Return the first of the unfinished arms with the fewest slots."""
    live = [index for index, arm in enumerate(arms) if not arm.finished]
    return min(live, key=lambda index: arms[index].n_slots)


def check_decision(decision: Decision, arms: Sequence[Arm]) -> None:
    """Raise unless a policy's decision can be carried out."""
    for index in (*decision.retired, *([] if decision.arm is None else [decision.arm])):
        if not isinstance(index, int | np.integer) or not 0 <= index < len(arms):
            raise InvalidOptionError(
                f"The policy named arm {index!r}; there are arms 0 to {len(arms) - 1}."
            )
    if decision.arm is not None and (
        arms[decision.arm].finished or decision.arm in decision.retired
    ):
        raise InvalidOptionError(
            f"The policy chose arm {decision.arm} ({arms[decision.arm].name}), which is "
            "finished; a policy must choose among the others or end the run with None."
        )
    if decision.n_trials is not None and decision.n_trials < 1:
        raise InvalidOptionError(
            f"The policy asked for {decision.n_trials} trials; ask for at least 1, or None."
        )
    if decision.scores is not None:
        try:
            shape = np.asarray(decision.scores, dtype=np.float64).shape
        except (TypeError, ValueError) as error:
            raise InvalidOptionError(
                "The policy's scores must be one number per arm, or None."
            ) from error
        if shape != (len(arms),):
            raise InvalidOptionError(
                f"The policy must give one score per arm but got shape {shape}; there are "
                f"{len(arms)} arms. Give nan for those that were not compared, or None."
            )


def decision_fields(decision: Decision, arms: Sequence[Arm]) -> dict[str, Any]:
    """Return a decision as JSON-ready fields, for the journal."""
    scores = None if decision.scores is None else [float(score) for score in decision.scores]
    chosen = None if decision.arm is None else arms[decision.arm]
    return {
        "task": None if chosen is None else chosen.name,
        "task_id": decision.arm,
        "reason": decision.reason,
        "n_asked": decision.n_trials,
        "n_trials": None if chosen is None else chosen.n_trials,
        "best_ms": None if chosen is None else chosen.best_ms,
        "gain": None if scores is None or decision.arm is None else scores[decision.arm],
        "unit": decision.unit,
        "scores": scores,
        "retired": [arms[index].name for index in decision.retired],
    }
