"""The play-offs of a run's tasks: their order, and the seconds of each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tvm_adaptive._tvm import Builder
from tvm_adaptive.runner.playoff.finalist import CALL_TIMEOUT_SEC, PlayoffOptions
from tvm_adaptive.runner.playoff.playoff import FinalistReport, play_off, without_playoff
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.budget import (
    LEAST_CHECK_SEC,
    LEAST_TIMING_SEC,
    PLAYOFF_CHECK_SEC,
    Budget,
)
from tvm_adaptive.tuning.checks.library import kernel_worker
from tvm_adaptive.tuning.finals.finalists import Finalists, note_unchecked, with_proven
from tvm_adaptive.tuning.parts import make_playoff_builder, remove_candidates
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.tuning.warm_start import VerdictRecorder
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# For a task that is deployed without a search: enough rounds to tell candidates apart that
# differ by a few percent.
_SHORT_TIMING_SEC = 1.0
# A check mostly takes a second; one that needs longer must not use up the time of all others.
_LEAST_LIMIT_SEC = 5.0
# A farm that has no device for so many pauses of a minute has none.
_MOST_PAUSES = 3
_PAUSE_STEP_SEC = 0.2


@dataclasses.dataclass(frozen=True)
class Allowance:
    """What a task's play-off may take, by its position among the play-offs of a run."""

    share: float  # of the latency of all tasks
    n_left: int  # tasks whose play-offs have not been held, this one included
    due_sec: float  # to check and compile the later tasks that have no checked record
    most_sec: float = math.inf  # in which a search would bring as much

    def limit_sec(self, spare_sec: float) -> float:
        """Return the seconds that the play-off may take, so that later tasks can be checked.

        If the time does not suffice for all, the tasks that matter most are checked, which
        come first: equal shares would be too short for any.
        """
        least_sec = min(spare_sec, _LEAST_LIMIT_SEC)
        limit_sec = max(spare_sec - self.due_sec, spare_sec / self.n_left, least_sec)
        return min(limit_sec, self.most_sec)

    def timing_sec(self, spare_sec: float, max_sec: float) -> float:
        """Return the seconds that the play-off's timings may take."""
        fair_sec = (spare_sec - self.n_left * PLAYOFF_CHECK_SEC) / self.n_left
        most_sec = min(max_sec, self.most_sec - PLAYOFF_CHECK_SEC)
        return min(most_sec, max(LEAST_TIMING_SEC, fair_sec))

    def is_hurried(self, spare_sec: float) -> bool:
        """Return True if a full play-off would leave too little to check later tasks."""
        return spare_sec < PLAYOFF_CHECK_SEC + self.due_sec


# Reasons of play-offs that do not say whether a record is sound: the check within the network does.
UNDECIDED = ("not-held", "no-time", "no-reference", "error")


def hold_playoffs(
    session: Session,
    finalists: Mapping[int, Finalists],
    recorder: VerdictRecorder,
    most_secs: Mapping[int, float] = MappingProxyType({}),
) -> dict[int, FinalistReport]:
    """Hold the play-offs of tasks; some have a limit of their own for their seconds."""
    budget, reports = session.budget, dict[int, FinalistReport]()
    if not finalists:
        return reports
    # If the time does not suffice for all: first those without a checked record, and among
    # them the ones that matter most.
    order = sorted(finalists, key=lambda i: (finalists[i].is_proven, -finalists[i].importance_sec))
    total_sec = sum(each.importance_sec for each in finalists.values()) or 1.0
    last_sec = PLAYOFF_CHECK_SEC
    is_checked_later = bool(most_secs)  # within the network, what has no play-off
    with (
        session.stage("play-off"),
        _builder_and_pool(session, session.work_dir, lambda: budget.spare_sec) as (builder, pool),
    ):
        outages = _Outages(pool, budget)
        for n_done, index in enumerate(order):
            mine, later = finalists[index], [finalists[i] for i in order[n_done + 1 :]]
            n_tuned = sum(report.winner is not None for report in reports.values())
            n_tuned += sum(each.proven is not None for each in later)
            budget.release_playoffs((1 + n_tuned) / len(order))
            held = without_playoff(mine.records, mine.proven, mine.name)
            if index in outages.again:
                held = with_proven(reports[index], mine)
            if budget.interrupted or (mine.is_proven and budget.spare_sec < last_sec):
                reports[index] = held
                continue
            if is_checked_later and budget.spare_sec < PLAYOFF_CHECK_SEC + LEAST_TIMING_SEC:
                reports[index] = held  # of one finalist alone, the network's check tells as much
                continue
            if mine.is_due and budget.spare_sec <= 0:  # nothing of it can be checked any more
                if mine.proven is None and index not in outages.again:
                    held = dataclasses.replace(held, reason="no-time")
                reports[index] = held
                continue
            n_due = 0 if is_checked_later else sum(each.is_due for each in later)
            allowance = Allowance(
                share=mine.importance_sec / total_sec,
                n_left=len(order) - n_done,
                due_sec=n_due * (LEAST_CHECK_SEC + budget.compile_task_sec),
                most_sec=most_secs.get(index, math.inf),
            )
            outages.pause()
            held = hold_playoff(session, mine, allowance, builder=builder, pool=pool)
            last_sec = held.elapsed_sec
            if outages.play_again(index, held):
                order.append(index)  # its device may be another one then
            else:
                held = with_proven(held, mine)
                if not (is_checked_later and held.reason in UNDECIDED):
                    note_unchecked(held, session.observer)
            reports[index] = held
            recorder.add(held)
    return reports


