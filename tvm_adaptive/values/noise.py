"""The machine's noise: by how much two timings of one kernel differ, a moment apart."""

from __future__ import annotations

import collections
import math
import statistics

# Before anything is known: the middle of the 2 to 7 % that timings of one kernel scatter by
# on rented virtual machines.
PRIOR_ERROR = 0.05
# The prior counts as so many pairs: fewer do not tell 2 % from 7 %.
_PRIOR_PAIRS = 5
# The noise of the last minutes: neighbours come and go.
_MAX_PAIRS = 100
# Makes the median of absolute deviations estimate a normal standard deviation. A median, as one
# pair in ten is on both sides of a change of the machine's speed.
MAD_TO_SIGMA = 1.4826
# A single micro-batch is a fifth of a repeat of an incumbent (``runner/duet.py``), so it
# scatters by the root of five, about twice as much.
_MICRO_BATCH_FACTOR = 2.0

# Two timings that differ by three errors of their difference are on two sides of a change of the
# machine's speed (``runner/duet.py``): with this error, by a third. Without a limit, load that
# comes within most batches would count as noise.
_MOST_ERROR = 0.08


class MachineNoise:
    """A run's one estimate of the noise of its timings, from pairs of timings of one kernel."""

    def __init__(self) -> None:
        self._differences: collections.deque[float] = collections.deque(maxlen=_MAX_PAIRS)

    def add_pair(self, first_sec: float, second_sec: float) -> None:
        """Learn from two timings of one kernel, a batch apart."""
        # Each of the two has the noise once.
        self._differences.append(abs(math.log(second_sec / first_sec)) / math.sqrt(2.0))

    @property
    def relative_error(self) -> float:
        """The relative standard deviation of one timing of a kernel around its mean."""
        prior = [PRIOR_ERROR / MAD_TO_SIGMA] * _PRIOR_PAIRS
        return MAD_TO_SIGMA * statistics.median([*prior, *self._differences])

    @property
    def quiet_error(self) -> float:
        """The same without changes of the machine's speed: what tells such a change."""
        return min(self.relative_error, _MOST_ERROR)

    @property
    def micro_batch_error(self) -> float:
        """The relative standard error of a time that is a single micro-batch's."""
        return _MICRO_BATCH_FACTOR * self.relative_error
