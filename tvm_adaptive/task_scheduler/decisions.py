"""Whether a policy's decision can be carried out, and what the journal keeps of a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.slots import Slot


def check_decision(decision: Decision, arms: Sequence[Arm]) -> None:
    """Raise unless a policy's decision can be carried out."""
    indices = (*decision.retired, *([] if decision.arm is None else [decision.arm]))
    for index in indices:
        if not 0 <= index < len(arms):
            raise InvalidOptionError(
                f"The policy named arm {index}; there are arms 0 to {len(arms) - 1}."
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


def slot_fields(
    slot: Slot, arms: Sequence[Arm], now_sec: float, weighted_ms: float
) -> dict[str, Any]:
    """Return what a slot that ended has brought, as JSON-ready fields."""
    arm = arms[slot.arm]
    return {
        "task": arm.name,
        "task_id": slot.arm,
        "n_rounds": slot.n_rounds,
        "n_trials": slot.n_trials,
        "seconds": now_sec - slot.start_sec,
        "best_ms": arm.best_ms,
        "weighted_ms": weighted_ms,
        "finished": arm.finished,
    }
