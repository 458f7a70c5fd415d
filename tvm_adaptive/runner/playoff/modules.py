"""Helpers of the play-off for records and modules."""

from __future__ import annotations

import math
from typing import Any

from tvm_adaptive._tvm import (
    Database,
    IRModule,
    PrimFunc,
    Schedule,
    Target,
    TuningRecord,
    args_info_of,
    buffer_of,
)
from tvm_adaptive.values.trial import FAILED_SEC

_REWRITES_WEIGHT = "meta_schedule.layout_rewrite_preproc"
# A play-off takes some hundred at most, some of which are duplicates or another target's; all
# records of a long run would take gigabytes.
MAX_RECORDS = 256


def sane_records(
    database: Database, mod: IRModule, target: Target, n: int = MAX_RECORDS
) -> list[TuningRecord]:
    """Return a task's best records with valid times, fastest first."""
    if not database.has_workload(mod):
        return []
    records = database.get_top_k(database.commit_workload(mod), n)
    sane = [record for record in records if _is_sane(record, target)]
    return sorted(sane, key=mean_sec)


def mean_sec(record: TuningRecord) -> float:
    """Return the mean of a record's times in seconds, as databases do; infinite without times."""
    seconds = [float(second) for second in record.run_secs or ()]
    return math.fsum(seconds) / len(seconds) if seconds else math.inf


def scheduled(record: TuningRecord) -> IRModule:
    """Return the module with a record's schedule."""
    return record.as_measure_candidate().sch.mod


def buffers_of(mod: IRModule) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return type and shape of each argument."""
    infos = [info.as_json() for info in args_info_of(mod)]
    return tuple((str(dtype), tuple(int(n) for n in shape)) for _, dtype, shape in infos)


def with_plain_weights(mod: IRModule) -> IRModule:
    """Keep a weight's layout change inside the kernel, for checks."""
    # A builder drops an annotated block, which is meant to run once, ahead of time.
    schedule = Schedule(mod)
    marked = [
        block for block in _blocks(schedule) if _REWRITES_WEIGHT in schedule.get(block).annotations
    ]
    for block in marked:
        schedule.unannotate(block, _REWRITES_WEIGHT)
    return schedule.mod if marked else mod


def longest_sums(mod: IRModule) -> dict[str, int]:
    """Return the terms of the longest sum of an unscheduled module, by the type it adds in."""
    longest: dict[str, int] = {}
    schedule = Schedule(mod)
    for block in map(schedule.get, _blocks(schedule)):
        extents = [
            int(axis.dom.extent)
            for axis in block.iter_vars
            if axis.iter_type == axis.CommReduce and hasattr(axis.dom.extent, "value")
        ]
        for dtype in {str(buffer_of(region).dtype) for region in block.writes}:
            longest[dtype] = max(longest.get(dtype, 1), math.prod(extents))
    return longest


def _is_sane(record: TuningRecord, target: Target) -> bool:
    if record.target is not None and record.target.kind.name != target.kind.name:
        return False
    return bool(record.run_secs) and 0.0 < mean_sec(record) < FAILED_SEC


def _blocks(schedule: Schedule) -> list[Any]:
    """Return references to all blocks of all functions, outer ones first."""
    waiting = [
        schedule.get_sblock("root", func_name=variable.name_hint)
        for variable, function in schedule.mod.functions.items()
        if isinstance(function, PrimFunc)
    ]
    found = []
    while waiting:
        found.append(waiting.pop(0))
        waiting += schedule.get_child_blocks(found[-1])
    return found
