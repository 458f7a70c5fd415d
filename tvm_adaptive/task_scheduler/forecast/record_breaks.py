"""The belief that needs no curve: how often records fall, and how large past ones were."""

from __future__ import annotations

import math

import numpy as np

from tvm_adaptive.task_scheduler.forecast.jumps import exchangeable_chance, jump_samples
from tvm_adaptive.task_scheduler.forecast.result import Forecast, History, unchanged

METHOD = "records"
# Older jumps were made from far below, and tell little of the next.
_N_LAST_JUMPS = 8
# The prior is worth three jumps (fewer leave the variance infinite) of 5 % each, about
# what a search gains that has had its first dozen trials.
_PRIOR_JUMPS = 3.0
_PRIOR_JUMP = 0.05


def forecast_records(
    history: History,
    horizon_trials: int,
    rng: np.random.Generator,
    *,
    n_samples: int = 512,
    warning: str = "",
) -> Forecast:
    """Forecast from the theory of records and the size of past jumps.

    A record falls in the next m trials with probability m / (n + m). Its relative gain
    is exponential with a rate that has a gamma posterior, given the logarithms of the
    past jumps; the predictive is a generalised Pareto.
    """
    if history.incumbent <= 0:
        return unchanged(history, horizon_trials, METHOD, warning or "no success yet")
    jumps = np.diff(np.log(history.records))[-_N_LAST_JUMPS:]
    tail = _PRIOR_JUMPS + len(jumps)
    mean_jump = (_PRIOR_JUMPS - 1) * _PRIOR_JUMP + float(jumps.sum())
    mean_jump /= tail - 1
    chance = exchangeable_chance(len(history), horizon_trials)
    mean_gain = chance * mean_jump
    # Of a generalised Pareto E[J^2] = 2 E[J]^2 (tail - 1) / (tail - 2).
    second = chance * 2.0 * mean_jump**2 * (tail - 1) / (tail - 2)
    gains = jump_samples(chance, np.full(n_samples, mean_gain), rng, tail=tail)
    incumbent = history.incumbent
    return Forecast(
        float(history.capped(incumbent * (1.0 + mean_gain))),
        incumbent * math.sqrt(max(second - mean_gain**2, 0.0)),
        history.capped(incumbent * (1.0 + gains)),
        METHOD,
        warning,
        incumbent,
        horizon_trials,
    )
