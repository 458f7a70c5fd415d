"""What the search needs of schedules: keys, knobs, vectors, and those that were measured."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tvm_adaptive._tvm import (
    Database,
    IRModule,
    MeasureCandidate,
    Schedule,
    Target,
    TuneContext,
    TuningRecord,
    args_info_of,
    database_hooks,
    estimate_tir_flops,
    handle,
    load_own_json,
    module_key,
    save_json,
)
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.search_strategy.knobs import as_ints
from tvm_adaptive.search_strategy.tilings import Processor
from tvm_adaptive.values.roofline import fastest_believable_sec
from tvm_adaptive.values.trial import FloatArray, median_sec

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Records that a thread replays before it waits for the others; with fewer it would wait often.
_REPLAYED_AT_ONCE = 16


def key_of(schedule: Schedule) -> int:
    """Return a key that is equal for schedules that lead to the same module."""
    return module_key(schedule.mod)


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


def processor_of(target: Target) -> Processor | None:
    """Return the core of a CPU target; None for other devices, or without a number of cores."""
    n_threads = int(target.attrs.get("num-cores", 0))
    if target.kind.name != "llvm" or not n_threads:
        return None
    unit = vector_unit_of(target)
    return Processor(unit.lanes, unit.n_registers, n_threads)


def knobs_of(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the sampled decisions of a schedule's trace, in the order of its trace."""
    trace = schedule.trace
    decisions = trace.decisions
    return [as_ints(decisions[inst]) for inst in trace.insts if inst in decisions]


def measured_schedules(
    database: Database, mod: IRModule, n_threads: int = 1
) -> Iterator[tuple[float, Schedule]]:
    """Replay the records that a database holds of a workload, a few at a time."""
    mods = [mod] if n_threads == 1 else []
    records = _records_of(database, mod)
    while some := list(itertools.islice(records, _REPLAYED_AT_ONCE * n_threads)):
        mods = mods or copies_of(mod, n_threads)
        for record, schedule in zip(some, in_threads(_replay, mods, some), strict=True):
            if schedule is not None:
                yield median_sec(record.run_secs), schedule


def copies_of(mod: IRModule, n: int) -> list[IRModule]:
    """Copy a module for threads: schedules copy it on write, which only one may do at a time."""
    return [load_own_json(save_json(mod)) for _ in range(n)]


def in_threads(
    function: Callable[[IRModule, _Item], _Result], mods: list[IRModule], items: Sequence[_Item]
) -> list[_Result]:
    """Call a function with every item, in as many threads as there are modules, one for each."""

    def work(thread: int) -> list[_Result]:
        return [function(mods[thread], item) for item in items[thread :: len(mods)]]

    if len(mods) == 1 or len(items) < 2:
        return work(0)
    with ThreadPoolExecutor(len(mods)) as threads:
        parts = list(threads.map(work, range(len(mods))))
    return [parts[i % len(mods)][i // len(mods)] for i in range(len(items))]


def _records_of(database: Database, mod: IRModule) -> Iterator[TuningRecord]:
    """Yield the records of a workload; of a database that can, without reading all at once."""
    if not database.has_workload(mod):
        return
    hooks = database_hooks(database)
    if hooks is not None:
        yield from hooks.records_of(mod)
        return
    mine = handle(database.commit_workload(mod))
    for record in database.get_all_tuning_records():
        if handle(record.workload) == mine:
            yield record


def distinct(schedules: Iterable[Schedule], measured: Container[int]) -> Iterator[Schedule]:
    """Yield schedules but those whose module is measured or was seen earlier."""
    seen: set[int] = set()
    for schedule in schedules:
        key = key_of(schedule)
        if key not in seen and key not in measured:
            seen.add(key)
            yield schedule


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


def _replay(mod: IRModule, record: TuningRecord) -> Schedule | None:
    schedule = Schedule(mod)
    try:
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
    except Exception:
        logger.info("a record of the database does not replay and is left out", exc_info=True)
        return None
    return schedule
