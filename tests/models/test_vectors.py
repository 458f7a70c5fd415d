"""Vectors of several registers that become loops over registers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from tvm_adaptive._tvm import For, ForKind, IRModule, SBlockRealize, Schedule, SeqStmt, Target
from tvm_adaptive.models.vectors import with_register_vectors
from tvm_adaptive.tuning.target import resolve_target

FEW = Target({"kind": "llvm", "mcpu": "znver3"})  # 8 numbers in a register
MANY = Target({"kind": "llvm", "mcpu": "skylake-avx512"})  # 16
N_ROWS, N_SUMMED = 4, 32


def product(n_columns: int, dtype: str = "float32") -> Schedule:
    """Return a product whose tile is all of its columns, collected for what follows."""
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
    schedule.decompose_reduction(block, k_loop)
    schedule.vectorize(schedule.get_loops(schedule.get_sblock("D"))[-1])
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
    ("n_columns", "dtype", "target", "expected"),
    [
        (24, "float32", FEW, (3, 8)),
        (40, "int32", FEW, (5, 8)),
        (48, "float32", MANY, (3, 16)),
        (24, "float32", MANY, None),  # not whole registers
        (20, "float32", FEW, None),
        (32, "float32", FEW, None),  # LLVM divides it as well
        (8, "float32", FEW, None),
        (24, "float64", FEW, None),
        (24, "float32", Target("cuda"), None),
    ],
)
def test_uneven_vectors_are_loops_over_registers(n_columns, dtype, target, expected):
    mod = product(n_columns, dtype).mod
    body = with_register_vectors(mod, target)["main"].body
    n_registers, lanes = expected or (None, n_columns)
    # Of the initial zeros, the sums, and what follows.
    assert loops_of(body, ForKind.VECTORIZED) == [lanes] * 3
    assert loops_of(body, ForKind.UNROLLED) == ([n_registers] * 3 if expected else [])


@pytest.mark.parametrize("n_columns", [24, 40, 48, 56])
def test_results_stay_the_same(n_columns):
    target = resolve_target("cpu")
    mod = product(n_columns).mod
    rng = np.random.default_rng(0)
    a, b = (rng.random(shape, "float32") for shape in ((N_ROWS, N_SUMMED), (N_SUMMED, n_columns)))
    outputs = []
    for each in (mod, with_register_vectors(mod, target)):
        built = tvm.compile(each, target=target)
        arguments = [
            tvm.runtime.tensor(x) for x in (a, b, np.zeros((N_ROWS, n_columns), "float32"))
        ]
        built["main"](*arguments)
        outputs.append(arguments[-1].numpy())
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(outputs[0], (a @ b) ** 2, rtol=1e-5)
