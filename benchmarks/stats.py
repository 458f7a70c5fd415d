"""Statistics of tuning runs: curves, times to a quality, bounds, paired ratios. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Curve:
    """Best latency so far of one run, as steps.

    Attributes
    ----------
    times_sec : tuple of float
        When each round's results were known, ascending.
    best_ms : tuple of float
        Best so far from then on, never rising, infinite before the first success.
    trials : tuple of int
        Trials until then.
    end_sec : float
        When the search ended; at least the last time.
    """

    times_sec: tuple[float, ...]
    best_ms: tuple[float, ...]
    trials: tuple[int, ...]
    end_sec: float

    @property
    def final_ms(self) -> float:
        """Best of the whole run."""
        return self.best_ms[-1] if self.best_ms else math.inf

    def at(self, time_sec: float) -> float:
        """Return the best at a time."""
        n = int(np.searchsorted(self.times_sec, time_sec, side="right"))
        return self.best_ms[n - 1] if n else math.inf

    def at_trial(self, n_trials: int) -> float:
        """Return the best after so many trials."""
        n = int(np.searchsorted(self.trials, n_trials, side="right"))
        return self.best_ms[n - 1] if n else math.inf

    def trials_at(self, time_sec: float) -> int:
        """Return the trials whose results were known at a time."""
        n = int(np.searchsorted(self.times_sec, time_sec, side="right"))
        return self.trials[n - 1] if n else 0


def make_curve(
    times_sec: Sequence[float],
    latencies_ms: Sequence[float | None],
    trials: Sequence[int],
    end_sec: float,
) -> Curve:
    """Return best-so-far steps of the latencies known after each round.

    Parameters
    ----------
    times_sec : sequence of float
    latencies_ms : sequence of float or None
        None while the latency is not known.
    trials : sequence of int
    end_sec : float
    """
    known = [math.inf if ms is None or not math.isfinite(ms) else ms for ms in latencies_ms]
    best = np.minimum.accumulate(known).tolist() if known else []
    end_sec = max([end_sec, *times_sec])
    return Curve(tuple(times_sec), tuple(best), tuple(trials), end_sec)


@dataclasses.dataclass(frozen=True)
class Interval:
    """Where the truth lies: a point where it is known, else between two bounds.

    Attributes
    ----------
    low, high : float
        At least 0 and at most infinite: a run that never reached a quality did so after
        its end, between that and infinity.
    """

    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether the value is known."""
        return self.low == self.high

    def over(self, other: Interval) -> Interval:
        """Return the ratio of two positive values that are known independently."""
        low = self.low / other.high if math.isfinite(other.high) else 0.0
        return Interval(low, self.high / other.low if other.low > 0 else math.inf)


def exactly(value: float) -> Interval:
    """Return a value that is known."""
    return Interval(value, value)


def median_interval(values: Sequence[Interval]) -> Interval:
    """Return where the median lies, whatever the truth is within each interval.

    The median rises with each value, so that it lies between that of the lower and that
    of the upper bounds. Of an even number it is the geometric mean of the middle two: the median
    of ratios is then the reciprocal of that of their reciprocals. With an unbounded one in its
    middle pair it is unbounded, too.
    """
    return Interval(_median([each.low for each in values]), _median([each.high for each in values]))


def _median(values: Sequence[float]) -> float:
    low, high = statistics.median_low(values), statistics.median_high(values)
    return low if low == high else math.sqrt(low) * math.sqrt(high)


def geometric_mean_interval(values: Sequence[Interval]) -> Interval:
    """Return where the geometric mean lies; it is a bound as soon as one value is."""
    low = 0.0 if any(each.low <= 0 for each in values) else geometric_mean([x.low for x in values])
    high = geometric_mean([each.high for each in values])
    return Interval(low, high)


def first_within(
    steps: Sequence[tuple[float, float | None]], end: float, tolerance: float
) -> Interval:
    """Return when a run first had something within a tolerance of a quality.

    Parameters
    ----------
    steps : sequence of (float, float or None)
        Second (or trial) from which on each incumbent was the run's, ascending, and its
        time as timed anew over the quality; None where it was not timed anew.
    end : float
        Of the run: one that never got there would have later, or never.
    tolerance : float
        As a share of the quality.

    Returns
    -------
    Interval
        A point where all incumbents before were timed anew.
    """
    low = math.inf
    for at, ratio in steps:
        if ratio is None:
            low = min(low, at)
        elif ratio <= 1.0 + tolerance:
            return Interval(min(low, at), at)
    return Interval(min(low, end), math.inf)


@dataclasses.dataclass(frozen=True)
class Paired:
    """The median of ratios that were each taken within one round.

    Attributes
    ----------
    value : float
    low, high : float
        Interval of at least 95 % from order statistics (the sign test's), or the whole range
        where there are too few rounds for one.
    n : int
        Rounds.
    """

    value: float
    low: float
    high: float
    n: int


def paired(over: Mapping[int, float], under: Mapping[int, float]) -> Paired | None:
    """Return the ratio of two things that were timed in the same rounds; None without one.

    Parameters
    ----------
    over, under : mapping of int to float
        Milliseconds by rounds. What a round does to both cancels.
    """
    ratios = sorted(over[number] / under[number] for number in over.keys() & under.keys())
    if not ratios:
        return None
    n = len(ratios)
    # The most values that may be left out at each end: P(Binomial(n, 1/2) < k) <= 2.5 %.
    k, below = 0, 0.5**n
    while below <= 0.025:
        k += 1
        below += math.comb(n, k) * 0.5**n
    first = max(k - 1, 0)
    return Paired(statistics.median(ratios), ratios[first], ratios[n - 1 - first], n)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median over seeds and how far they are apart.

    Attributes
    ----------
    median : Interval
    low, high : float
        Of all seeds, and of the intervals within each where there are some.
    n, n_bounds, n_never : int
        Seeds, those of which only a bound is known, and those of these that may never have
        got there.
    """

    median: Interval
    low: float
    high: float
    n: int
    n_bounds: int
    n_never: int


def spread(values: Sequence[Interval], ranges: Sequence[Interval] = ()) -> Spread | None:
    """Summarise over seeds; None without any.

    Parameters
    ----------
    values : sequence of Interval
    ranges : sequence of Interval
        Confidence intervals, which widen the range.
    """
    if not values:
        return None
    every = [*values, *ranges]
    low, high = min(each.low for each in every), max(each.high for each in every)
    n_bounds = sum(not each.is_exact for each in values)
    n_never = sum(each.low <= 0 for each in values)
    return Spread(median_interval(values), low, high, len(values), n_bounds, n_never)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values, the right one for ratios; nan of none."""
    if not values:
        return math.nan
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def median_curve(curves: Sequence[Curve], times_sec: Sequence[float]) -> list[float]:
    """Return the median best over runs at each time; infinite while half have none."""
    return [float(np.median([curve.at(time) for curve in curves])) for time in times_sec]


def spread_of_samples(samples: Sequence[float]) -> dict[str, float]:
    """Describe repeated timings of the same thing.

    Returns
    -------
    dict
        ``median``, ``spread`` (90th over 10th percentile, less one), ``cv`` (standard
        deviation over mean) and ``drift`` (medians of second over first half, less one).
    """
    array = np.asarray(samples, dtype=np.float64)
    low, high = np.quantile(array, [0.1, 0.9])
    half = max(1, len(array) // 2)
    drift = float(np.median(array[-half:]) / np.median(array[:half]) - 1.0)
    return {
        "median": float(np.median(array)),
        "spread": float(high / low - 1.0),
        "cv": float(array.std() / array.mean()),
        "drift": drift,
    }
