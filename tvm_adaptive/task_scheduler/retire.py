"""Which arms are retired, and how long each has waited."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.warmup import WarmUp

# A forecast after a short pause may be wrong, and a retired arm never returns: wait for as
# many trials as stock takes in one batch.
STUCK_TRIALS = 64
# End-to-end timings repeat to some 0.1 %: a tenth of that does not show even if it vanishes.
NEGLIGIBLE_SHARE = 1e-4


def end_to_end_ms(arms: Sequence[Arm]) -> float:
    """Return the weighted sum of the incumbents' milliseconds, of arms that have one."""
    return math.fsum(arm.weight * arm.best_ms for arm in arms if math.isfinite(arm.best_ms))


def trials_since_improvement(arm: Arm) -> int:
    """Return the trials since the incumbent was found; all of them without an incumbent."""
    if math.isinf(arm.best_ms):
        return arm.n_trials
    return arm.n_trials - 1 - int(np.nanargmin(arm.latencies_ms))


def out_of_patience(arm: Arm, patience_trials: int | None) -> bool:
    """Say whether the paper's early termination applies; never with None."""
    return patience_trials is not None and trials_since_improvement(arm) >= patience_trials


def is_spent(arm: Arm, warm_up: WarmUp, patience_trials: int | None) -> bool:
    """Say whether an arm without a result is given up, or one with a result out of patience."""
    if math.isinf(arm.best_ms):
        return warm_up.is_hopeless(arm)
    return out_of_patience(arm, patience_trials)


def not_worth_a_slot(arm: Arm, gain_ms: float, total_ms: float, share: float) -> bool:
    """Say whether an arm is negligible, or stuck with too small a share to gain."""
    if arm.weight * arm.best_ms < NEGLIGIBLE_SHARE * total_ms:
        return share > 0.0
    is_stuck = trials_since_improvement(arm) >= STUCK_TRIALS
    return is_stuck and gain_ms < share * total_ms


class Retirement:
    """The arms that a policy has retired, for good."""

    def __init__(self) -> None:
        self._retired: set[int] = set()

    def live(self, arms: Sequence[Arm]) -> list[int]:
        """Return the arms that can be played."""
        return [k for k, arm in enumerate(arms) if not arm.finished and k not in self._retired]

    def add(self, which: Iterable[int]) -> tuple[int, ...]:
        """Retire arms and return them."""
        added = tuple(which)
        self._retired.update(added)
        return added


class Waiting:
    """Counts for how many slots of the others each arm has not been played."""

    def __init__(self) -> None:
        self._n_slots: list[int] = []
        self._last: list[int] = []  # slots of all arms when each was played last

    def observe(self, arms: Sequence[Arm]) -> None:
        """Compare the counts with those before; a count that falls belongs to a new run."""
        counts = [arm.n_slots for arm in arms]
        total = sum(counts)
        pairs = list(zip(counts, self._n_slots, strict=False))
        if len(counts) != len(self._n_slots) or any(now < before for now, before in pairs):
            self._last = [total] * len(counts)
        else:
            self._last = [
                total if now > before else last
                for (now, before), last in zip(pairs, self._last, strict=True)
            ]
        self._n_slots = counts

    def longest(self, live: Sequence[int]) -> tuple[int, int]:
        """Return the live arm that has waited longest, and its slots of waiting."""
        k = min(live, key=lambda each: self._last[each])
        return k, sum(self._n_slots) - self._last[k]
