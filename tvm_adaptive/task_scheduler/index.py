r"""The value of a slot of an arm: action functions on arrays.

==============  =====================================================  =========
symbol          meaning                                                unit
==============  =====================================================  =========
flop / f        latency of one run at throughput f                     ms
r               drop of the network's latency by a slot                ms
L               seconds that the slot takes                            s
n_k, T          slots of arm k, and of all arms together               1
==============  =====================================================  =========

UCB, epsilon-greedy and softmax are those of DynaTune (Zhang et al., ICLR 2021, section 4
and appendix A). Expected gain per second ranks like the fractional knapsack: for concave
gains, greedy by gain per second is optimal (Fox, "Discrete Optimization via Marginal
Analysis", 1966).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.values.trial import FloatArray

# Auer et al. (2002); the paper found it robust.
EXPLORATION = 2.0
# The paper's for small networks: a bonus of a millisecond would drown their gains.
EXPLORATION_BELOW_1_MS = 0.2
# The paper's, appendix A.
EPSILON = 0.05


def published_gain_ms(mean: float, incumbent: float, best_ms: float, weight: float) -> float:
    """Return the paper's r: the drop of the network's latency at the mean of the forecast, in ms.

    ``mean`` and ``incumbent`` are throughputs of any unit, higher is better; ``weight`` says how
    often the task occurs in the network.
    """
    return weight * best_ms * (1.0 - incumbent / max(mean, incumbent))


def exploration_constant(initial_ms: float) -> float:
    """Return the paper's C for a network that starts at ``initial_ms``: 2, or 0.2 under 1 ms."""
    return EXPLORATION_BELOW_1_MS if initial_ms < 1.0 else EXPLORATION


def ucb(
    gains_ms: npt.ArrayLike, n_slots: npt.ArrayLike, n_slots_total: int, c: float
) -> FloatArray:
    """Return the paper's upper confidence bound, gain + sqrt(C ln T / n), in ms.

    Parameters
    ----------
    gains_ms : array_like of shape (k,)
        Expected gain of the next slot, the occurrence weight included.
    n_slots : array_like of shape (k,)
        Slots that each arm has had.
    n_slots_total : int
        Slots of all arms ever, finished ones and the warm-up included.
    c : float
        See :func:`exploration_constant`.

    Returns
    -------
    ndarray of shape (k,)
        ``inf`` for an arm that was never played.
    """
    played = np.asarray(n_slots, dtype=np.float64)
    log_total = np.log(max(n_slots_total, 1))
    bonus = np.sqrt(c * log_total / np.maximum(played, 1.0))
    return np.where(played > 0, np.asarray(gains_ms, dtype=np.float64) + bonus, np.inf)


def epsilon_greedy(
    scores: FloatArray, epsilon: float, rng: np.random.Generator
) -> tuple[int, bool]:
    """Return the best arm, or with probability ``epsilon`` any; and whether it was chance.

    ``scores``, of shape (k,), are higher for better arms; ``nan`` for one that is no choice.
    """
    if rng.random() < epsilon:
        return int(rng.choice(np.flatnonzero(~np.isnan(scores)))), True
    return argmax(scores, rng), False


def softmax_probabilities(scores: FloatArray) -> FloatArray:
    """Return the chance of each arm, proportional to exp(score / mean of the scores).

    The paper leaves the temperature open.

    Parameters
    ----------
    scores : ndarray of shape (k,)
        ``nan`` for an arm that is not a choice: its chance is 0.

    Returns
    -------
    ndarray of shape (k,)
        Sums to 1.
    """
    choice = ~np.isnan(scores)
    if not choice.any():
        raise InvalidOptionError("softmax needs at least one score that is not nan; found none.")
    scale = float(np.mean(scores[choice]))
    if not np.isfinite(scale) or scale <= 0.0:
        return np.where(choice, 1.0 / choice.sum(), 0.0)
    with np.errstate(over="ignore"):
        above = (scores - np.nanmax(scores)) / scale
    weights = np.where(choice, np.exp(np.where(choice, above, -np.inf)), 0.0)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def argmax(scores: FloatArray, rng: np.random.Generator) -> int:
    """Return the index of the highest score, ties by ``rng``; ``nan`` is no choice."""
    if np.isnan(scores).all():
        raise InvalidOptionError("argmax needs at least one score that is not nan; found none.")
    best = np.flatnonzero(scores == np.nanmax(scores))
    return int(best[0]) if len(best) == 1 else int(rng.choice(best))
