"""The curve's posterior by Markov chains, as DynaTune published it, with starts that mix.

Ten walkers of the affine-invariant ensemble sampler, 500 steps from the least-squares
fit; the last 200 steps, thinned by 10, leave 200 curves. Their values at the end of the
slot are the forecast. They have the curve's uncertainty only, not the staircase's, so the
intervals are far too narrow.

References
----------
Zhang, Li, Wang & Li (2021), "DynaTune", ICLR, section 4.3 and appendix B. Goodman & Weare (2010),
"Ensemble samplers with affine invariance", Comm. App. Math. Comp. Sci. 5. Foreman-Mackey
et al. (2013), "emcee: The MCMC Hammer", PASP 125.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tvm_adaptive.task_scheduler.forecast.curve import CurveFamily
from tvm_adaptive.task_scheduler.forecast.result import Forecast, NoFitError, ThroughputHistory
from tvm_adaptive.values.trial import FloatArray

METHOD = "emcee"
# As published.
N_WALKERS = 10
N_STEPS = 500
N_BURN_IN = 300
THIN_BY = 10
# Uniform prior of the noise in scaled units; a fit below the floor would leave every
# other curve without probability.
_MAX_SIGMA = 1.0
_MIN_SIGMA = 1e-4
# In multiples of the task's own best: wide, so that the prior does not
# decide.
_OWN_BEST_CEILING = 10.0
# Of a parameter's range: with starts this far apart the ensemble has the posterior's width
# at once; from the published 1e-6 it needs 100 steps.
_START_SPREAD = 0.05
_N_START_ATTEMPTS = 200
# Healthy ensembles accept 0.2 to 0.6 of the steps; a frozen one nothing.
_LEAST_ACCEPTANCE = 0.1
# DynaTune, section 4.3: a jump of more than 20 % starts a new segment.
SEGMENT_JUMP = 0.2
# Twice the parameters of the default family with its noise; a shorter segment is pooled
# with the one before.
MIN_SEGMENT_POINTS = 8
# Neighbouring nodes of a grid lead to the same minimum; a few distant ones suffice.
_N_STARTS = 4
# A quotient of basis values below is 0 / 0.
_TINY = 1e-300


@dataclasses.dataclass(frozen=True)
class CurveFit:
    """The curve of a family that is nearest to the data."""

    theta: FloatArray  # amplitude, then shape
    rms: float  # root of the mean squared residual, unit of the data


def last_segment(best: FloatArray) -> int:
    """Return where the last segment of a history starts; the first success starts none."""
    previous, current = best[:-1], best[1:]
    cuts = 1 + np.flatnonzero((previous > 0) & (current > (1.0 + SEGMENT_JUMP) * previous))
    starts = [0, *cuts.tolist()]
    while len(starts) > 1 and len(best) - starts[-1] < MIN_SEGMENT_POINTS:
        starts.pop()
    return int(starts[-1])


def fit_least_squares(
    family: CurveFamily, x: FloatArray, y: FloatArray, *, ceiling: float
) -> CurveFit:
    """Fit a curve that has reached the last value at the last trial, by variable projection."""
    # Its import takes a quarter of a second of each command.
    from scipy.optimize import least_squares

    lower, upper = family.bounds(int(x[-1]))

    def project(shapes: FloatArray) -> tuple[FloatArray, FloatArray]:
        g = family.basis(x, shapes)
        low, high = family.amplitude_bounds(float(y[-1]), ceiling, g[:, -1])
        best = (g @ y) / np.maximum((g * g).sum(axis=1), _TINY)
        # Outside the ceiling a shape is bad rather than forbidden: the search walks back.
        amplitude = np.maximum(np.minimum(best, high), low)
        return amplitude, np.maximum(low - high, 0.0)

    def residuals(shape: FloatArray) -> FloatArray:
        amplitude, excess = project(shape[None])
        finite_excess = np.minimum(excess, 1.0 / MIN_SEGMENT_POINTS)
        values = amplitude[0] * family.basis(x, shape) - y
        return np.append(values, len(x) * finite_excess)

    shapes = family.grid(int(x[-1])).shapes
    amplitude, excess = project(shapes)
    rss = ((amplitude[:, None] * family.basis(x, shapes) - y) ** 2).sum(axis=1)
    possible = np.flatnonzero(np.isfinite(rss) & (excess <= 0))
    if not len(possible):
        raise NoFitError(f"no curve of the family {family.name} stays below the ceiling")
    order = possible[np.argsort(rss[possible], kind="stable")]
    starts = order[np.unique(np.geomspace(1, len(order), _N_STARTS).astype(int) - 1)]
    found = [(float(rss[order[0]]), shapes[order[0]])]
    for start in shapes[starts]:
        inside = np.clip(start, lower, upper)
        result = least_squares(residuals, inside, bounds=(lower, upper), x_scale=upper - lower)
        if np.isfinite(result.cost) and project(result.x[None])[1][0] <= 0:
            found.append((2.0 * float(result.cost), result.x))
    cost, shape = min(found, key=lambda pair: pair[0])
    theta = np.concatenate([project(shape[None])[0], shape])
    return CurveFit(theta, float(np.sqrt(cost / len(x))))


@dataclasses.dataclass(frozen=True)
class Posterior:
    """The log density of (amplitude, shape..., sigma), with uniform priors within bounds."""

    family: CurveFamily
    x: FloatArray  # trials, and scaled throughput; the last one positive
    y: FloatArray
    ceiling: float  # largest limit of the curve, same unit as ``y``

    def __call__(self, theta: FloatArray) -> FloatArray:
        """Return the log density of each row, shapes (k, 2 + p) and (k,); never NaN."""
        amplitude, shape, sigma = theta[:, 0], theta[:, 1:-1], theta[:, -1]
        lower, upper = self.family.bounds(int(self.x[-1]))
        inside = ((shape >= lower) & (shape <= upper)).all(axis=1)
        inside &= (sigma >= _MIN_SIGMA) & (sigma <= _MAX_SIGMA)
        g = self.family.basis(self.x, np.clip(shape, lower, upper))
        low, high = self.family.amplitude_bounds(float(self.y[-1]), self.ceiling, g[:, -1])
        inside &= (amplitude >= low) & (amplitude <= high)
        rss = ((amplitude[:, None] * g - self.y) ** 2).sum(axis=1)
        spread = np.clip(sigma, _MIN_SIGMA, _MAX_SIGMA)
        log_density = -0.5 * rss / spread**2 - len(self.x) * np.log(spread)
        return np.asarray(np.where(inside & np.isfinite(log_density), log_density, -np.inf))

    def starts(self, fit: CurveFit, n_walkers: int, rng: np.random.Generator) -> FloatArray:
        """Draw starts around a fit, shape (n_walkers, 2 + p), all of finite density."""
        lower, upper = self.family.bounds(int(self.x[-1]))
        shape, found = fit.theta[1:], list[FloatArray]()
        for attempt in range(_N_START_ATTEMPTS):
            # Closer and closer to the fit, which itself is feasible.
            spread = _START_SPREAD * 0.98**attempt
            near = shape + spread * (upper - lower) * rng.standard_normal(len(shape))
            near = np.clip(near, lower, upper)
            sigma = max(fit.rms, 2 * _MIN_SIGMA) * math.exp(0.3 * rng.standard_normal())
            sigma = min(sigma, 0.9 * _MAX_SIGMA * rng.uniform(0.5, 1.0))
            start = np.concatenate([[self._lifted(near, fit, rng)], near, [sigma]])
            if np.isfinite(self(start[None])[0]):
                found.append(start)
            if len(found) == n_walkers:
                return np.stack(found)
        raise NoFitError("the least-squares fit has no feasible neighbours to start chains from")

    def _lifted(self, shape: FloatArray, fit: CurveFit, rng: np.random.Generator) -> float:
        """Return an amplitude near the fit's that reaches the incumbent."""
        g_last = self.family.basis(self.x[-1:], shape[None])[:, 0]
        low, high = self.family.amplitude_bounds(float(self.y[-1]), self.ceiling, g_last)
        amplitude = fit.theta[0] * math.exp(_START_SPREAD * rng.standard_normal())
        room = max(float(high[0] - low[0]), 0.0)
        lifted = low[0] + _START_SPREAD * room * rng.random()
        return float(min(max(amplitude, lifted), high[0]))


