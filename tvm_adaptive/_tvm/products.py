"""Products of matrices: small tasks to test a machine, or an extension, with."""

from __future__ import annotations

from tvm_adaptive._tvm import IRModule, Schedule, te


def matrix_product(size: int) -> IRModule:
    """Return a product of square matrices, one of MetaSchedule's testing workloads."""
    from tvm.s_tir.meta_schedule.testing.te_workload import matmul

    return IRModule({"main": te.create_prim_func(matmul(n=size, m=size, k=size))})


def parallel_product(size: int) -> IRModule:
    """Return a product of square matrices whose rows all cores share."""
    schedule = Schedule(matrix_product(size))
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    schedule.parallel(schedule.get_loops(block)[0])
    return schedule.mod
