"""The end of a run: play-offs, the final database, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from tvm_adaptive._tvm import Builder, Database, ExtractedTask
from tvm_adaptive.contenders import Contenders, contenders_of
from tvm_adaptive.judge import FunctionJudge, NetworkJudge
from tvm_adaptive.measure_callback.recorder import RunProgress, TaskProgress
from tvm_adaptive.outcome import Comparison, TaskOutcome, TuneReport
from tvm_adaptive.parts import make_builder
from tvm_adaptive.remember import remember_finals
from tvm_adaptive.reserve import LEAST_CHECK_SEC, PLAYOFF_CHECK_SEC, qualifying_sec
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
# Timings of a play-off that are worth the name take at least this long.
_LEAST_TIMING_SEC = 0.2


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Of a task whose play-off comes next.

    Attributes
    ----------
    share : float
        Of all tasks' latency.
    n_left : int
        Tasks whose play-offs have not been held, this one included.
    n_due : int
        Tasks after it that cannot do without.
    """

    share: float
    n_left: int
    n_due: int


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
        last_sec = PLAYOFF_CHECK_SEC
        for n_done, index in enumerate(order):
            mine = contenders[index]
            if session.budget.interrupted or (mine.is_proven and _spare_sec(session) < last_sec):
                reports[index] = best_as_recorded(
                    mine.database, mine.mod, session.target, mine.name
                )
                continue
            turn = _Turn(
                share=mine.importance_sec / total_sec,
                n_left=len(order) - n_done,
                n_due=sum(contenders[i].is_due for i in order[n_done + 1 :]),
            )
            reports[index] = _play_off(session, mine, turn, builder=builder, pool=pool)
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
    turn: _Turn,
    *,
    builder: Builder,
    pool: WorkerPool,
) -> FinalistReport:
    """Hold the play-off of a task.

    Where the seconds would not suffice to check those that are due after it, only its best
    record is checked.
    """
    finish = session.config.finish
    is_hurried = _spare_sec(session) < PLAYOFF_CHECK_SEC + turn.n_due * LEAST_CHECK_SEC
    return play_off(
        mine.database,
        mine.mod,
        session.target,
        builder=builder,
        top_k=1 if is_hurried else finish.top_k,
        n_qualifiers=0 if is_hurried else round(turn.share * finish.n_qualifiers),
        qualifying_sec=turn.share * qualifying_sec(session.budget, finish),
        prefetch=finish.prefetch and not is_hurried,
        max_sec=_timing_sec(session, turn.n_left),
        seed=session.seed,
        journal=session.journal,
        task_name=mine.name,
        pool=pool,
        scratch_dir=session.work_dir,
    )


def _spare_sec(session: Session) -> float:
    return session.budget.left_sec - session.budget.reserve_sec


def _timing_sec(session: Session, n_left: int) -> float:
    spare_sec = _spare_sec(session) - n_left * PLAYOFF_CHECK_SEC
    return min(session.config.finish.max_task_sec, max(_LEAST_TIMING_SEC, spare_sec / n_left))


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
