"""What a scheduler knows during one call of ``tune``."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm, Played, Policy
from tvm_adaptive.task_scheduler.ledger import Ledger
from tvm_adaptive.task_scheduler.slots import Plateau, Slot

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RunState:
    """One call of ``tune``.

    Attributes
    ----------
    records : list
        MetaSchedule's, one per task.
    ledger : Ledger
    policy : Policy
    plateau : Plateau
    rng : numpy.random.Generator
        Of the policy.
    start_sec : float
        Monotonic time.
    mark_sec : float
        Up to here the seconds are charged.
    slot : Slot or None
        Being played.
    waiting : list of Slot
        Over but for their results, the oldest first: they are still being measured while
        the batch of another task is searched and built.
    arrived : dict of int to list
        Results by task that MetaSchedule has joined and the books do not have yet.
    n_sent : int
        Trials that were sent, their results in or not.
    n_empty : dict of int to int
        Empty batches in a row, by task.
    """

    records: list[Any]
    ledger: Ledger
    policy: Policy
    plateau: Plateau
    rng: np.random.Generator
    start_sec: float
    mark_sec: float
    slot: Slot | None = None
    waiting: list[Slot] = dataclasses.field(default_factory=list)
    arrived: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    n_sent: int = 0
    n_empty: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def choosable(self) -> tuple[Arm, ...]:
        """All arms; those whose results are still to come count as finished for now."""
        arms = list(self.ledger.arms)
        for slot in self.waiting:
            arms[slot.arm] = dataclasses.replace(arms[slot.arm], finished=True)
        return tuple(arms)

    def open_slots(self) -> list[Slot]:
        """Return the slots that are not closed, in the order they began."""
        return [*self.waiting, *([] if self.slot is None else [self.slot])]


def ledger_of(records: Sequence[Any], earlier: Mapping[str, Played]) -> Ledger:
    """Open the books for MetaSchedule's records, with what earlier sittings left in them.

    Parameters
    ----------
    records : sequence
        One per task.
    earlier : mapping of str to Played
        By the names of tasks.
    """
    names = [str(record.ctx.task_name) for record in records]
    ledger = Ledger(
        names,
        [float(record.task_weight) for record in records],
        [float(record.flop) for record in records],
    )
    for index, name in enumerate(names):
        if name in earlier:
            ledger.restore(index, earlier[name])
    return ledger


def least_played(arms: Sequence[Arm]) -> int:
    """Return the arm with the fewest slots that is not finished, the first of several.

    Raises
    ------
    ValueError
        When all are finished.
    """
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
