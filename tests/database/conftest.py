from __future__ import annotations

import pytest

from tvm_adaptive._tvm import (
    IRModule,
    Schedule,
    Target,
    TuningRecord,
    Workload,
    args_info_of,
    te_workload,
)


@pytest.fixture(scope="session")
def target() -> Target:
    return Target({"kind": "llvm", "num-cores": 2})


@pytest.fixture(scope="session")
def mods() -> dict[str, IRModule]:
    return {name: te_workload(name) for name in ("GMM", "C1D")}


def make_record(
    mod: IRModule, target: Target, seconds: float | None, seed: int = 1
) -> TuningRecord:
    """Return a record of a schedule whose first loop is split at random."""
    schedule = Schedule(mod, seed=seed)
    block = schedule.get_sblock(_first_block(mod))
    loop = schedule.get_loops(block)[1]
    schedule.split(loop, schedule.sample_perfect_tile(loop, n=4))
    schedule.enter_postproc()
    run_secs = [1e10] if seconds is None else [seconds]
    return TuningRecord(schedule.trace, Workload(mod), run_secs, target, args_info_of(mod))


def _first_block(mod: IRModule) -> str:
    from tvm_adaptive._tvm import anchor_of

    return anchor_of(mod)
