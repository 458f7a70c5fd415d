"""Drop a candidate as soon as it is clear that it does not win.

Of a batch most candidates are much slower than the best that the task has; how much
slower exactly is of no use to anybody. A race bounds what is spent on them. What was
measured stays a timing with its error, never a failure.

The host of a virtual machine slows a kernel down now and then and never makes it faster,
so the fastest of some micro-batches bounds the time from below better than an interval
around their mean. A better candidate is dropped only if all its micro-batches were
disturbed, and a disturbance that lasts so long would have spoilt a full measurement, too.

References
----------
Racing: Maron and Moore, "Hoeffding Races", NeurIPS 1993; the bound by the minimum:
Chen and Revels, "Robust benchmarking in noisy environments", 2016.
"""

from __future__ import annotations

import dataclasses

from tvm_adaptive.values.trial import FloatArray

RACED = "raced"
# No more than one run is needed to see it.
HOPELESS_FACTOR = 3.0
# Two measurements of one kernel, a minute apart, may differ by 15 to 20 % on a virtual
# machine, and the incumbent is the luckiest of all.
BEHIND_FACTOR = 1.25


@dataclasses.dataclass(frozen=True)
class Race:
    """A race against the fastest known candidate of the task."""

    incumbent_sec: float  # seconds of one run of it
    # A single run that takes so many times as long ends the race
    hopeless_factor: float = HOPELESS_FACTOR
    # so do a rule's first micro-batches if each of them takes so many times as long
    behind_factor: float = BEHIND_FACTOR

    def is_hopeless(self, run_sec: float) -> bool:
        """Say whether to give up after one run, or one micro-batch, of a warm kernel."""
        return run_sec >= self.hopeless_factor * self.incumbent_sec

    def is_behind(self, batch_means_sec: FloatArray) -> bool:
        """Say whether to give up after micro-batches, shape (i,), seconds."""
        return float(batch_means_sec.min()) >= self.behind_factor * self.incumbent_sec
