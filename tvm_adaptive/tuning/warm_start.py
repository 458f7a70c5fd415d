"""Warm-start a run from record stores, and write its trials and verdicts to them.

There are two stores: the shared one that the configuration names, and the run's own. The own
one holds what MetaSchedule's JSON files have no fields for: features and timing errors, from
which a resumed run restores its cost model, and failed trials' messages. It also holds the
batches that the shared store could not take. The JSON files stay beside it: stock
MetaSchedule reads them, and they are complete where no store can be written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import operator
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    TVM_VERSION,
    IRModule,
    TuneContext,
    TuningRecord,
    model_hooks,
    python_side,
    scheduler_hooks,
)
from tvm_adaptive.database.location import HIDDEN, NO_STORE, RUN_STORE
from tvm_adaptive.database.maintenance import add_new
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import Identity, StoredTask, StoredTrial
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore, add_accepted, redacted_name
from tvm_adaptive.database.store_callback import StoreCallback
from tvm_adaptive.database.verdicts import (
    SECOND_DECISION,
    VerdictFile,
    candidate_key,
    disqualified_in,
)
from tvm_adaptive.errors import StoreError
from tvm_adaptive.runner.playoff.finalist import Finalist
from tvm_adaptive.runner.playoff.playoff import FinalistReport
from tvm_adaptive.tuning.other_machine import seed_from_set_aside
from tvm_adaptive.tuning.parts import Parts
from tvm_adaptive.tuning.prior_trials import find_prior_trials, restore
from tvm_adaptive.tuning.session import Session
from tvm_adaptive.tuning.starter import start_from, starter_file_of
from tvm_adaptive.tuning.target import environment_of
from tvm_adaptive.values.hooks import ModelHooks
from tvm_adaptive.values.trial import FAILED_SEC

logger = logging.getLogger(__name__)

# Time for pending writes at the end of a run, while the shared store does not answer.
_FLUSH_SEC = 30.0
# After Ctrl-C the user waits for the end.
_INTERRUPTED_FLUSH_SEC = 5.0


@contextlib.contextmanager
def warm_started(
    session: Session, contexts: Sequence[TuneContext], parts: Parts, database: RunDatabase
) -> Iterator[list[StoreCallback]]:
    """Give prior trials to a run's parts; yield the callbacks that store its own trials.

    A store that fails costs the warm start, never the run.
    """
    model = model_hooks(parts.cost_model)
    shared = session.store
    with contextlib.ExitStack() as stack:
        own = _own_store(session, model)
        if own is not None:
            stack.enter_context(own)
            _add_lost(session, own, contexts, database)
            _restore(session, own, contexts, model)
        if parts.transfer_pool is not None:
            seeded = seed_from_set_aside(session.work_dir, contexts, parts.transfer_pool)
            begun = _begun(session)
            if first := [name for name in seeded if name not in begun]:
                session.journal.write("hinted", tasks=first)
                session.observer.note(f"the best records of {len(first)} tasks are measured again")
        if shared is not None:
            _warm_start(session, shared, contexts, parts)
        if session.config.starter and session.config.store != NO_STORE:
            _start(session, contexts, parts)
        if own is None and shared is None:
            yield []
            return
        callback = StoreCallback(
            contexts,
            own=None if _is_one_file(own, shared) else own,
            shared=shared,
            run=session.run_id,
            trial_log=parts.trial_log,
            journal=session.journal,
        )
        try:
            yield [callback]
        finally:
            _flush(session, callback)


class VerdictRecorder:
    """Writes the verdicts of each play-off to the run's file and the shared store."""

    def __init__(self, session: Session, *, is_second: bool = False) -> None:
        self._session = session
        # Of each decision of a run the first sound candidate is the winner.
        self._run_id = f"{session.run_id}{SECOND_DECISION}" if is_second else session.run_id
        self._file = VerdictFile(session.work_dir, str(TVM_VERSION))
        self._refused: list[tuple[StoredTask, list[StoredTrial]]] = []

    def add(
        self,
        report: FinalistReport,
        *,
        is_earlier: bool = False,
        beaten: Finalist | None = None,
    ) -> None:
        """Write the verdicts on one task; those of an earlier run are not new to the store.

        What was proven earlier and is ``beaten`` was not checked again: only a store must know.
        """
        found = [(self._is_loose(report, each), each) for each in report.finalists]
        pairs = [
            (is_loose, _final_of(each, self._run_id, is_earlier=is_earlier))
            for is_loose, each in found
        ]
        judged = [(is_loose, final) for is_loose, final in pairs if final is not None]
        # With and without prefetching it is the same candidate, which one sound form deploys.
        sound = {candidate_key(final) for _, final in judged if final.seconds is not None}
        judged = [
            (is_loose, final)
            for is_loose, final in judged
            if final.seconds is not None or candidate_key(final) not in sound
        ]
        if not judged:
            return
        mod = report.finalists[0].record.workload.mod
        task = task_of(mod, self._session.target, report.task_name)
        consequence = "If the run ends early, apply checks its winners once more."
        with _Reported(self._session, consequence, OSError, where="verdicts"):
            # Neighbours only: the winner stays the first.
            for is_loose, group in itertools.groupby(judged, key=operator.itemgetter(0)):
                self._file.add(task, [final for _, final in group], is_loose=is_loose)
        finals = [final for is_loose, final in judged if not is_loose]
        if finals and beaten is not None:
            finals += filter(None, [_final_of(beaten, self._run_id, is_earlier=False)])
        if self._session.store is None or is_earlier or not finals:
            return
        try:
            if not self._refused:
                self._write(self._session.store, task, finals)
                return
        except StoreError as error:
            logger.warning("%s The next try is after the play-offs.", error)
        self._refused.append((task, finals))

    def _is_loose(self, report: FinalistReport, finalist: Finalist) -> bool:
        """Whether a proof holds by the run's tolerance alone, which others did not choose."""
        # A play-off has a tolerance of its own. Of what an earlier attempt has proven within
        # the network, nothing says by which tolerance.
        in_network = report.reason == "network" or finalist.in_network
        is_loosened = self._session.config.finish.is_loosened
        return in_network and is_loosened and not finalist.disqualified

    def close(self) -> None:
        """Write to the store the verdicts that it has refused."""
        store = self._session.store
        consequence = "A later run will not know the verdicts of the play-offs."
        if store is not None and self._refused:
            consequence += f" {_import_command(self._session)}"
        with _Reported(self._session, consequence):
            while store is not None and self._refused:
                self._write(store, *self._refused[0])
                del self._refused[0]

    def _write(self, store: RecordStore, task: StoredTask, finals: list[StoredTrial]) -> None:
        """Write verdicts; those that the store refuses for their content are left out."""
        for error in add_accepted(store.add_finals, task, finals):
            self._session.journal.write("error", where="store", message=str(error))


