"""Schedules as the search sees them: keys, knobs, and what a database has measured.

An adapter, like :mod:`tvm_adaptive.search_strategy.strategy`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from tvm_adaptive._tvm import (
    Database,
    IRModule,
    MeasureCandidate,
    Schedule,
    args_info_of,
    handle,
    structural_hash,
)

logger = logging.getLogger(__name__)

# MetaSchedule writes 1e10 s for a failed trial; nothing that long is a measurement.
FAILED_SEC = 1e9


def key_of(schedule: Schedule) -> int:
    """Return a key that is equal for schedules that lead to the same module."""
    return int(structural_hash(schedule.mod))


def candidate_of(schedule: Schedule) -> MeasureCandidate:
    """Wrap a schedule for the builder, the runner and the cost model."""
    return MeasureCandidate(schedule, args_info_of(schedule.mod))


def knobs_of(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the sampled decisions of a schedule's trace, in the order of its trace."""
    trace = schedule.trace
    decisions = trace.decisions
    return [_as_ints(decisions[inst]) for inst in trace.insts if inst in decisions]


def measured_schedules(
    database: Database, mod: IRModule
) -> tuple[set[int], list[tuple[float, Schedule]]]:
    """Replay the records that a database holds of a workload.

    Parameters
    ----------
    database : Database
    mod : IRModule
        The workload, not scheduled.

    Returns
    -------
    keys : set of int
        Of everything that was tried, failed trials included.
    elites : list of (seconds, Schedule)
        The successful ones, fastest first. Records that no longer replay are left out.
    """
    if not database.has_workload(mod):
        return set(), []
    workload = database.commit_workload(mod)
    keys: set[int] = set()
    elites: list[tuple[float, Schedule]] = []
    for record in database.get_all_tuning_records():
        if handle(record.workload) != handle(workload):
            continue
        schedule = _replay(mod, record)
        if schedule is None:
            continue
        keys.add(key_of(schedule))
        seconds = [float(sec) for sec in record.run_secs or ()]
        mean_sec = math.fsum(seconds) / len(seconds) if seconds else math.inf
        if 0 < mean_sec < FAILED_SEC:
            elites.append((mean_sec, schedule))
    return keys, sorted(elites, key=lambda elite: elite[0])


def _replay(mod: IRModule, record: Any) -> Schedule | None:
    schedule = Schedule(mod)
    try:
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
    except Exception:
        logger.info("a record of the database does not replay and is left out", exc_info=True)
        return None
    return schedule


def _as_ints(decision: Any) -> tuple[int, ...]:
    """Flatten a decision: perfect tiles are lists, others are single numbers."""
    try:
        return tuple(int(part) for part in decision)
    except TypeError:
        return (int(decision),)
