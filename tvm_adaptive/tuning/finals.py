"""The end of a run: play-offs, the final database, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tvm_adaptive._tvm import Builder, Database, ExtractedTask, copy_record, memory_database
from tvm_adaptive.database.metaschedule import trial_of
from tvm_adaptive.database.verdicts import candidate_of
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.runner.playoff.finalist import (
    REFERENCE_TIMEOUT_SEC,
    Finalist,
    PlayoffOptions,
)
from tvm_adaptive.runner.playoff.playoff import (
    FinalistReport,
    final_database,
    finalist_pool,
    play_off,
    without_playoff,
)
from tvm_adaptive.tuning.end_to_end import NetworkCheck, OperatorCheck
from tvm_adaptive.tuning.finalists import Finalists, finalists_of
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.outcome import Comparison, TaskOutcome, TuneReport
from tvm_adaptive.tuning.parts import make_builder
from tvm_adaptive.tuning.reserve import LEAST_CHECK_SEC, PLAYOFF_CHECK_SEC, qualifying_sec
from tvm_adaptive.tuning.session import Session
from tvm_adaptive.tuning.target import describe_target, n_cores_of
from tvm_adaptive.tuning.warm_start import FinalsKeeper
from tvm_adaptive.workers.pool import WorkerPool

FINAL_DIR = "final"
# Timings of a play-off that are worth the name take at least this long.
_LEAST_TIMING_SEC = 0.2
# Of a task that is deployed without a search before it: enough rounds to tell apart who
# differs by some hundredths.
_SHORT_TIMING_SEC = 1.0
# An untuned function gets so long to run also when the budget is spent: without it, nothing
# of the task can be checked, and the task's search was in vain.
_LEAST_REFERENCE_SEC = 30.0


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Of a task whose play-off comes next."""

    share: float  # of all tasks' latency
    n_left: int  # tasks whose play-offs have not been held, this one included
    n_due: int  # tasks after it that cannot do without


def decide(
    session: Session, tasks: Sequence[ExtractedTask], progress: RunProgress
) -> tuple[Database, list[TaskOutcome]]:
    """Hold the play-offs and write the final database, in which everything was checked.

    A task that the search did not come to is played for by what earlier runs have proven.
    What each play-off says is kept before the next one begins.
    """
    finalists = finalists_of(session, tasks, progress)
    # Should the time not suffice for all: first those that nobody has checked yet, and the
    # ones that matter most.
    order = sorted(
        range(len(tasks)), key=lambda i: (finalists[i].is_proven, -finalists[i].importance_sec)
    )
    reports: dict[int, FinalistReport] = {}
    with (
        session.stage("play-off"),
        contextlib.closing(FinalsKeeper(session)) as keeper,
        contextlib.closing(
            make_builder(
                session.config,
                session.target,
                session.work_dir,
                server=session.server,
                time_left=lambda: _spare_sec(session),
            )
        ) as builder,
        contextlib.closing(
            finalist_pool(
                n_cores_of(session.target),
                session.server,
                session.farm,
                time_left=lambda: _spare_sec(session),
            )
        ) as pool,
    ):
        total_sec = sum(each.importance_sec for each in finalists) or 1.0
        last_sec = PLAYOFF_CHECK_SEC
        for n_done, index in enumerate(order):
            mine = finalists[index]
            if session.budget.interrupted or (mine.is_proven and _spare_sec(session) < last_sec):
                reports[index] = without_playoff(mine.records, mine.proven, mine.name)
                continue
            if mine.is_due and _spare_sec(session) <= 0:
                # Nobody can check anything of it any more.
                held = without_playoff(mine.records, mine.proven, mine.name)
                reports[index] = dataclasses.replace(held, reason="no-time")
                continue
            turn = _Turn(
                share=mine.importance_sec / total_sec,
                n_left=len(order) - n_done,
                n_due=sum(finalists[i].is_due for i in order[n_done + 1 :]),
            )
            held = _play_off(session, mine, turn, builder=builder, pool=pool)
            keeper.keep(held)
            last_sec = held.elapsed_sec
            reports[index] = _with_proven(held, mine, session.observer)
    database = final_database(session.work_dir, [reports[i] for i in range(len(tasks))])
    outcomes = [_outcome(progress.tasks[i], reports[i]) for i in range(len(tasks))]
    return database, outcomes


def checked_database(session: Session, finalists: Sequence[Finalists]) -> Database:
    """Return what can be deployed of tasks that are not tuned any more, each checked.

    What a play-off has proven is taken as it is. Of the others the best few are checked and
    timed now, shortly; a task of which none passes is left out.
    """
    reports = [
        without_playoff(each.records, each.proven, each.name)
        for each in finalists
        if each.proven is not None
    ]
    unknown = [each for each in finalists if each.proven is None and each.records]
    if unknown:
        session.observer.note(
            f"{len(unknown)} of {len(finalists)} tasks were in no play-off: they are checked now"
        )
        with session.stage("play-off"):
            reports += _checked_now(session, unknown)
    database = memory_database()
    for report in reports:
        if report.winner is not None:
            copy_record(report.winner.record, database, [report.winner.final_sec()])
    return database