def _final_of(finalist: Finalist, run_id: str, *, is_earlier: bool) -> StoredTrial | None:
    """Return a finalist with its verdict; None without one."""
    is_timed = math.isfinite(finalist.playoff_sec)
    is_judged = (is_timed or finalist.in_network) and 0.0 < finalist.final_sec() < FAILED_SEC
    if not (finalist.is_refuted or (is_judged and finalist.is_sound)):
        return None
    record = finalist.record
    seconds = [min(finalist.final_sec(), FAILED_SEC)]  # JSON has no infinity; of a failure
    timed = TuningRecord(record.trace, record.workload, seconds, record.target, record.args_info)
    trial = trial_of(timed, failure=finalist.disqualified, run=run_id)
    has_error = is_timed and math.isfinite(finalist.stderr_sec) and finalist.playoff_sec > 0
    # Of one timing the error is not known; only a check within the network leaves it out.
    unknown = None if finalist.in_network else 0.0
    error = finalist.stderr_sec / finalist.playoff_sec if has_error else unknown
    trial = dataclasses.replace(trial, error=error)
    proof = finalist.proof
    if proof is None or finalist.disqualified:
        return trial
    if is_earlier:
        return dataclasses.replace(trial, **proof._asdict())
    # It was not checked again: what has disqualified it since, elsewhere, stands.
    return dataclasses.replace(trial, unix_sec=proof.unix_sec)


