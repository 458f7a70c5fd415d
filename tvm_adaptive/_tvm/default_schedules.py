"""Schedules without a search: for GPUs those of DLight, for CPUs threads and vectors.

For CPUs, TVM builds a function as it is written, for one thread and number by number: an
inference of ResNet-50 takes 6 s so, and 0.4 s with its last axes in vectors and its outer loops
on two threads. Each result stays the sum of the same terms in the same order.
"""

from __future__ import annotations

import math
from typing import Any

from tvm_adaptive._tvm import (
    IRModule,
    PrimFunc,
    Schedule,
    ScheduleError,
    Target,
    buffer_of,
    has_blocks,
    is_gpu,
    is_scheduled,
    tirx,
)
from tvm_adaptive._tvm.tensor_functions import with_rewritten_functions

# 32-bit numbers in the largest vectors of today's CPUs; LLVM halves them where they are smaller.
_LANES = 16
# Fewer steps take less time than it takes to wake a thread.
LEAST_STEPS = 1 << 14
# Chunks for the threads; more make no difference.
_MANY_CHUNKS = 64


def with_default_schedules(mod: IRModule, target: Target) -> IRModule:
    """Give functions without a schedule one that needs no search."""
    if target.kind.name == "llvm":
        return _for_cpu(mod)
    if not is_gpu(target):
        return mod
    from tvm.s_tir import dlight

    rules = dlight.gpu
    # DLight changes the module that it is given.
    mod = IRModule(dict(mod.functions.items()), attrs=mod.attrs)
    with target:
        return dlight.ApplyDefaultSchedule(
            rules.Matmul(),
            rules.GEMV(),
            rules.Reduction(),
            rules.GeneralReduction(),
            rules.Fallback(),
        )(mod)


def _for_cpu(mod: IRModule) -> IRModule:
    def scheduled(function: PrimFunc) -> PrimFunc:
        is_open = not is_scheduled(function) and has_blocks(function)
        return _scheduled(function) if is_open else function

    return with_rewritten_functions(mod, scheduled)


def _scheduled(function: PrimFunc) -> PrimFunc:
    """Return a function with each of its blocks in better loops, or as it was."""
    name = "main"
    schedule = Schedule(IRModule({name: function}))
    for block in schedule.get_child_blocks(schedule.get_sblock("root", func_name=name)):
        trial = schedule.copy()
        try:
            _improve(trial, block)
        except ScheduleError:  # such as of a block whose results overlap
            continue
        schedule = trial
    (changed,) = schedule.mod.functions.values()
    return changed


def _improve(schedule: Schedule, block: Any) -> None:
    """Give a block vectors within its reductions, and its outer loops to the threads."""
    node, loops = schedule.get(block), schedule.get_loops(block)
    kinds = [each.iter_type for each in node.iter_vars]
    n_spatial = sum(each == tirx.IterVar.DataPar for each in kinds)
    extents = [int(getattr(schedule.get(each).extent, "value", 0)) for each in loops]
    is_plain = kinds[:n_spatial] == [tirx.IterVar.DataPar] * n_spatial
    if not is_plain or len(loops) != len(kinds) or not n_spatial or min(extents) < 1:
        return
    spatial, reduced = loops[:n_spatial], loops[n_spatial:]
    lanes = math.gcd(extents[n_spatial - 1], _LANES)
    is_bool = any(str(buffer_of(each).dtype) == "bool" for each in [*node.reads, *node.writes])
    if lanes > 1 and not is_bool:  # TVM has no vectors of truth values in memory
        outer, inner = schedule.split(spatial[-1], [None, lanes])
        schedule.reorder(outer, *reduced, inner)
        spatial = [*spatial[:-1], outer]
        schedule.vectorize(inner)
    if math.prod(extents) >= LEAST_STEPS:
        n_fused, n_chunks = 0, 1
        while n_fused < n_spatial and n_chunks < _MANY_CHUNKS:
            n_chunks *= extents[n_fused]
            n_fused += 1
        schedule.parallel(schedule.fuse(*spatial[:n_fused]))
    if reduced:  # only now: what adds to a result alone cannot be changed
        schedule.decompose_reduction(block, reduced[0])
