"""Rules for every acquisition of a cost model: what the model and the search need of it."""

from __future__ import annotations

import numpy as np

from tvm_adaptive.cost_model.surrogate import LogAcquisition
from tvm_adaptive.testing.conformance.raising import must_not_raise
from tvm_adaptive.values.trial import FloatArray

# Forecasts in the units of all targets: relative throughputs and their roots are in [0, 1] or
# a little above, their logarithms far below 0.
_MEANS = np.concatenate([np.linspace(-20.0, -2.0, 10), np.linspace(-1.5, 2.5, 41)])
# The model passes no smaller one than the first.
_STDS = np.array([0.01, 0.1, 1.0])
_INCUMBENTS = (-0.5, 0.0, 1.0)
# By which the origin of the unit may differ; exact in binary.
_SHIFTS = (-4.0, 0.5)
# Differences below are rounding: functions of scipy are good to ten digits or more.
_TOLERANCE = 1e-8
# Takes the place of -inf in differences.
_LEAST = -1e300


def check_acquisition(acquisition: LogAcquisition, *, seed: int = 0) -> None:
    """Run all checks of an acquisition.

    Values need not be logarithms: the order of candidates is what is checked. Upper confidence
    bounds pass, for example.

    Parameters
    ----------
    acquisition : callable
        From mean and standard deviation, arrays of shape (n,), and the incumbent, a number,
        to an array of shape (n,), higher is better.
    seed : int, default 0
        Of the order in which candidates come.

    Raises
    ------
    AssertionError
        With the rule, and what the acquisition did.
    """
    check_single(acquisition)
    check_repeats(acquisition)
    check_finite(acquisition)
    check_increasing(acquisition)
    check_origin(acquisition)
    check_order(acquisition, np.random.default_rng(seed))
    check_certain(acquisition)


def values_of(
    acquisition: LogAcquisition, mean: FloatArray, std: FloatArray, incumbent: float
) -> FloatArray:
    """Return an acquisition's values; require one per candidate, and arguments as they were."""
    given = mean.copy(), std.copy()
    with (
        must_not_raise(f"the acquisition of {len(mean)} candidates, std from {std.min():g} on,"),
        np.errstate(all="ignore"),  # an underflow is no broken rule
    ):
        values = np.array(acquisition(*given, incumbent), dtype=np.float64)
    assert values.shape == mean.shape, (
        f"{len(mean)} candidates need values of shape {mean.shape} but got shape {values.shape}"
    )
    for name, before, after in zip(("mean", "std"), (mean, std), given, strict=True):
        assert np.array_equal(before, after), f"the acquisition wrote to its argument {name}"
    return values


def check_single(acquisition: LogAcquisition) -> None:
    """Require that a single candidate has a value, too."""
    values_of(acquisition, np.array([0.5]), np.array([0.1]), 1.0)


def check_repeats(acquisition: LogAcquisition) -> None:
    """Require the same values each time: the order of candidates follows from the seed alone."""
    first, second = (values_of(acquisition, *_candidates(), 1.0) for _ in range(2))
    assert np.array_equal(first, second, equal_nan=True), (
        "the same arguments led to other values the second time"
    )


def check_finite(acquisition: LogAcquisition) -> None:
    """Require numbers, or -inf for what is worth nothing, wherever std is above 0."""
    for incumbent in _INCUMBENTS:
        mean, std = _candidates()
        values = values_of(acquisition, mean, std, incumbent)
        for place in np.flatnonzero(np.isnan(values) | np.isposinf(values))[:1]:
            raise AssertionError(
                f"a value must be finite or -inf, but mean {mean[place]:g}, std {std[place]:g} "
                f"and incumbent {incumbent:g} led to {values[place]}"
            )


def check_increasing(acquisition: LogAcquisition) -> None:
    """Require that of two candidates of one std the one of the higher mean is worth as much."""
    for incumbent in _INCUMBENTS:
        values = _comparable(values_of(acquisition, *_candidates(), incumbent))
        by_std = values.reshape(len(_STDS), len(_MEANS))
        falls = by_std[:, :-1] - by_std[:, 1:] > _tolerance(by_std[:, :-1])
        for row, place in np.argwhere(falls)[:1]:
            raise AssertionError(
                f"a higher mean must not lower a value, but at std {_STDS[row]:g} and incumbent "
                f"{incumbent:g} it fell from {by_std[row, place]:g} to {by_std[row, place + 1]:g} "
                f"as the mean grew from {_MEANS[place]:g} to {_MEANS[place + 1]:g}"
            )


def check_origin(acquisition: LogAcquisition) -> None:
    """Require the same order wherever the unit begins, which each target of the model decides.

    Values may change: those of upper confidence bounds move along.
    """
    mean, std = _candidates()
    for incumbent in _INCUMBENTS:
        values = _comparable(values_of(acquisition, mean, std, incumbent))
        for shift in _SHIFTS:
            moved = _comparable(values_of(acquisition, mean + shift, std, incumbent + shift))
            above = values[:, None] - values > _tolerance(values)
            below = moved - moved[:, None] > _tolerance(moved)
            for one, other in np.argwhere(above & below)[:1]:
                raise AssertionError(
                    "the order of candidates must not depend on the origin of the unit, but "
                    f"with mean and incumbent {shift:+g} (mean, std) = ({mean[other]:g}, "
                    f"{std[other]:g}) overtook ({mean[one]:g}, {std[one]:g})"
                )


def check_order(acquisition: LogAcquisition, rng: np.random.Generator) -> None:
    """Require that a value belongs to its candidate, not to its place."""
    mean, std = _candidates()
    order = rng.permutation(len(mean))
    values = _comparable(values_of(acquisition, mean, std, 1.0))[order]
    permuted = _comparable(values_of(acquisition, mean[order], std[order], 1.0))
    wrong = np.abs(values - permuted) > _tolerance(values)
    assert not wrong.any(), (
        f"the values of {wrong.sum()} of {len(order)} candidates changed with their order"
    )


def check_certain(acquisition: LogAcquisition) -> None:
    """Require values where std is 0; NaN is allowed.

    The model passes no std of 0, and takes NaN for a candidate that is worth nothing. The
    probability of an improvement has no limit where mean and incumbent are equal.
    """
    values_of(acquisition, _MEANS, np.zeros(len(_MEANS)), float(_MEANS[20]))


def _candidates() -> tuple[FloatArray, FloatArray]:
    """Return all pairs of mean and std, shape (n,) each, means of one std together."""
    return np.tile(_MEANS, len(_STDS)), np.repeat(_STDS, len(_MEANS))


def _comparable(values: FloatArray) -> FloatArray:
    return np.asarray(np.maximum(values, _LEAST))


def _tolerance(values: FloatArray) -> FloatArray:
    return np.asarray(_TOLERANCE * (1.0 + np.abs(values)))
