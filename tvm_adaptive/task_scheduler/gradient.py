"""TVM's own rule, for comparison where there is no TVM: in replay.

It restates what MetaSchedule's ``GradientBased`` scheduler decides, after Ansor (Zheng et
al., OSDI 2020, section 6): one batch for each task, then the task with the steepest
``weight (alpha g1 + (1 - alpha) g2)``, where g1 is the mean drop of its best latency over
the last ``window_size`` batches and g2 its best latency over the number of batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.values.trial import FloatArray

# What TVM writes for a failed trial, in ms.
_FAILED_MS = 1e9
# The gradient of a task without a valid result: any other is steeper.
_NEVER_VALID = -1e9


class GradientPolicy:
    """Decide as MetaSchedule's ``"gradient"`` does. One object serves one run.

    Where all gradients are equal TVM draws with a generator of its own, this policy with
    the one it is handed; everything else is the same decision for decision.
    """

    def __init__(self, alpha: float = 0.2, window_size: int = 3) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise InvalidOptionError(f"alpha must be in [0, 1] but got {alpha}.")
        if window_size < 1:
            raise InvalidOptionError(f"window_size must be at least 1 but got {window_size}.")
        self.alpha = alpha
        self.window_size = window_size
        self._n_warmed = 0
        self._n_joined: list[int] = []
        self._best_ms: list[list[float]] = []

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        self._join(arms)
        while self._n_warmed < len(arms):
            self._n_warmed += 1
            if not arms[self._n_warmed - 1].finished:
                return Decision(self._n_warmed - 1, "warm-up")
        scores: FloatArray = np.array(
            [np.nan if arm.finished else self._gradient(k, arm) for k, arm in enumerate(arms)]
        )
        alive = np.flatnonzero(~np.isnan(scores))
        if len(alive) == 0:
            return Decision(None, "nothing-left")
        if np.nanmax(scores) == np.nanmin(scores):
            return Decision(int(rng.choice(alive)), "tie", scores=scores, unit="ms/batch")
        # The first of several steepest ones, as TVM.
        return Decision(int(np.nanargmax(scores)), "gradient", scores=scores, unit="ms/batch")

    def _join(self, arms: Sequence[Arm]) -> None:
        """Append one entry for each batch that came in, whatever its size."""
        if len(self._n_joined) != len(arms):
            self._n_joined = [0] * len(arms)
            self._best_ms = [[] for _ in arms]
        for k, arm in enumerate(arms):
            if arm.n_slots > self._n_joined[k] and arm.n_trials > 0:
                self._best_ms[k].append(min(arm.best_ms, _FAILED_MS))
            self._n_joined[k] = arm.n_slots

    def _gradient(self, k: int, arm: Arm) -> float:
        history, window = self._best_ms[k], self.window_size
        n = len(history)
        if n == 0 or not history[-1] < _FAILED_MS:
            return _NEVER_VALID
        best = history[-1]
        recent = (history[-1 - window] - best) / window if n > window else 0.0
        return (self.alpha * recent + (1.0 - self.alpha) * best / n) * arm.weight
