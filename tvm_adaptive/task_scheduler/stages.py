"""Which arms are played first, how long each has waited, and which are postponed or retired."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tvm_adaptive.errors import check_at_least
from tvm_adaptive.measure_callback.progress import GIVE_UP_TRIALS
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.values.forms import in_use

# A task forecast to be below this share of the network's latency is trivial: halving
# its latency would not show in an end-to-end timing, which repeats to some 0.1 %.
TRIVIAL_SHARE = 1e-3
# One candidate may fail for a reason of its own; two are the fewest that mean anything.
TRIVIAL_TRIALS = 2
# A forecast after a short pause may be wrong, and the run ends when all arms are stuck: wait
# for as many trials as stock takes in one batch.
STUCK_TRIALS = 64
# End-to-end timings repeat to some 0.1 %: a tenth of that does not show even if it vanishes.
NEGLIGIBLE_SHARE = 1e-4


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Plays arms without a valid result until each has one or is given up.

    Arms with the fewest slots come first: what fails may take long to do so, and others have
    nothing yet. Of these, arms of which earlier runs have proven nothing, large ones first.
    """

    # trials of an arm's first slot; None for a full batch. If all of them fail, full batches
    # follow: random candidates of a GPU fail more often than not
    n_trials: int | None = 4
    # an arm with so many trials and no valid result is given up. Stock's own batch
    give_up_trials: int = GIVE_UP_TRIALS
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
            key=lambda k: (-arms[k].n_slots, not arms[k].prior.is_proven, arms[k].work, -k),
            default=None,
        )

    def trials_of(self, arms: Sequence[Arm], k: int) -> int | None:
        """Return the trials of arm k's slot; None for a full batch."""
        if self.n_trials is None or arms[k].n_trials > 0:
            return None
        return min(TRIVIAL_TRIALS, self.n_trials) if is_trivial(arms, k) else self.n_trials


def is_trivial(arms: Sequence[Arm], k: int) -> bool:
    """Say whether an arm will be negligible end to end, guessed from its work; False at first."""
    # A task of weight 0 does not say what work takes.
    known = [arm for arm in arms if 0.0 < arm.share_ms < math.inf]
    if not known:
        return False
    work_per_ms = float(np.median([arm.work / arm.share_ms for arm in known]))
    return arms[k].work / work_per_ms < TRIVIAL_SHARE * end_to_end_ms(arms)


def end_to_end_ms(arms: Sequence[Arm]) -> float:
    """Return the weighted sum of the incumbents' milliseconds, of arms in use that have one."""
    used = in_use([arm.key for arm in arms], [arm.share_ms for arm in arms])
    pairs = zip(arms, used, strict=True)
    return math.fsum(arm.share_ms for arm, is_used in pairs if is_used and has_result(arm))


def has_result(arm: Arm) -> bool:
    """Say whether the arm has an incumbent."""
    return math.isfinite(arm.best_ms)


def trials_since_improvement(arm: Arm) -> int:
    """Return the trials since the incumbent was found; all of them without an incumbent."""
    if math.isinf(arm.best_ms):
        return arm.n_trials
    return arm.n_trials - 1 - int(np.nanargmin(arm.latencies_ms))


def is_spent(arm: Arm, warm_up: WarmUp, patience_trials: int | None) -> bool:
    """Say whether an arm without a result is given up, or one with a result out of patience."""
    if math.isinf(arm.best_ms):
        return warm_up.is_hopeless(arm)
    return patience_trials is not None and trials_since_improvement(arm) >= patience_trials


def is_postponed(arm: Arm, gain_ms: float, total_ms: float, share: float) -> bool:
    """Say whether an arm is negligible for now, or stuck with too small a share to gain.

    The sum of all arms is far too large at first, so that the answer may change.
    """
    if arm.share_ms < NEGLIGIBLE_SHARE * total_ms:
        return share > 0.0
    is_stuck = trials_since_improvement(arm) >= STUCK_TRIALS
    return is_stuck and gain_ms < share * total_ms


class Starvation:
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