class _Outages:
    """What the outages of a farm cost its play-offs: pauses, and second turns of tasks."""

    def __init__(self, pool: WorkerPool, budget: Budget) -> None:
        self._farm = pool if isinstance(pool, LeasingPool) else None
        self._budget = budget
        self._n_pauses = 0
        self.again = set[int]()  # tasks that play once more

    def pause(self) -> None:
        """Wait until a farm that had no device is asked again, if there is time."""
        pause_sec = 0.0 if self._farm is None else self._farm.pause_sec
        if self._n_pauses >= _MOST_PAUSES or not 0.0 < pause_sec < self._budget.spare_sec:
            return
        self._n_pauses += 1
        end_sec = time.monotonic() + pause_sec
        while time.monotonic() < end_sec and not self._budget.interrupted:
            time.sleep(_PAUSE_STEP_SEC)

    def play_again(self, index: int, held: FinalistReport) -> bool:
        """Say whether a task has lost its device, so that it plays once more after the others."""
        is_lost = self._farm is not None and held.reason == "error" and held.winner is None
        if not is_lost or index in self.again:
            return False
        self.again.add(index)
        return True


def hold_playoff(
    session: Session, mine: Finalists, allowance: Allowance, *, builder: Builder, pool: WorkerPool
) -> FinalistReport:
    """Hold the play-off of a task; in a hurry, only its best record is checked."""
    finish, spare_sec = session.config.finish, session.budget.spare_sec
    is_hurried = allowance.is_hurried(spare_sec)
    options = PlayoffOptions(
        top_k=1 if is_hurried else finish.top_k,
        n_qualifiers=0 if is_hurried else round(allowance.share * finish.n_qualifiers),
        qualifying_sec=allowance.share * session.budget.qualifying_sec(finish),
        prefetch=finish.prefetch and not is_hurried,
        timeout_sec=_call_timeout_sec(session),
        max_sec=allowance.timing_sec(spare_sec, finish.max_task_sec),
        limit_sec=allowance.limit_sec(spare_sec),
        seed=session.seed,
        scratch_dir=session.work_dir,
    )
    return _play_off(session, mine, options, builder, pool)


def _call_timeout_sec(context: RunContext) -> float:
    """Return a deadline of a check or timing that no kernel misses which the runner measured."""
    return max(CALL_TIMEOUT_SEC, 2.0 * context.config.measure.timeout_sec)


def _play_off(
    context: RunContext,
    mine: Finalists,
    options: PlayoffOptions,
    builder: Builder,
    pool: WorkerPool,
) -> FinalistReport:
    return play_off(
        mine.records,
        context.target,
        options,
        builder=builder,
        pool=pool,
        journal=context.journal,
        task_name=mine.name,
    )


def checked_now(
    context: RunContext, finalists: Mapping[int, Finalists]
) -> dict[int, FinalistReport]:
    """Hold short play-offs of tasks that are deployed without a search, until an interrupt."""
    reports: dict[int, FinalistReport] = {}
    order = list(finalists)
    with (
        ScratchFolder("playoff", context.work_dir) as folder,
        _builder_and_pool(context, folder) as (builder, pool),
    ):
        options = PlayoffOptions(
            top_k=context.config.finish.top_k,
            prefetch=False,
            timeout_sec=_call_timeout_sec(context),
            max_sec=_SHORT_TIMING_SEC,
            seed=context.seed,
            scratch_dir=folder,
        )
        outages = _Outages(pool, context.budget)
        for index in order:
            outages.pause()
            if context.budget.interrupted:
                break
            mine = finalists[index].complete()
            held = _play_off(context, mine, options, builder, pool)
            reports[index] = with_proven(held, mine)
            if outages.play_again(index, held):
                order.append(index)
            else:
                note_unchecked(reports[index], context.observer)
    return reports


@contextlib.contextmanager
def _builder_and_pool(
    context: RunContext, folder: Path, time_left: Callable[[], float] | None = None
) -> Iterator[tuple[Builder, WorkerPool]]:
    """Open the builder and the worker that play-offs share."""
    with contextlib.ExitStack() as stack:
        stack.callback(remove_candidates, folder)  # when no worker holds them any more
        pool = stack.enter_context(contextlib.closing(kernel_worker(context, time_left)))
        made = make_playoff_builder(context, folder, time_left)
        yield stack.enter_context(contextlib.closing(made)), pool
