"""The results of a run so far: its tasks, and the best schedule of each."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tvm_adaptive._tvm import TVM_VERSION, Schedule, TuningRecord, workload_key
from tvm_adaptive.database.metaschedule import readable_database, record_of, trial_of
from tvm_adaptive.database.records import StoredTrial
from tvm_adaptive.database.verdicts import (
    VerdictFile,
    candidate_key,
    ever_disqualified,
    standing_winner,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.history import has_same_times
from tvm_adaptive.measure_callback.journal import follow
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import journal_of
from tvm_adaptive.values.run_folder import FINAL_DIR
from tvm_adaptive.values.trial import median_sec

_Parsed = TypeVar("_Parsed")
# Of a workload, the fastest by the mean of their times, of which the best by the median is one
# unless its own times scatter. Each takes some milliseconds to read.
_N_BEST = 64


class Best(NamedTuple):
    """The best record of a task."""

    seconds: float = math.inf
    record: Any = None
    is_checked: bool = False


class ShownTask(NamedTuple):
    """A task of a run."""

    name: str
    family: str
    weight: float  # calls per inference
    best: Best = Best()


def shown_tasks(work_dir: Path) -> list[ShownTask]:
    """Return the tasks of a run in their order, also of one in progress or killed."""

    def parse(event: dict[str, Any]) -> list[tuple[str, ShownTask]]:
        return [
            (task["workload_key"], ShownTask(task["name"], task["family"], float(task["weight"])))
            for task in event["tasks"]
        ]

    tasks = _last_event(work_dir, "tasks", parse)
    if not tasks:
        if shown_comparison(work_dir) is not None or _last_event(work_dir, "report", bool):
            return []  # a budget for no search, or nothing to tune
        if not _last_event(work_dir, "run", bool):
            raise InvalidOptionError(f"There is no run in {work_dir}.")
        raise InvalidOptionError(
            f"{work_dir}: the run has not begun its search: wait for it, or continue it with "
            f"tvm-adaptive tune --resume {shlex.quote(str(work_dir))}."
        )
    best = _best_records(work_dir)
    return [task._replace(best=best.get(key, Best())) for key, task in tasks]


def shown_comparison(work_dir: Path) -> Comparison | None:
    """Return the comparison of the library that is there; None if it was not compared."""
    return _last_event(work_dir, "comparison", Comparison.from_fields, ended_by="library")


def _last_event(
    work_dir: Path,
    kind: str,
    parse: Callable[[dict[str, Any]], _Parsed],
    ended_by: str = "",  # the kind of event after which it no longer holds
) -> _Parsed | None:
    """Return the last event of a kind in a run's journal, parsed; None without one."""
    found: list[_Parsed] = []
    run: dict[str, Any] = {}

    def take(event: dict[str, Any]) -> None:  # an event that cannot be parsed is named
        nonlocal run
        if event["event"] == "run":
            before, run = run, event
            if event.get("resumed") is False or not has_same_times(before, run):
                found.clear()  # it is another run's, or another machine's
        if event["event"] == ended_by:
            found.clear()
        if event["event"] == kind:
            found[:] = [parse(event)]

    follow(journal_of(work_dir), take)
    return found[0] if found else None


def best_schedule(work_dir: Path, task_name: str | None = None) -> tuple[str, str]:
    """Return a task's best schedule as TVMScript, and its trace."""
    tasks = {task.name: task for task in shown_tasks(work_dir)}
    if task_name is None and len(tasks) == 1:
        (task_name,) = tasks
    if task_name is None:
        raise InvalidOptionError(f"Name a task with --task: {', '.join(tasks) or 'there is none'}.")
    if task_name not in tasks:
        raise InvalidOptionError(
            f"The task must be one of {', '.join(tasks)} but got {task_name!r}."
        )
    record = tasks[task_name].best.record
    if record is None:
        raise InvalidOptionError(f"Nothing was found for task {task_name} yet.")
    schedule = Schedule(record.workload.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    return str(schedule.mod.script()), str(record.trace)


def _best_records(work_dir: Path) -> dict[str, Best]:
    """Return by workload the winner of its play-off, else the fastest not disqualified."""
    finals: dict[str, list[StoredTrial]] = {}
    for (key, _), verdicts in VerdictFile(work_dir, str(TVM_VERSION)).read().items():
        finals.setdefault(key, []).extend(verdicts)
    best: dict[str, Best] = {}
    # Drafts, and what only an earlier run has measured, are among the winners alone.
    found = _records_by_workload(work_dir / FINAL_DIR) | _records_by_workload(work_dir)
    for key, records in found.items():
        verdicts = finals.get(key, [])
        winner = standing_winner(verdicts)
        record = None if winner is None else record_of(winner, records[0].workload)
        if record is not None:
            best[key] = Best(median_sec(record.run_secs), record, is_checked=True)
            continue
        lost = ever_disqualified(verdicts)
        for each in records:
            if not lost or candidate_key(trial_of(each)) not in lost:
                best[key] = Best(median_sec(each.run_secs), each)
                break
    return best


def _records_by_workload(work_dir: Path) -> dict[str, list[TuningRecord]]:
    """Return a run's best records that have a time, the fastest first."""
    found: dict[str, list[TuningRecord]] = {}
    database = readable_database(work_dir)
    for workload in database.readable_workloads:
        best = database.get_top_k(workload, _N_BEST)
        timed = [each for each in best if math.isfinite(median_sec(each.run_secs))]
        if timed:
            timed.sort(key=lambda each: median_sec(each.run_secs))
            found[workload_key(workload.mod)] = timed
    return found
