from __future__ import annotations

import json

import numpy as np
import pytest

from tvm_adaptive._tvm import Target, TuningRecord, copy_record, ms, tensor
from tvm_adaptive.models import (
    Coverage,
    call_counts,
    compile_network,
    compile_tir,
    extract,
    load_workload,
    outputs_agree,
    run_network,
)

WAYS = ["NHWC", "prepack"]


@pytest.mark.parametrize("way", WAYS)
def test_every_tuned_task_is_found_again(case, way):
    coverage = case.tuned[way].coverage
    assert coverage.tuned == call_counts(case.prepared[way].mod)
    assert coverage.fallback == {}
    assert coverage.failed == {}


@pytest.mark.parametrize("way", WAYS)
def test_schedules_do_not_change_the_outputs(case, way):
    assert outputs_agree(run_network(case.tuned[way], case.inputs), case.reference)


def test_records_of_another_preparation_are_not_found(case):
    other = compile_network(case.prepared["keep"], case.databases["prepack"], case.target)
    assert not any("conv2d" in name for name in other.coverage.tuned)
    assert outputs_agree(run_network(other, case.inputs), case.reference)


def libraries_of(compiled):
    """Return the level of optimisation of each kernel."""
    names = [*compiled.coverage.tuned, *compiled.coverage.fallback]
    found = {}
    for library in compiled.executable.mod.imports:
        level = json.loads(library.get_function("_get_target_string")()).get("opt-level")
        found |= {name: level for name in names if library.implements_function(name)}
    return found


def test_functions_without_a_schedule_are_compiled_with_less_effort(case):
    prepared, records = case.prepared["NHWC"], case.databases["NHWC"]
    database = ms.database.MemoryDatabase()
    for record in records.get_all_tuning_records()[::2]:
        copy_record(record, database)
    compiled = compile_network(prepared, database, case.target)
    coverage = compiled.coverage
    assert coverage.tuned
    assert coverage.fallback
    expected = dict.fromkeys(coverage.tuned, None) | dict.fromkeys(coverage.fallback, 2)
    assert libraries_of(compiled) == expected
    assert set(libraries_of(case.tuned["NHWC"]).values()) == {None}
    assert set(libraries_of(case.untuned["NHWC"]).values()) == {2}
    assert outputs_agree(run_network(compiled, case.inputs), case.reference)


def test_the_effort_that_a_target_names_stays(case):
    target = Target({**case.target.export(), "opt-level": 1})
    compiled = compile_network(case.prepared["NHWC"], None, target)
    assert set(libraries_of(compiled).values()) == {1}


def database_of(task, trace, target, run_secs):
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(task.dispatched[0])
    database.commit_tuning_record(TuningRecord(trace, workload, run_secs, target, None))
    return database


def test_a_record_that_cannot_be_applied_costs_only_its_function(case, caplog, valid_schedule):
    prepared = case.prepared["NHWC"]
    tasks = {task.task_name: task for task in extract(prepared, case.target)}
    convolution = next(name for name in tasks if "conv2d" in name)
    # The trace of another operator names blocks that this one does not have.
    foreign = valid_schedule(tasks["max_pool2d"].dispatched[0], case.target, seed=1).trace
    database = database_of(tasks[convolution], foreign, case.target, [1e-3])
    compiled = compile_network(prepared, database, case.target)
    assert list(compiled.coverage.failed) == [convolution]
    assert convolution in compiled.coverage.fallback
    assert f"{convolution}: its record could not be applied" in caplog.text
    assert outputs_agree(run_network(compiled, case.inputs), case.reference)


def test_failed_measurements_are_no_schedules(case, valid_schedule):
    prepared = case.prepared["NHWC"]
    task = extract(prepared, case.target)[1]
    trace = valid_schedule(task.dispatched[0], case.target, seed=1).trace
    database = database_of(task, trace, case.target, [1e10])
    assert compile_network(prepared, database, case.target).coverage.tuned == {}


def test_summary_counts_functions_and_calls():
    coverage = Coverage({"a": 2, "b": 1}, {"c": 4}, {"c": "it broke"})
    assert coverage.summary() == ("2 of 3 functions tuned (3 of 7 calls); could not be applied: c")


def test_an_operator_computes_the_same_with_and_without_a_record(case, valid_schedule):
    mod = load_workload("te:GMM").mod
    database = ms.database.MemoryDatabase()
    trace = valid_schedule(mod, case.target, seed=1).trace
    workload = database.commit_workload(mod)
    database.commit_tuning_record(TuningRecord(trace, workload, [1e-3], case.target, None))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1, 128, 128)).astype("float32") for _ in range(2))
    for records in (None, database):
        out = tensor(np.zeros((1, 128, 128), "float32"))
        compile_tir(mod, case.target, records)["main"](tensor(a), tensor(b), out)
        np.testing.assert_allclose(out.numpy(), a @ b, rtol=1e-3, atol=1e-3)