def _flush(session: Session, callback: Any) -> None:
    """Write pending trials to the shared store, and report those that it still lacks."""
    # The run's own store has all of it, and what is left of the budget is for the end of the run.
    limit_sec = min(_FLUSH_SEC, max(0.0, session.budget.search_left_sec))
    if session.budget.interrupted:
        limit_sec = _INTERRUPTED_FLUSH_SEC
    side: Any = python_side(callback)
    n_missing = side.close(limit_sec)
    _report_undelivered(session, n_missing, f"{n_missing} trials are not in")


def report_waiting(session: Session) -> None:
    """Report the trials that waited for the shared store when an earlier attempt was killed."""
    n_waiting = session.history.n_waiting
    what = f"at least {n_waiting} trials of an earlier attempt were not written to"
    _report_undelivered(session, n_waiting, what)


def _report_undelivered(session: Session, n_trials: int, what: str) -> None:
    """Say how trials come to the shared store that it lacks."""
    if not n_trials or session.store is None:
        return
    name = session.store.name
    session.observer.note(f"{what} the record store {name}. {_import_command(session)}")
    session.journal.write("undelivered", store=name, n_trials=n_trials)


def _import_command(session: Session) -> str:
    """Say how the records and verdicts of a run come to the shared store that it lacks."""
    command, password = _store_command(session)
    folder = shlex.quote(str(session.work_dir))
    return f"When it can be written again{password}: {command} import {folder}"


def _store_command(session: Session) -> tuple[str, str]:
    """Return the command for the shared store, and what to know of its password."""
    assert session.store is not None
    given = redacted_name(session.config.store, session.store)
    password = f" (with the password instead of {HIDDEN})" if HIDDEN in given else ""
    return f"tvm-adaptive db --store {shlex.quote(given)}", password


def _own_store(session: Session, model: ModelHooks | None) -> RecordStore | None:
    """Open the run's own store; without shared store and restorable model it needs none."""
    if session.store is None and model is None:
        return None
    with _Reported(session, "This run can only be resumed without its cost model."):
        here = environment_of(session.target, session.config)
        return RecordStore(session.work_dir / RUN_STORE, here)
    return None


def _is_one_file(own: RecordStore | None, shared: RecordStore | None) -> bool:
    """Say whether the shared store is the run's own: each trial belongs into it once."""
    if own is None or shared is None:
        return False
    return os.path.realpath(own.url.database or "") == os.path.realpath(shared.url.database or "")


def _add_lost(
    session: Session, own: RecordStore, contexts: Sequence[TuneContext], database: RunDatabase
) -> None:
    """Add to the stores the trials that a killed attempt had in its database only."""
    lost: list[tuple[StoredTask, list[StoredTrial]]] = []
    with _Reported(session, "Trials of a killed attempt may be in no record store."):
        if session.history.run and len(database) > 0:
            lost += _lost_trials(session, own, contexts, database)
    for store in (own, session.store):
        if store is None or not lost:
            continue
        consequence = "It lacks trials of a killed attempt."
        if store is session.store:
            consequence += f" {_import_command(session)}"
        with _Reported(session, consequence):
            if n_added := sum(add_new(store, task, trials) for task, trials in lost):
                session.observer.note(
                    f"{n_added} trials of a killed attempt were not in {store.name}: they are added"
                )


def _lost_trials(
    session: Session, own: RecordStore, contexts: Sequence[TuneContext], database: RunDatabase
) -> list[tuple[StoredTask, list[StoredTrial]]]:
    """Return the trials that a run's database has beyond those in its own store and journal.

    They are its last ones. Only their numbers are compared: reading a record takes time.
    """
    n_stored = {each.task.identity: each.n_trials for each in own.at(None).stats()}
    n_journalled = Counter[Identity]()
    tasks: dict[Identity, tuple[StoredTask, IRModule]] = {}
    for context in contexts:
        name = str(context.task_name)
        task = task_of(context.mod, context.target, name)
        tasks.setdefault(task.identity, (task, context.mod))
        if name in session.history.tasks:
            n_journalled[task.identity] += session.history.tasks[name].n_trials
    found: list[tuple[StoredTask, list[StoredTrial]]] = []
    run = str(session.history.run.get("run_id", ""))  # the attempt that was killed
    for identity, (task, mod) in tasks.items():
        # A store may have been pruned, and a journal has no earlier run of its folder.
        n_known = max(n_stored.get(identity, 0), n_journalled[identity])
        if (n_lost := database.n_records_of(mod) - n_known) > 0:
            records = database.records_of(mod, last=n_lost)
            found.append((task, [trial_of(each, unix_sec=0.0, run=run) for each in records]))
    return found


