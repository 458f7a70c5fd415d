"""Vectors of several registers that become loops over registers, in schedules and by a search."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from tests.models.prefetch.conftest import product as large_product
from tvm_adaptive._tvm import For, ForKind, IRModule, SBlockRealize, Schedule, SeqStmt
from tvm_adaptive._tvm.vector_unit import vector_unit_of
from tvm_adaptive.search_strategy.knobs import Point
from tvm_adaptive.search_strategy.sketches import Sketches, split_uneven_vectors
from tvm_adaptive.tuning.target import resolve_target

CPU = resolve_target("cpu")
LANES = vector_unit_of(CPU).lanes
N_ROWS, N_SUMMED = 4, 32


def product(n_columns: int, dtype: str = "float32", lanes: int | None = None) -> Schedule:
    """Return a product whose tile is all of its columns, collected for what follows.

    With ``lanes``, vectors are split as a search does it: before the sums are divided.
    """
    a = te.placeholder((N_ROWS, N_SUMMED), dtype, name="A")
    b = te.placeholder((N_SUMMED, n_columns), dtype, name="B")
    k = te.reduce_axis((0, N_SUMMED), name="k")
    c = te.compute((N_ROWS, n_columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    d = te.compute((N_ROWS, n_columns), lambda i, j: c[i, j] * c[i, j], name="D")
    function = te.create_prim_func([a, b, d]).with_attr("global_symbol", "main")
    schedule = Schedule(IRModule({"main": function}))
    block = schedule.get_sblock("C")
    i, j, k_loop = schedule.get_loops(block)
    schedule.reorder(k_loop, i, j)
    schedule.vectorize(j)
    schedule.vectorize(schedule.get_loops(schedule.get_sblock("D"))[-1])
    if lanes is not None:
        split_uneven_vectors(schedule, lanes)
    schedule.decompose_reduction(block, k_loop)
    return schedule


def loops_of(statement, kind):
    """Return the extents of loops of a kind, the outermost first."""
    found = []
    if isinstance(statement, For):
        found = [int(statement.extent)] * (int(statement.kind) == int(kind))
        return found + loops_of(statement.body, kind)
    if isinstance(statement, SeqStmt):
        return [n for each in statement.seq for n in loops_of(each, kind)]
    if isinstance(statement, SBlockRealize):
        return loops_of(statement.block.body, kind)
    return found


@pytest.mark.parametrize(
    ("n_columns", "dtype", "lanes", "expected"),
    [
        (24, "float32", 8, (3, 8)),
        (40, "int32", 8, (5, 8)),
        (48, "float32", 16, (3, 16)),
        (24, "float32", 16, None),  # not whole registers
        (20, "float32", 8, None),
        (32, "float32", 8, None),  # LLVM divides it as well
        (8, "float32", 8, None),
        (24, "float64", 8, None),
    ],
)
def test_uneven_vectors_are_loops_over_registers(n_columns, dtype, lanes, expected):
    schedule = product(n_columns, dtype, lanes)
    body = schedule.mod["main"].body
    n_registers, n_numbers = expected or (None, n_columns)
    # Of the initial zeros, the sums, and what follows.
    assert loops_of(body, ForKind.VECTORIZED) == [n_numbers] * 3
    assert loops_of(body, ForKind.UNROLLED) == ([n_registers] * 3 if expected else [])


@pytest.mark.parametrize("n_columns", [24, 40, 48, 56])
def test_results_stay_the_same(n_columns):
    rng = np.random.default_rng(0)
    a, b = (rng.random(shape, "float32") for shape in ((N_ROWS, N_SUMMED), (N_SUMMED, n_columns)))
    outputs = []
    for schedule in (product(n_columns), product(n_columns, lanes=LANES)):
        built = tvm.compile(schedule.mod, target=CPU)
        arguments = [
            tvm.runtime.tensor(x) for x in (a, b, np.zeros((N_ROWS, n_columns), "float32"))
        ]
        built["main"](*arguments)
        outputs.append(arguments[-1].numpy())
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(outputs[0], (a @ b) ** 2, rtol=1e-5)


def test_a_search_splits_them_and_their_records_replay(make_context):
    width = 3 * LANES
    context = make_context("GMM", mod=large_product(4 * width))
    space = context.space_generator.generate_design_space(context.mod)
    sketches = Sketches(context, space)
    # Tiles of four rows and three registers.
    point = Point(1, (1, 8, 1, 4, 2, 2, 1, width, 128, 4, 2))
    (found,) = sketches.replay([point], np.random.default_rng(0))
    assert found is not None
    again, schedule = found
    assert again == point
    body = schedule.mod["main"].body
    assert loops_of(body, ForKind.VECTORIZED).count(LANES) >= 2
    assert width not in loops_of(body, ForKind.VECTORIZED)
    # As whoever compiles a record does.
    replayed = Schedule(context.mod)
    schedule.trace.apply_to_schedule(replayed, remove_postproc=False)
    tvm.ir.assert_structural_equal(replayed.mod, schedule.mod)
    assert sketches.point_of(replayed) == point
