r"""How much is a candidate worth measuring: the logarithm of expected improvement.

========  ============================================  ==============================
symbol    meaning                                       unit
========  ============================================  ==============================
mean      posterior mean of the objective               any; higher is better
std       posterior standard deviation                  as mean, >= 0
best      the incumbent's value                         as mean
z         (mean - best) / std                           1
h(z)      phi(z) + z Phi(z), so that EI = std h(z)      1
========  ============================================  ==============================

Far below the incumbent, expected improvement (:mod:`~tvm_adaptive.values.improvement`)
underflows to zero and no longer ranks; its logarithm does not (the idea of LogEI: Ament et
al., "Unexpected Improvements to Expected Improvement for Bayesian Optimization", NeurIPS 2023).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr

from tvm_adaptive.values.improvement import LOG_SQRT_2PI, standardise
from tvm_adaptive.values.trial import FloatArray

# Above, h(z) is computed as it is defined: less than one digit is lost.
_DIRECT_ABOVE_Z = -1.0
# Below, the closed form loses digits to cancellation (z^2 * 1e-16) while four terms of the
# asymptotic series are already exact to 1e-10.
_SERIES_BELOW_Z = -50.0
# Takes the place of log(0), so that a score stays positive: 1 / 1e300 is a normal number.
_MIN_LOG_EI = -1e300


def log_expected_improvement(
    mean: npt.ArrayLike, std: npt.ArrayLike, best: npt.ArrayLike
) -> FloatArray:
    """Return the logarithm of expected improvement without underflow.

    Finite wherever ``std`` > 0; ``-inf`` where ``std`` is 0 and nothing is gained.
    """
    gain, spread, z = standardise(mean, std, best)
    certain = np.log(np.maximum(gain, 0.0), where=gain > 0, out=np.full(gain.shape, -np.inf))
    log_spread = np.log(spread, where=spread > 0, out=np.zeros(gain.shape))
    # h(z) -> z for large z, where gain is the better conditioned of the two.
    log_ei = np.where(z > -_SERIES_BELOW_Z, certain, log_spread + _log_h(z))
    return np.asarray(np.where(spread > 0, log_ei, certain), dtype=np.float64)


def selection_score(log_ei: npt.ArrayLike) -> FloatArray:
    """Map log EI to scores that native evolution can draw parents with.

    Evolution draws parents in proportion to the score. EI itself starves it (~0 for nearly
    all candidates), so the score falls only like ``1 / (1 - log EI)``, continued by
    ``1 + log EI`` above 0.

    Parameters
    ----------
    log_ei : array_like of shape (n,)
        Higher is better; ``-inf`` allowed.

    Returns
    -------
    ndarray of shape (n,)
        Positive, finite, strictly increasing in ``log_ei`` above -1e300.
    """
    value = np.clip(np.asarray(log_ei, dtype=np.float64), _MIN_LOG_EI, -_MIN_LOG_EI)
    value = np.where(np.isnan(value), _MIN_LOG_EI, value)
    return np.asarray(
        np.where(value > 0, 1.0 + value, 1.0 / (1.0 - np.minimum(value, 0.0))), dtype=np.float64
    )


def _log_h(z: FloatArray) -> FloatArray:
    """Return log(phi(z) + z Phi(z)), piecewise so that no digits are lost."""
    near = np.maximum(z, _DIRECT_ABOVE_Z)
    direct = np.log(np.exp(-0.5 * near * near - LOG_SQRT_2PI) + near * ndtr(near))
    # phi(z) factored out: h = phi (1 - |z| M(|z|)) with Mills' ratio M, by erfcx.
    far = -np.clip(z, _SERIES_BELOW_Z, _DIRECT_ABOVE_Z)
    mills = np.sqrt(0.5 * np.pi) * erfcx(far / np.sqrt(2.0))
    closed = -0.5 * far * far - LOG_SQRT_2PI + np.log1p(-far * mills)
    # 1 - |z| M(|z|) = z^-2 (1 - 3 z^-2 + 15 z^-4 - 105 z^-6 + ...)
    tail = -np.minimum(z, _SERIES_BELOW_Z)
    inverse = 1.0 / (tail * tail)
    series = np.log1p(inverse * (-3.0 + inverse * (15.0 - 105.0 * inverse)))
    distant = -0.5 * tail * tail - LOG_SQRT_2PI - 2.0 * np.log(tail) + series
    return np.asarray(
        np.where(z >= _DIRECT_ABOVE_Z, direct, np.where(z >= _SERIES_BELOW_Z, closed, distant)),
        dtype=np.float64,
    )
