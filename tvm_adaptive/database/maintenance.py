"""Maintain a record store: list, prune, import and export its records.

Records come from and go to MetaSchedule's own JSON databases, or another store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import TVM_VERSION, Target, TuningRecord, Workload
from tvm_adaptive.database.engine import advice_on
from tvm_adaptive.database.location import NO_STORE, RUN_STORE, resolve_url, url_of
from tvm_adaptive.database.metaschedule import target_text, task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial, TaskStats
from tvm_adaptive.database.repair import lines_of
from tvm_adaptive.database.store import RecordStore, add_accepted
from tvm_adaptive.database.verdicts import (
    VerdictFile,
    candidate_key,
    mean_sec,
    program_key,
    proven,
    sound,
    trusted,
    without_lucky,
)
from tvm_adaptive.errors import InvalidOptionError, JournalError, StoreError
from tvm_adaptive.measure_callback.history import read_history
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.values.run_folder import FINAL_DIR, RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.workers.environment import UNKNOWN, Environment
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# With 10 kB each, as of a network, some megabytes: less than a server has seconds for.
_TRIALS_PER_WRITE = 256


class _SourceError(StoreError):
    """A store that is to be imported cannot be read; the one that it is added to may be sound."""


def stats(store: str) -> tuple[str, list[TaskStats]]:
    """Return a store's displayed name, and its counts per task."""
    with _open(store, must_exist=True) as opened:
        return opened.name, opened.stats()


def prune(store: str, keep: int) -> tuple[str, int]:
    """Keep the fastest trials of each task; return the store's name and the number deleted."""
    with _open(store, must_exist=True) as opened:
        return opened.name, opened.prune(keep)


def export_records(
    store: str, folder: Path, best: int | None = None, targets: Sequence[Target] = ()
) -> int:
    """Write a store's records of one target, or the best of each task, as a JSON database."""
    with _open(store, must_exist=True) as opened:
        return export_json(opened, folder, best, targets)


def import_records(store: str, source: Path) -> tuple[str, int, int]:
    """Add the records of a run's or JSON database's folder, or of a store in a file.

    The source is only read. Returns the store's name, and how many were added and left out.
    """
    if not source.exists():  # or a mistyped one would leave a new, empty store
        raise InvalidOptionError(f"There is no folder or record store {source}.")
    with _open(store) as opened:
        path = Path(opened.url.database or "").resolve()
        if source.is_dir():
            return opened.name, *_import_folder(opened, path, source)
        if source.resolve() == path:
            raise InvalidOptionError(f"{source} is the store itself; name another one.")
        return opened.name, *_import_store(opened, source)


def _import_folder(opened: RecordStore, path: Path, folder: Path) -> tuple[int, int]:
    """Add what a folder holds to a store at a path; count added and left out.

    What a damaged store has added before that shows is not counted.
    """
    own = folder / RUN_STORE
    environment = _environment_of(folder)
    counts: tuple[int, int] | None = None
    if own.is_file() and own.resolve() != path:
        try:
            counts = _import_store(opened, own)
        except _SourceError as error:
            if not _has_json(folder):
                raise
            logger.warning("%s The other files of %s are read.", error, folder)
    if counts is None:
        counts = import_json(opened, folder, environment)
    elif _has_json(folder):
        # The run's store held nearly all of it: the number left out says nothing.
        counts = counts[0] + import_json(opened, folder, environment)[0], counts[1]
    _import_verdicts(opened, folder, environment)
    return counts


def _has_json(folder: Path) -> bool:
    """Say whether a folder holds a JSON database."""
    return (folder / WORKLOAD_FILE).is_file() and (folder / RECORD_FILE).is_file()


def _import_verdicts(store: RecordStore, folder: Path, environment: Environment) -> None:
    """Add a run's verdicts of the tasks that it or the store knows."""
    file = VerdictFile(folder, environment.tvm or str(TVM_VERSION))
    verdicts = file.read(with_loose=False)
    # A draft, and what only an earlier run has measured, is a record of the winners alone.
    tasks = {task.identity: task for task in _tasks_in(folder / FINAL_DIR)}
    known = store.tasks(workload_keys=[workload_key for workload_key, _ in verdicts])
    tasks |= {task.identity: task for task in known}
    for identity, task in tasks.items():
        if finals := verdicts.get(identity):
            here = [dataclasses.replace(each, environment=environment) for each in finals]
            _add_finals(store, task, here)


