"""How fast the best candidate of a task may be, of which few were measured.

A task with four trials looks finished if its targets are relative to its own best: that one
is then as good as it gets. So the ceiling is shrunk from the best to what other tasks reach
for as many operations, the more the fewer trials there are. That is a line through the logarithms
of work and seconds: a power law, which with exponent 1 is the compute side of a roofline
(Williams et al., CACM 52, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

# Trials that count as much as the other tasks. Of tasks left out of four recorded runs, 4, 8 and
# 16 forecast better than none, and differ little.
_PRIOR_TRIALS = 8.0
# The best of so many is a ceiling: on the same runs, 25 % of headroom at 24 trials ranks worse.
_SETTLED_TRIALS = 20
# A line through fewer says nothing of another task.
_MIN_TASKS = 8


def ceilings_of(
    tasks: Mapping[str, tuple[float, int, float]],
    clock_of: Callable[[str], object] = lambda _: None,
) -> dict[str, float]:
    """Return the seconds of each task that its targets are relative to, at most the best's.

    A task is (seconds of its best, successes, logarithm of its operations); ``clock_of`` says by
    what key which machine timed it. Machines share the slope of the line, and not its height.
    A task without operations, such as a copy, is not on the line.
    """
    bests = {key: best_sec for key, (best_sec, _, _) in tasks.items()}
    placed = {key: each for key, each in tasks.items() if each[2] > 0.0}
    if len(placed) < _MIN_TASKS:
        return bests
    best_sec, n_trials, log_work = np.array(list(placed.values())).T
    if np.ptp(log_work) == 0.0:
        return bests
    log_best = np.log(best_sec)
    _, clocks = np.unique([str(clock_of(key)) for key in placed], return_inverse=True)
    of_clock = clocks[:, None] == np.arange(clocks.max() + 1)
    # Squared residuals count by the root of the trials: tasks differ by more than trials tell.
    weights = n_trials**0.25
    columns = np.column_stack([log_work, of_clock])
    line, *_ = np.linalg.lstsq(columns * weights[:, None], log_best * weights, rcond=None)
    share = _PRIOR_TRIALS / (_PRIOR_TRIALS + n_trials) * (n_trials < _SETTLED_TRIALS)
    # What was measured is possible, whatever others reach.
    headroom = np.minimum(columns @ line - log_best, 0.0)
    ceilings_sec = np.exp(log_best + share * headroom).tolist()
    return bests | dict(zip(placed, ceilings_sec, strict=True))
