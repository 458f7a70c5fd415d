"""Connect a run with the stores that outlive it.

What they know goes in, what the run measures goes out. There are two: the one that the
configuration names, shared by runs, and the run's own, from which it can be resumed with
its cost model in the same state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    TVM_VERSION,
    TuneContext,
    TuningRecord,
    model_hooks,
    python_side,
    scheduler_hooks,
)
from tvm_adaptive.database.location import RUN_STORE
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.store_callback import StoreCallback
from tvm_adaptive.database.verdict_file import VerdictFile
from tvm_adaptive.errors import StoreError
from tvm_adaptive.runner.playoff.finalist import BUILD_FAILED, SAME, Finalist
from tvm_adaptive.runner.playoff.playoff import FinalistReport
from tvm_adaptive.tuning.other_machine import recall_set_aside
from tvm_adaptive.tuning.parts import Parts
from tvm_adaptive.tuning.prior_trials import find_prior_trials, restore
from tvm_adaptive.tuning.session import Session
from tvm_adaptive.values.hooks import ModelHooks
from tvm_adaptive.workers.environment import Environment

logger = logging.getLogger(__name__)

# At the end of a run a shared store that does not answer is waited for so long.
_DELIVERY_SEC = 30.0
# After Ctrl-C somebody waits for the end.
_HURRIED_DELIVERY_SEC = 5.0


@contextlib.contextmanager
def remembering(
    session: Session, contexts: Sequence[TuneContext], parts: Parts
) -> Iterator[list[StoreCallback]]:
    """Teach a run's parts what is known; yield the callbacks that keep what it measures.

    A store that fails costs what it knows, never the run.
    """
    model = model_hooks(parts.cost_model)
    shared = session.store
    with contextlib.ExitStack() as stack:
        own = _own_store(session, model)
        if own is not None:
            stack.enter_context(own)
            _restore(session, own, contexts, model)
        if parts.transfer_pool is not None:
            hinted = recall_set_aside(session.work_dir, contexts, parts.transfer_pool)
            if hinted:
                session.journal.write("hinted", tasks=hinted)
        if shared is not None:
            _recall(session, shared, contexts, parts)
        if own is None and shared is None:
            yield []
            return
        keeper = StoreCallback(
            contexts,
            own=own,
            shared=shared,
            run=session.run_id,
            trial_log=parts.trial_log,
            journal=session.journal,
        )
        try:
            yield [keeper]
        finally:
            _deliver(session, keeper)


class FinalsKeeper:
    """Keep what play-offs prove and what they find out: with the run, and in the shared store.

    Each play-off's verdicts are on disk before the next begins. What a store does not take
    is offered to it once more when the keeper is closed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file = VerdictFile(session.work_dir, str(TVM_VERSION))
        self._refused: list[tuple[StoredTask, list[StoredTrial]]] = []

    def keep(self, report: FinalistReport) -> None:
        """Keep what a play-off said."""
        found = [_final_of(each, self._session.run_id) for each in report.finalists]
        finals = [each for each in found if each is not None]
        if not finals:
            return
        mod = report.finalists[0].record.workload.mod
        task = task_of(mod, self._session.target, report.task_name)
        try:
            self._file.add(task, finals)
        except OSError as error:
            consequence = "If the run ends early, apply checks its winners once more."
            _tell(self._session, error, consequence, where="verdicts")
        if self._session.store is None:
            return
        try:
            if not self._refused:
                self._session.store.add_finals(task, finals)
                return
        except StoreError as error:
            logger.warning("%s It is tried again when the play-offs are over.", error)
        self._refused.append((task, finals))

    def close(self) -> None:
        """Offer the store what it has refused."""
        store = self._session.store
        try:
            while store is not None and self._refused:
                store.add_finals(*self._refused[0])
                del self._refused[0]
        except StoreError as error:
            consequence = "A later run will not know what the play-offs have shown."
            _tell(self._session, error, consequence)


def _final_of(finalist: Finalist, run_id: str) -> StoredTrial | None:
    """Return what became of a finalist as a row; None if nothing was learned of it."""
    is_timed = math.isfinite(finalist.playoff_sec)
    # A build that failed may have been short of time or memory.
    is_found_out = bool(finalist.disqualified) and not finalist.disqualified.startswith(
        (SAME, BUILD_FAILED)
    )
    if not (is_found_out or (is_timed and finalist.is_sound)):
        return None
    record = finalist.record
    seconds = [finalist.final_sec()]
    timed = TuningRecord(record.trace, record.workload, seconds, record.target, record.args_info)
    trial = trial_of(timed, failure=finalist.disqualified, run=run_id)
    is_known = is_timed and math.isfinite(finalist.stderr_sec) and finalist.playoff_sec > 0
    error = finalist.stderr_sec / finalist.playoff_sec if is_known else None
    return dataclasses.replace(trial, error=error)


def _deliver(session: Session, keeper: Any) -> None:
    """Let the shared store have what it could not take, and say what it still lacks."""
    limit_sec = _HURRIED_DELIVERY_SEC if session.budget.interrupted else _DELIVERY_SEC
    written: Any = python_side(keeper)
    n_missing = written.close(limit_sec)
    if not n_missing or session.store is None:
        return
    name = session.store.name
    session.observer.note(
        f"{n_missing} trials are not in the record store {name}. When it can be written again: "
        f"tvm-adaptive db --store {shlex.quote(name)} import {shlex.quote(str(session.work_dir))}"
    )
    session.journal.write("undelivered", store=name, n_trials=n_missing)


def _own_store(session: Session, model: ModelHooks | None) -> RecordStore | None:
    """Open the run's own store; who shares nothing and restores no cost model needs none."""
    if session.store is None and model is None:
        return None
    try:
        here = Environment.current(session.target, session.farm)
        return RecordStore(session.work_dir / RUN_STORE, here)
    except StoreError as error:
        _tell(session, error, "This run can be resumed without its cost model only.")
        return None


def _restore(
    session: Session,
    own: RecordStore,
    contexts: Sequence[TuneContext],
    model: ModelHooks | None,
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
    model = model_hooks(parts.cost_model)
    try:
        recalled = find_prior_trials(
            store, contexts, parts.transfer_pool, model, without=session.history.run_ids
        )
        scheduler = scheduler_hooks(parts.task_scheduler)
        if scheduler is not None:
            scheduler.set_prior(recalled.tasks)
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
        n_left_out=recalled.n_left_out,
    )
    if recalled.n_left_out:
        session.observer.note(
            f"{recalled.n_left_out} rows of {store.name} are no records and were left out; "
            "tvm-adaptive db prune deletes them"
        )
    if recalled.n_known or recalled.n_related:
        session.observer.note(
            f"{recalled.n_known} of {len(contexts)} tasks were tuned before, "
            f"{recalled.n_related} more have relatives in {store.name}"
        )


def _tell(session: Session, error: Exception, consequence: str, where: str = "store") -> None:
    session.observer.note(f"{error} {consequence}")
    session.journal.write("error", where=where, message=str(error))
