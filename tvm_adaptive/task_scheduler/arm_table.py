"""The books of a run: what each arm got and gave, slot by slot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm, Played, PriorTrials


class ArmTable:
    """Keeps one :class:`Arm` per task up to date."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        flops: Sequence[float],
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
        """Milliseconds of the network: occurrences times incumbent, summed over the arms.

        Infinite until each arm has a valid result or is finished; arms that finished
        without one are left out.
        """
        counted = [arm for arm in self._arms if not (arm.finished and math.isinf(arm.best_ms))]
        return math.fsum(arm.weight * arm.best_ms for arm in counted) if counted else math.inf

    def remember(self, index: int, remembered: PriorTrials) -> None:
        """Enter what earlier runs know of an arm."""
        self._change(index, remembered=remembered)

    def restore(self, index: int, played: Played) -> None:
        """Enter what an arm got and gave in an earlier sitting of the run."""
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
        """Charge wall-clock seconds to an arm."""
        self._change(index, spent_sec=self._arms[index].spent_sec + seconds)

    def add_trials(self, index: int, latencies_ms: Iterable[float]) -> None:
        """Append trials in the order measured; ``nan`` for one that failed."""
        added = np.fromiter(latencies_ms, dtype=np.float64)
        self._change(index, latencies_ms=np.concatenate([self._arms[index].latencies_ms, added]))

    def finish(self, index: int) -> None:
        """Take an arm out of the choice for good."""
        self._change(index, finished=True)

    def _change(self, index: int, **changes: object) -> None:
        self._arms[index] = dataclasses.replace(self._arms[index], **changes)  # type: ignore[arg-type]
