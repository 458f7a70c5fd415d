"""Expected improvement over an incumbent, for candidates, tasks and forms alike.

Eq. 1 and 2 of AdaTune (Li et al., NeurIPS 2020), after Mockus (1975) and Jones et al. (1998).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from tvm_adaptive.values.trial import FloatArray

LOG_SQRT_2PI = 0.5 * np.log(2.0 * np.pi)
# z^2 overflows beyond 1e154; no finite objective is so far away in earnest.
_MIN_Z = -1e150


def expected_improvement(
    mean: npt.ArrayLike, std: npt.ArrayLike, best: npt.ArrayLike
) -> FloatArray:
    """Return E[max(0, objective - best)] for a normal posterior, whose ``std`` may be 0.

    Parameters
    ----------
    mean, std : array_like of shape (n,)
        Posterior of the objective, higher is better; ``std`` not negative.
    best : array_like, scalar or of shape (n,)
        The incumbent's value, same unit.

    Returns
    -------
    ndarray of shape (n,)
        Same unit, never negative, never NaN for finite arguments.
    """
    gain, spread, z = standardise(mean, std, best)
    phi = np.exp(-0.5 * z * z - LOG_SQRT_2PI)
    improvement = gain * ndtr(z) + spread * phi
    # Rounding may take it a hair below its own lower bound.
    return np.asarray(np.maximum(improvement, np.maximum(gain, 0.0)), dtype=np.float64)


def standardise(
    mean: npt.ArrayLike, std: npt.ArrayLike, best: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return mean - best, the deviation and their quotient, finite also where ``std`` is 0."""
    gain = np.asarray(mean, dtype=np.float64) - np.asarray(best, dtype=np.float64)
    gain, spread = np.broadcast_arrays(gain, np.asarray(std, dtype=np.float64))
    z = np.full(gain.shape, np.inf)
    with np.errstate(over="ignore"):
        np.divide(gain, spread, out=z, where=spread > 0)
    z = np.where(spread > 0, z, np.where(gain > 0, -_MIN_Z, _MIN_Z))
    return gain, spread, np.clip(z, _MIN_Z, -_MIN_Z)
