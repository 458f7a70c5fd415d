"""What the end of a run decides: which records and forms are deployed, each of them checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    ExtractedTask,
    IRModule,
    TuneContext,
    TuningRecord,
    copy_record,
    memory_database,
    workload_key,
)
from tvm_adaptive.errors import MachineError
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.runner.playoff.finalist import NOT_CHECKED, Finalist, as_recorded
from tvm_adaptive.runner.playoff.modules import mean_sec
from tvm_adaptive.runner.playoff.playoff import (
    FinalistReport,
    copy_winners,
    final_database,
    without_playoff,
)
from tvm_adaptive.tuning.checks.library import LibraryCheck
from tvm_adaptive.tuning.finals.finalists import N_STAKED, Finalists, beaten_by, finalists_of
from tvm_adaptive.tuning.finals.form_choice import FormChoice, work_of
from tvm_adaptive.tuning.finals.playoffs import UNDECIDED, checked_now, hold_playoffs
from tvm_adaptive.tuning.outcome import TaskOutcome
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.tuning.warm_start import VerdictRecorder

# A schedule for a task without trials; None where there is none.
Draft: TypeAlias = Callable[[TuneContext, np.random.Generator], TuningRecord | None]


def decide(
    session: Session,
    tasks: Sequence[ExtractedTask],
    contexts: Sequence[TuneContext],
    progress: RunProgress,
    check: LibraryCheck,
    *,
    run_database: Database,
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
    if is_second:  # all is compiled and checked again
        session.update_reserve(progress)
    n_records = N_STAKED if budget.checks_network or budget.interrupted else None
    recorded = finalists_of(session, tasks, run_database, n_records=n_records)
    add_drafts = None
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
        reports |= hold_playoffs(session, wanted, recorder, most_secs)
        if budget.checks_network and not budget.interrupted:
            _check_others(session, check, finalists, reports, recorder)
        hold = functools.partial(_hold_complete, session, recorder=recorder)
        choice = _hold_replacements(choice, reports, hold, add_drafts)
        # ``apply`` and ``show`` read the run's own verdicts: also on what the store has proven.
        for report in reports.values():
            if report.reason == "not-held":
                recorder.add(report, is_earlier=True)
    if check.forms:
        session.journal.write("forms", groups=choice.as_fields(progress))
    in_order = [reports[index] for index in range(len(finalists))]
    database = _final_database(session, in_order)
    outcomes = [
        outcome_of(task, report, is_used=is_used)
        for task, report, is_used in zip(progress.tasks, in_order, choice.used, strict=True)
    ]
    return database, outcomes


def _final_database(session: Session, reports: Sequence[FinalistReport]) -> Database:
    """Return the database of the winners; a disk that does not take it ends the run early."""
    try:
        return final_database(session.work_dir, reports)
    except MachineError as error:
        if session.budget.interrupted:  # then nothing else tells of it
            session.observer.note(str(error))
        session.machine_failed(str(error))
    database = memory_database()
    copy_winners(reports, database)
    return database


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
    while not choice.is_complete and works:
        drafted = choice.finalists
        lost = {i for i in choice.of_other_forms if not drafted[i].records}  # had no draft
        works = {i: works[i] for i in works.keys() - lost} if works.keys() & lost else {}
        choice = FormChoice.of(finalists, check.forms, works, is_direct=check.is_direct)
        for i, each in enumerate(drafted):
            if choice.used[i] and each.records:  # there may be no time to draft it again
                choice.finalists[i] = each
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


def _hold_complete(
    session: Session, finalists: Mapping[int, Finalists], *, recorder: VerdictRecorder
) -> dict[int, FinalistReport]:
    """Hold play-offs of all records."""
    return hold_playoffs(session, _complete_in_time(session, finalists), recorder)


def _complete_in_time(
    session: Session, finalists: Mapping[int, Finalists]
) -> Mapping[int, Finalists]:
    """Return finalists with all records, which take seconds to read; without time, as they are."""
    if session.budget.interrupted or session.budget.spare_sec <= 0:
        return finalists
    return {index: each.complete() for index, each in finalists.items()}


def _hold_replacements(
    choice: FormChoice,
    reports: dict[int, FinalistReport],
    hold: Callable[[dict[int, Finalists]], dict[int, FinalistReport]],
    add_drafts: Callable[[FormChoice], None] | None = None,
) -> FormChoice:
    """Hold the play-offs of what takes the place of unchecked forms; return what is used."""
    first = choice.used
    # What was proven may be refuted now: then the direct form is left.
    for only_direct in (False, True):
        left = choice.without_unchecked(reports, only_direct=only_direct)
        if left is choice:
            continue
        if add_drafts is not None:
            add_drafts(left)
        reports |= hold(
            {
                index: left.finalists[index]
                for index, was_used in enumerate(choice.used)
                if left.used[index] and not (was_used or first[index])
            }
        )
        choice = left
    return choice


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
    left = _left_to_check(session, finalists, reports)
    if not left:
        return
    winners = {
        index: (finalists[index].mod, each.winner)
        for index, each in reports.items()
        if index not in left and each.winner is not None
    }
    found, problems = _check_together(check, left, winners)
    for index, report in found.items():
        recorder.add(report, beaten=beaten_by(report, left[index]))
        _note_refuted(session, report.task_name, report.finalists)
        lost = [each for each in reports[index].finalists if each.disqualified]
        reports[index] = report.with_lost(lost)
    for index, problem in problems.items():
        winner, *others = reports[index].finalists
        lost = [dataclasses.replace(winner, disqualified=problem)]
        reports[index] = dataclasses.replace(reports[index], finalists=(*others, *lost))
        recorder.add(reports[index])
        _note_refuted(session, reports[index].task_name, lost)
    lost_tasks = [index for index in (*left, *problems) if reports[index].winner is None]
    if problems or any(not each.finalists[0].unchecked for each in found.values()):
        session.budget.network_checked(len(lost_tasks))  # else nothing may be compiled
    whole = _complete_in_time(session, {i: left.get(i, finalists[i]) for i in lost_tasks})
    failed = {index: each.without(reports[index].finalists) for index, each in whole.items()}
    if failed:
        for index, report in hold_playoffs(session, failed, recorder).items():
            reports[index] = report.with_lost(reports[index].finalists)


def _left_to_check(
    session: Session, finalists: Sequence[Finalists], reports: Mapping[int, FinalistReport]
) -> dict[int, Finalists]:
    """Return what no play-off has decided, without the records that are lost already."""
    left = {}
    for index, mine in enumerate(finalists):
        if not (mine.is_due and _is_undecided(reports[index])):
            continue
        others = mine.without(reports[index].finalists)
        if not others.records:  # of the few that were read
            whole = _complete_in_time(session, {index: mine})[index]
            others = whole.without(reports[index].finalists)
        if others.records:
            left[index] = others
    return left


def _note_refuted(session: Session, task_name: str, checked: Sequence[Finalist]) -> None:
    """Write an event that names what the check within the network has refuted of a task."""
    if any(each.is_refuted for each in checked):
        # The seconds are those of the check, which has an event of its own.
        report = FinalistReport(task_name, tuple(checked), "network", 0.0)
        session.journal.write("playoff", **report.as_fields())


def _is_undecided(report: FinalistReport) -> bool:
    """Whether an unchecked record may take the place of what a report has."""
    return report.reason == "not-held" or (report.reason in UNDECIDED and report.winner is None)


def _check_together(
    check: LibraryCheck,
    finalists: Mapping[int, Finalists],
    winners: Mapping[int, tuple[IRModule, Finalist]],
) -> tuple[dict[int, FinalistReport], dict[int, str]]:
    """Check the best records of tasks within the network, beside the winners of others.

    Of equal functions a network has one, of which the best record of all is checked. Also return
    what is wrong with winners.
    """
    database = memory_database()
    keys = {index: workload_key(mine.mod) for index, mine in finalists.items()}
    keys |= {index: workload_key(mod) for index, (mod, _) in winners.items()}
    compiled: dict[str, TuningRecord] = {}
    for index, (_, winner) in sorted(winners.items(), key=lambda each: each[1][1].final_sec()):
        copy_record(winner.record, database, [winner.final_sec()])
        compiled.setdefault(keys[index], winner.record)
    is_of_winner = set(compiled)
    for index, mine in sorted(finalists.items(), key=lambda each: mean_sec(each[1].records[0])):
        compiled.setdefault(keys[index], mine.records[0])
    for key in compiled.keys() - is_of_winner:
        # A database gives out no record without times; a draft is the only one of its task.
        copy_record(compiled[key], database, None if compiled[key].run_secs else [1.0])
    mods = [mine.mod for mine in finalists.values()] + [mod for mod, _ in winners.values()]
    verdicts = dict(zip((*finalists, *winners), check.check_functions(database, mods), strict=True))
    found = {}
    for index, mine in finalists.items():
        verdict = verdicts[index]
        finalist = as_recorded(compiled[keys[index]], NOT_CHECKED)
        finalist.is_draft = not math.isfinite(finalist.recorded_sec)
        if finalist.is_draft:
            finalist.recorded_sec = verdict.seconds
        if verdict.problem is not None:
            finalist.unchecked, finalist.disqualified = "", verdict.problem
            finalist.in_network = not verdict.problem
        found[index] = FinalistReport(mine.name, (finalist,), "network", 0.0)
    return found, {
        index: problem
        for index, (_, winner) in winners.items()
        if compiled[keys[index]] is winner.record and (problem := verdicts[index].problem)
    }


def checked_database(
    context: RunContext, finalists: Sequence[Finalists], check: LibraryCheck
) -> Database:
    """Return what can be deployed of tasks that are not tuned any more, each checked.

    Of forms only the fastest are; where one does not pass, another that is proven is, or the
    direct form. What a play-off has proven is taken as it is. Of the other tasks, a short
    play-off checks the best records now; a task of which none passes is left out.
    """
    choice = FormChoice.of(finalists, check.forms, is_direct=check.is_direct)
    hold = functools.partial(_checked_reports, context)
    reports = hold(dict(enumerate(choice.finalists)))
    left = _hold_replacements(choice, reports, hold)
    database = memory_database()
    copy_winners((reports[i] for i, is_used in enumerate(left.used) if is_used), database)
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
            reports |= checked_now(context, {index: finalists[index] for index in unknown})
    return reports


def outcome_of(task: TaskProgress, report: FinalistReport, *, is_used: bool = True) -> TaskOutcome:
    """Return the outcome of a task after its play-off; of a form not used, after its search."""
    first = next((each for each in report.finalists if not each.disqualified), None)
    winner = report.winner if is_used else None
    chosen_sec = math.inf if first is None else first.final_sec()
    return TaskOutcome(
        task.name,
        task.weight,
        task.n_trials,
        task.n_errors,
        best_sec=chosen_sec if is_used else task.best_sec,
        played_off=winner is not None and not winner.in_network,
        in_network=winner is not None and winner.in_network,
        is_drafted=winner is not None and winner.is_draft,
        n_disqualified=is_used * sum(each.is_refuted for each in report.finalists),
        **task.key._asdict(),
        is_used=is_used,
    )
