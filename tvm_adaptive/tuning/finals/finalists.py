"""The finalists of each task: its records, and what a play-off has proven already."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tvm_adaptive._tvm import (
    TVM_VERSION,
    Database,
    ExtractedTask,
    IRModule,
    Target,
    TuningRecord,
    Workload,
    database_hooks,
)
from tvm_adaptive.database import verdicts
from tvm_adaptive.database.metaschedule import readable_database, record_of, task_of, trial_of
from tvm_adaptive.database.records import Identity, StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.runner.playoff.finalist import Finalist, Proof
from tvm_adaptive.runner.playoff.modules import MAX_RECORDS, mean_sec, sane_records
from tvm_adaptive.runner.playoff.playoff import MAX_PLAYOFF_BATCHES, FinalistReport
from tvm_adaptive.tuning.config import DEFAULT, FinishConfig
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.session import Session
from tvm_adaptive.tuning.stakes import SELECTION_BIAS, Stake, plausible_gain
from tvm_adaptive.values.trial import FAILED_SEC, N_VERIFIED

logger = logging.getLogger(__name__)

# Of a task's records, what its stake follows from: the best two.
N_STAKED = 2
# Records of a store without a verdict that are tried: hardly ever are more than one in ten
# of the fastest wrong.
_N_OF_STORE = 12


@dataclasses.dataclass(frozen=True)
class Finalists:
    """The records of one task that a play-off may choose from."""

    mod: IRModule  # not tuned
    name: str
    # In the order to try them: this run's or, without any, the one that earlier runs have
    # proven. Without those that a play-off has disqualified.
    records: tuple[TuningRecord, ...]
    importance_sec: float  # seconds of an inference that the task takes; 0 if not known
    # Checked and timed by an earlier play-off, of this run or of another; it stands if no
    # other play-off is held.
    proven: Finalist | None = None
    # Whether ``proven`` suffices without another play-off: no record seems better but those that
    # have lost beside it.
    is_proven: bool = False
    # Reads all records that a play-off may need; None if ``records`` has them.
    read_all: Callable[[], Finalists] | None = None

    def complete(self) -> Finalists:
        """Return the finalists with all records that a play-off may need."""
        return self if self.read_all is None else self.read_all()

    def unused(self) -> Finalists:
        """Return a task of a form that is not used: nothing of it is checked or deployed."""
        return dataclasses.replace(
            self, records=(), proven=None, is_proven=False, importance_sec=0.0, read_all=None
        )

    @property
    def is_due(self) -> bool:
        """Whether the task has records of which none is checked that would do."""
        return bool(self.records) and not self.is_proven

    @property
    def stake(self) -> Stake:
        """What a play-off can change: nothing if what is proven suffices."""
        if self.is_proven:
            return Stake(self.importance_sec)
        secs = [mean_sec(record) for record in self.records[:2]]
        return Stake(self.importance_sec, plausible_gain(secs))

    def without(self, others: Iterable[Finalist]) -> Finalists:
        """Return the finalists without those of ``others`` that were disqualified."""
        lost = {_key_of(each.record) for each in others if each.disqualified}
        if not lost:
            return self
        records = tuple(each for each in self.records if _key_of(each) not in lost)
        if self.proven is None or _key_of(self.proven.record) not in lost:
            return dataclasses.replace(self, records=records)
        return dataclasses.replace(self, records=records, proven=None, is_proven=False)


@dataclasses.dataclass(frozen=True)
class _Verdicts:
    """What play-offs have found of a task."""

    winner: Finalist | None = None
    # The winner, and what is sound of all decisions that have chosen it. What another decision
    # has checked was never timed beside it.
    decided: frozenset[str] = frozenset()
    disqualified: frozenset[str] = frozenset()

    def filled_from(self, other: _Verdicts) -> _Verdicts:
        """Return both sources; the winner is this one's if neither has disqualified it."""
        lost = self.disqualified | other.disqualified
        sides = [
            each
            for each in (self, other)
            if each.winner is not None and each._winner_key not in lost
        ]
        if not sides:
            return _Verdicts(disqualified=lost)
        first, *others = sides
        decided = first.decided.union(
            *(each.decided for each in others if each._winner_key == first._winner_key)
        )
        return _Verdicts(first.winner, decided - lost, lost)

    @functools.cached_property
    def _winner_key(self) -> str:
        return "" if self.winner is None else _key_of(self.winner.record)


class StoreVerdicts:
    """The verdicts in a record store, asked for once per task; none after a failure."""

    def __init__(self, store: RecordStore | None) -> None:
        self._store = store
        self._known: dict[Identity, _Verdicts] = {}

    def of(self, task: StoredTask, mod: IRModule) -> _Verdicts:
        """Return what play-offs have found of a task."""
        known = self._known.get(task.identity)
        if known is None and self._store is not None:
            try:
                known = _verdicts_of_store(self._store, task, mod)
                self._known[task.identity] = known
            except StoreError as error:
                logger.warning("%s What it knows is not used.", error)
                self._store = None  # each try may wait for a time limit
        return known or _Verdicts()


