from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tvm_adaptive._tvm import Database, Schedule, TuneContext, TuningRecord, ms
from tvm_adaptive.models import (
    Compiled,
    Network,
    Prepared,
    compile_network,
    extract,
    prepare,
    resnet18,
    run_network,
)
from tvm_adaptive.target import resolve_target

# Random tilings of a convolution are valid more often than not, and half of them unroll
# little; fifty in a row never fail.
ATTEMPTS = 50
MAX_UNROLL = 16
WAYS = {"keep": ("keep", False), "NHWC": ("NHWC", False), "prepack": ("NHWC", True)}


class Lazily(dict):
    """Values that are made when first asked for: building a tuned network takes seconds."""

    def __init__(self, make):
        super().__init__()
        self._make = make

    def __missing__(self, key):
        self[key] = self._make(key)
        return self[key]


@dataclasses.dataclass(frozen=True)
class Case:
    """A small network in every way it can be prepared, and what it computes."""

    target: Any
    network: Network
    inputs: list
    reference: list
    prepared: dict[str, Prepared]
    databases: dict[str, Any]
    tuned: dict[str, Compiled]


@pytest.fixture(scope="session")
def case() -> Case:
    target = resolve_target("cpu")
    network = resnet18(image_size=32, width=8, classes=10)
    inputs = network.random_inputs(seed=3)
    prepared = {
        way: prepare(network, target, layout, prepack=prepack)
        for way, (layout, prepack) in WAYS.items()
    }
    databases = Lazily(lambda way: random_records(extract(prepared[way], target), target))
    tuned = Lazily(lambda way: compile_network(prepared[way], databases[way], target))
    reference = run_network(compile_network(prepared["keep"], None, target), inputs)
    return Case(target, network, inputs, reference, prepared, databases, tuned)


@pytest.fixture
def valid_schedule():
    return draw_schedule


def random_records(tasks, target, seed=0) -> Database:
    database = ms.database.MemoryDatabase()
    for index, task in enumerate(tasks):
        mod = task.dispatched[0]
        schedule = draw_schedule(mod, target, seed * 1000 + index + 1)
        workload = database.commit_workload(mod)
        database.commit_tuning_record(TuningRecord(schedule.trace, workload, [1e-3], target, None))
    return database


def draw_schedule(mod, target, seed) -> Schedule:
    context = TuneContext(
        mod=mod,
        target=target,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        task_name="task",
        rand_state=seed,
        num_threads=1,
    )
    for _ in range(ATTEMPTS):
        for schedule in context.generate_design_space():
            postprocs = context.space_generator.postprocs
            if all(each.apply(schedule) for each in postprocs) and not is_unrolled(schedule):
                return schedule
    raise AssertionError("no valid schedule was drawn")


def is_unrolled(schedule) -> bool:
    """Whether LLVM would spend seconds on long unrolled loops."""
    steps = re.findall(r'"pragma_auto_unroll_max_step": (?:T\.int\d+\()?(\d+)', str(schedule.mod))
    return any(int(step) > MAX_UNROLL for step in steps)
