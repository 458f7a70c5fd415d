"""Belief: the posterior of a task's best throughput at the end of its next slot."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import check_choices
from tvm_adaptive.task_scheduler.forecast import emcee_chains, quadrature, record_breaks
from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER, CurveFamily
from tvm_adaptive.task_scheduler.forecast.result import (
    Forecast,
    NoFitError,
    ThroughputHistory,
    unchanged,
)

__all__ = ["METHODS", "Forecast", "forecast"]

METHODS = (quadrature.METHOD, emcee_chains.METHOD, record_breaks.METHOD)

# The grid's prior needs no data to be sensible, only a slope; sampled from flat priors,
# a curve needs as many points as a segment.
_MIN_TRIALS = {quadrature.METHOD: 2, emcee_chains.METHOD: emcee_chains.MIN_SEGMENT_POINTS}

logger = logging.getLogger(__name__)


def forecast(
    best_throughput_history: npt.ArrayLike,
    horizon_trials: int,
    *,
    method: str = "quadrature",
    family: CurveFamily = LOG_POWER,
    expected_peak: float | None = None,
    rng: np.random.Generator,
) -> Forecast:
    """Forecast a task's best throughput at the end of its next slot.

    ``"quadrature"`` is calibrated and takes about a millisecond; ``"emcee"`` is DynaTune
    as published, on the last segment of the history; ``"records"`` needs no curve and
    replaces either without a fit or with too few trials (2 and 8).

    Parameters
    ----------
    best_throughput_history : array_like of shape (n,)
        Best throughput after each trial, any unit, higher is better, never falling;
        zeros for the trials before the first success.
    horizon_trials : int
        Trials in the slot; not negative.
    method : str, default "quadrature"
        One of ``METHODS``.
    family : CurveFamily, default LOG_POWER
    expected_peak : float or None, default None
        What the task is expected to reach at most, same unit as the history;
        ``"quadrature"`` only. It may be wrong: draws may exceed it, and it is ignored once it
        was reached.
    rng : numpy.random.Generator

    Returns
    -------
    Forecast
        Same unit as the history.

    Raises
    ------
    InvalidOptionError
        If there is no such method, or the expected peak is not positive.
    ValueError
        If the history is invalid, or the horizon is negative.
    """
    check_choices("method", method, METHODS)
    best = np.asarray(best_throughput_history, dtype=np.float64)
    history = ThroughputHistory(best, expected_peak)
    if horizon_trials < 0:
        raise ValueError(f"horizon_trials must not be negative but got {horizon_trials}.")
    return forecast_history(history, horizon_trials, rng, method=method, family=family)


def forecast_history(
    history: ThroughputHistory,
    horizon_trials: int,
    rng: np.random.Generator,
    *,
    method: str,
    family: CurveFamily,
) -> Forecast:
    """Forecast from a history that was checked."""
    if method == record_breaks.METHOD or history.incumbent <= 0:
        return record_breaks.forecast_records(history, horizon_trials, rng)
    if len(history) < _MIN_TRIALS[method]:
        return record_breaks.forecast_records(history, horizon_trials, rng)
    if horizon_trials == 0:
        return unchanged(history)
    try:
        if method == quadrature.METHOD:
            return quadrature.forecast_quadrature(history, horizon_trials, rng, family)
        start = emcee_chains.last_segment(history.best)
        return emcee_chains.forecast_emcee(history, horizon_trials, rng, family, start)
    except NoFitError as error:
        logger.info("Forecasting from records instead of by %s: %s", method, error)
        return record_breaks.forecast_records(history, horizon_trials, rng)
