"""Functions without a record run in parallel and in vectors, and compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvm_adaptive._tvm import (
    IRModule,
    Schedule,
    Target,
    args_info_of,
    build_tir,
    te,
    te_workload,
    tensor,
    tirx,
)
from tvm_adaptive._tvm.default_schedules import with_default_schedules
from tvm_adaptive.tuning.target import resolve_target

TARGET = resolve_target("cpu")


def arguments_of(mod: IRModule) -> list[Any]:
    """Return random arguments for a function, the results among them."""
    rng = np.random.default_rng(0)
    infos = args_info_of(mod)
    shapes = [([int(n) for n in each.shape], str(each.dtype)) for each in infos]
    return [tensor(rng.standard_normal(shape).astype(dtype)) for shape, dtype in shapes]


def ran(mod: IRModule) -> list[Any]:
    """Return all arguments of a function after a call."""
    arguments = arguments_of(mod)
    with TARGET:
        build_tir(mod, target=TARGET)["main"](*arguments)
    return [each.numpy() for each in arguments]


def module_of(*tensors: Any) -> IRModule:
    return IRModule({"main": te.create_prim_func(list(tensors))})


# Those whose loops take a second at most as TVM builds them.
@pytest.mark.parametrize(
    "name", ["C1D", "CAP", "CBR", "DEP", "DIL", "GMM", "GRP", "NRM", "SFM", "T2D", "TBG"]
)
def test_operators_of_tvm_use_all_threads_and_compute_the_same(name: str) -> None:
    mod = te_workload(name)
    changed = with_default_schedules(mod, TARGET)
    text = changed.script()
    assert "T.parallel" in text
    # Norms and softmax reduce their last axis.
    assert ("T.vectorized" in text) == (name != "NRM")
    for expected, found in zip(ran(mod), ran(changed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_small_functions_wake_no_thread() -> None:
    a = te.placeholder((4, 64), "float32", name="a")
    text = with_default_schedules(
        module_of(a, te.compute((4, 64), lambda i, j: a[i, j] + 1.0)), TARGET
    ).script()
    assert "T.vectorized(16)" in text
    assert "T.parallel" not in text


def test_truth_values_are_no_vectors() -> None:
    a = te.placeholder((64, 1024), "float32", name="a")
    mod = module_of(a, te.compute((64, 1024), lambda i, j: a[i, j] > 0.0))
    changed = with_default_schedules(mod, TARGET)
    assert "T.parallel" in changed.script()
    np.testing.assert_array_equal(ran(changed)[1], ran(mod)[1])
    b = te.placeholder((64, 1024), "bool", name="b")
    mod = module_of(a, b, te.compute((64, 1024), lambda i, j: te.if_then_else(b[i, j], a[i, j], 0)))
    np.testing.assert_array_equal(ran(with_default_schedules(mod, TARGET))[2], ran(mod)[2])


def test_open_extents_and_what_has_its_schedule_stay() -> None:
    n = tirx.Var("n", "int64")
    a = te.placeholder((n, 64), "float32", name="a")
    mod = module_of(a, te.compute((n, 64), lambda i, j: a[i, j] + 1.0))
    assert with_default_schedules(mod, TARGET).script() == mod.script()
    tuned = te_workload("GMM")["main"].with_attr("tirx.is_scheduled", True)
    mod = IRModule({"main": tuned})
    assert with_default_schedules(mod, TARGET).script() == mod.script()


def test_loops_that_are_not_as_written_stay_right() -> None:
    mod = te_workload("GMM")
    schedule = Schedule(mod)
    block = next(iter(schedule.get_child_blocks(schedule.get_sblock("root"))))
    loops = schedule.get_loops(block)
    schedule.reorder(loops[-1], *loops[:-1])  # the reduction outside
    for expected, found in zip(
        ran(mod), ran(with_default_schedules(schedule.mod, TARGET)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_of_a_target_that_is_no_cpu_nothing_changes_without_threads() -> None:
    mod = te_workload("GMM")
    assert with_default_schedules(mod, Target("c")).script() == mod.script()
