"""Time the finalists side by side, and trust only these timings.

The best of many short measurements looks better than it is (the winner's curse). So the
finalists are timed in interleaved rounds, where drift of the machine affects all alike;
those that are clearly slower drop out; and the winner's time comes from further rounds,
which had no part in choosing it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
from scipy.special import stdtrit

from tvm_adaptive.runner.summary import MEDIAN_SE_FACTOR
from tvm_adaptive.values.noise import MAD_TO_SIGMA
from tvm_adaptive.values.trial import FloatArray

# With fewer values the median absolute deviation is zero too often.
_MIN_FOR_MAD = 6


@dataclasses.dataclass(frozen=True)
class PlayoffResult:
    """The result of a play-off; all arrays are indexed by finalist."""

    ranking: tuple[int, ...]  # finalists, fastest first, without failed ones
    location_sec: FloatArray  # median seconds of one run; NaN for a failed finalist
    stderr_sec: FloatArray  # its standard error; NaN with fewer than two timings
    # "separated", "tied", "rounds" or "time"; "failed" when no finalist is left
    reason: str


def play_rounds(
    measure: Callable[[int], float],
    n_finalists: int,
    *,
    min_rounds: int = 3,  # after two, a loser is behind by 64 standard errors
    # On a host with noise of 13 %, 60 choose the slower of two that differ by 3 % half as often
    max_rounds: int = 20,
    confirm_rounds: int = 10,  # the winner's time is known to 0.4 of a timing's noise
    max_sec: float = 5.0,
    # Of one look; with up to 18, one of two equal finalists drops out in 9 % of play-offs
    significance: float = 0.005,
    indifference: float = 0.005,  # does not show in a network's latency
    clock: Callable[[], float] = time.monotonic,
) -> PlayoffResult:
    """Time finalists in interleaved rounds until the leader is known.

    The slower of two that differ by 3 % is chosen by at most 2 % of play-offs where the noise of a
    round is at most 4 %, and by a fifth at 13 % (``benchmarks/micro/playoff_simulation.py``).
    Hodges-Lehmann estimates, those of a signed-rank test, are no better there than medians.
    """
    rounds = _Rounds(measure, n_finalists, max_sec, clock)
    reason = "rounds"
    for number in range(1, max_rounds + 1):
        rounds.play(number)
        if not rounds.remaining:
            reason = "failed"
            break
        if number >= min_rounds:
            quantile = float(stdtrit(number - 1, 1.0 - significance))
            rounds.drop_slower(quantile)
            if len(rounds.remaining) == 1:
                reason = "separated"
                break
            if rounds.is_tied(quantile, indifference):
                reason = "tied"
                break
        if not rounds.has_time(len(rounds.remaining) + confirm_rounds):
            reason = "time"
            break
    for place, winner in enumerate(ranking := rounds.ranking()):
        timings = rounds.time_alone(winner, confirm_rounds)
        if winner not in rounds.failed:
            if len(timings) >= min_rounds:
                rounds.timings[winner] = timings
            return rounds.result(ranking[place:], reason)
    return rounds.result([], "failed")


def median_stderr(values: FloatArray) -> float:
    """Return a robust standard error of the median of ``values``."""
    n = len(values)
    if n < 2:
        return math.nan
    spread = float(np.std(values, ddof=1))
    if n >= _MIN_FOR_MAD:
        spread = MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))
        spread *= n / (n - 0.8)  # Croux and Rousseeuw (1992): small samples spread less
    return MEDIAN_SE_FACTOR * spread / math.sqrt(n)


class _Rounds:
    """The timings of all finalists, and which are still in the play-off."""

    def __init__(
        self,
        measure: Callable[[int], float],
        n_finalists: int,
        max_sec: float,
        clock: Callable[[], float],
    ) -> None:
        self._measure = measure
        self._clock = clock
        self._start_sec = clock()
        self._max_sec = max_sec
        self._n_measured = 0
        self.timings: list[list[float]] = [[] for _ in range(n_finalists)]
        self.remaining = list(range(n_finalists))
        self.failed: set[int] = set()

    def play(self, number: int) -> None:
        # The first one changes, because the first after a pause runs on a cooler core.
        first = number % len(self.remaining)
        for index in self.remaining[first:] + self.remaining[:first]:
            seconds = self._timing(index)
            if seconds is not None:
                self.timings[index].append(seconds)
        self.remaining = [index for index in self.remaining if index not in self.failed]

    def time_alone(self, index: int, n_timings: int) -> list[float]:
        timings: list[float] = []
        while len(timings) < n_timings and self.has_time(1):
            seconds = self._timing(index)
            if seconds is None:
                break
            timings.append(seconds)
        return timings

    def has_time(self, n_timings: int) -> bool:
        elapsed = self._clock() - self._start_sec
        return elapsed * (1.0 + n_timings / max(self._n_measured, 1)) <= self._max_sec

    def drop_slower(self, quantile: float) -> None:
        leader, rivals, lead, stderr = self._leads()
        slower = lead > quantile * stderr
        self.remaining = sorted([leader, *(rivals[i] for i in np.flatnonzero(~slower))])

    def is_tied(self, quantile: float, indifference: float) -> bool:
        leader, _, lead, stderr = self._leads()
        possible_loss = quantile * stderr - lead
        return bool(np.all(possible_loss <= indifference * self._median(leader)))

    def ranking(self) -> list[int]:
        """Return the finalists that did not fail; those that dropped out come last."""
        timed = [i for i, values in enumerate(self.timings) if values and i not in self.failed]
        return sorted(timed, key=lambda index: (index not in self.remaining, self._median(index)))

    def result(self, ranking: list[int], reason: str) -> PlayoffResult:
        location, stderr = np.full((2, len(self.timings)), np.nan)
        for index in ranking:
            location[index] = self._median(index)
            stderr[index] = median_stderr(np.asarray(self.timings[index]))
        return PlayoffResult(tuple(ranking), location, stderr, reason)

    def _leads(self) -> tuple[int, list[int], FloatArray, FloatArray]:
        """Return the leader, its rivals, and their median loss with its standard error."""
        leader = min(self.remaining, key=self._median)
        rivals = [index for index in self.remaining if index != leader]
        losses = [np.subtract(self.timings[index], self.timings[leader]) for index in rivals]
        medians = np.array([float(np.median(loss)) for loss in losses])
        return leader, rivals, medians, np.array([median_stderr(loss) for loss in losses])

    def _timing(self, index: int) -> float | None:
        self._n_measured += 1
        seconds = self._measure(index)
        if math.isfinite(seconds) and seconds >= 0.0:
            return seconds
        self.failed.add(index)
        return None

    def _median(self, index: int) -> float:
        return float(np.median(self.timings[index]))