def finalists_of(
    session: Session,
    tasks: Sequence[ExtractedTask],
    recorded: Database,
    *,
    n_records: int | None = None,
) -> list[Finalists]:
    """Return the finalists of a run's tasks by its records; a store that fails is not used.

    With ``n_records``, they have only so many at first: reading a record replays its schedule,
    which takes 7 ms, and most tasks have no play-off.
    """
    find = functools.partial(
        finalists_of_run,
        session.work_dir,
        session.target,
        recorded=recorded,
        finish=session.config.finish,
        store=StoreVerdicts(session.store),
    )
    return find(tasks) if n_records is None else _with_few(find, tasks, n_records)


def finalists_to_apply(
    work_dir: Path, target: Target, tasks: Sequence[ExtractedTask], *, finish: FinishConfig
) -> list[Finalists]:
    """Return the finalists of a run's directory, at first with few records: most are proven."""
    recorded = readable_database(work_dir)
    find = functools.partial(finalists_of_run, work_dir, target, recorded=recorded, finish=finish)
    return _with_few(find, tasks, N_STAKED)


def _with_few(
    find: Callable[..., list[Finalists]], tasks: Sequence[ExtractedTask], n_records: int
) -> list[Finalists]:
    """Return finalists that have so many records at first, and read all when they are needed."""

    def read_all(task: ExtractedTask) -> Finalists:
        (found,) = find([task])
        return found

    return [
        dataclasses.replace(each, read_all=functools.partial(read_all, task))
        for each, task in zip(find(tasks, n_records=n_records), tasks, strict=True)
    ]


def finalists_of_run(
    work_dir: Path,
    target: Target,
    tasks: Sequence[ExtractedTask],
    *,
    recorded: Database | None = None,
    finish: FinishConfig = DEFAULT.finish,
    store: StoreVerdicts | None = None,
    n_records: int = MAX_RECORDS,
) -> list[Finalists]:
    """Return the finalists of a run's directory, also of one in progress or killed."""
    if recorded is None:
        recorded = readable_database(work_dir)
    # What passed a looser tolerance than others' is not proven for a run with the usual one.
    file = verdicts.VerdictFile(work_dir, str(TVM_VERSION))
    finals = file.read(with_loose=finish.is_loosened)
    found = []
    for task in tasks:
        mod, stored = task.dispatched[0], _stored(task, target)
        known = _verdicts_of_run(finals.get(stored.identity, ()), mod)
        if known.winner is not None and known.winner.in_network:
            known.winner.is_draft = not sane_records(recorded, mod, target, 1)
        if store is not None:
            known = known.filled_from(store.of(stored, mod))
        n_most = finish.n_qualifiers + MAX_PLAYOFF_BATCHES * finish.top_k
        n_wanted = min(n_most, n_records)
        records = _in_order(recorded, mod, target, known, n_records=n_wanted, top_k=finish.top_k)
        found.append(_finalists(task, records, known))
    return found


def finalists_of_store(
    store: RecordStore, target: Target, tasks: Sequence[ExtractedTask]
) -> list[Finalists]:
    """Return the finalists in a store: what is proven, then the fastest recorded."""
    found = []
    for task in tasks:
        mod, stored = task.dispatched[0], _stored(task, target)
        known = _verdicts_of_store(store, stored, mod)
        records = [
            record_of(row, Workload(mod)) for row in verdicts.trusted(store, stored, _N_OF_STORE)
        ]
        readable = [each for each in records if each is not None]
        found.append(_finalists(task, readable, known))
    return found


def with_proven(held: FinalistReport, mine: Finalists) -> FinalistReport:
    """Let what an earlier play-off has proven win, unless this one has timed something faster."""
    if mine.proven is not None:
        key = _key_of(mine.proven.record)  # the same of its variant that prefetches
        again = [each for each in held.finalists if _key_of(each.record) == key]
        secs = [mean_sec(each) for each in mine.records if _key_of(each) == key]  # this run's
        is_lost = any(each.is_refuted for each in again)
        is_beaten = held.winner is not None and (
            any(math.isfinite(each.playoff_sec) for each in again)
            or held.winner.playoff_sec < min(secs, default=mine.proven.final_sec())
        )
        if not is_lost and not is_beaten:
            others = tuple(each for each in held.finalists if each not in again)
            return dataclasses.replace(held, finalists=(mine.proven, *others))
    return held


