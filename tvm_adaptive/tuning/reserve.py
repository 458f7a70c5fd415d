"""How many seconds a search leaves to what comes after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container

from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import FinishConfig

# A task's play-off without its timings: three finalists and the untuned function are built,
# and checked.
PLAYOFF_CHECK_SEC = 1.0
# The same for one finalist: what a task needs at the least.
LEAST_CHECK_SEC = 0.6
# Building one qualifier and timing it some five times: most of that is the build.
_QUALIFIER_SEC = 0.3
# Of what a short run has left, play-offs get no more: without a search there is nothing to
# play for.
_MAX_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Reserve:
    """Seconds to keep back."""

    later_sec: float = 0.0  # for what comes after the play-offs, where every task is tuned
    least_later_sec: float = 0.0  # the same, where none is
    playoff_sec: float = 0.0  # for the play-offs
    check_sec: float = 0.0  # for play-offs that check one record of each task, and nothing else

    def kept_sec(self, *, has_gaps: bool, share: float = 1.0) -> float:
        """Return what a search keeps back; less while there are tasks that have nothing.

        Untuned, a function often takes a hundred times as long, and play-offs win some
        hundredths.
        """
        if not has_gaps:
            return self.after_sec(share) + self.playoff_sec
        return self.after_sec(share) + share * self.check_sec

    def after_sec(self, share: float) -> float:
        """Return what comes after the play-offs, where so much of all tasks is tuned."""
        return self.least_later_sec + share * (self.later_sec - self.least_later_sec)


def reserve_of(
    budget: Budget,
    finish: FinishConfig,
    n_tasks: int,
    *,
    later_sec: float,
    least_later_sec: float,
) -> Reserve:
    """Return what to keep back for the end of a run."""
    timing_sec = n_tasks * finish.max_task_sec
    if budget.seconds is not None:
        timing_sec = min(timing_sec, finish.max_share * budget.seconds)
    wanted_sec = n_tasks * PLAYOFF_CHECK_SEC + timing_sec + qualifying_sec(budget, finish)
    most_sec = _MAX_SHARE * max(0.0, budget.left_sec - least_later_sec)
    return Reserve(
        later_sec=later_sec,
        least_later_sec=least_later_sec,
        playoff_sec=min(wanted_sec, most_sec),
        check_sec=min(n_tasks * LEAST_CHECK_SEC, most_sec),
    )


def qualifying_sec(budget: Budget, finish: FinishConfig) -> float:
    """Return the seconds for the qualifying of all tasks."""
    spent_sec = budget.seconds or budget.elapsed_sec
    return min(finish.n_qualifiers * _QUALIFIER_SEC, finish.max_share * spent_sec)


def tuned_share(progress: RunProgress) -> float:
    """Return the share of the tasks that have a result."""
    n_tuned = sum(math.isfinite(task.best_sec) for task in progress.tasks)
    return n_tuned / max(len(progress.tasks), 1)


def has_gaps(progress: RunProgress, proven: Container[str], n_tries: int) -> bool:
    """Say whether a task has nothing to deploy, and might have if it was tried."""
    return any(
        math.isinf(task.best_sec) and task.n_trials < n_tries and task.name not in proven
        for task in progress.tasks
    )
