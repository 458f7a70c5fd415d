"""The seconds that a run may spend, and the part of them that a search leaves to its end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Container, Mapping, Sequence

from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.tuning.config import FinishConfig
from tvm_adaptive.tuning.stakes import (
    PLAYOFF_SHARE,
    Plateau,
    Stake,
    plausible_gain,
    worth_playing,
)
from tvm_adaptive.values.forms import in_use

# The next round is expected to take as long as the mean of this many. A longer one spends some
# of the reserve, the largest part of which is rounds of the comparison that can be shorter;
# with the longest of them, one candidate that timed out cost EfficientNet-B0 3 s of a minute.
_RECENT_ROUNDS = 8
# A task's play-off without its timings: three finalists and the untuned function are built
# and checked.
PLAYOFF_CHECK_SEC = 1.5
# The same for one finalist, the least that a task needs: 0.6 to 2.3 s for convolutions of
# networks, half of that for small functions, on two cores.
LEAST_CHECK_SEC = 1.0
# Shorter timings of a play-off tell nothing apart.
LEAST_TIMING_SEC = 0.2
# Building one qualifier and timing it some five times: most of that is the build.
_QUALIFIER_SEC = 0.3
# The largest share of what a short run has left that play-offs get: without a search there
# are no finalists.
_MAX_SHARE = 0.5
# Drafting a schedule took 12 to 25 ms on two cores, as a mean of six networks; compiling it 0.9 to
# 1.2 times as long as the function untuned, which is in the reserve anyway.
_DRAFT_SEC = 0.03
# MetaSchedule makes the design spaces of all tasks before the first round: 28 to 60 ms a task in
# networks of 62 to 136 tasks.
_DESIGN_SPACE_SEC = 0.03
# What follows a search may take so many times as long as estimated; if it does not end in time, the
# library is the untuned one. ResNet-18 with 60 s needed 1.15 times. What the end can do without
# is a part of that.
_LATER_MARGIN = 1.2
# What is being compiled when the budget ends, and its check, may take so large a share of it more:
# untuned, a network takes up to ten times as long. Of 48 runs of 30 and 60 s on a noisy machine,
# two lacked less than a second.
_OVERTIME_SHARE = 0.1
# Closing the parts of the search, and writing what was found.
_CLOSING_SEC = 0.5
# Reading the two best records of a task, and writing its winner.
_CLOSING_TASK_SEC = 0.02


@dataclasses.dataclass(frozen=True)
class EndCosts:
    """Seconds of what follows the play-offs, and of a check that takes the place of some."""

    later_sec: float = 0.0  # if every task is tuned
    least_later_sec: float = 0.0  # if no task is tuned: the untuned code is compiled once more
    margin_sec: float = 0.0  # of ``least_later_sec``, without which there is a library, too
    # One comparison of all functions within the network; None if that is impossible.
    network_check_sec: float | None = None
    # To write the weights that forms of tasks add to the library, by the tasks' names.
    weight_secs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def compile_sec(self) -> float:
        """Compiling all tasks, beside their untuned code."""
        return self.later_sec - self.least_later_sec

    def after_playoffs_sec(self, tuned_share: float) -> float:
        """Return the seconds if a share of the tasks is tuned."""
        return self.least_later_sec + tuned_share * self.compile_sec


@dataclasses.dataclass(frozen=True)
class _Reserve:
    """Seconds that the end of a run needs."""

    costs: EndCosts = EndCosts()
    playoff_sec: float = 0.0  # all play-offs
    check_sec: float = 0.0  # play-offs that only check one record of each task
    n_compilers: int = 1  # processes that compile a network
    n_tasks: int = 1
    draft_sec: float = 0.0  # to draft a task without trials


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
        self.reserve_parts: dict[str, float] = {}  # what it is for, in seconds, for the journal
        self.interrupted = False
        self.machine_failure = ""  # that has interrupted the run; "" for a signal
        self.stop_reason = ""  # why the search ended before its seconds were spent
        self.plateau = Plateau()
        self._reserve = _Reserve()
        self._after_sec = 0.0  # of the reserve, what follows the play-offs
        self._finish = FinishConfig()
        self._plan_sec = self._start_sec
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
    def overtime_left_sec(self) -> float:
        """Seconds until what was begun in time to compile the result has to end, too."""
        return self.left_sec + _OVERTIME_SHARE * (self.seconds or 0.0)

    @property
    def spare_sec(self) -> float:
        """Seconds left without the reserve; negative when the reserve is being spent."""
        # Without a limit, the reserve may be infinite, too.
        return math.inf if self.seconds is None else self.left_sec - self.reserve_sec

    @property
    def search_left_sec(self) -> float:
        """Seconds until the search has to end, never below 0."""
        return max(0.0, self.spare_sec)

    @property
    def searched_sec(self) -> float:
        """Seconds since the search began, and those of earlier attempts."""
        return self._clock() - self._plan_sec + self.spent_sec

    @property
    def checks_network(self) -> bool:
        """Whether tasks may be checked within the network instead of in a play-off."""
        return self._reserve.costs.network_check_sec is not None

    def interrupt(self, machine_failure: str = "") -> None:
        """Request a clean stop: a signal without a reason, or a failure of the machine."""
        self.interrupted, self.machine_failure = True, machine_failure

    @property
    def stopped(self) -> str:
        """Seconds of the run, and why its search ended before they were spent; "" if not."""
        if not self.stop_reason:
            return ""
        of = "" if self.seconds is None else f" of {self.seconds:.0f}"
        return f"stopped after {self.elapsed_sec:.0f}{of} s: {self.stop_reason}"

    def round_started(self) -> None:
        """Note that a round begins; the one before has ended."""
        now = self._clock()
        if self._round_start_sec is not None:
            self._round_secs = [*self._round_secs, now - self._round_start_sec][-_RECENT_ROUNDS:]
        self._round_start_sec = now

    @property
    def next_round_sec(self) -> float:
        """Seconds that the next round may take, from the recent ones."""
        return math.fsum(self._round_secs) / max(len(self._round_secs), 1)

    def should_stop(self) -> bool:
        """Return True if no further round should begin.

        True after an interrupt, when the search has a reason to stop, and when what is left
        after the next round would not cover the reserve. Once true it stays so: MetaSchedule
        does not ask again for tasks that were refused.
        """
        if self.left_sec < self.reserve_sec + self.next_round_sec:
            self._is_over = True
        return self.interrupted or bool(self.stop_reason) or self._is_over

    def can_search(self, n_tasks: int) -> bool:
        """Say whether a search of so many tasks would reach its first round."""
        return not self.should_stop() and self.spare_sec > n_tasks * _DESIGN_SPACE_SEC

    def plan_reserve(
        self,
        finish: FinishConfig,
        n_tasks: int,
        costs: EndCosts,
        *,
        n_compilers: int = 1,
        drafts: bool = True,
    ) -> None:
        """Compute what the end of the run needs."""
        timing_sec = n_tasks * finish.max_task_sec
        if self.seconds is not None:
            timing_sec = min(timing_sec, finish.max_share * self.seconds)
        wanted_sec = n_tasks * PLAYOFF_CHECK_SEC + timing_sec + self.qualifying_sec(finish)
        most_sec = _MAX_SHARE * max(0.0, self.left_sec - costs.least_later_sec)
        self._finish, self._plan_sec = finish, self._clock()
        if self.seconds is None or not finish.within_network:  # without a limit, time has no price
            costs = dataclasses.replace(costs, network_check_sec=None)
        self._reserve = _Reserve(
            costs,
            playoff_sec=min(wanted_sec, most_sec),
            check_sec=min(n_tasks * LEAST_CHECK_SEC, most_sec),
            n_compilers=n_compilers,
            n_tasks=max(n_tasks, 1),
            draft_sec=_DRAFT_SEC if drafts else 0.0,
        )

    def update_reserve(
        self, progress: RunProgress, proven: Container[str], n_trials_per_round: int
    ) -> None:
        """Set the reserve of a search; smaller while some task has nothing to deploy.

        Untuned, a function often takes a hundred times as long; play-offs gain a few
        percent. ``proven`` names the tasks of which an earlier run has proven a record, which is
        compiled also if the search does not reach the task.
        """
        reserve, costs = self._reserve, self._reserve.costs
        used = _tasks_in_use(progress, proven)
        tuned = [task for task in used if _has_result(task, proven)]
        share = len(tuned) / max(len(used), 1)
        has_gaps = any(
            not _has_result(task, proven)
            and not task.is_given_up
            and task.n_trials < n_trials_per_round
            for task in used
        )
        if costs.network_check_sec is None:
            check_sec = timed_share(progress) * reserve.check_sec  # none of what is proven
            later = {"later": costs.after_playoffs_sec(share)}
            first = {"play-off": check_sec if has_gaps else reserve.playoff_sec}
        else:
            n_tasks = len(used)
            default_sec = costs.compile_sec / max(n_tasks, 1)
            build_sec = tuned_compile_sec(tuned, default_sec)
            # Reading, packing and linking a network take about as long as the code of its
            # untuned functions, which stays in the reserve for that.
            later = {
                "later": costs.least_later_sec,
                "compile": build_sec / reserve.n_compilers,
                "check": costs.network_check_sec,
                "weights": self._weights_sec(progress, proven),
            }
            # A task without trials is drafted.
            drafts_sec = (1.0 - share) * n_tasks * reserve.draft_sec
            first = {
                "draft": drafts_sec if has_gaps else 0.0,
                "play-off": 0.0 if has_gaps else self._worthy_playoffs_sec(progress),
                "close": _CLOSING_SEC + n_tasks * _CLOSING_TASK_SEC,
                "margin": max(0.0, (_LATER_MARGIN - 1.0) * sum(later.values()) - costs.margin_sec),
            }
        self._after_sec = sum(later.values())
        self.reserve_parts = first | later
        self.reserve_sec = sum(self.reserve_parts.values())

    def _weights_sec(self, progress: RunProgress, proven: Container[str]) -> float:
        """Return the seconds of writing weights, of the fastest forms or the heaviest tried."""
        used = {task.name: task for task in progress.used_tasks}
        known = {task.key.group for task in used.values() if math.isfinite(task.best_sec)}
        most: dict[str, float] = {}
        for task in progress.tasks:
            is_open = task.n_trials or task.name in proven
            if is_open and (task.name in used or task.key.group not in known):
                own_sec = self._reserve.costs.weight_secs.get(task.name, 0.0)
                most[task.key.group] = max(own_sec, most.get(task.key.group, 0.0))
        return math.fsum(most.values())

    def _worthy_playoffs_sec(self, progress: RunProgress) -> float:
        """Return the seconds of the play-offs that would be held now."""
        stakes = [
            Stake(task.weight * task.best_sec, plausible_gain((task.best_sec, task.second_sec)))
            if math.isfinite(task.best_sec)
            else Stake(0.0)
            for task in progress.used_tasks
        ]
        allowance_sec = PLAYOFF_SHARE * (self.seconds or 0.0)
        return min(allowance_sec, sum(self.worthy(stakes, math.inf).values()))

    def worthy(self, stakes: Sequence[Stake], spare_sec: float) -> dict[int, float]:
        """Return the play-offs that are worth their time, and the most seconds of each."""
        most_sec = PLAYOFF_CHECK_SEC + self._finish.max_task_sec
        found = worth_playing(
            stakes,
            searched_sec=self.searched_sec,
            playoff_sec=PLAYOFF_CHECK_SEC + LEAST_TIMING_SEC,
            allowance_sec=min(spare_sec, PLAYOFF_SHARE * (self.seconds or 0.0)),
        )
        return {index: min(sec, most_sec) for index, sec in found.items()}

    def reserve_drafts(self, n_wanted: int) -> int:
        """Reserve the seconds that drafts take; return for how many tasks there is time.

        If time is short they come before the margin: untuned, a network often takes ten times
        as long, and it is there if a compilation does not end in time.
        """
        each_sec = self._reserve.draft_sec
        if each_sec <= 0:
            return 0
        left_sec = self.left_sec - self._after_sec
        n_drafts = int((left_sec + self._reserve.costs.margin_sec) / each_sec)
        n_drafts = min(n_wanted, max(0, n_drafts))
        self._after_sec += min(n_drafts * each_sec, max(0.0, left_sec))
        return n_drafts

    def release_playoffs(self, tuned_share: float) -> None:
        """Reserve only what follows the play-offs if a share of the tasks is tuned."""
        if not self.checks_network:
            self._after_sec = self._reserve.costs.after_playoffs_sec(tuned_share)
        self.reserve_sec = self._after_sec

    def network_checked(self, n_failed: int) -> None:
        """Reserve what follows a check within the network that so many tasks have failed.

        Of the others, what was compiled is used again.
        """
        parts, n_compilers = self.reserve_parts, self._reserve.n_compilers
        mean_sec = n_compilers * parts.get("compile", 0.0) / self._reserve.n_tasks
        again_sec = n_failed * max(self.compile_task_sec, mean_sec) + parts.get("weights", 0.0)
        self._after_sec = min(self._after_sec, self.least_later_sec + again_sec)
        self.reserve_sec = self._after_sec

    @property
    def least_later_sec(self) -> float:
        """Seconds after the play-offs if no task is tuned."""
        return self._reserve.costs.least_later_sec

    @property
    def compile_task_sec(self) -> float:
        """Seconds that compiling a task takes, beside those of its untuned code."""
        return self._reserve.costs.compile_sec / self._reserve.n_tasks

    def qualifying_sec(self, finish: FinishConfig) -> float:
        """Return the seconds for the qualifying of all tasks."""
        total_sec = self.seconds or self.elapsed_sec
        return min(finish.n_qualifiers * _QUALIFIER_SEC, finish.max_share * total_sec)


def timed_share(progress: RunProgress) -> float:
    """Return the share of the tasks that have a result of this run."""
    n_timed = sum(math.isfinite(task.best_sec) for task in progress.used_tasks)
    return n_timed / max(len(progress.used_tasks), 1)


def tuned_compile_sec(tuned: Sequence[TaskProgress], default_sec: float) -> float:
    """Return the seconds that compiling the best candidates of tasks takes, in one process.

    A task whose build was not timed takes as long as the others, at most ``default_sec``, and
    just as long if none was. Builds of candidates, each with a linker and beside others, take a
    little longer than that.
    """
    known = [task.build_sec for task in tuned if math.isfinite(task.build_sec)]
    # A search begins with large functions: their builds alone must not end it.
    rest_sec = min(math.fsum(known) / len(known), default_sec) if known else default_sec
    return math.fsum(known) + (len(tuned) - len(known)) * rest_sec


def _has_result(task: TaskProgress, proven: Container[str]) -> bool:
    return math.isfinite(task.best_sec) or task.name in proven


def _tasks_in_use(progress: RunProgress, proven: Container[str]) -> list[TaskProgress]:
    """Return the tasks of the fastest forms; where none is timed, of one that is proven.

    Which proven form is the fastest is not known yet. The one with the most tasks takes the
    longest to compile: of sums of -1, it has the least.
    """
    timed = {task.key.group for task in progress.used_tasks if math.isfinite(task.best_sec)}

    def cost(task: TaskProgress) -> float:
        if task.key.group in timed:
            return task.share_sec
        return -1.0 if _has_result(task, proven) else math.inf

    used = in_use([task.key for task in progress.tasks], [cost(task) for task in progress.tasks])
    return [task for task, is_used in zip(progress.tasks, used, strict=True) if is_used]
