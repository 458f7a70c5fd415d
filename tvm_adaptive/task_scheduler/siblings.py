"""Which tasks of a run are siblings, and what their searches promise. An adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_adaptive._tvm import anchor_of, search_hooks
from tvm_adaptive.task_scheduler.arms import Policy
from tvm_adaptive.task_scheduler.foresight import Foresight
from tvm_adaptive.values.trial import Promise

# TVM's own batch, for a run that does not say its own.
_BATCH = 64


def with_foresight(
    policy: Policy,
    records: Sequence[Any],
    share: float | None,
    batch: int | None,
    slot_rounds: int,
) -> Policy:
    """Return a policy that also gives foresee slots to siblings."""
    if share is None:
        return policy

    def promise_of(index: int) -> Promise | None:
        hooks = search_hooks(records[index].ctx.search_strategy)
        return None if hooks is None else hooks.promise()

    families = [anchor_of(record.ctx.mod) for record in records]
    slot_trials = slot_rounds * (batch or _BATCH)
    return Foresight(policy, families, promise_of, slot_trials=slot_trials, share=share)
