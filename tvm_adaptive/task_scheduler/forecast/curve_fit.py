"""Least-squares fits of learning curves, and the part of a history that one curve fits.

See :mod:`tvm_adaptive.task_scheduler.forecast.curve` for the families and the symbols.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.optimize import least_squares

from tvm_adaptive.task_scheduler.forecast.curve import CurveFamily
from tvm_adaptive.values.trial import FloatArray

# DynaTune, section 4.3: a jump of more than 20 % starts a new segment.
SEGMENT_JUMP = 0.2
# Twice the parameters of the default family with its noise; a shorter segment is pooled
# with the one before.
MIN_SEGMENT_POINTS = 8
# Neighbouring nodes of a grid lead to the same minimum; a few distant ones suffice.
_N_STARTS = 4
# A quotient of basis values below is 0 / 0.
_TINY = 1e-300


class NoFitError(RuntimeError):
    """No curve of the family goes with the data; the message says why."""


@dataclasses.dataclass(frozen=True)
class CurveFit:
    """The curve of a family that is nearest to the data."""

    theta: FloatArray  # amplitude, then shape
    rms: float  # root of the mean squared residual, unit of the data


def last_segment(
    best: FloatArray, jump: float = SEGMENT_JUMP, min_points: int = MIN_SEGMENT_POINTS
) -> int:
    """Return where the last segment of a history starts.

    A segment starts wherever the best throughput rises by more than ``jump`` of itself;
    the first success starts none. DynaTune, section 4.3.
    """
    previous, current = best[:-1], best[1:]
    cuts = 1 + np.flatnonzero((previous > 0) & (current > (1.0 + jump) * previous))
    starts = [0, *cuts.tolist()]
    if len(starts) > 1 and len(best) - starts[-1] < min_points:
        starts.pop()
    return int(starts[-1])


def fit_least_squares(
    family: CurveFamily, x: FloatArray, y: FloatArray, *, ceiling: float
) -> CurveFit:
    """Fit a curve that has reached the last value at the last trial.

    Only the shape is searched for, from the best nodes of a grid; the amplitude follows
    from it (variable projection).
    """
    lower, upper = family.bounds(int(x[-1]))

    def project(shapes: FloatArray) -> tuple[FloatArray, FloatArray]:
        g = family.basis(x, shapes)
        low, high = family.amplitude_bounds(float(y[-1]), ceiling, g[:, -1])
        if not family.has_amplitude:
            return np.ones(len(g)), np.where(low < high, 0.0, np.inf)
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
