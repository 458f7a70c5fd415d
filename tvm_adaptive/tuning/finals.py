"""The play-offs at the end of a run, and those of records that are deployed without one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from tvm_adaptive._tvm import (
    Builder,
    Database,
    ExtractedTask,
    IRModule,
    TuneContext,
    TuningRecord,
    copy_record,
    memory_database,
)
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.runner.playoff.finalist import (
    CALL_TIMEOUT_SEC,
    NOT_CHECKED,
    REFERENCE_TIMEOUT_SEC,
    Finalist,
    PlayoffOptions,
    as_recorded,
)
from tvm_adaptive.runner.playoff.playoff import (
    FinalistReport,
    final_database,
    play_off,
    without_playoff,
)
from tvm_adaptive.tuning.budget import (
    LEAST_CHECK_SEC,
    LEAST_TIMING_SEC,
    PLAYOFF_CHECK_SEC,
    Budget,
)
from tvm_adaptive.tuning.finalists import Finalists, finalists_of, with_proven
from tvm_adaptive.tuning.form_choice import FormChoice, work_of
from tvm_adaptive.tuning.library_check import LibraryCheck, kernel_worker
from tvm_adaptive.tuning.outcome import TaskOutcome
from tvm_adaptive.tuning.parts import make_playoff_builder
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.tuning.warm_start import VerdictRecorder
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# For a task that is deployed without a search: enough rounds to tell candidates apart that
# differ by a few percent.
_SHORT_TIMING_SEC = 1.0
# A check mostly takes a second; one that needs longer must not use up the time of all others.
_LEAST_LIMIT_SEC = 5.0
# An untuned function may run so long also when the budget is spent: without it, nothing
# of the task can be checked, and its search was useless.
_LEAST_REFERENCE_SEC = 30.0
# Of a task's records, what its stake follows from: the best two.
_N_STAKED = 2
# A play-off that ended like this does not say whether a record of the task is sound.
_UNDECIDED = ("not-held", "no-time", "no-reference", "error")


# A schedule for a task without trials; None where there is none.
Draft: TypeAlias = Callable[[TuneContext, np.random.Generator], TuningRecord | None]


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


def decide(
    session: Session,
    tasks: Sequence[ExtractedTask],
    contexts: Sequence[TuneContext],
    progress: RunProgress,
    check: LibraryCheck,
    *,
    draft: Draft,
    is_second: bool = False,
) -> tuple[Database, list[TaskOutcome]]:
    """Check the best records and write the final database, in which everything was checked.

    Tasks whose play-off is worth its time have one, the others are checked within the
    network; without such a check, each has a play-off. A task that the search did not reach
    has the finalists that earlier runs have proven, or a draft. What is found of a task is
    written before anything of it is used.
    """
    budget = session.budget
    n_records = _N_STAKED if budget.checks_network or budget.interrupted else None
    recorded = finalists_of(session, tasks, n_records=n_records)
    if budget.checks_network and not budget.interrupted:
        add_drafts = functools.partial(_add_drafts, session, contexts, progress, draft)
        choice = _choose_forms(recorded, contexts, progress, check, add_drafts=add_drafts)
    else:
        choice = FormChoice.of(recorded, check.forms, is_direct=check.is_direct)
    finalists = choice.finalists
    reports = {
        index: without_playoff(mine.records, mine.proven, mine.name)
        for index, mine in enumerate(finalists)
    }
    wanted = {i: mine for i, mine in enumerate(finalists) if mine.is_due or mine.is_proven}
    most_secs = dict[int, float]()
    if budget.interrupted:
        wanted = {}
    elif budget.checks_network:
        budget.release_playoffs(1.0)
        most_secs = budget.worthy([each.stake for each in finalists], budget.spare_sec)
        wanted = {index: finalists[index].complete() for index in most_secs}
    with contextlib.closing(VerdictRecorder(session, is_second=is_second)) as recorder:
        reports |= _hold_playoffs(session, wanted, recorder, most_secs)
        if budget.checks_network and not budget.interrupted:
            _check_others(session, check, finalists, reports, recorder)
        hold = functools.partial(_hold_playoffs, session, recorder=recorder)
        choice = _hold_direct(choice, reports, hold)
        # ``apply`` and ``show`` read the run's own verdicts: also on what the store has proven.
        for report in reports.values():
            if report.reason == "not-held":
                recorder.add(report, is_earlier=True)
    if check.forms:
        session.journal.write("forms", groups=choice.as_fields(progress))
    in_order = [reports[index] for index in range(len(finalists))]
    database = final_database(session.work_dir, in_order)
    outcomes = [
        outcome_of(task, report, is_used=is_used)
        for task, report, is_used in zip(progress.tasks, in_order, choice.used, strict=True)
    ]
    return database, outcomes


def _choose_forms(
    finalists: Sequence[Finalists],
    contexts: Sequence[TuneContext],
    progress: RunProgress,
    check: LibraryCheck,
    *,
    add_drafts: Callable[[FormChoice], None],
) -> FormChoice:
    """Choose the forms of a network's parts, and give the tasks in use without a record drafts."""
    works = {
        i: task.weight * work_of(contexts[i].mod)
        for i, task in enumerate(progress.tasks)
        # Where trials have failed, a draft would.
        if check.forms and (finalists[i].records or not task.n_trials)
    }
    choice = FormChoice.of(finalists, check.forms, works, is_direct=check.is_direct)
    add_drafts(choice)
    if not choice.is_complete:
        choice = FormChoice.of(finalists, check.forms, is_direct=check.is_direct)
        add_drafts(choice)
    return choice


