"""Between a record store and MetaSchedule's own JSON databases."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import TuningRecord, Workload
from tvm_adaptive.database.metaschedule import target_text, task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.repair import RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import candidate_of, sound, trusted
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.workers.environment import UNKNOWN, Environment


def export_json(store: RecordStore, folder: Path, best: int | None = None) -> int:
    """Write a store as a JSON database, for MetaSchedule and for people without our package.

    What play-offs found out, wrong results above all, is left out: MetaSchedule would take
    the fastest of it. Its records do not say where they were measured: of a store without an
    environment, those of all devices are written.
    """
    if any((folder / name).exists() for name in (WORKLOAD_FILE, RECORD_FILE)):
        raise InvalidOptionError(f"{folder} holds a database already; name another folder.")
    places: dict[str, int] = {}
    workloads: list[str] = []
    records: list[str] = []
    for task in store.tasks():
        if best is None:
            trials = sound(store, task, store.latest(task))
        else:
            trials = trusted(store, task, best)
        timed = [trial for trial in trials if trial.seconds is not None]
        if timed and task.workload_key not in places:
            places[task.workload_key] = len(workloads)
            workloads.append(task.workload)
        records += [f"[{places[task.workload_key]},{trial.record}]" for trial in timed]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORKLOAD_FILE).write_text("".join(f"{line}\n" for line in workloads))
        (folder / RECORD_FILE).write_text("".join(f"{line}\n" for line in records))
    except OSError as error:
        raise InvalidOptionError(
            f"{folder} cannot be written ({error.strerror}); name another folder."
        ) from error
    return len(records)


def has_json(folder: Path) -> bool:
    """Say whether a folder holds a JSON database."""
    return all((folder / name).is_file() for name in (WORKLOAD_FILE, RECORD_FILE))


def import_json(
    store: RecordStore, folder: Path, environment: Environment = UNKNOWN
) -> tuple[int, int]:
    """Add a JSON database's records that a store does not hold yet."""
    if not has_json(folder):
        raise InvalidOptionError(
            f"{folder} holds no database of MetaSchedule ({WORKLOAD_FILE}, {RECORD_FILE})."
        )
    workloads = [_workload(line) for line in _lines(folder / WORKLOAD_FILE)]
    tasks: dict[tuple[int, str], StoredTask] = {}
    found: dict[tuple[int, str], list[StoredTrial]] = {}
    n_unreadable = 0
    for line in _lines(folder / RECORD_FILE):
        parsed = _record(line, workloads)
        if parsed is None:
            n_unreadable += 1
            continue
        number, record = parsed
        key = (number, target_text(record.target))
        if key not in tasks:
            tasks[key] = task_of(workloads[number].mod, key[1], "main")
        trial = trial_of(record, unix_sec=0.0, run=str(folder))
        found.setdefault(key, []).append(dataclasses.replace(trial, environment=environment))
    n_added = n_known = 0
    for key, trials in found.items():
        n_new = _add_new(store, tasks[key], trials)
        n_added += n_new
        n_known += len(trials) - n_new
    return n_added, n_known + n_unreadable


def import_store(store: RecordStore, other: RecordStore) -> tuple[int, int]:
    """Add another store's rows that a store does not hold yet, as they are."""
    n_added = n_known = 0
    for task in other.tasks():
        trials = other.latest(task)
        n_new = _add_new(store, task, trials)
        n_added += n_new
        n_known += len(trials) - n_new
        known = {_place_of(each) for each in store.finals(task)}
        store.add_finals(
            task, [each for each in other.finals(task) if _place_of(each) not in known]
        )
    return n_added, n_known + other.n_left_out


def _add_new(store: RecordStore, task: StoredTask, trials: Sequence[StoredTrial]) -> int:
    """Add the trials that a store does not hold; return how many."""
    known = {_measurement(trial) for trial in store.latest(task)}
    new = [trial for trial in trials if _measurement(trial) not in known]
    store.add(task, new)
    return len(new)


def _measurement(trial: StoredTrial) -> tuple[str, float | None]:
    """Return what tells measurements apart; the texts of their records may differ."""
    return candidate_of(trial), trial.seconds


def _place_of(final: StoredTrial) -> tuple[str, str, float]:
    """Return what two verdicts on one candidate differ by."""
    return final.record, final.run, final.unix_sec


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text(errors="replace").splitlines():
        if line.strip():
            yield line


def _workload(line: str) -> Any:
    try:
        return Workload.from_json(json.loads(line))
    except Exception:  # what TVM's parser may raise is anything
        return None


def _record(line: str, workloads: list[Any]) -> tuple[int, TuningRecord] | None:
    try:
        number, fields = json.loads(line)
        record = TuningRecord.from_json(fields, workloads[number])
    except Exception:  # half a line, a workload that is not there, a trace of another TVM
        return None
    return None if record.target is None else (int(number), record)
