"""The seconds that a run may spend, and the part of them that a search leaves to its end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Container

from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.tuning.config import FinishConfig

# The next round is expected to take as long as the longest of this many: one slow task
# must not make every later estimate pessimistic.
_RECENT_ROUNDS = 8
# A task's play-off without its timings: three finalists and the untuned function are built
# and checked.
PLAYOFF_CHECK_SEC = 1.5
# The same for one finalist, the least that a task needs: 0.6 to 2.3 s for convolutions of
# networks, half of that for small functions, on two cores.
LEAST_CHECK_SEC = 1.0
# Building one qualifier and timing it some five times: most of that is the build.
_QUALIFIER_SEC = 0.3
# The largest share of what a short run has left that play-offs get: without a search there
# are no finalists.
_MAX_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class _Reserve:
    """Seconds that the end of a run needs."""

    later_sec: float = 0.0  # after the play-offs, if every task is tuned
    least_later_sec: float = 0.0  # after the play-offs, if no task is tuned
    playoff_sec: float = 0.0  # all play-offs
    check_sec: float = 0.0  # play-offs that only check one record of each task

    def after_playoffs_sec(self, tuned_share: float) -> float:
        return self.least_later_sec + tuned_share * (self.later_sec - self.least_later_sec)


class Budget:
    """Wall-clock seconds that a run may spend, and the reserve that its search leaves."""

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        spent_sec: float = 0.0,
    ) -> None:
        self._clock = clock
        self._start_sec = clock()
        self.spent_sec = spent_sec  # before the start
        self.seconds = seconds
        self.reserve_sec = 0.0
        self.interrupted = False
        self.reached = False  # the user's goal
        self._reserve = _Reserve()
        self._round_secs: list[float] = []
        self._round_start_sec: float | None = None
        self._is_over = False

    @property
    def elapsed_sec(self) -> float:
        """Seconds since the start, and those of earlier attempts."""
        return self._clock() - self._start_sec + self.spent_sec

    @property
    def left_sec(self) -> float:
        """Seconds until the command has to end; infinite without a limit."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed_sec

    @property
    def spare_sec(self) -> float:
        """Seconds left without the reserve; negative when the reserve is being spent."""
        return self.left_sec - self.reserve_sec

    @property
    def search_left_sec(self) -> float:
        """Seconds until the search has to end, never below 0."""
        return max(0.0, self.spare_sec)

    def interrupt(self) -> None:
        """Request a clean stop, e.g. from a signal handler."""
        self.interrupted = True

    def round_started(self) -> None:
        """Note that a round begins; the one before has ended."""
        now = self._clock()
        if self._round_start_sec is not None:
            self._round_secs = [*self._round_secs, now - self._round_start_sec][-_RECENT_ROUNDS:]
        self._round_start_sec = now

    @property
    def next_round_sec(self) -> float:
        """Seconds that the next round may take, from the recent ones."""
        return max(self._round_secs, default=0.0)

    def should_stop(self) -> bool:
        """Return True if no further round should begin.

        True after an interrupt, when the goal is reached, and when what is left after the
        next round would not cover the reserve. Once true it stays so: MetaSchedule does not
        ask again for tasks that were refused.
        """
        if self.left_sec < self.reserve_sec + self.next_round_sec:
            self._is_over = True
        return self.interrupted or self.reached or self._is_over

    def plan_reserve(
        self, finish: FinishConfig, n_tasks: int, *, later_sec: float, least_later_sec: float
    ) -> None:
        """Compute what the end of the run needs; for the seconds, see ``_Reserve``."""
        timing_sec = n_tasks * finish.max_task_sec
        if self.seconds is not None:
            timing_sec = min(timing_sec, finish.max_share * self.seconds)
        wanted_sec = n_tasks * PLAYOFF_CHECK_SEC + timing_sec + self.qualifying_sec(finish)
        most_sec = _MAX_SHARE * max(0.0, self.left_sec - least_later_sec)
        self._reserve = _Reserve(
            later_sec=later_sec,
            least_later_sec=least_later_sec,
            playoff_sec=min(wanted_sec, most_sec),
            check_sec=min(n_tasks * LEAST_CHECK_SEC, most_sec),
        )

    def update_reserve(
        self, progress: RunProgress, proven: Container[str], n_trials_per_round: int
    ) -> None:
        """Set the reserve of a search; smaller while some task has nothing to deploy.

        Untuned, a function often takes a hundred times as long; play-offs gain a few
        percent. ``proven`` names the tasks of which an earlier run has proven a record.
        """
        share = tuned_share(progress)
        has_gaps = any(
            math.isinf(task.best_sec)
            and task.n_trials < n_trials_per_round
            and task.name not in proven
            for task in progress.tasks
        )
        playoff_sec = share * self._reserve.check_sec if has_gaps else self._reserve.playoff_sec
        self.reserve_sec = self._reserve.after_playoffs_sec(share) + playoff_sec

    def release_playoffs(self, tuned_share: float) -> None:
        """Reserve only what follows the play-offs if a share of the tasks is tuned."""
        self.reserve_sec = self._reserve.after_playoffs_sec(tuned_share)

    @property
    def compile_sec(self) -> float:
        """Seconds that compiling all tasks takes, beside those of untuned code."""
        return self._reserve.later_sec - self._reserve.least_later_sec

    def qualifying_sec(self, finish: FinishConfig) -> float:
        """Return the seconds for the qualifying of all tasks."""
        total_sec = self.seconds or self.elapsed_sec
        return min(finish.n_qualifiers * _QUALIFIER_SEC, finish.max_share * total_sec)


def tuned_share(progress: RunProgress) -> float:
    """Return the share of the tasks that have a result."""
    n_tuned = sum(math.isfinite(task.best_sec) for task in progress.tasks)
    return n_tuned / max(len(progress.tasks), 1)
