"""A second, smaller slot for a sibling of the task that was just tuned.

FamilySeer's *foresee tuning* (Zhang et al., ICPP 2023, algorithm 1): a model that was
updated with one task's results also predicts its siblings better, so the most promising of
them gets ``share`` of a slot at once. Unlike in its released code, the choice uses the
updated model, and only where its recent predictions ranked what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm, Decision, Policy
from tvm_adaptive.task_scheduler.forms import FormArms
from tvm_adaptive.values.trial import Promise

# Rank correlation of forecast and measurement below which a promise is mostly noise.
MIN_ACCURACY = 0.3
# Reasons of decisions that are no main slots.
_NOT_MAIN = ("warm-up", "starved", "explore", "foresee")


@dataclasses.dataclass(eq=False)
class Foresight:
    """Adds a foresee slot after each main slot of another policy."""

    policy: Policy
    families: Sequence[str]  # of each arm
    promise_of: Callable[[int], Promise | None]
    slot_trials: int
    share: float  # of these, for a foresee slot
    _played: list[int] = dataclasses.field(default_factory=list, init=False)

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        # The model knows a slot once all its trials are measured.
        for played in [k for k in self._played if not arms[k].is_under_way]:
            self._played.remove(played)
            if (foreseen := self._foresee(played, arms)) is not None:
                return foreseen
        decision = self.policy.choose(arms, rng)
        if decision.arm is not None and decision.reason not in _NOT_MAIN:
            self._played.append(decision.arm)
        return decision

    def _foresee(self, played: int, arms: Sequence[Arm]) -> Decision | None:
        family = self.families[played]
        gains_ms: dict[int, float] = {}
        for k, arm in enumerate(arms):
            if not family or self.families[k] != family or k == played or arm.finished:
                continue
            promise = self.promise_of(k)
            if promise is not None and promise.accuracy >= MIN_ACCURACY:
                gains_ms[k] = arm.share_ms * promise.expected_drop
        # Before its first result a sibling's latency is infinite; its warm-up comes first.
        known_ms = {k: gain_ms for k, gain_ms in gains_ms.items() if math.isfinite(gain_ms)}
        scores = np.full(len(arms), np.nan)
        for k, worth_ms in FormArms(arms).worth(known_ms).items():
            scores[k] = worth_ms
        if not np.nanmax(scores, initial=0.0) > 0.0:
            return None
        n_trials = max(1, round(self.share * self.slot_trials))
        return Decision(int(np.nanargmax(scores)), "foresee", n_trials, scores, "ms")
