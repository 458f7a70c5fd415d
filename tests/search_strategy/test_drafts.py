"""A task that no trial has reached gets a schedule all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tvm_adaptive._tvm import IRModule, Schedule, Target, anchor_of, ms
from tvm_adaptive.search_strategy.schedules import knobs_of
from tvm_adaptive.search_strategy.sketches import Sketches
from tvm_adaptive.search_strategy.surrogate_proposer import draft_of
from tvm_adaptive.search_strategy.transfer import TransferPool, TransferRecord

NO_RECORDS = TransferPool()


def replayed(context: Any, trace: Any) -> Schedule:
    schedule = Schedule(context.mod)
    trace.apply_to_schedule(schedule, remove_postproc=False)
    return schedule


def test_without_relatives_it_is_a_schedule_for_the_processor(make_context: Any) -> None:
    context = make_context("GMM", num_threads=2)
    draft = draft_of(context, np.random.default_rng(0), NO_RECORDS)
    assert draft is not None
    assert draft.run_secs is None
    assert "T.parallel" in replayed(context, draft.trace).mod.script()
    again = draft_of(context, np.random.default_rng(0), NO_RECORDS)
    assert again is not None
    assert str(again.trace) == str(draft.trace)


@pytest.mark.parametrize("is_own", [False, True])
def test_the_best_of_an_equal_task_or_an_earlier_run_goes_before(
    make_context: Any, is_own: bool
) -> None:
    context = make_context("GMM", num_threads=2)
    sketches = Sketches(context, context.generate_design_space())
    rng = np.random.default_rng(7)
    points = [sketches.space.draw(rng) for _ in range(8)]
    point, schedule = next(each for each in sketches.replay(points, rng) if each is not None)
    names, knobs = sketches.space.names, sketches.space.sketches
    record = TransferRecord(names[point.sketch], knobs[point.sketch], point.vector, 1e-3)
    pool = TransferPool()
    if is_own:
        pool.remember(anchor_of(context.mod), "gmm", [record])
    else:
        pool.tell(anchor_of(context.mod), "relative", [record])
    draft = draft_of(context, np.random.default_rng(0), pool)
    assert draft is not None
    assert knobs_of(replayed(context, draft.trace))[:-1] == knobs_of(schedule)[:-1]


def test_a_processor_that_is_not_known_has_no_drafts() -> None:
    mod = IRModule({"main": create_te_workload("GMM", 0)})
    context: Any = ms.TuneContext(mod, target=Target("llvm"), task_name="gmm")
    assert draft_of(context, np.random.default_rng(0), NO_RECORDS) is None


def test_a_record_of_another_machine_does_not(make_context: Any) -> None:
    context = make_context("GMM", num_threads=2)
    sketches = Sketches(context, context.generate_design_space())
    point = sketches.space.draw(np.random.default_rng(7))
    names, knobs = sketches.space.names, sketches.space.sketches
    record = TransferRecord(names[point.sketch], knobs[point.sketch], point.vector, 1e-3)
    pool = TransferPool()
    pool.hint(anchor_of(context.mod), "relative", [record])
    drafts = [draft_of(context, np.random.default_rng(0), each) for each in (pool, NO_RECORDS)]
    assert all(drafts)
    decisions = [knobs_of(replayed(context, each.trace)) for each in drafts if each is not None]
    assert decisions[0] == decisions[1]
