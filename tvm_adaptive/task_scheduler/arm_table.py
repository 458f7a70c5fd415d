"""The arms of a run, kept up to date slot by slot, and what a policy may decide on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.history import TaskHistory
from tvm_adaptive.task_scheduler.arms import Arm, Decision, PriorTrials


class ArmTable:
    """One :class:`Arm` per task, replaced whenever something is measured or charged."""

    def __init__(
        self, names: Sequence[str], weights: Sequence[float], flops: Sequence[float]
    ) -> None:
        self._arms = [
            Arm(str(name), float(weight), max(1.0, float(flop)), np.empty(0), 0, 0.0)
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
        """Milliseconds of the network, without arms that finished without a valid result."""
        counted = [arm for arm in self._arms if not (arm.finished and math.isinf(arm.best_ms))]
        return math.fsum(arm.weight * arm.best_ms for arm in counted) if counted else math.inf

    def set_prior(self, index: int, prior: PriorTrials) -> None:
        """Enter the trials that earlier runs made for an arm."""
        self._change(index, prior=prior)

    def restore(self, index: int, played: TaskHistory) -> None:
        """Enter the trials, slots and seconds of an arm in earlier attempts of this run."""
        self._change(
            index,
            latencies_ms=np.array(played.latencies_ms, dtype=np.float64),
            n_slots=played.n_slots,
            spent_sec=played.spent_sec,
        )

    def open_slot(self, index: int) -> None:
        """Count a slot that begins."""
        self._change(index, n_slots=self._arms[index].n_slots + 1)

    def charge(self, index: int, seconds: float) -> None:
        """Add wall-clock seconds to what an arm has cost."""
        self._change(index, spent_sec=self._arms[index].spent_sec + seconds)

    def add_trials(self, index: int, latencies_ms: Iterable[float]) -> None:
        """Append trials in the order measured; ``nan`` for one that failed."""
        added = np.fromiter(latencies_ms, dtype=np.float64)
        self._change(index, latencies_ms=np.concatenate([self._arms[index].latencies_ms, added]))

    def finish(self, index: int) -> None:
        """Exclude an arm from all further decisions."""
        self._change(index, finished=True)

    def _change(self, index: int, **changes: object) -> None:
        self._arms[index] = dataclasses.replace(self._arms[index], **changes)  # type: ignore[arg-type]


def check_decision(decision: Decision, arms: Sequence[Arm]) -> None:
    """Raise unless a policy's decision can be carried out."""
    for index in (*decision.retired, *([] if decision.arm is None else [decision.arm])):
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
