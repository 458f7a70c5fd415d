"""The warm-up: a first valid result for each arm, at the least cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.errors import check_at_least
from tvm_adaptive.task_scheduler.arms import Arm

# A task forecast to be below this share of the network's latency is trivial: halving
# its latency would not show in an end-to-end timing, which repeats to some 0.1 %.
TRIVIAL_SHARE = 1e-3
# One candidate may fail for a reason of its own; two are the fewest that mean anything.
TRIVIAL_TRIALS = 2


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Plays arms without a valid result until each has one or is given up.

    Large arms come first; before them all, those of which earlier runs have proven nothing.
    """

    # trials of an arm's first slot; None for a full batch. If all of them fail, full batches
    # follow: random candidates of a GPU fail more often than not
    n_trials: int | None = 4
    # an arm with so many trials and no valid result is given up. Stock's own batch
    give_up_trials: int = 64
    # the same in slots, as a search may return fewer trials than it should, or none
    give_up_slots: int = 8

    def __post_init__(self) -> None:
        for name in ("n_trials", "give_up_trials", "give_up_slots"):
            check_at_least(f"The warm-up's {name}", getattr(self, name), 1)

    def is_hopeless(self, arm: Arm) -> bool:
        """Say whether the arm has no valid result and is given up."""
        tried = arm.n_trials >= self.give_up_trials or arm.n_slots >= self.give_up_slots
        return tried and math.isinf(arm.best_ms)

    def next_arm(self, arms: Sequence[Arm], live: Sequence[int]) -> int | None:
        """Return the next arm without a valid result; None if all have one."""
        cold = [k for k in live if math.isinf(arms[k].best_ms)]
        return max(
            cold,
            key=lambda k: (not arms[k].prior.is_proven, arms[k].weight * arms[k].flop, -k),
            default=None,
        )

    def trials_of(self, arms: Sequence[Arm], k: int) -> int | None:
        """Return the trials of arm k's slot; None for a full batch."""
        if self.n_trials is None or arms[k].n_trials > 0:
            return None
        return min(TRIVIAL_TRIALS, self.n_trials) if is_trivial(arms, k) else self.n_trials


def is_trivial(arms: Sequence[Arm], k: int) -> bool:
    """Say whether an arm will be negligible end to end, guessed from its flop; False at first."""
    known = [arm for arm in arms if math.isfinite(arm.best_ms)]
    if not known:
        return False
    flop_per_ms = float(np.median([arm.flop / arm.best_ms for arm in known]))
    total_ms = sum(arm.weight * arm.best_ms for arm in known)
    return arms[k].weight * arms[k].flop / flop_per_ms < TRIVIAL_SHARE * total_ms
