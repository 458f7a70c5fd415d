"""The local runner: real kernels, and faults in a real worker process."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir.meta_schedule.arg_info import TensorInfo
from tvm.s_tir.meta_schedule.runner import Runner, RunnerInput, RunnerResult
from tvm.support.tar import tar

from tests.processes import gone
from tvm_adaptive.errors import InvalidOptionError, is_machine_failure, is_out_of_time
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.runner.local import AdaptiveRunner, MeasurementFuture
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import TrialLog

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

N = 64


def fake(deed):
    """An input for ``misbehave``: the path says what to do."""
    return RunnerInput(deed, "cpu", [])


def misbehave(artifact_path, device_type, args_info, options):
    deed, _, argument = artifact_path.partition(" ")
    if deed == "abort":
        os.abort()
    elif deed == "segfault":
        ctypes.string_at(0)
    elif deed == "exit":
        os._exit(0)
    elif deed == "raise":
        raise RuntimeError("device lost")
    elif deed == "hang":
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "grandchild":
        child = subprocess.Popen(["sleep", "1000"])
        Path(argument).write_text(str(child.pid))
        time.sleep(1000)
    elif deed == "nan":
        return Timing(float("nan"), 0.0, 1, 1, "precise", 0.1)
    elif deed == "wrong":
        return [1.0]
    return Timing(float(os.getpid()), 0.0, 1, 1, "precise", 0.1)


@pytest.fixture
def make_runner():
    runners = []

    def make(**options):
        runners.append(AdaptiveRunner(**options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def results(runner, inputs):
    futures = Runner.run(runner, inputs)  # through C++, as a run does
    assert all(future.done() for future in futures)
    return [future.result() for future in futures]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_stay_within_any_table(make_runner, dtype, tmp_path):
    table = te.placeholder((2, N), name="table")
    places = te.placeholder((N,), dtype, name="places")
    rows = te.compute((N, N), lambda i, j: table[places[i], j])
    mod = tvm.IRModule({"main": te.create_prim_func([table, places, rows])})
    path = tmp_path / "take.tar"
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    tvm.driver.build(mod, target=target).export_library(str(path), fcompile=tar)
    shapes = [("float32", (2, N)), (dtype, (N,)), ("float32", (N, N))]
    arguments = [TensorInfo(kind, shape) for kind, shape in shapes]
    (result,) = results(make_runner(), [RunnerInput(str(path), "cpu", arguments)])
    assert result.error_msg is None


@pytest.mark.parametrize("rule", ["precision", "paper"])
def test_a_real_kernel_gets_one_time(make_runner, matmul, rule, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    runner = make_runner(rule=rule, journal=journal)
    first, second = results(runner, [matmul, matmul])
    for result in (first, second):
        assert result.error_msg is None
        assert len(result.run_secs) == 1
        assert 1e-7 < float(result.run_secs[0]) < 0.1
    events = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert [event["index"] for event in events] == [0, 1]
    assert events[0]["mean_sec"] == pytest.approx(float(first.run_secs[0]))
    assert events[0]["reason"]
    assert events[0]["error"] is None
    assert events[0]["n_runs"] >= 1
    assert {field.name for field in dataclasses.fields(Timing)} <= events[0].keys()


def test_cache_flush_measures_single_runs(make_runner, matmul, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    runner = make_runner(cpu_cache_flush=True, journal=journal)
    (result,) = results(runner, [matmul])
    assert result.error_msg is None
    event = read_journal(journal.path)[-1]
    assert event["n_runs"] == event["n_batches"]


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("abort", "SIGABRT"),
        ("segfault", "SIGSEGV"),
        ("exit", "exit code 0"),
        ("raise", "RuntimeError: device lost"),
        ("hang", r"Timeout: timeout: killed after 1 s of running"),
        ("stop", r"Timeout: timeout: killed after 1 s of running"),
        ("nan", "measured nan s"),
        ("wrong", r"expected the measuring function's Timing, got \[1.0\]"),
    ],
)
def test_a_fault_costs_one_result(make_runner, deed, message, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    runner = make_runner(measure=misbehave, timeout_sec=1.0, journal=journal)
    before, failed, after = results(runner, [fake("good"), fake(deed), fake("good")])
    assert failed.run_secs is None
    assert re.search(message, failed.error_msg)
    assert failed.error_msg.startswith("AdaptiveRunner: ")
    assert before.error_msg is None
    assert after.error_msg is None
    events = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert [event["index"] for event in events] == [0, 1, 2]
    assert "\n" not in events[1]["error"]
    # All seconds of a candidate that hangs were spent on it.
    assert float(deed in ("hang", "stop")) <= events[1]["elapsed_sec"] <= 1.0


@pytest.mark.parametrize(
    ("deed", "same"),
    [
        ("good", True),
        ("raise", False),
        ("abort", False),
        pytest.param("hang", False, marks=pytest.mark.slow),
    ],
)
def test_the_worker_changes_after_any_error_and_only_then(make_runner, deed, same):
    runner = make_runner(measure=misbehave, timeout_sec=1.0)
    before, _, after = results(runner, [fake("good"), fake(deed), fake("good")])
    assert (float(before.run_secs[0]) == float(after.run_secs[0])) == same


def test_the_worker_changes_after_its_uses(make_runner):
    runner = make_runner(measure=misbehave, max_uses=2)
    pids = [float(result.run_secs[0]) for result in results(runner, [fake("good")] * 4)]
    assert pids[0] == pids[1]
    assert pids[1] != pids[2]
    assert pids[2] == pids[3]


def test_a_timeout_also_kills_what_the_kernel_had_started(make_runner, tmp_path):
    runner = make_runner(measure=misbehave, timeout_sec=1.0)
    note = tmp_path / "pid"
    (result,) = results(runner, [fake(f"grandchild {note}")])
    assert "Timeout" in result.error_msg
    assert gone(int(note.read_text()))


def test_closing_ends_the_worker_and_a_later_run_starts_one(make_runner):
    runner = make_runner(measure=misbehave)
    (first,) = results(runner, [fake("good")])
    runner.close()
    assert gone(int(float(first.run_secs[0])))
    (second,) = results(runner, [fake("good")])
    assert second.error_msg is None


def test_a_missing_artifact_is_an_error_result(make_runner):
    (result,) = results(make_runner(), [RunnerInput("missing.tar", "cpu", [])])
    assert "No such file or directory: 'missing.tar'" in result.error_msg


def test_an_empty_batch_gives_an_empty_list(make_runner):
    assert list(Runner.run(make_runner(), [])) == []


def test_an_error_of_our_own_does_not_leave_the_runner(make_runner, tmp_path):
    class Untravelled:
        min_batches, max_batches, runs_per_batch = 1, 1, None

        def __reduce__(self):
            raise ValueError("stays at home")

    (result,) = results(make_runner(rule=Untravelled(), measure=misbehave), [fake("good")])
    assert "stays at home" in result.error_msg


def test_a_journal_that_fails_costs_no_measurement(make_runner):
    class Full:
        def write(self, event, **fields):
            raise OSError("no space left")

    (result,) = results(make_runner(measure=misbehave, journal=Full()), [fake("good")])
    assert result.error_msg is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_sec": 0}, "timeout_sec must be above 0 but got 0"),
        ({"timeout_sec": float("nan")}, "timeout_sec must be above 0 but got nan"),
        ({"min_repeat_ms": -1}, "min_repeat_ms must be at least 0 but got -1"),
        ({"max_sec": 0}, "max_sec must be above 0 but got 0"),
        ({"devices": (-1,)}, r"different numbers from 0 on but got \[-1\]"),
        ({"devices": (0, 0)}, r"different numbers from 0 on but got \[0, 0\]"),
        ({"devices": ()}, r"different numbers from 0 on but got \[\]"),
        ({"max_uses": 0}, "max_uses must be at least 1 but got 0"),
        ({"rule": "best"}, "one of 'precision', 'paper', 'cv', but got 'best'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(InvalidOptionError, match=message):
        AdaptiveRunner(**options)


def test_times_of_a_faster_and_a_slower_kernel_keep_their_order(make_runner, matmul, tmp_path):
    x = te.placeholder((N,), name="X")
    mod = tvm.IRModule({"main": te.create_prim_func([x, te.compute((N,), lambda i: x[i] + 1.0)])})
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    path = tmp_path / "add.tar"
    tvm.driver.build(mod, target=target).export_library(str(path), fcompile=tar)
    add = RunnerInput(str(path), "cpu", [TensorInfo("float32", (N,))] * 2)
    secs = [float(result.run_secs[0]) for result in results(make_runner(), [add, matmul])]
    assert np.argmin(secs) == 0


def tell_the_race(artifact_path, device_type, args_info, options):
    """Take the artifact's name for a time, and the race's incumbent for its error."""
    raced = options.race is not None
    incumbent_sec = options.race.incumbent_sec if raced else 0.0
    return Timing(float(artifact_path), incumbent_sec, 1, 1, "precise", 0.1)


def incumbents_of(log, *times):
    """Return what candidates raced against, by the times that are their artifacts' names."""
    for sec in times:
        log.identify(str(sec), hash(sec))
    return [log.get(hash(sec)).relative_error * sec for sec in times]


