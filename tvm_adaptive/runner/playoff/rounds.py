"""The play-off: time the best few again, side by side, and believe only these timings.

The best of many short measurements looks better than it is (the winner's curse). Here
the finalists are timed in interleaved rounds, so that drift of the machine meets all of
them alike; the clearly slower ones drop out; and the winner's own time is taken from
rounds that had no part in choosing it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
from scipy.special import stdtrit

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.values.trial import FloatArray

# Of normal noise: standard deviation / median absolute deviation, and
# standard error of the median / standard error of the mean.
_STD_PER_MAD = 1.4826
_MEDIAN_PENALTY = math.sqrt(math.pi / 2.0)
# With fewer values the median absolute deviation is zero too often.
_MIN_FOR_MAD = 6


@dataclasses.dataclass(frozen=True)
class PlayoffResult:
    """What the play-off found; all arrays are indexed by candidate."""

    ranking: tuple[int, ...]  # candidates, fastest first; failed ones are not among them
    # median seconds of one run, lower is better; ``nan`` for a failed candidate
    location_sec: FloatArray
    # standard error of ``location_sec``; ``nan`` with fewer than two timings
    stderr_sec: FloatArray
    n_timings: tuple[int, ...]  # timings that ``location_sec`` stands on
    failed: tuple[int, ...]  # candidates whose timing failed
    # why it ended: ``"separated"``, ``"tied"``, ``"rounds"``, ``"time"``, or ``"failed"`` when no
    # candidate is left
    reason: str
    confirmed: bool  # whether the winner's numbers come from rounds of its own, after the choice


def play_rounds(
    measure: Callable[[int], float],
    n_candidates: int,
    *,
    min_rounds: int = 3,
    max_rounds: int = 20,
    confirm_rounds: int = 10,
    max_sec: float = 5.0,
    significance: float = 0.005,
    indifference: float = 0.005,
    clock: Callable[[], float] = time.monotonic,
) -> PlayoffResult:
    """Time candidates in interleaved rounds until the leader is known."""
    _check_options(n_candidates, min_rounds, max_rounds, confirm_rounds, significance)
    field = _Field(measure, n_candidates, max_sec, clock)
    options = _Options(min_rounds, max_rounds, confirm_rounds, significance, indifference)
    reason = _play(field, options)
    ranking = field.ranking()
    while ranking:
        fresh = field.confirm(ranking[0], confirm_rounds)
        if ranking[0] in field.failed:
            ranking = ranking[1:]
            continue
        if len(fresh) < min_rounds:
            return field.result(ranking, reason, confirmed=False)
        field.timings[ranking[0]] = fresh
        return field.result(ranking, reason, confirmed=True)
    return field.result([], "failed", confirmed=False)


def median_stderr(values: FloatArray) -> float:
    """Return a robust standard error of the median of ``values``."""
    n = len(values)
    if n < 2:
        return math.nan
    spread = float(np.std(values, ddof=1))
    if n >= _MIN_FOR_MAD:
        spread = _STD_PER_MAD * float(np.median(np.abs(values - np.median(values))))
        spread *= n / (n - 0.8)  # Croux and Rousseeuw (1992): small samples spread less
    return _MEDIAN_PENALTY * spread / math.sqrt(n)


class _Field:
    """The candidates that are still in, and all their timings."""

    def __init__(
        self,
        measure: Callable[[int], float],
        n_candidates: int,
        max_sec: float,
        clock: Callable[[], float],
    ) -> None:
        self._measure = measure
        self._clock = clock
        self._start_sec = clock()
        self._max_sec = max_sec
        self._n_measured = 0
        self.timings: list[list[float]] = [[] for _ in range(n_candidates)]
        self.alive = list(range(n_candidates))
        self.failed: set[int] = set()

    def play_round(self, number: int) -> None:
        # Who goes first changes, because the first after a pause runs on a cooler core.
        turn = number % len(self.alive)
        for index in self.alive[turn:] + self.alive[:turn]:
            seconds = self._timing(index)
            if seconds is not None:
                self.timings[index].append(seconds)
        self.alive = [index for index in self.alive if index not in self.failed]

    def confirm(self, index: int, n_timings: int) -> list[float]:
        fresh: list[float] = []
        for _ in range(n_timings):
            if not self.time_left(1):
                break
            seconds = self._timing(index)
            if seconds is None:
                break
            fresh.append(seconds)
        return fresh

    def time_left(self, n_timings: int) -> bool:
        elapsed = self._clock() - self._start_sec
        return elapsed * (1.0 + n_timings / max(self._n_measured, 1)) <= self._max_sec

    def leader(self) -> int:
        return min(self.alive, key=self._median)

    def leads(self) -> tuple[FloatArray, FloatArray]:
        """Return median and standard error of each living rival's time minus the leader's."""
        leader = self.timings[self.leader()]
        leads = [
            np.subtract(self.timings[index], leader)
            for index in self.alive
            if index != self.leader()
        ]
        medians = np.array([float(np.median(lead)) for lead in leads])
        return medians, np.array([median_stderr(lead) for lead in leads])

    def drop_slower(self, quantile: float) -> None:
        leader = self.leader()
        median, stderr = self.leads()
        rivals = [index for index in self.alive if index != leader]
        self.alive = [leader] + [
            index
            for index, slower in zip(rivals, median > quantile * stderr, strict=True)
            if not slower
        ]
        self.alive.sort()

    def ranking(self) -> list[int]:
        """Return the candidates that did not fail; those that dropped out come last."""
        timed = [i for i, values in enumerate(self.timings) if values and i not in self.failed]
        return sorted(timed, key=lambda index: (index not in self.alive, self._median(index)))

    def result(self, ranking: list[int], reason: str, *, confirmed: bool) -> PlayoffResult:
        n = len(self.timings)
        location, stderr = np.full(n, np.nan), np.full(n, np.nan)
        for index in ranking:
            location[index] = self._median(index)
            stderr[index] = median_stderr(np.asarray(self.timings[index]))
        counts = tuple(len(values) for values in self.timings)
        failed = tuple(sorted(self.failed))
        return PlayoffResult(tuple(ranking), location, stderr, counts, failed, reason, confirmed)

    def _timing(self, index: int) -> float | None:
        self._n_measured += 1
        seconds = self._measure(index)
        if math.isfinite(seconds) and seconds >= 0.0:
            return seconds
        self.failed.add(index)
        return None

    def _median(self, index: int) -> float:
        return float(np.median(self.timings[index]))


@dataclasses.dataclass(frozen=True)
class _Options:
    min_rounds: int
    max_rounds: int
    confirm_rounds: int
    significance: float
    indifference: float


def _play(field: _Field, options: _Options) -> str:
    for played in range(1, options.max_rounds + 1):
        field.play_round(played)
        if not field.alive:
            return "failed"
        if played >= options.min_rounds:
            quantile = float(stdtrit(played - 1, 1.0 - options.significance))
            field.drop_slower(quantile)
            if len(field.alive) == 1:
                return "separated"
            if _tied(field, quantile, options.indifference):
                return "tied"
        if not field.time_left(len(field.alive) + options.confirm_rounds):
            return "time"
    return "rounds"


def _tied(field: _Field, quantile: float, indifference: float) -> bool:
    median, stderr = field.leads()
    possible_loss = quantile * stderr - median
    leader_sec = float(np.median(field.timings[field.leader()]))
    return bool(np.all(possible_loss <= indifference * leader_sec))


def _check_options(
    n_candidates: int,
    min_rounds: int,
    max_rounds: int,
    confirm_rounds: int,
    significance: float,
) -> None:
    rules = [
        ("n_candidates", n_candidates, n_candidates >= 1, "at least 1"),
        ("min_rounds", min_rounds, min_rounds >= 2, "at least 2, as one timing has no spread"),
        ("max_rounds", max_rounds, max_rounds >= min_rounds, f"at least min_rounds={min_rounds}"),
        ("confirm_rounds", confirm_rounds, confirm_rounds >= 0, "at least 0"),
        ("significance", significance, 0.0 < significance < 0.5, "between 0 and 0.5"),
    ]
    for name, value, holds, rule in rules:
        if not holds:
            raise InvalidOptionError(f"{name} must be {rule}, but got {value}.")
