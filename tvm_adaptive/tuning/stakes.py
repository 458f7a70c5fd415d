"""What a play-off or a longer search can still change, against what its seconds cost.

The currency is the share of the network's latency. Pure mathematics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# The fastest of hundreds of timings is lucky by 2 to 7 %: only a record that seems to save
# more than a tenth goes before one that was proven and checked.
SELECTION_BIAS = 0.1
# Below this share of a network's latency, its noise on a quiet machine hides a difference.
VISIBLE_SHARE = 0.005
# A search of twice the seconds makes a network some 10 % faster: a second of it brings this
# much, divided by the seconds that it has lasted. ResNet-18 between 70 and 120 s: 0.17.
_SEARCH_GAIN = 0.15
# The largest share of a budget that goes into play-offs.
PLAYOFF_SHARE = 0.1
# Rounds of each task, on average, that a plateau lasts at least: after fewer, a search often
# goes on to gain 5 to 80 %. Of 24 recorded runs of 30 s to 28 min, six ended early with 8; five
# lost nothing, one (18 %) would have found a better schedule eight minutes later.
_PLATEAU_ROUNDS = 8


class Plateau:
    """Sees when a search has stopped to save anything visible."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []  # seconds of the search, of the network
        self._n_before = 0  # points before half of the seconds

    def add(self, searched_sec: float, network_sec: float) -> None:
        """Note the network's latency after a round; infinite ones are not counted."""
        if math.isfinite(network_sec):
            self._points.append((searched_sec, network_sec))

    def is_reached(self, n_tasks: int) -> bool:
        """Say whether the second half of the search saved too little to be seen.

        A search gains about as much whenever its seconds double, so that one which has just
        gained nothing by doubling is not expected to gain by what is left of a budget.
        """
        if not self._points:
            return False
        searched_sec, network_sec = self._points[-1]
        while self._points[self._n_before][0] < searched_sec / 2:
            self._n_before += 1
        if self._n_before == 0:
            return False
        before_sec = self._points[self._n_before - 1][1]
        lasts = len(self._points) - self._n_before >= _PLATEAU_ROUNDS * n_tasks
        return lasts and before_sec - network_sec <= VISIBLE_SHARE * before_sec


@dataclasses.dataclass(frozen=True)
class Stake:
    """What the play-off of one task can change."""

    importance_sec: float  # seconds of an inference that the task takes
    gain: float = 0.0  # the share of them that a play-off may save


def plausible_gain(secs: Sequence[float]) -> float:
    """Return the share of its time that a task may gain by a play-off; times are fastest first.

    The first time is too good by an unknown share, uniform between 0 and the selection
    bias b. Beside it, only a record can win that is slower by a smaller share d. The
    expected gain is (b - d)^2 / (2 b): b / 2 for two equal records, 0 from d = b on.
    """
    if len(secs) < 2:
        return 0.0
    lead = max(0.0, 1.0 - secs[0] / secs[1])
    return max(0.0, SELECTION_BIAS - lead) ** 2 / (2.0 * SELECTION_BIAS)


def worth_playing(
    stakes: Sequence[Stake], *, searched_sec: float, playoff_sec: float, allowance_sec: float
) -> dict[int, float]:
    """Return the play-offs that are worth their time, the most valuable first, with seconds.

    In these seconds a search would bring as much. A play-off is worth its time if a search
    brings less in the same seconds, and if what the remaining ones can change together is
    visible in the network's latency.
    """
    network_sec = math.fsum(each.importance_sec for each in stakes)
    savings = [each.importance_sec * each.gain for each in stakes]
    left_sec, found = math.fsum(savings), dict[int, float]()
    for index in sorted(range(len(stakes)), key=lambda i: -savings[i]):
        if left_sec <= VISIBLE_SHARE * network_sec:
            break
        most_sec = savings[index] / network_sec * searched_sec / _SEARCH_GAIN
        allowance_sec -= playoff_sec
        if most_sec < playoff_sec or allowance_sec < 0.0:
            break
        found[index] = most_sec
        left_sec -= savings[index]
    return found
