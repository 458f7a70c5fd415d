"""Products that are tiled in a given order, with their weights packed in it."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te

from tvm_adaptive._tvm import (
    IRModule,
    Schedule,
    Target,
    TuningRecord,
    anchor_of,
    args_info_of,
    memory_database,
)

N_ROWS, N_SUMMED, N_COLUMNS = 32, 512, 256
LLVM = Target("llvm")
LINE = 16  # floats
# Loops around the sum, the outermost first: a tile of columns (j) or of rows (i), and its
# rounds; then the sum's (k). What is left of each is inside.
ROWS_INSIDE = (("j", 8), ("i", 8), ("k", 64))
GROUPS = (("j", 4), ("i", 8), ("j", 2), ("k", 64))
TWO_SUMS = (("j", 8), ("i", 2), ("k", 2), ("k", 32))
COLUMNS_INSIDE = (("i", 8), ("j", 8), ("k", 64))


def product(n_columns: int = N_COLUMNS, sign: int = 1, dtype: str = "float32") -> IRModule:
    rows = te.placeholder((N_ROWS, N_SUMMED), dtype, name="A")
    weights = te.placeholder((N_SUMMED, n_columns), dtype, name="W")
    k = te.reduce_axis((0, N_SUMMED), name="k")
    result = te.compute(
        (N_ROWS, n_columns),
        lambda i, j: te.sum(rows[i, k] * weights[k, j] * sign, axis=k),
        name="C",
    )
    function = te.create_prim_func([rows, weights, result])
    function = function.with_attr("global_symbol", "main")
    return IRModule({"main": function.with_attr("layout_free_buffers", [1])})


def tiled(mod: IRModule, order: Sequence[tuple[str, int]], *, is_packed: bool = True) -> Schedule:
    """Schedule a product; weights are packed in the order in which they are read."""
    schedule = Schedule(mod)
    block = schedule.get_sblock(anchor_of(mod))
    left = dict(zip("ijk", schedule.get_loops(block), strict=True))
    outside = []
    for name, n in order:
        first, left[name] = schedule.split(left[name], factors=[n, None])
        outside.append(first)
    schedule.reorder(*outside, left["k"], left["i"], left["j"])
    schedule.parallel(outside[0])
    schedule.vectorize(left["j"])
    schedule.enter_postproc()
    if is_packed:
        width = int(schedule.get(left["j"]).extent)
        copy = schedule.cache_read(block, 1, "global")
        schedule.transform_layout(
            block,
            ("read", 1),
            lambda k, j: [j // width, k, j % width],
            assume_injective_transform=True,
        )
        schedule.annotate(copy, "meta_schedule.layout_rewrite_preproc", True)
    schedule.decompose_reduction(block, outside[[name for name, _ in order].index("k")])
    return schedule


def record_of_schedule(schedule: Schedule, mod: IRModule) -> TuningRecord:
    workload = memory_database().commit_workload(mod)
    return TuningRecord(schedule.trace, workload, [1e-3], LLVM, args_info_of(schedule.mod))
