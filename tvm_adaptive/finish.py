"""The end of a run: play-offs, the final database, and the report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from tvm_adaptive._tvm import Builder, Database, ExtractedTask
from tvm_adaptive.contenders import Contenders, contenders_of
from tvm_adaptive.judge import FunctionJudge, NetworkJudge
from tvm_adaptive.measure_callback.recorder import RunProgress, TaskProgress
from tvm_adaptive.outcome import Comparison, TaskOutcome, TuneReport
from tvm_adaptive.parts import make_builder
from tvm_adaptive.remember import remember_finals
from tvm_adaptive.runner.finalists import (
    FinalistReport,
    best_as_recorded,
    final_database,
    finalist_pool,
    play_off,
)
from tvm_adaptive.session import Session
from tvm_adaptive.target import describe_target, n_cores_of
from tvm_adaptive.workers import WorkerPool

FINAL_DIR = "final"
# Building three finalists and the untuned function and checking them, per task.
_CHECK_SEC = 1.0
# Building one qualifier and timing it some five times: most of that is the build.
_QUALIFIER_SEC = 0.3
# Timings of a play-off that are worth the name take at least this long.
_LEAST_TIMING_SEC = 0.2
# Of what a short run has left, play-offs get no more: without a search there is nothing to
# play for.
_MAX_RESERVE_SHARE = 0.5


def playoff_reserve_sec(session: Session, n_tasks: int, later_sec: float) -> float:
    """Return the seconds to keep back for the play-offs of ``n_tasks`` tasks.

    Parameters
    ----------
    session : Session
    n_tasks : int
    later_sec : float
        Seconds that are kept back for what comes after the play-offs.
    """
    finish = session.config.finish
    timing_sec = n_tasks * finish.max_task_sec
    if session.budget.seconds is not None:
        timing_sec = min(timing_sec, finish.max_share * session.budget.seconds)
    wanted_sec = n_tasks * _CHECK_SEC + timing_sec + _qualifying_sec(session)
    return min(wanted_sec, _MAX_RESERVE_SHARE * max(0.0, session.budget.left_sec - later_sec))


def _qualifying_sec(session: Session) -> float:
    """Return the seconds for the qualifying of all tasks."""
    finish = session.config.finish
    spent_sec = session.budget.seconds or session.budget.elapsed_sec
    return min(finish.n_qualifiers * _QUALIFIER_SEC, finish.max_share * spent_sec)


def decide(
    session: Session, tasks: Sequence[ExtractedTask], progress: RunProgress
) -> tuple[Database, list[TaskOutcome]]:
    """Hold the play-offs and write the final database.

    A task that the search did not come to is played for by what earlier runs have proven.

    Parameters
    ----------
    session : Session
        An interrupt ends the play-offs; tasks without one keep their best record.
    tasks : sequence of ExtractedTask
    progress : RunProgress
        In the order of ``tasks``.

    Returns
    -------
    database : Database
        With the winner of every task.
    outcomes : list of TaskOutcome
        In the order of ``tasks``.
    """
    contenders = contenders_of(session, tasks, progress)
    # Should the time not suffice for all: first those that nobody has checked yet, and the
    # ones that matter most.
    order = sorted(
        range(len(tasks)), key=lambda i: (contenders[i].is_proven, -contenders[i].importance_sec)
    )
    reports: dict[int, FinalistReport] = {}
    with (
        session.stage("play-off"),
        contextlib.closing(
            make_builder(session.config, session.target, session.work_dir, server=session.server)
        ) as builder,
        contextlib.closing(
            finalist_pool(n_cores_of(session.target), session.server, session.farm)
        ) as pool,
    ):
        total_sec = sum(each.importance_sec for each in contenders) or 1.0
        last_sec = _CHECK_SEC
        for n_done, index in enumerate(order):
            mine = contenders[index]
            if session.budget.interrupted or (mine.is_proven and _is_late(session, last_sec)):
                reports[index] = best_as_recorded(
                    mine.database, mine.mod, session.target, mine.name
                )
                continue
            share, n_left = mine.importance_sec / total_sec, len(order) - n_done
            reports[index] = _play_off(session, mine, share, n_left, builder=builder, pool=pool)
            last_sec = reports[index].elapsed_sec
    remember_finals(session, reports.values())
    database = final_database(
        session.work_dir, "structural", [reports[i] for i in range(len(tasks))]
    )
    outcomes = [_outcome(progress.tasks[i], reports[i]) for i in range(len(tasks))]
    return database, outcomes


def report_of(
    session: Session,
    what: str,
    judge: NetworkJudge | FunctionJudge,
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
        library=judge.library,
        tasks=tuple(outcomes),
        comparison=comparison,
        coverage=judge.coverage,
        weighted_sec=sum(task.weight * task.best_sec for task in outcomes),
        errors=dict(progress.errors),
        stage_secs=dict(session.stage_secs),
        elapsed_sec=session.budget.elapsed_sec,
        interrupted=session.budget.interrupted,
    )
    session.journal.write("report", **report.as_fields())
    return report


def _play_off(
    session: Session,
    mine: Contenders,
    share: float,
    n_left: int,
    *,
    builder: Builder,
    pool: WorkerPool,
) -> FinalistReport:
    """Hold the play-off of a task that has this share of all latency."""
    finish = session.config.finish
    return play_off(
        mine.database,
        mine.mod,
        session.target,
        builder=builder,
        top_k=finish.top_k,
        n_qualifiers=round(share * finish.n_qualifiers),
        qualifying_sec=share * _qualifying_sec(session),
        prefetch=finish.prefetch,
        max_sec=_timing_sec(session, n_left),
        seed=session.seed,
        journal=session.journal,
        task_name=mine.name,
        pool=pool,
        scratch_dir=session.work_dir,
    )


def _is_late(session: Session, next_sec: float) -> bool:
    """Say whether another play-off would take seconds that are kept back for later."""
    return session.budget.left_sec < session.budget.reserve_sec + next_sec


def _timing_sec(session: Session, n_left: int) -> float:
    finish = session.config.finish
    spare_sec = session.budget.left_sec - session.budget.reserve_sec - n_left * _CHECK_SEC
    return min(finish.max_task_sec, max(_LEAST_TIMING_SEC, spare_sec / n_left))


def _outcome(task: TaskProgress, report: FinalistReport) -> TaskOutcome:
    winner = report.winner
    return TaskOutcome(
        name=task.name,
        weight=task.weight,
        n_trials=task.n_trials,
        n_errors=task.n_errors,
        best_sec=math.inf if winner is None else winner.final_sec(),
        played_off=winner is not None and math.isfinite(winner.playoff_sec),
        n_disqualified=sum(bool(each.disqualified) for each in report.finalists),
    )