def run_chain(
    posterior: Posterior,
    rng: np.random.Generator,
    *,
    n_walkers: int = N_WALKERS,
    n_steps: int = N_STEPS,
) -> FloatArray:
    """Run the ensemble sampler from the least-squares fit."""
    import emcee

    fit = fit_least_squares(posterior.family, posterior.x, posterior.y, ceiling=posterior.ceiling)
    starts = posterior.starts(fit, n_walkers, rng)
    sampler = emcee.EnsembleSampler(n_walkers, starts.shape[1], posterior, vectorize=True)
    # The sampler has a Mersenne twister of its own; its state is all that can be given.
    twister = ("MT19937", rng.integers(0, 2**32, 624, dtype=np.uint32), 624, 0, 0.0)
    try:
        sampler.run_mcmc(emcee.State(starts, random_state=twister), n_steps)
    except ValueError as error:
        raise NoFitError(f"the sampler refused its starts: {error}") from error
    return np.asarray(sampler.get_chain(), dtype=np.float64)


def acceptance(chain: FloatArray) -> FloatArray:
    """Return the share of steps at which each walker moved."""
    moved = (np.diff(chain, axis=0) != 0).any(axis=2)
    return np.asarray(moved.mean(axis=0), dtype=np.float64)


def forecast_emcee(
    history: ThroughputHistory,
    horizon_trials: int,
    rng: np.random.Generator,
    family: CurveFamily,
    start: int = 0,
) -> Forecast:
    """Forecast as published, from one segment of the history."""
    scale = history.incumbent
    x = np.arange(start + 1, len(history) + 1, dtype=np.float64)
    chain = run_chain(Posterior(family, x, history.best[start:] / scale, _OWN_BEST_CEILING), rng)
    share = float(acceptance(chain).mean())
    if share < _LEAST_ACCEPTANCE:  # it hardly moved from its starts
        raise NoFitError(f"the chain is frozen: {share:.2f} of the steps accepted")
    kept = chain[N_BURN_IN::THIN_BY].reshape(-1, chain.shape[2])
    future = family.evaluate([float(len(history) + horizon_trials)], kept[:, :-1])[:, 0]
    samples = np.maximum(future * scale, history.incumbent)
    return Forecast(float(samples.mean()), samples, history.incumbent)