def _tasks_in(folder: Path) -> Iterator[StoredTask]:
    """Yield the task of each readable record of a JSON database; nothing without one."""
    for record in _records_in(folder):
        if record is not None:
            yield task_of(record.workload.mod, target_text(record.target), "main")


def _records_in(folder: Path) -> Iterator[TuningRecord | None]:
    """Yield what each line of a JSON database records, None if it is not readable."""
    workloads = [_workload(line) for line in lines_of(folder / WORKLOAD_FILE)]
    for line in lines_of(folder / RECORD_FILE):
        yield _record(line, workloads)


def _add_finals(store: RecordStore, task: StoredTask, finals: Sequence[StoredTrial]) -> None:
    """Add the verdicts that a store does not have."""
    known = {(each.record, each.run, each.unix_sec) for each in store.finals(task)}
    if new := [each for each in finals if (each.record, each.run, each.unix_sec) not in known]:
        add_accepted(store.add_finals, task, new)


def _environment_of(folder: Path) -> Environment:
    """Return where the records in a run's folder were measured; unknown without a journal."""
    try:
        return read_history(folder / JOURNAL_FILE).environment
    except JournalError:
        return UNKNOWN


def _open(store: str, *, must_exist: bool = False) -> RecordStore:
    if store == NO_STORE:
        raise InvalidOptionError(f"{NO_STORE} names no store; give a path or a URL.")
    url = resolve_url(store)
    # A mistyped path must not become a new, empty store.
    parsed = url_of(url)
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database
    if must_exist and is_file and not Path(is_file).is_file():
        raise InvalidOptionError(f"There is no record store {is_file}.")
    return RecordStore(url)


def export_json(
    store: RecordStore, folder: Path, best: int | None = None, targets: Sequence[Target] = ()
) -> int:
    """Write a store's records of one target as a JSON database; return the number of records.

    MetaSchedule does not distinguish records by target. Of ``targets``, it is the first that
    the store has records of; they are needed where it has several.

    Disqualified candidates, wrong results above all, are left out: MetaSchedule would take
    the fastest of them. So are unchecked candidates of a task that are recorded as faster than
    what a play-off has proven. The records do not name their environment: a store without one
    exports the records of all devices.
    """
    if any((folder / name).exists() for name in (WORKLOAD_FILE, RECORD_FILE)):
        raise InvalidOptionError(f"{folder} holds a database already; name another folder.")
    workloads: list[str] = []
    records: list[str] = []
    for task in store.tasks(target=_target_of_export(store, targets)):
        finals = store.finals(task)
        trials = sound(finals, store.latest(task)) if best is None else trusted(store, task, best)
        trials = _with_winner(finals, without_lucky(finals, trials))
        timed = [trial for trial in trials if trial.seconds is not None]
        records += [f"[{len(workloads)},{trial.record}]" for trial in timed]
        if timed:
            workloads.append(task.workload)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORKLOAD_FILE).write_text("".join(f"{line}\n" for line in workloads))
        (folder / RECORD_FILE).write_text("".join(f"{line}\n" for line in records))
    except OSError as error:
        raise InvalidOptionError(
            f"{folder} cannot be written ({error.strerror}); name another folder."
        ) from error
    return len(records)


def _target_of_export(store: RecordStore, targets: Sequence[Target]) -> str | None:
    """Return the target to export; None if the store has no record."""
    found = dict.fromkeys(
        each.task.target for each in store.stats() if each.n_trials or store.finals(each.task)
    )
    named = [text for text in map(target_text, targets) if text in found]
    if named or (len(found) <= 1 and not targets):
        return next(iter(named or found), None)
    known = ", ".join(f"'{json.dumps(json.loads(text))}'" for text in found)
    if targets:
        raise InvalidOptionError(
            f"{store.name} has no records of the target {target_text(targets[0])}. Its targets "
            f"are: {known or 'none'}."
        )
    raise InvalidOptionError(
        f"{store.name} has records of {len(found)} targets, which MetaSchedule does not "
        f"distinguish. Name one with --target: {known}."
    )


def _with_winner(finals: Sequence[StoredTrial], trials: list[StoredTrial]) -> list[StoredTrial]:
    """Return trials with what is proven, also if it was pruned, or slower in the search."""
    winner = proven(finals)
    if winner is None:
        return trials
    key = program_key(winner)
    own_secs = [mean_sec(each) for each in trials if program_key(each) == key]
    return trials if min(own_secs, default=math.inf) <= mean_sec(winner) else [*trials, winner]