def _checked_now(session: Session, finalists: Sequence[Finalists]) -> Iterator[FinalistReport]:
    """Hold a short play-off for each of some tasks."""
    with (
        tempfile.TemporaryDirectory(prefix="play-off-", dir=session.work_dir) as folder,
        contextlib.closing(
            make_builder(session.config, session.target, Path(folder), server=session.server)
        ) as builder,
        contextlib.closing(
            finalist_pool(n_cores_of(session.target), session.server, session.farm)
        ) as pool,
    ):
        for mine in finalists:
            if session.budget.interrupted:
                return
            options = PlayoffOptions(
                top_k=session.config.finish.top_k,
                prefetch=False,
                max_sec=_SHORT_TIMING_SEC,
                seed=session.seed,
                scratch_dir=folder,
            )
            held = play_off(
                mine.records,
                session.target,
                options,
                builder=builder,
                pool=pool,
                journal=session.journal,
                task_name=mine.name,
            )
            yield _with_proven(held, mine, session.observer)


def report_of(
    session: Session,
    what: str,
    check: NetworkCheck | OperatorCheck,
    *,
    outcomes: Sequence[TaskOutcome],
    progress: RunProgress,
    comparison: Comparison | None,
) -> TuneReport:
    """Put the report together and write it to the journal."""
    report = TuneReport(
        what=what,
        target=describe_target(session.target),
        work_dir=session.work_dir,
        database_dir=session.work_dir / FINAL_DIR,
        library=check.library,
        tasks=tuple(outcomes),
        comparison=comparison,
        coverage=check.coverage,
        weighted_sec=sum(task.weight * task.best_sec for task in outcomes),
        errors=dict(progress.errors),
        stage_secs=dict(session.stage_secs),
        elapsed_sec=session.budget.elapsed_sec,
        interrupted=session.budget.interrupted,
        shortfall=check.shortfall,
    )
    session.journal.write("report", **report.as_fields())
    return report


def _play_off(
    session: Session,
    mine: Finalists,
    turn: _Turn,
    *,
    builder: Builder,
    pool: WorkerPool,
) -> FinalistReport:
    """Hold the play-off of a task.

    Where the seconds would not suffice to check those that are due after it, only its best
    record is checked, as thoroughly as any.
    """
    finish = session.config.finish
    is_hurried = _spare_sec(session) < PLAYOFF_CHECK_SEC + turn.n_due * LEAST_CHECK_SEC
    options = PlayoffOptions(
        top_k=1 if is_hurried else finish.top_k,
        n_qualifiers=0 if is_hurried else round(turn.share * finish.n_qualifiers),
        qualifying_sec=turn.share * qualifying_sec(session.budget, finish),
        prefetch=finish.prefetch and not is_hurried,
        reference_timeout_sec=_reference_timeout_sec(session),
        max_sec=_timing_sec(session, turn.n_left),
        limit_sec=_limit_sec(session, turn),
        seed=session.seed,
        scratch_dir=session.work_dir,
    )
    return play_off(
        mine.records,
        session.target,
        options,
        builder=builder,
        pool=pool,
        journal=session.journal,
        task_name=mine.name,
    )


def _spare_sec(session: Session) -> float:
    return session.budget.left_sec - session.budget.reserve_sec


def _limit_sec(session: Session, turn: _Turn) -> float:
    """Return the seconds that a play-off may take: others need some to be checked at all."""
    spare_sec = _spare_sec(session)
    return max(spare_sec - turn.n_due * LEAST_CHECK_SEC, spare_sec / turn.n_left)


def _timing_sec(session: Session, n_left: int) -> float:
    spare_sec = _spare_sec(session) - n_left * PLAYOFF_CHECK_SEC
    return min(session.config.finish.max_task_sec, max(_LEAST_TIMING_SEC, spare_sec / n_left))


def _reference_timeout_sec(session: Session) -> float:
    """Return the deadline of an untuned function's run: longer where the budget allows it."""
    return min(REFERENCE_TIMEOUT_SEC, max(_LEAST_REFERENCE_SEC, _spare_sec(session)))


def _with_proven(held: FinalistReport, mine: Finalists, observer: Observer) -> FinalistReport:
    """Let what an earlier play-off has proven stand where this one had no winner."""
    if held.winner is not None:
        return held
    if mine.proven is not None and not _is_disqualified(mine.proven, held):
        return dataclasses.replace(held, finalists=(mine.proven, *held.finalists))
    if held.unchecked:
        observer.note(f"{mine.name} stays untuned, as nothing could be checked: {held.unchecked}")
    return held


def _is_disqualified(finalist: Finalist, held: FinalistReport) -> bool:
    key = candidate_of(trial_of(finalist.record))
    lost = (each.record for each in held.finalists if each.disqualified)
    return any(candidate_of(trial_of(record)) == key for record in lost)


def _outcome(task: TaskProgress, report: FinalistReport) -> TaskOutcome:
    first = next((each for each in report.finalists if not each.disqualified), None)
    return TaskOutcome(
        name=task.name,
        weight=task.weight,
        n_trials=task.n_trials,
        n_errors=task.n_errors,
        best_sec=math.inf if first is None else first.final_sec(),
        played_off=report.winner is not None,
        n_disqualified=sum(bool(each.disqualified) for each in report.finalists),
    )
