"""The curve's posterior on a grid of shapes, its amplitude and noise integrated out.

=========  ==============================================================  ===========
symbol     meaning                                                         unit
=========  ==============================================================  ===========
x, y       trials, best throughput after them                              count, scaled
a, g       amplitude and basis of the curve, f(x) = a g(x; shape)          as y; none
nu         degrees of freedom of a's Student t, given the shape            count
=========  ==============================================================  ===========

Given the shape, y ~ N(a g, sigma^2) is a regression on one column. With a uniform prior
on a and on sigma its posterior is a Student t with nu = n - 2, cut to the amplitudes with
which the curve has reached the incumbent and stays below the ceiling; the mass left of it
is the shape's evidence. What a task is expected to reach is such a ceiling with a small chance
of being wrong: two posteriors, mixed by that chance and their evidence.

References
----------
Golub & Pereyra (1973), SIAM J. Numer. Anal. 10, for the separation; Zhang, Li, Wang & Li (2021),
"DynaTune", ICLR, section 4.3, for the model and its constraint.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit, stdtr

from tvm_adaptive.task_scheduler.forecast.curve import CurveFamily
from tvm_adaptive.task_scheduler.forecast.record_breaks import (
    expected_drop,
    jump_samples,
    learned_chance,
)
from tvm_adaptive.task_scheduler.forecast.result import Forecast, NoFitError, ThroughputHistory
from tvm_adaptive.values.trial import FloatArray

METHOD = "quadrature"
# Points of a history that are compared with the curve, even in the logarithm of x: as
# records are, of which there are about log n.
_N_POINTS = 24
# A staircase has no more independent errors than records, and the place of its next step
# says little of the one after. Of 0.5, 1 and 1.5 the smallest chose best on the recorded
# tunings of ResNet-18 and SqueezeNet (benchmarks/scheduler), and intervals cover what they say.
_ERRORS_PER_RECORD = 0.5
# In multiples of the incumbent. No slot is forecast to do better on average than twice
# the incumbent; of 1.5, 2, 2.5, 3 and 4 the least CRPS on recorded tunings.
HEADROOM = 2.0
# Where there is an expectation, it may be further away: the first few candidates are drawn
# at random, and a task's best is often a quarter of what its peers reach.
EXPECTED_HEADROOM = 4.0
# Of 0, 0.01, 0.03, 0.05 and 0.1: with 0 a task that is the best of all and still improving
# looks finished, with more than 0.01 recorded tunings take longer.
_CHANCE_OF_A_WRONG_EXPECTATION = 0.01
# Of the scale: the scatter of repeated measurements. Keeps an exact fit from certainty.
NOISE_FLOOR = 0.02
_TINY = 1e-300


@dataclasses.dataclass(frozen=True)
class CurvePosterior:
    """Posterior of a family's curves given a history."""

    family: CurveFamily
    shapes: FloatArray
    weights: FloatArray  # posterior probabilities of the shapes; their sum is 1
    location: FloatArray  # of the amplitude's Student t before it is cut
    scale: FloatArray
    dof: float  # its degrees of freedom
    lower: FloatArray  # where it is cut
    upper: FloatArray
    # logarithm of the probability of the data, up to a constant of the family and of n
    log_evidence: float

    def draw_shapes(self, size: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
        """Draw indices of shapes, shape (size,), stratified and in increasing order."""
        u = (np.arange(size) + rng.random(size)) / size
        index = np.searchsorted(np.cumsum(self.weights), u)
        return np.minimum(index, len(self.weights) - 1)

    def mixed_with(self, other: CurvePosterior, chance: float) -> CurvePosterior:
        """Return this posterior with the shapes' weights of a mixture of models."""
        share = expit(logit(chance) + other.log_evidence - self.log_evidence)
        weights = (1.0 - share) * self.weights + share * other.weights
        return dataclasses.replace(self, weights=weights)

    def relative_gains(self, n_trials: int, horizon_trials: int) -> FloatArray:
        """Return f(n + m) / f(n) - 1 of each shape, shape (s,); amplitudes cancel."""
        x = np.array([n_trials, n_trials + horizon_trials], dtype=np.float64)
        g = self.family.basis(x, self.shapes)
        return np.asarray(np.maximum(g[:, 1] / g[:, 0] - 1.0, 0.0))


def curve_posterior(
    family: CurveFamily,
    x: FloatArray,
    y: FloatArray,
    *,
    ceiling: float,
    effective_points: float | None = None,
    uniform_prior: bool = False,
    noise_floor: float = NOISE_FLOOR,
) -> CurvePosterior:
    """Return the posterior of a family's curves."""
    grid = family.grid(int(x[-1]))
    g = family.basis(x, grid.shapes)
    lower, upper = family.amplitude_bounds(float(y[-1]), ceiling, g[:, -1])
    possible = upper > lower
    if not possible.any():
        raise NoFitError(f"no curve of the family {family.name} stays below the ceiling")
    # Where lower >= upper the formulas have no meaning; the weight is 0 anyway.
    upper = np.where(possible, upper, lower + 1.0)
    log_weight = grid.log_volume if uniform_prior else grid.log_prior
    points = len(x) if effective_points is None else min(effective_points, len(x))
    dof = max(points - 2.0, 1.0)
    norm = (g * g).sum(axis=1)
    location = (g @ y) / norm
    rss = ((location[:, None] * g - y) ** 2).sum(axis=1) + len(x) * noise_floor**2
    scale = np.sqrt(rss / (dof * norm))
    mass = _student_mass(dof, (lower - location) / scale, (upper - location) / scale)
    log_weight = log_weight - 0.5 * dof * np.log(rss) - 0.5 * np.log(norm) + np.log(mass)
    if not uniform_prior:
        log_weight = log_weight - np.log(upper - lower)
    log_weight = np.where(possible, log_weight, -np.inf)
    highest = float(log_weight.max())
    weights = np.exp(log_weight - highest)
    total = float(weights.sum())
    weights /= total
    evidence = highest + math.log(total)
    return CurvePosterior(
        family, grid.shapes, weights, location, scale, dof, lower, upper, evidence
    )


def _student_mass(dof: float, lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Return the probability between two quantiles, to full precision in either tail."""
    above = lower > 0
    low = stdtr(dof, np.where(above, -upper, lower))
    high = stdtr(dof, np.where(above, -lower, upper))
    return np.asarray(np.maximum(high - low, _TINY))


def thinned(best: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return points of a history that are even in the logarithm of x, the last included."""
    x = np.unique(np.round(np.geomspace(1, len(best), _N_POINTS)).astype(int))
    return x.astype(np.float64), best[x - 1]


def _posterior(history: ThroughputHistory, family: CurveFamily) -> CurvePosterior:
    # The whole history, without cuts: this model has jumps.
    x, y = thinned(history.best)

    def below(ceiling: float) -> CurvePosterior:
        points = _ERRORS_PER_RECORD * len(history.records)
        scaled = y / history.incumbent
        return curve_posterior(family, x, scaled, ceiling=ceiling, effective_points=points)

    free = below(HEADROOM)
    if math.isinf(history.expected_gain):
        return free
    try:
        expected = below(min(EXPECTED_HEADROOM, history.expected_gain))
    except NoFitError:
        return free
    return expected.mixed_with(free, _CHANCE_OF_A_WRONG_EXPECTATION)


def forecast_quadrature(
    history: ThroughputHistory,
    horizon_trials: int,
    rng: np.random.Generator,
    family: CurveFamily,
    *,
    n_samples: int = 512,
) -> Forecast:
    """Forecast a jump: its mean by the posterior of the curve, its chance by the records."""
    incumbent = history.incumbent
    posterior = _posterior(history, family)
    gains = posterior.relative_gains(len(history), horizon_trials)
    chance = learned_chance(history, horizon_trials)
    index = posterior.draw_shapes(n_samples, rng)
    samples = 1.0 + jump_samples(chance, gains[index], rng)
    return Forecast(
        incumbent * (1.0 + float(posterior.weights @ gains)),
        incumbent * samples,
        incumbent,
        exact_drop=float(posterior.weights @ expected_drop(chance, gains)),
    )
