"""Connect a run with the stores that outlive it.

What they know goes in, what the run measures goes out. There are two: the one that the
configuration names, shared by runs, and the run's own, from which it can be resumed with
its cost model in the same state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tvm_adaptive._tvm import TuneContext, TuningRecord, python_side
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.keeper import Keeper
from tvm_adaptive.memory import recall, restore
from tvm_adaptive.parts import Parts
from tvm_adaptive.runner.finalist import BUILD_FAILED, SAME, Finalist
from tvm_adaptive.runner.finalists import FinalistReport
from tvm_adaptive.session import Session

RUN_STORE = "records.db"


@contextlib.contextmanager
def remembering(
    session: Session, contexts: Sequence[TuneContext], parts: Parts
) -> Iterator[list[Keeper]]:
    """Teach a run's parts what is known; yield the callbacks that keep what it measures.

    A store that fails costs what it knows, never the run.

    Parameters
    ----------
    session : Session
    contexts : sequence of TuneContext
        One per task.
    parts : Parts
    """
    model = python_side(parts.cost_model)
    with contextlib.ExitStack() as stack:
        stores = []
        own = _own_store(session, model)
        if own is not None:
            stores.append(stack.enter_context(own))
            _restore(session, own, contexts, model)
        if session.store is not None:
            stores.append(session.store)
            _recall(session, session.store, contexts, parts)
        lessons = parts.last_lesson
        keeper = Keeper(stores, contexts, session.run_id, lessons, session.journal)
        yield [keeper] if stores else []


def remember_finals(session: Session, reports: Iterable[FinalistReport]) -> None:
    """Keep what play-offs proved and what they found out in the store that runs share.

    Parameters
    ----------
    session : Session
    reports : iterable of FinalistReport
    """
    if session.store is None:
        return
    try:
        for report in reports:
            finals = [_final_of(each, session.run_id) for each in report.finalists]
            told = [each for each in finals if each is not None]
            if told:
                mod = report.finalists[0].record.workload.mod
                session.store.add_finals(task_of(mod, session.target, report.task_name), told)
    except StoreError as error:
        _tell(session, error, "A later run will not know what the play-offs have shown.")


def _final_of(finalist: Finalist, run_id: str) -> StoredTrial | None:
    """Return what became of a finalist as a row; None if nothing was learned of it."""
    is_timed = math.isfinite(finalist.playoff_sec)
    # A build that failed may have been short of time or memory.
    is_found_out = bool(finalist.disqualified) and not finalist.disqualified.startswith(
        (SAME, BUILD_FAILED)
    )
    is_proven = is_timed and not finalist.disqualified and not finalist.unchecked
    if not (is_found_out or is_proven):
        return None
    record = finalist.record
    seconds = [finalist.final_sec()]
    timed = TuningRecord(record.trace, record.workload, seconds, record.target, record.args_info)
    trial = trial_of(timed, failure=finalist.disqualified, run=run_id)
    is_known = is_timed and math.isfinite(finalist.stderr_sec) and finalist.playoff_sec > 0
    error = finalist.stderr_sec / finalist.playoff_sec if is_known else None
    return dataclasses.replace(trial, error=error)


def _own_store(session: Session, model: Any) -> RecordStore | None:
    """Open the run's own store; a cost model that cannot be restored needs none."""
    if not hasattr(model, "restore"):
        return None
    try:
        return RecordStore(session.work_dir / RUN_STORE)
    except StoreError as error:
        _tell(session, error, "This run can be resumed without its cost model only.")
        return None


def _restore(
    session: Session, own: RecordStore, contexts: Sequence[TuneContext], model: Any
) -> None:
    if not session.history.n_trials:
        return
    try:
        n_samples = restore(own, contexts, model)
    except StoreError as error:
        _tell(session, error, "The cost model starts anew.")
    else:
        session.journal.write("restored", n_samples=n_samples)


def _recall(
    session: Session, store: RecordStore, contexts: Sequence[TuneContext], parts: Parts
) -> None:
    model = python_side(parts.cost_model)
    try:
        recalled = recall(store, contexts, parts.relatives, model, without=session.history.run_ids)
        scheduler = python_side(parts.task_scheduler)
        if scheduler is not None and hasattr(scheduler, "remember"):
            scheduler.remember(recalled.tasks)
    except StoreError as error:
        _tell(session, error, "The run starts from nothing.")
        return
    tasks = recalled.tasks
    session.proven = frozenset(name for name, each in tasks.items() if each.is_proven)
    session.journal.write(
        "recalled",
        store=store.name,
        n_known=recalled.n_known,
        n_related=recalled.n_related,
        n_samples=recalled.n_samples,
        n_trials={name: len(each.latencies_ms) for name, each in tasks.items()},
        proven=sorted(session.proven),
    )
    if recalled.n_known or recalled.n_related:
        session.observer.note(
            f"{recalled.n_known} of {len(contexts)} tasks were tuned before, "
            f"{recalled.n_related} more have relatives in {store.name}"
        )


def _tell(session: Session, error: StoreError, consequence: str) -> None:
    session.observer.note(f"{error} {consequence}")
    session.journal.write("error", where="store", message=str(error))