def import_json(
    store: RecordStore, folder: Path, environment: Environment = UNKNOWN
) -> tuple[int, int]:
    """Add a JSON database's new records; return how many were added and left out."""
    if not _has_json(folder):
        raise InvalidOptionError(
            f"{folder} holds no database of MetaSchedule ({WORKLOAD_FILE}, {RECORD_FILE})."
        )
    found: defaultdict[tuple[Workload, str], list[StoredTrial]] = defaultdict(list)
    n_lines = n_added = 0
    for record in _records_in(folder):
        n_lines += 1
        if record is None:
            continue
        trial = trial_of(record, unix_sec=0.0, run=str(folder))
        trial = dataclasses.replace(trial, environment=environment)
        found[record.workload, target_text(record.target)].append(trial)
    for (workload, target), trials in found.items():
        n_added += add_new(store, task_of(workload.mod, target, "main"), trials)
    return n_added, n_lines - n_added


def _import_store(store: RecordStore, source: Path) -> tuple[int, int]:
    """Add the new rows of a store's file as they are; return how many were added and left out."""
    n_added = n_known = 0
    with ScratchFolder("import") as folder:
        copy = folder / RUN_STORE
        _copy_store(source.resolve(), copy)
        with _reading(source, copy):
            other = RecordStore(copy)
        with other:
            with _reading(source, copy):
                tasks = other.tasks()
            for task in tasks:
                with _reading(source, copy):
                    trials, finals = other.latest(task), other.finals(task)
                n_new = add_new(store, task, trials)
                n_added += n_new
                n_known += len(trials) - n_new
                _add_finals(store, task, finals)
        return n_added, n_known + other.n_left_out


def _copy_store(source: Path, copy: Path) -> None:
    """Copy a store's file: it may be read-only, in use, or of a format that others still read."""
    try:
        with open(source, "rb") as file:
            has_log = file.read(19)[18:] == b"\x02"  # by SQLite's header
        # Even a connection that only reads leaves files beside a store with a log at rest.
        if not has_log or Path(f"{source}-shm").exists():
            uri = f"{source.as_uri()}?mode=ro"
            with (
                # After a killed process, reading may need a right to write. What is no database
                # is refused when its copy is opened.
                contextlib.suppress(sqlite3.DatabaseError),
                contextlib.closing(sqlite3.connect(uri, uri=True)) as given,
                contextlib.closing(sqlite3.connect(copy)) as taken,
            ):
                given.backup(taken)
                return
        shutil.copyfile(source, copy)
        for log in ("-wal", "-journal"):
            if Path(f"{source}{log}").exists():
                shutil.copyfile(f"{source}{log}", f"{copy}{log}")
    except (OSError, sqlite3.Error) as error:
        raise _SourceError(
            f"Could not copy the record store {source} to read it: {error}. "
            f"{advice_on(str(error))} TMPDIR names another place for the copy."
        ) from error


@contextlib.contextmanager
def _reading(source: Path, copy: Path) -> Iterator[None]:
    """Tell the errors of a source from those of the store that it is added to."""
    try:
        yield
    except StoreError as error:
        raise _SourceError(str(error).replace(str(copy), str(source))) from error


def add_new(store: RecordStore, task: StoredTask, trials: Sequence[StoredTrial]) -> int:
    """Add the trials that a store does not hold; return how many it has taken."""
    # Not by the texts of the records, which differ between a file and memory.
    places: defaultdict[tuple[str, float | None], set[Environment]] = defaultdict(set)
    for trial in store.latest(task):
        places[candidate_key(trial), trial.seconds].add(trial.environment)

    def is_new(trial: StoredTrial) -> bool:
        known = places.get((candidate_key(trial), trial.seconds), set())
        # Of an unknown place, it may be any of the known ones.
        return trial.environment not in known if trial.environment.is_known else not known

    new = [trial for trial in trials if is_new(trial)]
    n_refused = 0
    # One write may take no longer than a server's answer; a repeated import goes on from there.
    for start in range(0, max(len(new), 1), _TRIALS_PER_WRITE):
        piece = new[start : start + _TRIALS_PER_WRITE]
        n_refused += len(add_accepted(store.add, task, piece))
    return len(new) - n_refused


def _workload(line: bytes) -> Any:
    try:
        return Workload.from_json(json.loads(line))
    except Exception:  # TVM's parser may raise anything
        return None


def _record(line: bytes, workloads: list[Any]) -> TuningRecord | None:
    try:
        index, fields = json.loads(line)
        record = TuningRecord.from_json(fields, workloads[index])
    except Exception:  # half a line, a missing workload, a trace of another TVM
        return None
    return None if record.target is None else record
