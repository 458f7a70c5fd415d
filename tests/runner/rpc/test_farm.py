"""A farm of several servers: lost and stopped ones, and ones of different speed."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import cloudpickle
import pytest
from tvm.s_tir.meta_schedule.runner import Runner, RunnerInput

from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.runner.rpc.device_pool import BoardRules
from tvm_adaptive.values.trial import Timing

pytestmark = [pytest.mark.rpc, pytest.mark.slow]

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KERNEL_SEC = 0.3


def simulate(artifact_path, device_type, args_info, options):
    """Take KERNEL_SEC on the device that is held."""
    from tvm_adaptive.runner import measure
    from tvm_adaptive.workers import device_session

    end_sec = time.monotonic() + KERNEL_SEC
    while time.monotonic() < end_sec:
        time.sleep(0.02)
        device_session.function(measure.RANDOM_FILL)  # fails once it is gone
    return Timing(1.0 + int(artifact_path), 0.0, 1, 1, "precise", KERNEL_SEC)


def inputs_of(n):
    return [RunnerInput(str(number), "cpu", []) for number in range(n)]


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    with contextlib.closing(journal):
        yield journal


def events(journal, kind):
    return [event for event in read_journal(journal.path) if event["event"] == kind]


def run_while(runner, inputs, deed, after_sec):
    """Measure a batch, and do something to the farm meanwhile."""
    timer = threading.Timer(after_sec, deed)
    timer.start()
    found = [future.result() for future in Runner.run(runner, inputs)]
    timer.join()
    return found


def check_all_measured(found):
    assert [result.error_msg for result in found] == [None] * len(found)
    assert [float(result.run_secs[0]) for result in found] == [1.0 + i for i in range(len(found))]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_candidate_is_lost_with_a_server(make_farm, journal, number):
    farm = make_farm(4)
    runner = farm.connect(n_devices=4, measure=simulate, timeout_sec=3.0, journal=journal)
    with contextlib.closing(runner):
        list(Runner.run(runner, inputs_of(8)))  # all workers have started
        found = run_while(
            runner, inputs_of(24), lambda: farm.signal_server(1, number), 2.5 * KERNEL_SEC
        )
    check_all_measured(found)
    timings = events(journal, "timing")
    assert sorted(event["index"] for event in timings) == list(range(8 + 24))
    # On a busy machine the one that was stopped may not have had its first turn.
    others = {farm.address(i) for i in (0, 2, 3)}
    assert {event["board"] for event in timings} - {farm.address(1)} == others
    faults = {event["address"] for event in events(journal, "board") if event["state"] == "fault"}
    assert faults == {farm.address(1)}


def test_a_server_that_comes_back_is_used_again(make_farm, journal):
    farm = make_farm(2, restarts=True)
    runner = farm.connect(n_devices=2, measure=simulate, timeout_sec=3.0, journal=journal)
    with contextlib.closing(runner):
        found = run_while(runner, inputs_of(100), lambda: farm.signal_server(0, signal.SIGKILL), 1)
    check_all_measured(found)
    last = events(journal, "timing")[-20:]
    assert {event["board"] for event in last} == {farm.address(0), farm.address(1)}


def slower_on_odd(artifact_path, device_type, args_info, options):
    """Have the first argument for a time, on one of two devices half as fast."""
    from tvm_adaptive.runner.rpc import lease

    time.sleep(0.1)
    ports = sorted(int(port) for port in device_type.split())
    factor = 1.0 + ports.index(lease._Lease.offer[1])
    with open(artifact_path) as file:
        return Timing(factor * float(file.read()), 0.0, 1, 1, "precise", 0.1)


def test_devices_of_different_speed_give_comparable_times(make_farm, journal, tmp_path):
    farm = make_farm(2)
    ports = " ".join(map(str, farm.servers))
    inputs = []
    for number in range(12):
        path = tmp_path / f"kernel-{number}"
        path.write_text(str(1.0 + number))
        inputs.append(RunnerInput(str(path), ports, []))
    runner = farm.connect(n_devices=2, measure=slower_on_odd, journal=journal)
    with contextlib.closing(runner):
        found = [float(future.result().run_secs[0]) for future in Runner.run(runner, inputs)]
    ratios = [sec / (1.0 + number) for number, sec in enumerate(found)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert len({event["board"] for event in events(journal, "timing")}) == 2
    speeds = {
        event["address"]: event["speed"]
        for event in events(journal, "board")
        if event["state"] == "calibrated"
    }
    assert sorted(speeds.values()) in ([0.5, 1.0], [1.0, 2.0])


def crash_on_device(artifact_path, device_type, args_info, options):
    """End the server's process of this session, as a kernel that crashes does."""
    from tvm_adaptive.workers import device_session

    if artifact_path == "crash":
        device_session.function("tests.no_such_function")
        raise AssertionError("unreachable")
    return Timing(1.0, 0.0, 1, 1, "precise", 0.1)


def test_a_candidate_that_fails_on_a_live_device_is_to_blame(make_farm, journal):
    farm = make_farm(2)
    runner = farm.connect(n_devices=2, measure=crash_on_device, journal=journal)
    names = ["good", "crash", "good"]
    with contextlib.closing(runner):
        inputs = [RunnerInput(name, "cpu", []) for name in names]
        found = [future.result() for future in Runner.run(runner, inputs)]
    assert [result.error_msg is None for result in found] == [True, False, True]
    assert "no_such_function" in found[1].error_msg
    assert not [event for event in events(journal, "board") if event["state"] == "fault"]


def hang(artifact_path, device_type, args_info, options):
    if artifact_path == "hang":
        time.sleep(1000)
    return Timing(1.0, 0.0, 1, 1, "precise", 0.1)


def test_a_candidate_that_hangs_twice_is_to_blame(make_farm, journal):
    farm = make_farm(2)
    rules = BoardRules(max_faults=1)
    runner = farm.connect(n_devices=2, measure=hang, timeout_sec=1.0, boards=rules, journal=journal)
    names = ["hang", "good", "good"]
    with contextlib.closing(runner):
        inputs = [RunnerInput(name, "cpu", []) for name in names]
        found = [future.result() for future in Runner.run(runner, inputs)]
    assert [result.error_msg is None for result in found] == [False, True, True]
    assert "Timeout" in found[0].error_msg
    assert not [event for event in events(journal, "board") if event["state"] == "fault"]
