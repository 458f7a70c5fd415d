"""The oracle: a scheduler that knows every trial beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm, Decision, best_so_far
from tvm_adaptive.task_scheduler.index import argmax
from tvm_adaptive.task_scheduler.stages import WarmUp
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.testing.replay import draw
from tvm_adaptive.values.trial import FloatArray


class OraclePolicy:
    """Play the arm whose recorded future is steepest, in end-to-end milliseconds per second.

    The future's slope is that of the first edge of its concave majorant: the best mean
    rate over any number of slots to come. Greedy by it is optimal for concave curves
    (Fox, 1966) and, as whole edges are played, at the majorants' corners for any.

    Its warm-up costs what every policy's does.
    """

    def __init__(
        self,
        recording: Recording | Sequence[Recording],
        seed: int,
        *,
        batch: int | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        instance = draw(recording, seed)
        self._tasks = instance.tasks
        self._batch = batch or instance.batch
        self._warm_up = warm_up or WarmUp()
        self._slopes: dict[int, tuple[int, float]] = {}

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        live = [k for k, arm in enumerate(arms) if not arm.finished]
        hopeless = tuple(k for k in live if not self._tasks[k].is_valid)
        live = [k for k in live if k not in hopeless]
        cold = self._warm_up.next_arm(arms, live)
        if cold is not None:
            trials = self._warm_up.trials_of(arms, cold)
            return Decision(cold, "warm-up", n_trials=trials, retired=hopeless)
        slopes = np.full(len(arms), np.nan)
        for k in live:
            slopes[k] = self._slope(k, arms[k])
        if not live or np.nanmax(slopes) <= 0.0:
            return Decision(None, "nothing-left", retired=hopeless)
        return Decision(argmax(slopes, rng), "oracle", scores=slopes, unit="ms/s", retired=hopeless)

    def _slope(self, k: int, arm: Arm) -> float:
        known = self._slopes.get(k)
        if known is None or known[0] != arm.n_trials:
            known = (arm.n_trials, steepest_rate(self._tasks[k], arm.n_trials, self._batch))
            self._slopes[k] = known
        return known[1]


def steepest_rate(task: TaskRecording, n_trials: int, batch: int) -> float:
    """Return the best mean rate of a recorded future, in weighted ms per second."""
    sec, gain_ms = future(task, n_trials, batch)
    if len(sec) == 0:
        return 0.0
    return float(np.max(gain_ms / np.maximum(sec, np.finfo(np.float64).tiny)))


def future(task: TaskRecording, n_trials: int, batch: int) -> tuple[FloatArray, FloatArray]:
    """Return seconds and weighted milliseconds gained after one more slot, two, ..."""
    stops = [*range(n_trials + batch, task.n_trials, batch), task.n_trials]
    if n_trials >= task.n_trials:
        return np.empty(0), np.empty(0)
    starts = [n_trials, *stops[:-1]]
    pairs = zip(starts, stops, strict=True)
    sec = np.cumsum([task.slot_sec(start, stop) for start, stop in pairs])
    best = best_so_far(task.latencies_ms)
    ends = best[np.asarray(stops) - 1]
    return sec, task.weight * (best[n_trials - 1] - ends)
