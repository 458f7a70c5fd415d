"""What each task has to play for: its records, and what a play-off has proven already."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tvm_adaptive._tvm import (
    TVM_VERSION,
    Database,
    ExtractedTask,
    IRModule,
    Target,
    TuningRecord,
    Workload,
)
from tvm_adaptive.database.metaschedule import (
    readable_database,
    record_of,
    task_of,
    trial_of,
)
from tvm_adaptive.database.records import Identity, StoredTask, StoredTrial
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdict_file import VerdictFile
from tvm_adaptive.database.verdicts import (
    candidate_of,
    checked,
    disqualified,
    ever_disqualified,
    proven,
    standing_winner,
    trusted,
)
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.runner.playoff.finalist import Finalist
from tvm_adaptive.runner.playoff.modules import mean_sec, sane_records
from tvm_adaptive.runner.playoff.playoff import MAX_PLAYOFF_BATCHES
from tvm_adaptive.tuning.config import FinishConfig
from tvm_adaptive.tuning.session import Session

logger = logging.getLogger(__name__)

# The fastest of hundreds of timings flatters by some 2 to 7 %; only what seems to save more
# than a tenth goes before what was proven and checked.
SELECTION_BIAS = 0.9
# Of a store without a verdict so many are tried: more than one in ten of the fastest is
# hardly ever wrong.
_N_OF_STORE = 12


@dataclasses.dataclass(frozen=True)
class Finalists:
    """Of one task."""

    mod: IRModule  # not tuned
    name: str
    # whom to try first comes first: this run's or, without any, the one that earlier runs have
    # proven. Those that a play-off found out are not among them
    records: tuple[TuningRecord, ...]
    importance_sec: float  # seconds of an inference that go into the task; 0 where nothing is known
    # what an earlier play-off, of this run or of another one, has checked and timed; it stands
    # where no other play-off is held
    proven: Finalist | None = None
    # whether ``proven`` will do if there is no time for another play-off: nothing was recorded
    # since that nobody has checked and that seems better
    is_proven: bool = False

    @property
    def is_due(self) -> bool:
        """Whether there is something to play for that nobody has checked yet."""
        return self.importance_sec > 0.0 and not self.is_proven


@dataclasses.dataclass(frozen=True)
class _Known:
    """What play-offs have said of a task."""

    winner: Finalist | None = None
    checked: frozenset[str] = frozenset()  # candidates
    disqualified: frozenset[str] = frozenset()

    def filled_from(self, other: _Known) -> _Known:
        """Return what two sources know; the winner is this one's where it has one.

        Whom either of them has found out is no winner of the other.
        """
        lost = self.disqualified | other.disqualified
        winners = [each for each in (self.winner, other.winner) if each is not None]
        if lost:
            winners = [each for each in winners if _key_of(each.record) not in lost]
        sound = (self.checked | other.checked) - lost
        return _Known(winners[0] if winners else None, sound, lost)


def finalists_of(
    session: Session, tasks: Sequence[ExtractedTask], progress: RunProgress
) -> list[Finalists]:
    """Return what each task has to play for; a store that fails costs what it knows."""
    recorded = RunDatabase(session.work_dir)
    verdicts = VerdictFile(session.work_dir, str(TVM_VERSION)).read()
    store = session.store
    found = []
    for task, so_far in zip(tasks, progress.tasks, strict=True):
        mod, name = task.dispatched[0], str(task.task_name)
        known = _known_to_run(verdicts, task_of(mod, session.target, name), mod)
        if store is not None:
            try:
                known = known.filled_from(_known_to_store(store, mod, session.target, name))
            except StoreError as error:
                logger.warning("%s What it knows is not used.", error)
                store = None
        records = _in_order(recorded, mod, session.target, known, session.config.finish)
        found.append(_finalists(mod, name, records, known, so_far.weight))
    return found


def finalists_of_run(
    work_dir: Path, target: Target, tasks: Sequence[ExtractedTask]
) -> list[Finalists]:
    """Return what each task of a run has, also of one that goes on or was killed."""
    recorded = readable_database(work_dir)
    verdicts = VerdictFile(work_dir, str(TVM_VERSION)).read()
    found = []
    for task in tasks:
        mod, name = task.dispatched[0], str(task.task_name)
        known = _known_to_run(verdicts, task_of(mod, target, name), mod)
        records = _in_order(recorded, mod, target, known, FinishConfig())
        found.append(_finalists(mod, name, records, known, float(int(task.weight))))
    return found


def finalists_of_store(
    store: RecordStore, target: Target, tasks: Sequence[ExtractedTask]
) -> list[Finalists]:
    """Return what each task has in a store: what is proven, then the fastest recorded."""
    found = []
    for task in tasks:
        mod, name = task.dispatched[0], str(task.task_name)
        known = _known_to_store(store, mod, target, name)
        rows = trusted(store, task_of(mod, target, name), _N_OF_STORE)
        records = [record_of(row, Workload(mod)) for row in rows]
        readable = [each for each in records if each is not None]
        found.append(_finalists(mod, name, readable, known, float(int(task.weight))))
    return found


def _finalists(
    mod: IRModule, name: str, records: list[TuningRecord], known: _Known, weight: float
) -> Finalists:
    winner = known.winner
    is_best_checked = bool(known.checked and records) and _key_of(records[0]) in known.checked
    return Finalists(
        mod,
        name,
        tuple(records),
        importance_sec=weight * mean_sec(records[0]) if records else 0.0,
        proven=winner,
        is_proven=winner is not None and is_best_checked,
    )


def _in_order(
    recorded: Database, mod: IRModule, target: Target, known: _Known, finish: FinishConfig
) -> list[TuningRecord]:
    """Return as many records as a play-off may need, whom to try first comes first."""
    left: Iterable[TuningRecord] = sane_records(recorded, mod, target)
    if known.disqualified:  # nearly never, and telling candidates apart takes time
        left = (each for each in left if _key_of(each) not in known.disqualified)
    found = list(itertools.islice(left, finish.n_qualifiers + MAX_PLAYOFF_BATCHES * finish.top_k))
    if known.winner is not None:
        least_sec = SELECTION_BIAS * known.winner.final_sec()
        n_before = sum(mean_sec(record) < least_sec for record in found)
        found.insert(n_before, known.winner.record)
    return found


def _key_of(record: TuningRecord) -> str:
    return candidate_of(trial_of(record))


def _known_to_run(
    verdicts: Mapping[Identity, Sequence[StoredTrial]], task: StoredTask, mod: IRModule
) -> _Known:
    finals = verdicts.get(task.identity, ())
    lost = ever_disqualified(finals)
    return _Known(_finalist_of(standing_winner(finals), mod), checked(finals) - lost, lost)


def _known_to_store(store: RecordStore, mod: IRModule, target: Target, name: str) -> _Known:
    task = task_of(mod, target, name)
    finals = store.finals(task)
    return _Known(_finalist_of(proven(store, task), mod), checked(finals), disqualified(finals))


def _finalist_of(trial: StoredTrial | None, mod: IRModule) -> Finalist | None:
    """Return a proven row as a finalist; None if it cannot be read."""
    if trial is None or trial.seconds is None:
        return None
    record = record_of(trial, Workload(mod))
    if record is None:
        return None
    stderr_sec = math.nan if trial.error is None else trial.error * trial.seconds
    return Finalist(record, trial.seconds, trial.seconds, stderr_sec, unchecked="")