def _add_drafts(
    session: Session,
    contexts: Sequence[TuneContext],
    progress: RunProgress,
    draft: Draft,
    choice: FormChoice,
) -> None:
    """Give tasks in use without any record a promising schedule, as time allows."""
    finalists = choice.finalists
    gaps = [
        i
        for i, each in enumerate(finalists)
        if choice.used[i] and not each.records and each.proven is None
    ]
    if not gaps:
        return
    # Untuned, functions of many operations take most of the time.
    gaps.sort(key=lambda i: -progress.tasks[i].weight * work_of(contexts[i].mod))
    gaps_in_time = gaps[: session.budget.reserve_drafts(len(gaps))]
    rngs = np.random.default_rng(session.seed).spawn(len(gaps_in_time))
    with ThreadPoolExecutor(session.n_host_cores) as threads:
        drafts = threads.map(draft, (contexts[index] for index in gaps_in_time), rngs)
        found = {i: each for i, each in zip(gaps_in_time, drafts, strict=True) if each is not None}
    for index, record in found.items():
        finalists[index] = dataclasses.replace(finalists[index], records=(record,), read_all=None)
    session.journal.write("drafted", n_tasks=len(found), n_without=len(gaps) - len(found))


def _hold_direct(
    choice: FormChoice,
    reports: dict[int, FinalistReport],
    hold: Callable[[dict[int, Finalists]], dict[int, FinalistReport]],
) -> FormChoice:
    """Hold the play-offs of direct forms where another one did not pass; return what is used."""
    left = choice.without_unchecked(reports)
    again = {
        index: left.finalists[index].complete()
        for index, was_used in enumerate(choice.used)
        if left.used[index] and not was_used
    }
    if again:
        reports |= hold(again)
    return left


def _check_others(
    session: Session,
    check: LibraryCheck,
    finalists: Sequence[Finalists],
    reports: dict[int, FinalistReport],
    recorder: VerdictRecorder,
) -> None:
    """Check within the network what no play-off has, and hold those of what fails there.

    A function that differs within the network may only round differently: a play-off finds
    out which of its records do not. What fails of the winners beside them is lost, too.
    """
    left = {
        index: mine.without(reports[index].finalists)
        for index, mine in enumerate(finalists)
        if mine.is_due and _is_undecided(reports[index])
    }
    left = {index: mine for index, mine in left.items() if mine.records}
    if not left:
        return
    winners = {
        index: (finalists[index].mod, each.winner)
        for index, each in reports.items()
        if index not in left and each.winner is not None
    }
    found, problems = _check_together(check, left, winners)
    for index, report in found.items():
        recorder.add(report)
        lost = [each for each in reports[index].finalists if each.disqualified]
        reports[index] = report.with_lost(lost)
    for index, problem in problems.items():
        winner, *others = reports[index].finalists
        lost = [dataclasses.replace(winner, disqualified=problem)]
        reports[index] = dataclasses.replace(reports[index], finalists=(*others, *lost))
        recorder.add(reports[index])
    failed = {
        index: finalists[index].complete().without(reports[index].finalists)
        for index in (*left, *problems)
        if reports[index].winner is None
    }
    if failed:
        for index, report in _hold_playoffs(session, failed, recorder).items():
            reports[index] = report.with_lost(reports[index].finalists)


def _is_undecided(report: FinalistReport) -> bool:
    """Whether an unchecked record may take the place of what a report has."""
    return report.reason == "not-held" or (report.reason in _UNDECIDED and report.winner is None)


def _check_together(
    check: LibraryCheck,
    finalists: Mapping[int, Finalists],
    winners: Mapping[int, tuple[IRModule, Finalist]],
) -> tuple[dict[int, FinalistReport], dict[int, str]]:
    """Check the best records of tasks within the network, beside the winners of others.

    Also return what is wrong with winners.
    """
    database = memory_database()
    for _, winner in winners.values():
        copy_record(winner.record, database, [winner.final_sec()])
    for mine in finalists.values():
        # A database gives out no record without times; a draft is the only one of its task.
        copy_record(mine.records[0], database, None if mine.records[0].run_secs else [1.0])
    mods = [mine.mod for mine in finalists.values()] + [mod for mod, _ in winners.values()]
    verdicts = dict(zip((*finalists, *winners), check.check_functions(database, mods), strict=True))
    found = {}
    for index, mine in finalists.items():
        verdict = verdicts[index]
        finalist = as_recorded(mine.records[0], NOT_CHECKED)
        if not math.isfinite(finalist.recorded_sec):  # a draft
            finalist.recorded_sec = verdict.seconds
        if verdict.problem is not None:
            finalist.unchecked, finalist.disqualified = "", verdict.problem
            finalist.in_network = not verdict.problem
        found[index] = FinalistReport(mine.name, (finalist,), "network", 0.0)
    return found, {index: problem for index in winners if (problem := verdicts[index].problem)}