def beaten_by(checked: FinalistReport, mine: Finalists) -> Finalist | None:
    """Return what was proven earlier, with this run's time, if what is checked now is faster.

    A store would offer it as the winner again, by the time of another hour.
    """
    if checked.winner is None or mine.proven is None:
        return None
    key = _key_of(mine.proven.record)
    sec = min((mean_sec(each) for each in mine.records if _key_of(each) == key), default=0.0)
    if _key_of(checked.winner.record) == key or checked.winner.recorded_sec >= sec:
        return None
    return Finalist(mine.proven.record, sec, unchecked="", in_network=True)


def note_unchecked(held: FinalistReport, observer: Observer) -> None:
    """Say of a task that it stays untuned, if nothing of it could be checked."""
    if held.unchecked:
        why = f"as nothing could be checked: {held.unchecked}"
        observer.note(f"{held.task_name} stays untuned, {why}")


def _stored(task: ExtractedTask, target: Target) -> StoredTask:
    return task_of(task.dispatched[0], target, str(task.task_name))


def _finalists(task: ExtractedTask, records: list[TuningRecord], known: _Verdicts) -> Finalists:
    is_best_decided = bool(known.decided and records) and _key_of(records[0]) in known.decided
    return Finalists(
        task.dispatched[0],
        str(task.task_name),
        tuple(records),
        importance_sec=int(task.weight) * mean_sec(records[0]) if records else 0.0,
        proven=known.winner,
        is_proven=known.winner is not None and is_best_decided,
    )


def _in_order(
    recorded: Database,
    mod: IRModule,
    target: Target,
    known: _Verdicts,
    *,
    n_records: int,
    top_k: int,
) -> list[TuningRecord]:
    """Return the best records, so many of this run, in the order to try them, ``top_k`` at once."""
    n_lost = len(known.disqualified)
    left: Iterable[TuningRecord] = sane_records(recorded, mod, target, n_records + n_lost)
    if n_lost:  # nearly never, as above
        left = (each for each in left if _key_of(each) not in known.disqualified)
    found = list(itertools.islice(left, n_records))
    if known.winner is None:
        return found
    hooks = database_hooks(recorded)
    first = () if hooks is None else itertools.islice(hooks.records_of(mod), N_VERIFIED)
    # In the first batch of a play-off, but behind the two from which the stake follows.
    return _with_timed_winner(found, first, known.winner, max(N_STAKED, top_k - 1))


def _with_timed_winner(
    found: list[TuningRecord], first: Iterable[TuningRecord], winner: Finalist, most_before: int
) -> list[TuningRecord]:
    """Return the records with a proven winner at its place, by this run's own time of it.

    Not behind more than ``most_before``: a play-off's times compare with one another only.
    """
    # Times of another hour do not compare. The run began with the best of earlier ones.
    record, key = winner.record, _key_of(winner.record)
    keyed = [(_key_of(each), each) for each in found]
    others = [each for its_key, each in keyed if its_key != key]
    secs = [mean_sec(each) for its_key, each in keyed if its_key == key]
    secs = secs or [mean_sec(each) for each in first if _key_of(each) == key]
    sec = min((sec for sec in secs if sec < FAILED_SEC), default=winner.final_sec())
    timed = TuningRecord(record.trace, record.workload, [sec], record.target, record.args_info)
    n_faster = sum(mean_sec(each) < (1.0 - SELECTION_BIAS) * sec for each in others)
    n_before = min(n_faster, most_before)
    return [*others[:n_before], timed, *others[n_before:]]


def _key_of(record: TuningRecord) -> str:
    return verdicts.candidate_key(trial_of(record))


def _verdicts_of_run(finals: Sequence[StoredTrial], mod: IRModule) -> _Verdicts:
    winner = verdicts.standing_winner(finals)
    lost = verdicts.ever_disqualified(finals)
    decided = verdicts.decided_with(finals, winner) - lost
    return _Verdicts(_finalist_of(winner, mod), decided, lost)


def _verdicts_of_store(store: RecordStore, task: StoredTask, mod: IRModule) -> _Verdicts:
    finals = store.finals(task)
    winner = verdicts.proven(finals)
    decided = verdicts.decided_with(finals, winner)
    return _Verdicts(_finalist_of(winner, mod), decided, verdicts.disqualified(finals))


def _finalist_of(trial: StoredTrial | None, mod: IRModule) -> Finalist | None:
    """Return the finalist of a proven row; None if it cannot be read."""
    if trial is None or trial.seconds is None:
        return None
    record = record_of(trial, Workload(mod))
    if record is None:
        return None
    # A verdict without an error comes from a check within the network, which times one call.
    in_network = trial.error is None
    stderr_sec = math.nan if trial.error is None else trial.error * trial.seconds
    secs = (trial.seconds, trial.seconds, stderr_sec)
    proof = Proof(trial.record, trial.run, trial.unix_sec)
    return Finalist(record, *secs, unchecked="", in_network=in_network, proof=proof)
