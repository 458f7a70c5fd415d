"""Schedules as the search sees them: keys, knobs, and what a database has measured.

An adapter, like :mod:`tvm_adaptive.search_strategy.strategy`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    IRModule,
    MeasureCandidate,
    Schedule,
    TuneContext,
    args_info_of,
    estimate_tir_flops,
    handle,
    load_json,
    save_json,
    structural_hash,
)
from tvm_adaptive.records import FloatArray, median_sec
from tvm_adaptive.roofline import fastest_believable_sec
from tvm_adaptive.search_strategy.findings import as_ints

logger = logging.getLogger(__name__)


def key_of(schedule: Schedule) -> int:
    """Return a key that is equal for schedules that lead to the same module."""
    return int(structural_hash(schedule.mod))


def candidate_of(schedule: Schedule) -> MeasureCandidate:
    """Wrap a schedule for the builder, the runner and the cost model."""
    return MeasureCandidate(schedule, args_info_of(schedule.mod))


def floor_sec_of(context: TuneContext) -> float:
    """Return the seconds that no kernel of a task can be faster than; 0 if not known."""
    digits = [re.search(r"\d+", str(info.dtype)) for info in args_info_of(context.mod)]
    bits = min((int(found[0]) for found in digits if found), default=32)
    flop = float(estimate_tir_flops(context.mod))
    n_cores = int(context.target.attrs.get("num-cores", 0)) or None
    return fastest_believable_sec(flop, n_cores, bits)


def knobs_of(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the sampled decisions of a schedule's trace, in the order of its trace."""
    trace = schedule.trace
    decisions = trace.decisions
    return [as_ints(decisions[inst]) for inst in trace.insts if inst in decisions]


def measured_schedules(
    database: Database, mod: IRModule, n_threads: int = 1
) -> tuple[set[int], list[tuple[float, Schedule]]]:
    """Replay the records that a database holds of a workload.

    Parameters
    ----------
    database : Database
    mod : IRModule
        The workload, not scheduled.
    n_threads : int, default 1
        A record takes some ten milliseconds, and a resumed run may have thousands.

    Returns
    -------
    keys : set of int
        Of everything that was tried, failed trials included.
    elites : list of (seconds, Schedule)
        The successful ones, fastest first. Records that no longer replay are left out.
    """
    if not database.has_workload(mod):
        return set(), []
    mine = handle(database.commit_workload(mod))
    records = [
        record for record in database.get_all_tuning_records() if handle(record.workload) == mine
    ]
    keys: set[int] = set()
    elites: list[tuple[float, Schedule]] = []
    for record, schedule in zip(records, _replayed(mod, records, n_threads), strict=True):
        if schedule is None:
            continue
        keys.add(key_of(schedule))
        seconds = median_sec(record.run_secs)
        if math.isfinite(seconds):
            elites.append((seconds, schedule))
    return keys, sorted(elites, key=lambda elite: elite[0])


def distinct(schedules: Sequence[Schedule], measured: set[int]) -> list[Schedule]:
    """Drop schedules whose module is measured or was seen earlier in the list.

    Parameters
    ----------
    schedules : sequence of Schedule
    measured : set of int
        Keys; not changed.
    """
    seen = set(measured)
    kept = []
    for schedule in schedules:
        key = key_of(schedule)
        if key not in seen:
            seen.add(key)
            kept.append(schedule)
    return kept


def mix(
    exploit: list[Schedule], randoms: list[Schedule], explore: int, size: int
) -> list[Schedule]:
    """Put a batch together: the best to exploit, then random ones.

    Parameters
    ----------
    exploit : list of Schedule
        Best first.
    randoms : list of Schedule
        Fill the batch, also where ``exploit`` runs short.
    explore : int
        Places for random ones.
    size : int
        Places in all.
    """
    batch = exploit[: size - explore]
    seen = {key_of(schedule) for schedule in batch}
    for schedule in randoms:
        if len(batch) == size:
            break
        if key_of(schedule) not in seen:
            seen.add(key_of(schedule))
            batch.append(schedule)
    return batch


def vectors_of(schedules: list[Schedule]) -> FloatArray:
    """Place schedules in a space: log2 of their numeric knobs, one block per knob."""
    rows = [
        np.concatenate(
            [np.log2(1.0 + np.abs(np.asarray(knob, dtype=float))) for knob in knobs_of(schedule)]
            or [np.zeros(1)]
        )
        for schedule in schedules
    ]
    width = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def _replayed(mod: IRModule, records: Sequence[Any], n_threads: int) -> list[Schedule | None]:
    """Replay records in several threads; None for one that does not replay."""
    found: list[Schedule | None] = [None] * len(records)
    n_threads = min(n_threads, len(records))

    def work(thread: int) -> None:
        # Schedules copy a module on write, which is not safe from several threads.
        own = mod if n_threads == 1 else load_json(save_json(mod))
        for i in range(thread, len(records), n_threads):
            found[i] = _replay(own, records[i])

    if n_threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(max(1, n_threads)) as threads:
            list(threads.map(work, range(n_threads)))
    return found


def _replay(mod: IRModule, record: Any) -> Schedule | None:
    schedule = Schedule(mod)
    try:
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
    except Exception:
        logger.info("a record of the database does not replay and is left out", exc_info=True)
        return None
    return schedule