def test_candidates_race_against_the_best_so_far(make_runner):
    log = TrialLog()
    runner = make_runner(measure=tell_the_race, trial_log=log)
    results(runner, [fake(name) for name in ("4.0", "2.0", "3.0", "1.0")])
    assert incumbents_of(log, 4.0, 2.0, 3.0, 1.0) == [0.0, 4.0, 2.0, 2.0]
    results(runner, [fake("5.0")])  # another task, without any time
    assert incumbents_of(log, 5.0) == [0.0]
    log.batch_facts.incumbent_sec = 3.0
    results(runner, [fake("5.0"), fake("2.0"), fake("4.0")])
    assert incumbents_of(log, 5.0, 2.0, 4.0) == [3.0, 3.0, 2.0]
    assert log.batch_facts.incumbent_sec == 3.0  # the search's to change


def test_races_can_be_switched_off(make_runner):
    log = TrialLog()
    runner = make_runner(measure=tell_the_race, trial_log=log, race=False)
    results(runner, [fake("4.0"), fake("2.0")])
    assert incumbents_of(log, 2.0) == [0.0]


def slow_race(artifact_path, device_type, args_info, options):
    time.sleep(0.3)
    return tell_the_race(artifact_path, device_type, args_info, options)


def test_in_the_background_the_caller_goes_on(make_runner):
    log = TrialLog()
    log.batch_facts.incumbent_sec = 8.0
    runner = make_runner(measure=slow_race, overlap=True, trial_log=log)
    first = Runner.run(runner, [fake("4.0"), fake("5.0")])
    log.batch_facts.incumbent_sec = 1.0  # the next batch is another task's
    second = Runner.run(runner, [fake("2.0"), fake("failing")])
    assert not any(future.done() for future in (*first, *second))
    assert [float(future.result().run_secs[0]) for future in first] == [4.0, 5.0]
    assert all(future.done() for future in first)
    good, failed = (future.result() for future in second)
    assert float(good.run_secs[0]) == 2.0
    assert "could not convert" in failed.error_msg
    assert incumbents_of(log, 4.0, 5.0, 2.0) == [8.0, 4.0, 1.0]


