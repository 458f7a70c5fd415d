"""A second, smaller slot for a sibling of the task that was just tuned.

FamilySeer's *foresee tuning* (Zhang et al., ICPP 2023, algorithm 1): a model that was
updated with one task's results knows more about its siblings, too, so the most promising
of them gets ``share`` of a slot at once. Its released code chooses by what was known
before the update, and never asks whether the model is any good; here the choice is made
anew, only where the model's forecasts of late ranked what was measured, and only where it
promises an improvement. What the slot costs is charged to the sibling like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision, Policy
from tvm_adaptive.values.trial import Promise

# FamilySeer: 16 programs after every 64.
SHARE = 0.25
# Rank correlation of forecast and measurement below which a promise is mostly noise.
MIN_ACCURACY = 0.3
# Reasons of decisions that are no main slots.
_NOT_MAIN = ("warm-up", "starved", "explore", "foresee")


# What is promised of an arm; None where nothing is known.
Promises = Callable[[int], Promise | None]


class Foresight:
    """Puts a foresee slot after each main slot of another policy."""

    def __init__(
        self,
        policy: Policy,
        families: Sequence[str],
        promises: Promises,
        *,
        slot_trials: int,
        share: float = SHARE,
        min_accuracy: float = MIN_ACCURACY,
    ) -> None:
        check_share(share)
        self.policy = policy
        self.families = list(families)
        self.promises = promises
        self.n_trials = max(1, round(share * slot_trials))
        self.min_accuracy = min_accuracy
        self._played: int | None = None

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        played, self._played = self._played, None
        if played is not None:
            decision = self._foresee(played, arms)
            if decision is not None:
                return decision
        decision = self.policy.choose(arms, rng)
        if decision.arm is not None and decision.reason not in _NOT_MAIN:
            self._played = decision.arm
        return decision

    def _foresee(self, played: int, arms: Sequence[Arm]) -> Decision | None:
        family = self.families[played]
        siblings = [
            k
            for k, arm in enumerate(arms)
            if family and self.families[k] == family and k != played and not arm.finished
        ]
        gains_ms = np.full(len(arms), np.nan)
        for k in siblings:
            promise = self.promises(k)
            if promise is not None and promise.accuracy >= self.min_accuracy:
                gains_ms[k] = arms[k].weight * arms[k].best_ms * promise.expected_drop
        # Before its first result a sibling's latency is infinite, and its warm-up comes.
        gains_ms[~np.isfinite(gains_ms)] = np.nan
        if not np.nanmax(gains_ms, initial=0.0) > 0.0:
            return None
        best = int(np.nanargmax(gains_ms))
        return Decision(best, "foresee", self.n_trials, gains_ms, "ms")


def check_share(share: float) -> None:
    """Raise unless a share can be one of a slot."""
    if not 0.0 < share <= 1.0:
        raise InvalidOptionError(f"The share of a foresee slot must be in (0, 1] but got {share}.")
