"""What a run has found so far: its tasks, and the best schedule of each."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from tvm_adaptive._tvm import Schedule, json_database, workload_key
from tvm_adaptive.database.repair import RECORD_FILE
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.finish import FINAL_DIR
from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.records import median_sec
from tvm_adaptive.session import journal_of


@dataclasses.dataclass(frozen=True)
class ShownTask:
    """A task of a run.

    Attributes
    ----------
    name, family : str
    weight : float
        Calls per inference.
    best_sec : float
        Of the best record, by the play-off if there was one; infinite without any.
    record : object or None
        MetaSchedule's record of it.
    """

    name: str
    family: str
    weight: float
    best_sec: float
    record: Any


class _Told(NamedTuple):
    """A task as the journal has it."""

    name: str
    family: str
    weight: float
    workload_key: str


def shown_tasks(work_dir: Path) -> list[ShownTask]:
    """Return the tasks of a run in their order, also of one that goes on or was killed.

    Parameters
    ----------
    work_dir : Path

    Raises
    ------
    InvalidOptionError
        When it is no run's directory.
    JournalError
        When its journal is damaged.
    """
    told: list[_Told] = []

    def take(event: dict[str, Any]) -> None:
        if event["event"] == "tasks":
            told[:] = [
                _Told(task["name"], task["family"], float(task["weight"]), task["workload_key"])
                for task in event["tasks"]
            ]

    follow(journal_of(work_dir), take)
    if not told:
        raise InvalidOptionError(f"{work_dir}: the run had not begun its search; let it go on.")
    best = best_records(work_dir)
    return [
        ShownTask(name, family, weight, *best.get(key, (math.inf, None)))
        for name, family, weight, key in told
    ]


def best_schedule(work_dir: Path, task_name: str | None = None) -> tuple[str, str]:
    """Return a task's best schedule as TVMScript, and the trace that leads to it.

    Parameters
    ----------
    work_dir : Path
    task_name : str or None, default None
        None where the run has one task only.

    Raises
    ------
    InvalidOptionError
        When there is no such task, or nothing was found for it.
    """
    tasks = {task.name: task for task in shown_tasks(work_dir)}
    if task_name is None and len(tasks) == 1:
        (task_name,) = tasks
    if task_name not in tasks:
        raise InvalidOptionError(
            f"The task must be one of {', '.join(tasks)} but got {task_name!r}."
        )
    record = tasks[task_name].record
    if record is None:
        raise InvalidOptionError(f"Nothing was found for task {task_name} yet.")
    schedule = Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    return str(schedule.mod.script()), str(record.trace)


def best_records(work_dir: Path) -> dict[str, tuple[float, Any]]:
    """Return seconds and record of a run's best of each workload, by the workload's key.

    That of its play-off, where there was one: it was measured again, at length.
    """
    return {**_fastest(work_dir), **_fastest(work_dir / FINAL_DIR)}


def _fastest(folder: Path) -> dict[str, tuple[float, Any]]:
    if not (folder / RECORD_FILE).is_file():
        return {}
    best: dict[str, tuple[float, Any]] = {}
    for record in json_database(folder).get_all_tuning_records():
        seconds, key = median_sec(record.run_secs), workload_key(record.workload.mod)
        if seconds < best.get(key, (math.inf, None))[0]:
            best[key] = (seconds, record)
    return best
