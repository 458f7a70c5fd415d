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

A curve says what a slot gains on average, mu, but the gain of one slot is nothing or a
jump: with probability p exponential with mean mu / p. Noise around a curve, independent
from trial to trial, is what a staircase does not have: its errors persist.

References
----------
Renyi (1962), "Theorie des elements saillants d'une suite d'observations"; Arnold,
Balakrishnan & Nagaraja (1998), "Records", Wiley.
"""

from __future__ import annotations

import numpy as np

from tvm_adaptive.task_scheduler.forecast.result import History
from tvm_adaptive.values.trial import FloatArray

# Prior records, and prior units of log trials, behind lambda = 1. Of 1, 2, 4 and 8 the
# Brier score of "a record in the next slot" was best at 4 to 8.
_PRIOR_RECORDS = 4.0
# Logarithms of 0 are the only thing to avoid: below is one sample in 1e12.
_SMALLEST_U = 1e-12


def exchangeable_chance(n_trials: int, horizon_trials: int) -> float:
    """Return the chance of a new record, m / (n + m), if trials are exchangeable."""
    return horizon_trials / max(n_trials + horizon_trials, 1)


def learned_chance(history: History, horizon_trials: int) -> float:
    """Return the chance of a new record, given how often there were some.

    The posterior mean of 1 - (n / (n + m))^lambda under lambda ~ Gamma(4, 4).
    """
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


def strata(size: int, rng: np.random.Generator) -> FloatArray:
    """Draw uniform numbers in (0, 1), one in each of ``size`` equal strata, shuffled."""
    return np.asarray((rng.permutation(size) + rng.random(size)) / size)
