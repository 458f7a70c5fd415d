"""Means over an image have sketches that reduce vectors of channels, and they are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.starter.workloads import WORKLOADS
from tvm_adaptive._tvm import (
    IRModule,
    Schedule,
    Trace,
    TuneContext,
    build_tir,
    device,
    te,
    tensor,
    tirx,
)
from tvm_adaptive._tvm.reduction_rule import space_generator_of
from tvm_adaptive.models import extract, prepare
from tvm_adaptive.models.network import network_of_relax
from tvm_adaptive.tuning.target import resolve_target

TARGET = resolve_target("cpu")


def module_of(prefix: str) -> IRModule:
    workload = next(each for each in WORKLOADS if each.name.startswith(prefix))
    prepared = prepare(network_of_relax("net", workload.module(), {}), TARGET)
    return extract(prepared, TARGET)[0].dispatched[0]


def context_of(mod: IRModule, *, reductions: bool) -> TuneContext:
    space = space_generator_of([TARGET], reductions=reductions)
    return TuneContext(mod, target=TARGET, space_generator=space, rand_state=1).clone()


def spaces_of(mod: IRModule, *, reductions: bool) -> list[Schedule]:
    return list(context_of(mod, reductions=reductions).generate_design_space())


@pytest.mark.parametrize(
    ("prefix", "n_more"),
    [
        ("mean-1-20-20-192", 1),
        ("global-pool", 1),
        ("max-pool", 0),
        ("depthwise-3x3", 0),
        ("dense-1-", 0),
        ("conv-1x1", 0),
    ],
)
def test_only_long_reductions_that_keep_the_last_axis_have_more_sketches(
    prefix: str, n_more: int
) -> None:
    mod = module_of(prefix)
    n_stock = len(spaces_of(mod, reductions=False))
    assert len(spaces_of(mod, reductions=True)) == n_stock + n_more


def drawn(context: TuneContext, mod: IRModule, space: Schedule, seed: int) -> Schedule:
    """Return a schedule of a sketch with other decisions, as a record has it."""
    schedule = Schedule(mod, seed=seed)
    Trace(space.trace.insts, {}).apply_to_schedule(schedule, remove_postproc=True)
    written = schedule.trace.as_json()
    again = Schedule(mod)
    Trace.apply_json_to_schedule(written, again)
    again.enter_postproc()
    assert all(each.apply(again) for each in context.space_generator.postprocs)
    return again


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sketches_compute_the_mean(seed: int) -> None:
    mod = module_of("mean-1-20-20-192")
    context = context_of(mod, reductions=True)
    values = np.random.default_rng(0).random((1, 20, 20, 192), np.float32)
    where: Any = device("cpu")
    for space in context.generate_design_space():
        schedule = drawn(context, mod, space, seed)
        result = tensor(np.zeros((1, 1, 1, 192), np.float32), where)
        build_tir(schedule.mod, target=TARGET)["main"](tensor(values, where), result)
        expected = values.mean((1, 2), keepdims=True)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5)


def test_other_targets_and_the_paper_have_the_stock_sketches() -> None:
    cuda = resolve_target({"kind": "cuda", "arch": "sm_80"})
    assert space_generator_of([cuda], reductions=True) == "post-order-apply"
    assert space_generator_of([], reductions=True) == "post-order-apply"
    assert space_generator_of([TARGET], reductions=False) == "post-order-apply"


def test_a_reduction_that_cannot_be_divided_has_vectors_alone() -> None:
    x = te.placeholder((1, 20, 20, 32), name="x")
    axes = [te.reduce_axis((0, 20), name=name) for name in "hw"]
    half = tirx.const(0.5, "float32")
    fading = te.comm_reducer(lambda a, b: a * half + b, lambda dtype: tirx.const(0, dtype))
    y = te.compute((1, 32), lambda n, c: fading(x[n, axes[0], axes[1], c], axis=axes))
    mod = IRModule({"main": te.create_prim_func([x, y])})
    (space,) = spaces_of(mod, reductions=True)
    assert "reorder" in str(space.trace)
    assert "rfactor" not in str(space.trace)


def test_a_reduction_that_reads_a_single_number_has_the_stock_sketches() -> None:
    x, scale = te.placeholder((1, 20, 20, 32), name="x"), te.placeholder((), name="scale")
    h, w = (te.reduce_axis((0, 20), name=name) for name in "hw")
    y = te.compute((1, 32), lambda n, c: te.sum(x[n, h, w, c] * scale(), axis=[h, w]))
    mod = IRModule({"main": te.create_prim_func([x, scale, y])})
    assert len(spaces_of(mod, reductions=True)) == len(spaces_of(mod, reductions=False))
