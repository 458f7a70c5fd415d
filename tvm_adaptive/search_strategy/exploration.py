"""The random share of a batch, epsilon, from the posterior's uncertainty.

=========  =======================================================  ================
symbol     meaning                                                  unit
=========  =======================================================  ================
sigma(p)   posterior standard deviation of plan p                   throughput
Perf(p*)   throughput of the incumbent, the best measured plan      throughput
K          random unmeasured plans that sigma is averaged over      count
b          candidates in a batch                                    count
=========  =======================================================  ================

With throughput normalised by the incumbent's, ``Perf(p*) == 1``.

References
----------
Li, Zhang, Wang, Li: AdaTune: Adaptive Tensor Program Compilation Made Efficient,
NeurIPS 2020, section 4.3, Eq. 3.
"""

from __future__ import annotations

import math

from tvm_adaptive.values.trial import Exploration, Prediction

# The paper does not state K; the authors' released code draws 20.
N_PLANS = 20
# TVM's own fixed share, which the released code of AdaTune also starts from.
FALLBACK_EPSILON = 0.05


def posterior_epsilon(plans: Prediction) -> Exploration:
    """Set epsilon to the mean uncertainty of random plans that were not measured (Eq. 3).

    Their throughputs are relative to the incumbent's. Where no deviation is a number, it is the
    fallback.
    """
    finite = plans.std[(plans.std >= 0) & (plans.std < math.inf)]
    if finite.size == 0:
        return Exploration(FALLBACK_EPSILON, "no-success-yet")
    mean_std = float(finite.mean())
    epsilon = min(1.0, mean_std)
    return Exploration(epsilon, "posterior", mean_std=mean_std, n_plans=int(finite.size))


def n_random(epsilon: float, batch: int) -> int:
    """Return how many of ``batch`` candidates to draw at random: ``epsilon * batch``, rounded."""
    # Rounding down, as stock TVM does, never explores in batches below 1 / epsilon.
    return min(batch, math.floor(epsilon * batch + 0.5))
