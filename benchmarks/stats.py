"""Statistics of tuning runs: curves, times to a quality, censoring, ratios. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Below that many runs an interval would claim more than they can tell: their range.
MIN_FOR_INTERVAL = 6
_N_BOOTSTRAP = 2000


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

    @property
    def first_ms(self) -> float:
        """Best of the first round that had a success."""
        return next((ms for ms in self.best_ms if math.isfinite(ms)), math.inf)

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

    def scaled(self, factor: float) -> Curve:
        """Return the curve with every latency multiplied."""
        return dataclasses.replace(self, best_ms=tuple(ms * factor for ms in self.best_ms))


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
class Reached:
    """When a quality was reached, or that it was not.

    Attributes
    ----------
    value : float
        Seconds, or a ratio; where ``censored``, that after which it was given up.
    censored : bool
    """

    value: float
    censored: bool = False


def time_to(curve: Curve, quality_ms: float) -> Reached:
    """Return the seconds until a run's best was at most ``quality_ms``."""
    for time_sec, best_ms in zip(curve.times_sec, curve.best_ms, strict=True):
        if best_ms <= quality_ms:
            return Reached(time_sec)
    return Reached(curve.end_sec, censored=True)


def quality_of(curve: Curve, share: float) -> float:
    """Return the latency at which a run had made ``share`` of its improvement.

    Its improvement is from the best of its first round to its final best.
    """
    if not math.isfinite(curve.final_ms):
        return math.inf
    # Rounding must not place a run above its own quality.
    return max(curve.final_ms, (1.0 - share) * curve.first_ms + share * curve.final_ms)


def time_ratio(baseline: Curve, other: Curve, share: float) -> Reached | None:
    """Return the seconds of ``other`` per second of ``baseline`` to the same quality.

    The quality is what the baseline has after ``share`` of its improvement. Below 1,
    ``other`` was there sooner; where censored, the truth is above the value. None when
    the baseline never succeeded.
    """
    quality_ms = quality_of(baseline, share)
    if not math.isfinite(quality_ms):
        return None
    base = time_to(baseline, quality_ms)
    reached = time_to(other, quality_ms)
    return Reached(reached.value / base.value, reached.censored)


def kaplan_meier(observed: Sequence[Reached]) -> list[tuple[float, float]]:
    """Estimate the share that has not got there, with censored observations.

    Kaplan, Meier, *Nonparametric Estimation from Incomplete Observations*, JASA 1958.

    Returns
    -------
    list of (value, share)
        The share above each value at which something was reached, values ascending.
    """
    steps: list[tuple[float, float]] = []
    share = 1.0
    for value in sorted({each.value for each in observed if not each.censored}):
        n_at_risk = sum(each.value >= value for each in observed)
        n_reached = sum(each.value == value and not each.censored for each in observed)
        share *= 1.0 - n_reached / n_at_risk
        steps.append((value, share))
    return steps


def censored_median(observed: Sequence[Reached]) -> Reached:
    """Return the Kaplan-Meier median; censored where fewer than half got there.

    With an even number, none censored, it is the mean of the middle two, as usual.

    Raises
    ------
    ValueError
        When nothing was observed.
    """
    if not observed:
        raise ValueError("A median needs at least one observation.")
    if not any(each.censored for each in observed):
        return Reached(float(np.median([each.value for each in observed])))
    for value, share in kaplan_meier(observed):
        # A share of a half may be 0.5000000001 after the products.
        if share <= 0.5 + 1e-9:
            return Reached(value)
    return Reached(max(each.value for each in observed), censored=True)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median over seeds and how far they are apart.

    Attributes
    ----------
    median : Reached
    low, high : float
        Range of the seeds; from six seeds on a 95 % bootstrap interval of the median.
    n, n_censored : int
    is_interval : bool
    """

    median: Reached
    low: float
    high: float
    n: int
    n_censored: int
    is_interval: bool


def spread(observed: Sequence[Reached], seed: int = 0) -> Spread | None:
    """Summarise over seeds; None without observations."""
    if not observed:
        return None
    values = [each.value for each in observed]
    low, high, is_interval = min(values), max(values), False
    if len(observed) >= MIN_FOR_INTERVAL:
        rng = np.random.default_rng(seed)
        draws = rng.integers(len(observed), size=(_N_BOOTSTRAP, len(observed)))
        medians = [censored_median([observed[i] for i in draw]).value for draw in draws]
        low, high = (float(x) for x in np.quantile(medians, [0.025, 0.975]))
        is_interval = True
    n_censored = sum(each.censored for each in observed)
    return Spread(censored_median(observed), low, high, len(observed), n_censored, is_interval)


def inverse(each: Spread) -> Spread:
    """Return the spread of the reciprocals: times as ratios become speed-ups."""
    median = Reached(1.0 / each.median.value, each.median.censored)
    return dataclasses.replace(each, median=median, low=1.0 / each.high, high=1.0 / each.low)


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