def test_closing_lets_the_batch_in_the_background_end(make_runner):
    runner = make_runner(measure=slow_race, overlap=True)
    first, second = (Runner.run(runner, [fake("4.0")]) for _ in range(2))
    while len(runner._dispatcher._queue) > 1:  # the thread has not taken the first one
        time.sleep(0.01)
    runner.close()
    assert first[0].done()
    assert float(first[0].result().run_secs[0]) == 4.0
    assert "could not measure: the runner was closed" in second[0].result().error_msg
    assert is_machine_failure(second[0].result().error_msg)
    (again,) = Runner.run(runner, [fake("4.0")])
    assert float(again.result().run_secs[0]) == 4.0


def own_device(artifact_path, device_type, args_info, options):
    from tvm_adaptive.workers import device_session

    time.sleep(0.3)
    return Timing(1.0 + device_session._CurrentDevice.index, 0.0, 1, 1, "precise", 0.3)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_device_has_a_worker_of_its_own(make_runner, overlap):
    runner = make_runner(measure=own_device, devices=(0, 2), overlap=overlap)
    assert runner.n_devices == 2
    futures = Runner.run(runner, [fake(str(number)) for number in range(6)])
    found = [float(future.result().run_secs[0]) for future in futures]
    assert sorted(set(found)) == [1.0, 3.0]


