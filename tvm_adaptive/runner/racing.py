"""Stop measuring a candidate as soon as it clearly loses against the incumbent.

The host of a virtual machine can slow a kernel down, never speed it up. So the fastest
micro-batch bounds a kernel's time better than an interval around the mean. A better
candidate is lost only if all its micro-batches were disturbed, which would spoil a full
measurement as well.

References
----------
Racing: Maron and Moore, "Hoeffding Races", NeurIPS 1993; the bound by the minimum:
Chen and Revels, "Robust benchmarking in noisy environments", 2016.
"""

from __future__ import annotations

import dataclasses

from tvm_adaptive.values.trial import FloatArray

RACED = "raced"
# One run is enough to see it.
HOPELESS_FACTOR = 3.0
# Two measurements of one kernel, a minute apart, may differ by 15 to 20 % on a virtual
# machine, and the incumbent is the luckiest of all.
BEHIND_FACTOR = 1.25


@dataclasses.dataclass(frozen=True)
class Race:
    """A race against the fastest known candidate of the task."""

    incumbent_sec: float  # of one run

    def is_hopeless(self, run_sec: float) -> bool:
        """Say whether to stop after one run, or one micro-batch, of a warm kernel."""
        return run_sec >= HOPELESS_FACTOR * self.incumbent_sec

    def is_behind(self, batch_means_sec: FloatArray) -> bool:
        """Say whether to stop after micro-batches, shape (i,), seconds."""
        return float(batch_means_sec.min()) >= BEHIND_FACTOR * self.incumbent_sec