def _hold_playoffs(
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
        for n_done, index in enumerate(order):
            mine, later = finalists[index], [finalists[i] for i in order[n_done + 1 :]]
            n_tuned = sum(report.winner is not None for report in reports.values())
            n_tuned += sum(each.proven is not None for each in later)
            budget.release_playoffs((1 + n_tuned) / len(order))
            held = without_playoff(mine.records, mine.proven, mine.name)
            if budget.interrupted or (mine.is_proven and budget.spare_sec < last_sec):
                reports[index] = held
                continue
            if is_checked_later and budget.spare_sec < PLAYOFF_CHECK_SEC + LEAST_TIMING_SEC:
                reports[index] = held  # of one finalist alone, the network's check tells as much
                continue
            if mine.is_due and budget.spare_sec <= 0:  # nothing of it can be checked any more
                reports[index] = dataclasses.replace(held, reason="no-time")
                continue
            n_due = 0 if is_checked_later else sum(each.is_due for each in later)
            allowance = Allowance(
                share=mine.importance_sec / total_sec,
                n_left=len(order) - n_done,
                due_sec=n_due * (LEAST_CHECK_SEC + budget.compile_task_sec),
                most_sec=most_secs.get(index, math.inf),
            )
            held = hold_playoff(session, mine, allowance, builder=builder, pool=pool)
            last_sec = held.elapsed_sec
            reports[index] = with_proven(held, mine, session.observer)
            recorder.add(reports[index])
    return reports


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
        reference_timeout_sec=reference_timeout_sec(session.budget),
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


def checked_database(
    context: RunContext, finalists: Sequence[Finalists], check: LibraryCheck
) -> Database:
    """Return what can be deployed of tasks that are not tuned any more, each checked.

    Of forms only the fastest are; where one does not pass, the direct form is. What a play-off
    has proven is taken as it is. Of the other tasks, a short play-off checks the best records
    now; a task of which none passes is left out.
    """
    choice = FormChoice.of(finalists, check.forms, is_direct=check.is_direct)
    hold = functools.partial(_checked_reports, context)
    reports = hold(dict(enumerate(choice.finalists)))
    left = _hold_direct(choice, reports, hold)
    database = memory_database()
    for report in (reports[i] for i, is_used in enumerate(left.used) if is_used):
        if report.winner is not None:
            copy_record(report.winner.record, database, [report.winner.final_sec()])
    return database


def _checked_reports(
    context: RunContext, finalists: Mapping[int, Finalists]
) -> dict[int, FinalistReport]:
    """Return what is known of tasks; those of which nothing is proven are checked now."""
    reports = {
        index: without_playoff(each.records, each.proven, each.name)
        for index, each in finalists.items()
    }
    unknown = [i for i, each in finalists.items() if each.proven is None and each.records]
    if unknown:
        context.observer.note(
            f"{len(unknown)} of {len(finalists)} tasks were in no play-off: they are checked now"
        )
        with context.stage("play-off"):
            found = list(_checked_now(context, [finalists[index] for index in unknown]))
            reports |= dict(zip(unknown, found, strict=False))
    return reports


def _checked_now(context: RunContext, finalists: Sequence[Finalists]) -> Iterator[FinalistReport]:
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
        for mine in finalists:
            if context.budget.interrupted:
                return
            held = _play_off(context, mine, options, builder, pool)
            yield with_proven(held, mine, context.observer)


@contextlib.contextmanager
def _builder_and_pool(
    context: RunContext, folder: Path, time_left: Callable[[], float] | None = None
) -> Iterator[tuple[Builder, WorkerPool]]:
    """Open the builder and the worker that play-offs share."""
    with (
        contextlib.closing(kernel_worker(context, time_left)) as pool,
        contextlib.closing(make_playoff_builder(context, folder, time_left)) as builder,
    ):
        yield builder, pool


def reference_timeout_sec(budget: Budget) -> float:
    """Return the deadline of an untuned function's run: longer if the budget allows it."""
    return min(REFERENCE_TIMEOUT_SEC, max(_LEAST_REFERENCE_SEC, budget.spare_sec))


def outcome_of(task: TaskProgress, report: FinalistReport, *, is_used: bool = True) -> TaskOutcome:
    """Return the outcome of a task after its play-off; of a form not used, after its search."""
    first = next((each for each in report.finalists if not each.disqualified), None)
    winner = report.winner if is_used else None
    chosen_sec = math.inf if first is None else first.final_sec()
    return TaskOutcome(
        *(task.name, task.weight, task.n_trials, task.n_errors),
        best_sec=chosen_sec if is_used else task.best_sec,
        played_off=winner is not None and not winner.in_network,
        in_network=winner is not None and winner.in_network,
        n_disqualified=is_used * sum(bool(each.disqualified) for each in report.finalists),
        **task.key._asdict(),
        is_used=is_used,
    )
