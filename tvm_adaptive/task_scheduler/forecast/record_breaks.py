r"""A best-so-far history as a process of jumps: how likely one is, and how large.

=========  ==============================================================  ===========
symbol     meaning                                                         unit
=========  ==============================================================  ===========
n, m       trials so far, trials in the next slot                          count
lambda     records per unit of log trials; 1 if trials are exchangeable    none
p          chance of at least one record in the next m trials              none
mu         expected gain of the slot over the incumbent, relative          none
=========  ==============================================================  ===========

The best of exchangeable trials is broken by the next m with probability m / (n + m),
which is what a Poisson process of records with intensity lambda / x at trial x gives for
lambda = 1. A search that learns breaks it more often, one that is stuck less often, so
lambda has a gamma posterior around 1.

A curve gives the mean gain of a slot, mu, but the gain of one slot is nothing or a jump:
with probability p, exponential with mean mu / p. The errors of a staircase persist, so
noise that is independent from trial to trial does not describe it. Latency is the inverse
of throughput, of which a jump J saves J / (1 + J): on average p z U(2, 2, z), z = p / mu.

References
----------
Renyi (1962), "Theorie des elements saillants d'une suite d'observations"; Arnold,
Balakrishnan & Nagaraja (1998), "Records", Wiley. Tricomi's function U: DLMF, 13.4.4.
"""

from __future__ import annotations

import numpy as np
from scipy.special import hyperu

from tvm_adaptive.task_scheduler.forecast.result import Forecast, ThroughputHistory, unchanged
from tvm_adaptive.values.trial import FloatArray

METHOD = "records"
# Older jumps started from far below and say little of the next.
_N_LAST_JUMPS = 8
# The prior is worth three jumps (fewer leave the variance infinite) of 5 % each, about
# what a search gains that has had its first dozen trials.
_PRIOR_JUMPS = 3.0
_PRIOR_JUMP = 0.05
# Prior records, and prior units of log trials, behind lambda = 1. Of 1, 2, 4 and 8 the
# Brier score of "a record in the next slot" was best at 4 to 8.
_PRIOR_RECORDS = 4.0
# Logarithms of 0 are the only thing to avoid: below is one sample in 1e12.
_SMALLEST_U = 1e-12
# A mean jump of a million incumbents: beyond it the function below is not a number.
_SMALLEST_RATE = 1e-6


def exchangeable_chance(n_trials: int, horizon_trials: int) -> float:
    """Return the chance of a new record, m / (n + m), if trials are exchangeable."""
    return horizon_trials / max(n_trials + horizon_trials, 1)


def learned_chance(history: ThroughputHistory, horizon_trials: int) -> float:
    """Return the mean of 1 - (n / (n + m))^lambda under the posterior of lambda."""
    # Half a trial more: records are as likely as the integral of 1 / x over their trial.
    n, first = len(history) + 0.5, history.first_success + 0.5
    n_records = _PRIOR_RECORDS + len(history.records) - 1
    exposure = _PRIOR_RECORDS + np.log(n / first)
    more = np.log1p(horizon_trials / n)
    return float(-np.expm1(-n_records * np.log1p(more / exposure)))


def jump_samples(
    chance: float, mean_gain: FloatArray, rng: np.random.Generator, *, tail: float = np.inf
) -> FloatArray:
    """Draw relative gains of a slot, one for each expected gain."""
    if chance <= 0:
        return np.zeros(len(mean_gain))
    u = np.maximum(strata(len(mean_gain), rng) / chance, _SMALLEST_U)
    quantile = -np.log(u) if np.isinf(tail) else (tail - 1.0) * (u ** (-1.0 / tail) - 1.0)
    return np.asarray(np.where(u < 1.0, mean_gain / chance * quantile, 0.0))


def expected_drop(chance: float, mean_gain: FloatArray) -> FloatArray:
    """Return the expected share of its latency that a slot saves, for each expected gain."""
    if chance <= 0:
        return np.zeros(len(mean_gain))
    rate = np.maximum(chance / np.maximum(mean_gain, np.finfo(float).tiny), _SMALLEST_RATE)
    return np.asarray(chance * rate * hyperu(2.0, 2.0, rate))


def strata(size: int, rng: np.random.Generator) -> FloatArray:
    """Draw uniform numbers in (0, 1), one in each of ``size`` equal strata, shuffled."""
    return np.asarray((rng.permutation(size) + rng.random(size)) / size)


def forecast_records(
    history: ThroughputHistory,
    horizon_trials: int,
    rng: np.random.Generator,
    *,
    n_samples: int = 512,
) -> Forecast:
    """Forecast from the theory of records and the size of past jumps."""
    if history.incumbent <= 0:
        return unchanged(history)
    # An exponential gain, whose rate has a gamma posterior, is a generalised Pareto.
    jumps = np.diff(np.log(history.records))[-_N_LAST_JUMPS:]
    tail = _PRIOR_JUMPS + len(jumps)
    mean_jump = ((_PRIOR_JUMPS - 1) * _PRIOR_JUMP + float(jumps.sum())) / (tail - 1)
    chance = exchangeable_chance(len(history), horizon_trials)
    mean_gain = chance * mean_jump
    gains = jump_samples(chance, np.full(n_samples, mean_gain), rng, tail=tail)
    incumbent = history.incumbent
    return Forecast(incumbent * (1.0 + mean_gain), incumbent * (1.0 + gains), incumbent)
