"""Schedulers that believe nothing: round-robin, random, and linear in the flop.

With reallocation (DynaTune's section 5.3, "DA") what an arm leaves unused goes to the
others. Without it (section 5.2) each arm has its share of slots from the beginning, and
what it leaves unused lapses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.index import argmax
from tvm_adaptive.task_scheduler.retire import out_of_patience
from tvm_adaptive.task_scheduler.warmup import WarmUp
from tvm_adaptive.values.trial import FloatArray

# Among the live arms: (arms, live, rng) -> arm.
Rule = Callable[[Sequence[Arm], Sequence[int], np.random.Generator], int]
# Total slots, arms, rng -> slots of each arm, shape (k,).
Shares = Callable[[int, Sequence[Arm], np.random.Generator], FloatArray]
# Whole batches, as the papers' baselines have no smaller ones.
_FULL_BATCHES = WarmUp(n_trials=None)


class BaselinePolicy:
    """A full batch for each arm until it has a result, then a rule without belief."""

    def __init__(
        self,
        rule: Rule,
        *,
        patience_trials: int | None = None,
        shares: Shares | None = None,
        total_slots: int | None = None,
    ) -> None:
        if (shares is None) != (total_slots is None):
            raise InvalidOptionError(
                "Without reallocation slots are allotted once, so total_slots must be given, and "
                f"only then; got reallocate={shares is None}, total_slots={total_slots}."
            )
        self._rule = rule
        self._patience_trials = patience_trials
        self._shares = shares
        self._total_slots = total_slots
        self._quota: FloatArray | None = None
        self._retired: set[int] = set()

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot; see :class:`~.arms.Policy`."""
        if self._shares is not None and self._quota is None:
            assert self._total_slots is not None
            self._quota = self._shares(self._total_slots, arms, rng)
        live = [k for k, arm in enumerate(arms) if not arm.finished and k not in self._retired]
        spent = tuple(k for k in live if self._is_spent(arms[k], k))
        self._retired.update(spent)
        live = [k for k in live if k not in self._retired]
        if not live:
            return Decision(None, "nothing-left", retired=spent)
        cold = _FULL_BATCHES.next_arm(arms, live)
        if cold is not None:
            return Decision(cold, "warm-up", retired=spent)
        return Decision(self._rule(arms, live, rng), "rule", retired=spent)

    def _is_spent(self, arm: Arm, k: int) -> bool:
        if math.isinf(arm.best_ms):
            return _FULL_BATCHES.is_hopeless(arm)
        if self._quota is not None and arm.n_slots >= self._quota[k]:
            return True
        return out_of_patience(arm, self._patience_trials)


def round_robin(
    *,
    reallocate: bool = True,
    total_slots: int | None = None,
    patience_trials: int | None = None,
) -> BaselinePolicy:
    """Return the policy that plays arms in circular order."""
    return BaselinePolicy(
        _least_played,
        patience_trials=patience_trials,
        shares=None if reallocate else _equal_shares,
        total_slots=total_slots,
    )


def at_random(
    *,
    reallocate: bool = True,
    total_slots: int | None = None,
    patience_trials: int | None = None,
) -> BaselinePolicy:
    """Return the policy that plays any arm; parameters as for :func:`round_robin`."""
    return BaselinePolicy(
        _any_arm,
        patience_trials=patience_trials,
        shares=None if reallocate else _random_shares,
        total_slots=total_slots,
    )


def linear(
    *,
    reallocate: bool = True,
    total_slots: int | None = None,
    patience_trials: int | None = None,
) -> BaselinePolicy:
    """Return the policy that gives time in proportion to weight times flop.

    Parameters as for :func:`round_robin`. With reallocation it plays the arm that is
    furthest behind its share of the seconds spent; without, slots are allotted.
    """
    return BaselinePolicy(
        _furthest_behind,
        patience_trials=patience_trials,
        shares=None if reallocate else _linear_shares,
        total_slots=total_slots,
    )


def _least_played(arms: Sequence[Arm], live: Sequence[int], _rng: np.random.Generator) -> int:
    return min(live, key=lambda k: (arms[k].n_slots, k))


def _any_arm(_arms: Sequence[Arm], live: Sequence[int], rng: np.random.Generator) -> int:
    return int(rng.choice(np.asarray(live)))


def _furthest_behind(arms: Sequence[Arm], live: Sequence[int], rng: np.random.Generator) -> int:
    scores = np.full(len(arms), np.nan)
    for k in live:
        spent = arms[k].spent_sec if arms[k].spent_sec > 0 else arms[k].n_slots
        scores[k] = -spent / (arms[k].weight * arms[k].flop)
    return argmax(scores, rng)


def _equal_shares(total: int, arms: Sequence[Arm], _rng: np.random.Generator) -> FloatArray:
    return np.full(len(arms), math.ceil(total / len(arms)), dtype=np.float64)


def _random_shares(total: int, arms: Sequence[Arm], rng: np.random.Generator) -> FloatArray:
    chances = np.full(len(arms), 1.0 / len(arms))
    return np.maximum(rng.multinomial(total, chances), 1).astype(np.float64)


def _linear_shares(total: int, arms: Sequence[Arm], _rng: np.random.Generator) -> FloatArray:
    work = np.array([arm.weight * arm.flop for arm in arms], dtype=np.float64)
    shares: FloatArray = np.ceil(total * work / work.sum())
    return np.maximum(shares, 1.0)
