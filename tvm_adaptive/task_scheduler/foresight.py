"""A second, smaller slot for a sibling of the task that was just tuned.

FamilySeer's *foresee tuning* (Zhang et al., ICPP 2023, algorithm 1): a model that was
updated with one task's results also predicts its siblings better, so the most promising of
them gets a slot at once, with a ``share`` of that task's new trials. Unlike in its released code,
the choice uses the updated model, and only where its recent predictions ranked what was measured.
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
    share: float  # of a main slot's trials, for the foresee slot after it
    # Arms with a main slot that is not over, and their trials before it.
    _before: dict[int, int] = dataclasses.field(default_factory=dict, init=False)
    # Arms whose main slots are over, and the trials of these.
    _over: list[tuple[int, int]] = dataclasses.field(default_factory=list, init=False)
    # Whether searches of arms with a result had a forecast.
    _answers: set[bool] = dataclasses.field(default_factory=set, init=False)

    @property
    def is_silent(self) -> bool:
        """Whether searches were asked for forecasts, and none ever had one."""
        return self._answers == {False}

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        # The model knows a slot once all its trials are measured.
        for played in [k for k in self._before if not arms[k].is_under_way]:
            n_trials = arms[played].n_trials - self._before.pop(played)
            self._over.append((played, n_trials))
        while self._over:
            played, n_trials = self._over.pop(0)
            # Of an empty slot the model has learned nothing.
            if n_trials and (foreseen := self._foresee(played, n_trials, arms)) is not None:
                return foreseen
        decision = self.policy.choose(arms, rng)
        if decision.arm is not None and decision.reason not in _NOT_MAIN:
            self._before[decision.arm] = arms[decision.arm].n_trials
        return decision

    def _foresee(self, played: int, n_trials: int, arms: Sequence[Arm]) -> Decision | None:
        family = self.families[played]
        gains_ms: dict[int, float] = {}
        for k, arm in enumerate(arms):
            if not family or self.families[k] != family or k == played or arm.finished:
                continue
            promise = self.promise_of(k)
            if math.isfinite(arm.best_ms):
                self._answers.add(promise is not None)
            if promise is not None and promise.accuracy >= MIN_ACCURACY:
                gains_ms[k] = arm.share_ms * promise.expected_drop
        # Before its first result a sibling's latency is infinite; its warm-up comes first.
        known_ms = {k: gain_ms for k, gain_ms in gains_ms.items() if math.isfinite(gain_ms)}
        scores = np.full(len(arms), np.nan)
        for k, worth_ms in FormArms(arms).worth(known_ms).items():
            scores[k] = worth_ms
        if not np.nanmax(scores, initial=0.0) > 0.0:
            return None
        n_asked = max(1, round(self.share * n_trials))
        return Decision(int(np.nanargmax(scores)), "foresee", n_asked, scores, "ms")