def test_results_keep_the_order_of_their_batch_on_several_devices(make_runner, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    runner = make_runner(measure=long_ones_first, devices=(0, 1), journal=journal)
    secs = [0.6, 0.1, 0.2, 0.1]
    found = results(runner, [fake(str(sec)) for sec in secs])
    assert [float(result.run_secs[0]) for result in found] == secs
    events = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert [event["mean_sec"] for event in sorted(events, key=lambda e: e["index"])] == secs
    assert [event["index"] for event in events] != [0, 1, 2, 3]


def long_ones_first(artifact_path, device_type, args_info, options):
    time.sleep(float(artifact_path))
    return Timing(float(artifact_path), 0.0, 1, 1, "precise", 0.1)


def test_a_real_kernel_runs_on_its_own_device(make_runner, matmul, tmp_path):
    inputs = []
    for number in range(4):  # TVM unpacks an archive beside it
        path = shutil.copy(matmul.artifact_path, tmp_path / f"{number}.tar")
        inputs.append(RunnerInput(str(path), "cpu", matmul.args_info))
    found = results(make_runner(devices=(0, 1)), inputs)
    assert [result.error_msg for result in found] == [None] * 4


def test_a_fault_on_one_device_costs_the_other_nothing(make_runner):
    runner = make_runner(measure=misbehave, devices=(0, 1), timeout_sec=1.0)
    deeds = ["hang", "good", "abort", "good", "good"]
    found = results(runner, [fake(deed) for deed in deeds])
    assert [result.error_msg is None for result in found] == [deed == "good" for deed in deeds]


def test_what_the_machine_could_not_do_is_measured_once_more(make_runner, tmp_path, monkeypatch):
    monkeypatch.setattr("tvm_adaptive.runner.local._RETRY_PAUSE_SEC", 0.01)
    journal = Journal(tmp_path / "journal.jsonl")
    note = tmp_path / "tries"

    def measure(artifact_path, *_):
        with note.open("a") as file:
            file.write(artifact_path[0])
        if artifact_path == "always" or note.read_text().count(artifact_path[0]) == 1:
            raise MemoryError("no room")
        return Timing(1e-3, 1e-5, 3, 1, "precise", 0.1)

    runner = make_runner(measure=measure, journal=journal)
    always, once = (future.result() for future in runner.run([fake("always"), fake("once")]))
    assert [float(each) for each in once.run_secs] == [1e-3]
    assert str(always.error_msg) == "machine: AdaptiveRunner: Error: MemoryError: no room"
    assert is_machine_failure(str(always.error_msg))
    assert sorted(note.read_text()) == ["a", "a", "o", "o"]
    journal.close()
    events = read_journal(tmp_path / "journal.jsonl")
    errors = [each["error"] for each in events if each["event"] == "timing"]
    assert errors == ["machine: MemoryError: no room", None]


def test_what_is_faster_than_possible_is_a_failure(make_runner, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    log = TrialLog()
    log.batch_facts.floor_sec = 2.0
    runner = make_runner(measure=tell_the_race, trial_log=log, journal=journal)
    slow, impossible, possible = results(runner, [fake(name) for name in ("4.0", "1.9", "2.1")])
    assert slow.error_msg is None
    assert possible.error_msg is None
    assert "the kernel does not do them" in impossible.error_msg
    events = [event for event in read_journal(journal.path) if event["event"] == "timing"]
    assert [event["error"] is None for event in events] == [True, False, True]


def test_what_there_is_no_time_to_measure_is_no_candidates_fault(make_runner):
    left_sec = iter([60.0, 0.5, 0.0])
    runner = make_runner(
        measure=misbehave, timeout_sec=500.0, time_left=lambda: next(left_sec, 60.0)
    )
    first, hangs, late = results(runner, [fake("good"), fake("hang"), fake("good")])
    assert first.error_msg is None
    assert is_out_of_time(hangs.error_msg)
    assert is_out_of_time(late.error_msg)


def test_a_candidate_that_hangs_while_there_is_time_is_to_blame(make_runner):
    runner = make_runner(measure=misbehave, timeout_sec=1.0, time_left=lambda: 60.0)
    (result,) = results(runner, [fake("hang")])
    assert "Timeout" in result.error_msg
    assert not is_out_of_time(result.error_msg)


@pytest.mark.parametrize("left_sec", [0.05, 0.0, -3.0])
def test_nobody_waits_for_a_device_longer_than_there_is_time(left_sec):
    result = MeasurementFuture(Future(), lambda: left_sec).result()
    assert is_out_of_time(result.error_msg)


def test_a_result_is_waited_for_where_there_is_no_limit():
    for time_left in (None, lambda: float("inf")):
        answer = Future()
        threading.Timer(0.05, answer.set_result, [RunnerResult([2.0], None)]).start()
        assert [float(sec) for sec in MeasurementFuture(answer, time_left).result().run_secs] == [
            2.0
        ]
