"""Schedulers without a forecast: round-robin, random, linear in the flop, and TVM's gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.index import argmax
from tvm_adaptive.task_scheduler.stages import WarmUp, is_spent
from tvm_adaptive.values.trial import FloatArray

# Among the live arms: (arms, live, rng) -> arm.
Rule = Callable[[Sequence[Arm], Sequence[int], np.random.Generator], int]
# Whole batches, as the papers' baselines have no smaller ones.
_FULL_BATCHES = WarmUp(n_trials=None)


class BaselinePolicy:
    """Play full batches until each arm has a result, then follow a rule.

    What a finished arm leaves unused goes to the others (DynaTune, section 5.3, "DA").
    """

    def __init__(self, rule: Rule, *, patience_trials: int | None = None) -> None:
        self._rule = rule
        self._patience_trials = patience_trials

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        live = [k for k, arm in enumerate(arms) if not arm.finished]
        patience = self._patience_trials
        retired = tuple(k for k in live if is_spent(arms[k], _FULL_BATCHES, patience))
        live = [k for k in live if k not in retired]
        if not live:
            return Decision(None, "nothing-left", retired=retired)
        cold = _FULL_BATCHES.next_arm(arms, live)
        if cold is not None:
            return Decision(cold, "warm-up", retired=retired)
        return Decision(self._rule(arms, live, rng), "rule", retired=retired)


def _least_played(arms: Sequence[Arm], live: Sequence[int], _rng: np.random.Generator) -> int:
    return min(live, key=lambda k: (arms[k].n_slots, k))


def _any_arm(_arms: Sequence[Arm], live: Sequence[int], rng: np.random.Generator) -> int:
    return int(rng.choice(np.asarray(live)))


def _furthest_behind(arms: Sequence[Arm], live: Sequence[int], rng: np.random.Generator) -> int:
    """Choose the arm furthest behind its share of seconds, proportional to weight times flop."""
    scores = np.full(len(arms), np.nan)
    for k in live:
        spent = arms[k].spent_sec if arms[k].spent_sec > 0 else arms[k].n_slots
        share = arms[k].weight * arms[k].flop
        scores[k] = -spent / share if share > 0 else -math.inf  # a share of no seconds
    return argmax(scores, rng)


round_robin = functools.partial(BaselinePolicy, _least_played)
at_random = functools.partial(BaselinePolicy, _any_arm)
linear = functools.partial(BaselinePolicy, _furthest_behind)

# What TVM writes for a failed trial, in ms.
_FAILED_MS = 1e9
# The gradient of a task without a valid result: any other is steeper.
_NEVER_VALID = -1e9
# Ansor's weight of the recent gains against the mean rate, and the batches that are recent.
_ALPHA = 0.2
_WINDOW = 3


class GradientPolicy:
    """Decide as MetaSchedule's ``GradientBased`` scheduler does. One object serves one run.

    After Ansor (Zheng et al., OSDI 2020, section 6): one batch for each task, then the task
    with the steepest ``weight (alpha g1 + (1 - alpha) g2)``, where g1 is the mean drop of
    its best latency over the last batches and g2 its best latency over the number of
    batches. Where all gradients are equal TVM draws with a generator of its own.
    """

    def __init__(self) -> None:
        self._n_warmed = 0
        self._n_slots: list[int] = []
        self._best_ms: list[list[float]] = []

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        self._add_batches(arms)
        while self._n_warmed < len(arms):
            self._n_warmed += 1
            arm = arms[self._n_warmed - 1]
            if not (arm.finished or arm.n_trials):
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

    def _add_batches(self, arms: Sequence[Arm]) -> None:
        """Append one entry for each measured batch, whatever its size."""
        if len(self._n_slots) != len(arms):  # of a resumed run, all count as they are now
            # A slot of several batches that a kill has ended is not among the slots.
            self._n_slots = [max(1, arm.n_slots) if arm.n_trials else 0 for arm in arms]
            self._best_ms = [
                [min(arm.best_ms, _FAILED_MS)] * n
                for arm, n in zip(arms, self._n_slots, strict=True)
            ]
        for k, arm in enumerate(arms):
            if arm.is_under_way:  # its slot counts, and its results are not there
                continue
            if arm.n_slots > self._n_slots[k] and arm.n_trials > 0:
                self._best_ms[k].append(min(arm.best_ms, _FAILED_MS))
            self._n_slots[k] = arm.n_slots

    def _gradient(self, k: int, arm: Arm) -> float:
        history = self._best_ms[k]
        n = len(history)
        if n == 0 or not history[-1] < _FAILED_MS:
            return _NEVER_VALID
        best = history[-1]
        recent = (history[-1 - _WINDOW] - best) / _WINDOW if n > _WINDOW else 0.0
        return (_ALPHA * recent + (1.0 - _ALPHA) * best / n) * arm.weight
