"""Static allotments: DynaTune's baselines without reallocation (section 5.2).

Each arm gets its share of slots at the start; what it leaves unused lapses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tvm_adaptive.task_scheduler.arms import Arm, Decision, Policy
from tvm_adaptive.task_scheduler.baselines import at_random, linear, round_robin
from tvm_adaptive.values.trial import FloatArray

# Total slots, arms, rng -> slots of each arm, shape (k,).
Shares = Callable[[int, Sequence[Arm], np.random.Generator], FloatArray]


class StaticPolicy:
    """Another policy, restricted to each arm's share of the slots."""

    def __init__(self, policy: Policy, shares: Shares, total_slots: int) -> None:
        self.policy = policy
        self.shares = shares
        self.total_slots = total_slots
        self._quota: FloatArray | None = None
        self._retired: set[int] = set()

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next slot."""
        if self._quota is None:
            self._quota = self.shares(self.total_slots, arms, rng)
        # An arm without a result has its warm-up whatever its share.
        spent = [
            k
            for k, arm in enumerate(arms)
            if math.isfinite(arm.best_ms) and arm.n_slots >= self._quota[k]
        ]
        new = tuple(k for k in spent if not arms[k].finished and k not in self._retired)
        self._retired.update(new)
        left = [
            dataclasses.replace(arm, finished=arm.finished or k in self._retired)
            for k, arm in enumerate(arms)
        ]
        decision = self.policy.choose(left, rng)
        return dataclasses.replace(decision, retired=(*new, *decision.retired))


def equal_shares(total: int, arms: Sequence[Arm], _rng: np.random.Generator) -> FloatArray:
    return np.full(len(arms), math.ceil(total / len(arms)), dtype=np.float64)


def random_shares(total: int, arms: Sequence[Arm], rng: np.random.Generator) -> FloatArray:
    chances = np.full(len(arms), 1.0 / len(arms))
    return np.maximum(rng.multinomial(total, chances), 1).astype(np.float64)


def linear_shares(total: int, arms: Sequence[Arm], _rng: np.random.Generator) -> FloatArray:
    work = np.array([arm.weight * arm.flop for arm in arms], dtype=np.float64)
    shares: FloatArray = np.ceil(total * work / work.sum())
    return np.maximum(shares, 1.0)


# By the name of the baseline: it and its shares.
STATIC: Mapping[str, tuple[Callable[[], Policy], Shares]] = {
    "round-robin": (round_robin, equal_shares),
    "random": (at_random, random_shares),
    "linear": (linear, linear_shares),
}


def static(name: str, total_slots: int) -> StaticPolicy:
    """Return a baseline without reallocation."""
    make, shares = STATIC[name]
    return StaticPolicy(make(), shares, total_slots)