def _restore(
    session: Session, own: RecordStore, contexts: Sequence[TuneContext], model: ModelHooks | None
) -> None:
    if not session.history.n_trials:
        return
    # The run's times are all of one environment, which rows of a former version do not name. A
    # shared store in the same file has other machines' times, too.
    store = own if _is_one_file(own, session.store) else own.at(None)
    with _Reported(session, "The cost model starts without samples."):
        lost = disqualified_in(session.work_dir)
        session.journal.write("restored", n_samples=restore(store, contexts, model, lost))


def _warm_start(
    session: Session, store: RecordStore, contexts: Sequence[TuneContext], parts: Parts
) -> None:
    model = model_hooks(parts.cost_model)
    warm_start = None
    with _Reported(session, "The run starts without prior trials."):
        warm_start = find_prior_trials(
            store,
            contexts,
            parts.transfer_pool,
            model,
            without=session.history.run_ids,
            n_prior=session.history.n_prior,
            search_sec=session.budget.search_left_sec,
        )
        scheduler = scheduler_hooks(parts.task_scheduler)
        if scheduler is not None:
            scheduler.set_prior(warm_start.tasks)
    if warm_start is None:
        return
    tasks = warm_start.tasks
    proven = sorted(name for name, each in tasks.items() if each.is_proven)
    session.proven.update(proven)
    session.journal.write(
        "recalled",
        store=store.name,
        n_known=warm_start.n_known,
        n_related=warm_start.n_related,
        n_samples=warm_start.n_samples,
        n_trials={name: len(each.latencies_ms) for name, each in tasks.items()},
        proven=proven,
        n_left_out=warm_start.n_left_out,
    )
    if warm_start.n_left_out:
        command, password = _store_command(session)
        session.observer.note(
            f"{warm_start.n_left_out} invalid rows of {store.name} were left out; "
            f"{command} prune{password} deletes them, and all but the fastest trials of each "
            "task (--keep)"
        )
    if warm_start.n_known or warm_start.n_related:
        session.observer.note(
            f"{warm_start.n_known} of {len(contexts)} tasks were tuned before, "
            f"{warm_start.n_related} more have related tasks in {store.name}"
        )


def _start(session: Session, contexts: Sequence[TuneContext], parts: Parts) -> None:
    """Give starter records to a run's parts, after what the store knows."""
    file = starter_file_of(session.target)
    if file is None:
        return
    model = model_hooks(parts.cost_model)
    start = start_from(file, contexts, parts.transfer_pool, model, begun=_begun(session))
    if start is None or not (start.n_tasks or start.n_samples):
        return
    session.journal.write("starter", **dataclasses.asdict(start))
    what = f"{start.n_tasks} of {len(contexts)} tasks begin with starter records"
    if not start.n_tasks:
        what = f"the cost model begins with {start.n_samples} samples of starter records"
    session.observer.note(f"{what} ({start.file})")


def _begun(session: Session) -> set[str]:
    """Return the names of tasks that have trials: their searches do not begin any more."""
    return {name for name, task in session.history.tasks.items() if task.n_trials}


@dataclasses.dataclass(frozen=True)
class _Reported:
    """Reports an exception to the user and the journal instead of raising it."""

    session: Session
    consequence: str
    kind: type[Exception] = StoreError
    where: str = "store"

    def __enter__(self) -> None: ...

    # Not a generator: types would take it to raise whatever it meets.
    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, self.kind):
            return False
        self.session.observer.note(f"{error} {self.consequence}")
        self.session.journal.write("error", where=self.where, message=str(error))
        return True
