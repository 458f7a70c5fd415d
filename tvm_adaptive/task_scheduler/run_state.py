"""What a scheduler knows during one call of ``tune``."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.task_scheduler.arm_table import ArmTable
from tvm_adaptive.task_scheduler.arms import Arm, Played, Policy, PriorTrials
from tvm_adaptive.task_scheduler.presets import make_policy
from tvm_adaptive.task_scheduler.slots import Plateau, Slot, SlotLength

logger = logging.getLogger(__name__)

# Twice what TVM's own search allows itself: a strategy that brings empty batches without
# end would never use up a trial, nor give up its task.
MAX_EMPTY_ROUNDS = 10


@dataclasses.dataclass
class RunState:
    """One call of ``tune``."""

    records: list[Any]  # metaSchedule's, one per task
    arm_table: ArmTable
    policy: Policy
    plateau: Plateau
    rng: np.random.Generator  # of the policy
    start_sec: float  # monotonic time
    mark_sec: float  # up to here the seconds are charged
    slot: Slot | None = None  # being played
    # decided on, the oldest first: their first batches are being searched elsewhere
    ahead: list[Slot] = dataclasses.field(default_factory=list)
    # over but for their results, the oldest first: they are still being measured while the batch of
    # another task is searched and built
    waiting: list[Slot] = dataclasses.field(default_factory=list)
    # results by task that MetaSchedule has joined and the books do not have yet
    arrived: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    n_sent: int = 0  # trials that were sent, their results in or not
    # empty batches in a row, by task
    n_empty: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def choosable(self) -> tuple[Arm, ...]:
        """All arms; those that have a batch under way count as finished for now."""
        arms = list(self.arm_table.arms)
        for slot in [*self.waiting, *self.ahead]:
            arms[slot.arm] = dataclasses.replace(arms[slot.arm], finished=True)
        return tuple(arms)

    def is_measured(self, index: int) -> bool:
        """Say whether the results of a task's batch, which was sent, are there."""
        return all(future.done() for future in self.records[index].runner_futures)

    def is_empty_again(self, index: int, n_results: int) -> bool:
        """Count a task's batch; say whether too many in a row were empty."""
        self.n_empty[index] = 0 if n_results else self.n_empty.get(index, 0) + 1
        return self.n_empty[index] >= MAX_EMPTY_ROUNDS

    def open_slots(self) -> list[Slot]:
        """Return the slots that are not closed, in the order they began."""
        return [*self.waiting, *([] if self.slot is None else [self.slot]), *self.ahead]


def arm_table_of(
    records: Sequence[Any],
    earlier: Mapping[str, Played],
    remembered: Mapping[str, PriorTrials] | None = None,
) -> ArmTable:
    """Open the books for MetaSchedule's records, with what is known from before."""
    names = [str(record.ctx.task_name) for record in records]
    arm_table = ArmTable(
        names,
        [float(record.task_weight) for record in records],
        [float(record.flop) for record in records],
    )
    for index, name in enumerate(names):
        if remembered and name in remembered:
            arm_table.remember(index, remembered[name])
        if name in earlier:
            arm_table.restore(index, earlier[name])
    return arm_table


def policy_of(
    policy: Policy | str,
    batch: int | None,
    length: SlotLength,
    warm_up_trials: int,
    patience_trials: int | None,
) -> Policy:
    """Return a policy for a run of its own: a new one by name, or a copy of the user's."""
    if not isinstance(policy, str):
        return fresh_copy(policy)
    return make_policy(
        policy,
        batch=batch,
        slot_rounds=length.rounds,
        slot_sec=length.sec,
        warm_up_trials=warm_up_trials,
        patience_trials=patience_trials,
    )


def least_played(arms: Sequence[Arm]) -> int:
    """Return the arm with the fewest slots that is not finished, the first of several."""
    live = [index for index, arm in enumerate(arms) if not arm.finished]
    return min(live, key=lambda index: arms[index].n_slots)


def fresh_copy(policy: Policy) -> Policy:
    """Return a policy in the state in which it was handed over, for a run of its own."""
    if hasattr(policy, "reset"):
        policy.reset()
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:  # whatever a __deepcopy__ of a user's raises
        logger.warning("%s can't be copied; a second run goes on with its state", policy)
        return policy
