"""The RPC runner's queue always ends: devices are scripted, workers are real."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tvm.s_tir.meta_schedule.runner import RPCConfig, Runner, RunnerInput

from tvm_adaptive.errors import (
    AdaptiveError,
    WorkerTaskError,
    WorkerTimeoutError,
    is_machine_failure,
)
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.runner.rpc import device_pool
from tvm_adaptive.runner.rpc import runner as rpc
from tvm_adaptive.runner.rpc.device_pool import BoardRules
from tvm_adaptive.runner.rpc.runner import AdaptiveRPCRunner
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import BatchFacts, TrialLog
from tvm_adaptive.workers.scratch import OWNER_FILE

# A queue without an end is a test that hangs.
pytestmark = pytest.mark.timeout(120)

# The workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FAST, SLOW, SLOWER = "farm:1", "farm:2", "farm:3"
# Offers of the first device while the others are in use.
N_ALONE = 8


def offer_device(
    config: Any, avoided: Any, wait_sec: float, waits_for_server: bool
) -> tuple[str, tuple[str, ...]]:
    """Offer the device that was offered longest ago, as a tracker does."""
    from tvm_adaptive.runner.rpc import lease

    state = Path(config.tracker_host)
    with state.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _offer(lease, state, avoided)


def _offer(lease: Any, state: Path, avoided: Any) -> tuple[str, tuple[str, ...]]:
    devices = json.loads(state.read_text())
    allowed = [each for each in devices if each not in avoided] or list(devices)

    def offered_ns(address: str) -> int:
        mark = state.with_name(address)
        return mark.stat().st_mtime_ns if mark.exists() else 0

    chosen = min(allowed, key=offered_ns)
    state.with_name(chosen).write_text("")
    return _offered(lease, chosen), tuple(devices)


def _offered(lease: Any, address: str) -> str:
    host, _, port = address.partition(":")
    lease._Lease.offer = (host, int(port), "")
    return address


def offer_the_first_for_long(
    config: Any, avoided: Any, wait_sec: float, waits_for_server: bool
) -> tuple[str, tuple[str, ...]]:
    """Offer the first device once it has rested, as a tracker does while others use the second."""
    from tvm_adaptive.runner.rpc import lease

    state = Path(config.tracker_host)
    offers = state.with_name("offers")
    with offers.open("a") as file:
        file.write("x")
    is_alone = offers.stat().st_size <= N_ALONE
    if is_alone:
        time.sleep(avoided.get(FAST, 0.0))
    return _offered(lease, FAST if is_alone else SLOW), tuple(json.loads(state.read_text()))


def offer_to_who_waits(
    config: Any, avoided: Any, wait_sec: float, waits_for_server: bool
) -> tuple[str, tuple[str, ...]]:
    """Offer a device as soon as its server is back."""
    if not waits_for_server:
        raise AdaptiveError("no server with the key is left")
    return offer_device(config, avoided, wait_sec, waits_for_server)


def connect(timeout_sec: int) -> None:
    return None


def refuse_connection(timeout_sec: int) -> None:
    raise OSError("connection refused")


def queue_in_vain(config: Any, avoided: Any, wait_sec: float, waits_for_server: bool) -> Any:
    time.sleep(1000.0)


def note_release(folder: str) -> None:
    from tvm_adaptive.runner.rpc import lease

    assert lease._Lease.offer is not None
    host, port, _ = lease._Lease.offer
    with Path(folder, "released").open("a") as file:
        file.write(f"{host}:{port}\n")


def fail_always(artifact_path: str, device_type: str, args_info: Any, options: Any) -> Timing:
    raise RuntimeError("a bad kernel")


def fail_on_first(artifact_path: str, device_type: str, args_info: Any, options: Any) -> Timing:
    from tvm_adaptive.runner.rpc import lease

    if lease._Lease.offer is not None and lease._Lease.offer[1] == 1:
        raise RuntimeError("no linker")
    time.sleep(0.05)
    return measure(artifact_path, device_type, args_info, options)


def fail_later_on_first(
    artifact_path: str, device_type: str, args_info: Any, options: Any
) -> Timing:
    """Fail on the first device, but for the first kernel that it gets."""
    from tvm_adaptive.runner.rpc import lease

    assert lease._Lease.offer is not None
    if lease._Lease.offer[1] == 1:
        mark = Path(device_type).with_name("measured-once")
        if mark.exists():
            raise RuntimeError("no linker any more")
        mark.touch()
    time.sleep(0.02)
    return measure(artifact_path, device_type, args_info, options)


def fill_disk(artifact_path: str, device_type: str, args_info: Any, options: Any) -> Timing:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_on_first_by(
    cause: str, artifact_path: str, device_type: str, args_info: Any, options: Any
) -> Timing:
    from tvm_adaptive.runner.rpc import lease

    assert lease._Lease.offer is not None
    if lease._Lease.offer[1] == 1:
        if cause == "disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        if cause == "death":
            os._exit(1)
        raise RuntimeError("no linker")
    return measure(artifact_path, device_type, args_info, options)


def die_of(name: str, artifact_path: str, device_type: str, args_info: Any, options: Any) -> Timing:
    if Path(artifact_path).name == name:
        time.sleep(0.2)
        os._exit(1)
    return measure(artifact_path, device_type, args_info, options)


def measure(artifact_path: str, device_type: str, args_info: Any, options: Any) -> Timing:
    """Take as long as the kernel says, times how slow the device is."""
    from tvm_adaptive.runner.rpc import lease

    assert lease._Lease.offer is not None
    host, port, _ = lease._Lease.offer
    slowness = json.loads(Path(device_type).read_text())[f"{host}:{port}"]
    return Timing(slowness * float(Path(artifact_path).read_text()), 0.0, 1, 1, "precise", 0.0)


def fail_on_copies(artifact_path: str, device_type: str, args_info: Any, options: Any) -> Timing:
    if "tvm-adaptive-rpc-" in artifact_path:
        raise RuntimeError("the copy is bad")
    return measure(artifact_path, device_type, args_info, options)


class Farm:
    """Devices and their slowness, in a file that workers read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "devices.json"
        self.journal = Journal(folder / "journal.jsonl")
        self.runners: list[AdaptiveRPCRunner] = []

    def set(self, **slowness: float) -> None:
        devices = {name.replace("_", ":"): value for name, value in slowness.items()}
        self.state.write_text(json.dumps(devices))

    def runner(self, **options: Any) -> AdaptiveRPCRunner:
        options = {"measure": measure, "max_workers": 1, "journal": self.journal, **options}
        config = RPCConfig(str(self.state), 1, "board", 1, 5)
        self.runners.append(AdaptiveRPCRunner(config, **options))
        return self.runners[-1]

    def measure(self, runner: AdaptiveRPCRunner, n: int) -> list[Any]:
        inputs = []
        for number in range(n):
            path = self.folder / f"kernel-{number}"
            path.write_text(str(1.0 + number))
            inputs.append(RunnerInput(str(path), str(self.state), []))
        return [future.result() for future in Runner.run(runner, inputs)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(self.journal.path) if event["event"] == kind]


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    farm = Farm(tmp_path)

    def present(config: Any) -> tuple[str, ...]:
        return tuple(json.loads(farm.state.read_text()))

    monkeypatch.setattr(rpc, "devices_of", present)
    monkeypatch.setattr(rpc.lease, "queue_for_device", offer_device)
    monkeypatch.setattr(rpc.lease, "open_session", connect)
    # A lease for each candidate, so that devices take turns.
    monkeypatch.setattr(rpc, "LEASE_SEC", 1e-3)
    with contextlib.closing(farm.journal):
        yield farm
        for runner in farm.runners:
            runner.close()


def seconds(found: list[Any]) -> list[float]:
    assert [result.error_msg for result in found] == [None] * len(found)
    return [float(result.run_secs[0]) for result in found]


@pytest.mark.parametrize("left", [{"farm_2": 5.0}, {"farm_2": 5.0, "farm_3": 6.0}])
def test_the_queue_ends_when_only_slow_devices_are_left(left: Any, farm: Farm) -> None:
    farm.set(farm_1=1.0, farm_2=5.0)
    runner = farm.runner()
    assert seconds(farm.measure(runner, 4)) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert {event["board"] for event in farm.events("timing")} == {FAST}
    farm.set(**left)
    found = seconds(farm.measure(runner, 6))
    # As the device would have them that has left.
    assert found == pytest.approx([1.0 + n for n in range(6)])
    assert {event["board"] for event in farm.events("timing")[4:]} <= {SLOW, SLOWER}
    speeds = {e["address"]: e["speed"] for e in farm.events("board") if e["state"] == "calibrated"}
    expected = {FAST: 1.0, SLOW: 1 / 5, SLOWER: 1 / 6}
    assert speeds == pytest.approx({each: expected[each] for each in speeds})


def test_a_device_that_is_too_slow_costs_no_candidate(farm: Farm) -> None:
    farm.set(farm_1=1.0, farm_2=10.0)
    runner = farm.runner(boards=BoardRules(max_faults=2))
    assert seconds(farm.measure(runner, 8)) == pytest.approx([1.0 + n for n in range(8)])
    assert {event["board"] for event in farm.events("timing")[1:]} == {FAST}
    states = [event["state"] for event in farm.events("board") if event["address"] == SLOW]
    assert states.count("quarantined") <= 1


def test_another_reference_kernel_follows_one_that_vanished(farm: Farm) -> None:
    farm.set(farm_1=1.0, farm_2=2.0)
    runner = farm.runner(boards=BoardRules(calibrate_sec=1e-9))
    seconds(farm.measure(runner, 4))
    for kept in kept_kernels(runner):
        kept.unlink()
    assert seconds(farm.measure(runner, 6)) == pytest.approx([1.0 + n for n in range(6)])
    assert len(kept_kernels(runner)) == 1


def test_what_takes_an_impossible_time_is_no_reference_kernel(farm: Farm) -> None:
    farm.set(farm_1=1.0, farm_2=1.0)
    log = TrialLog()
    log.batch_facts = BatchFacts(floor_sec=1.5)
    runner = farm.runner(trial_log=log)
    impossible, *others = farm.measure(runner, 4)
    assert "does not do them" in str(impossible.error_msg)
    assert seconds(others) == pytest.approx([2.0, 3.0, 4.0])
    assert [path.name for path in kept_kernels(runner)] == ["0-kernel-1"]


def kept_kernels(runner: Any) -> list[Path]:
    return [path for path in runner._scratch.path.iterdir() if path.name != OWNER_FILE]


def test_a_reference_kernel_that_fails_everywhere_ends_no_queue(farm: Farm) -> None:
    farm.set(farm_1=1.0, farm_2=1.0)
    rules = BoardRules(calibrate_sec=1e-9)
    runner = farm.runner(measure=fail_on_copies, boards=rules)
    found = farm.measure(runner, 4)
    assert len(found) == 4
    reasons = [event["reason"] for event in farm.events("board") if event["state"] == "fault"]
    assert any("the reference kernel failed" in reason for reason in reasons)


def test_candidates_end_when_no_device_can_be_reached(farm: Farm, monkeypatch: Any) -> None:
    monkeypatch.setattr(rpc.lease, "open_session", refuse_connection)
    farm.set(farm_1=1.0, farm_2=1.0)
    found = farm.measure(farm.runner(queue_timeout_sec=1.0), 3)
    assert ["no device for 1 s" in str(result.error_msg) for result in found] == [True] * 3
    assert all(is_machine_failure(result.error_msg) for result in found)  # none was tried


@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_device_that_breaks_costs_few_candidates(farm: Farm, n_devices: int) -> None:
    farm.set(**{f"farm_{1 + n}": 1.0 for n in range(n_devices)})
    found = farm.measure(farm.runner(measure=fail_later_on_first, queue_timeout_sec=1.0), 20)
    errors = [str(each.error_msg) for each in found if each.error_msg is not None]
    own = [each for each in errors if not is_machine_failure(each)]
    assert 0 < len(own) <= 2
    assert all("no linker any more" in each for each in own)
    assert len(errors) - len(own) == (17 if n_devices == 1 else 0)  # which were not tried
    faults = [event for event in farm.events("board") if event["state"] == "fault"]
    assert {event["address"] for event in faults} == {FAST}


def test_a_device_is_given_back_after_a_candidate_that_fails(farm: Farm, monkeypatch: Any) -> None:
    note = functools.partial(note_release, str(farm.folder))
    monkeypatch.setattr(rpc.lease, "release", note)
    farm.set(farm_1=1.0)
    runner = farm.runner(measure=fail_always)
    (result,) = farm.measure(runner, 1)
    runner.close()  # which waits for the session to end
    assert "a bad kernel" in str(result.error_msg)
    assert not is_machine_failure(result.error_msg)
    assert (farm.folder / "released").read_text() == "farm:1\n"


def test_a_device_that_can_run_nothing_costs_no_candidate(farm: Farm) -> None:
    farm.set(farm_1=1.0, farm_2=1.0)
    runner = farm.runner(measure=fail_on_first, max_workers=2)
    assert seconds(farm.measure(runner, 6)) == pytest.approx([1.0 + n for n in range(6)])
    events = [event for event in farm.events("board") if event["address"] == FAST]
    assert "no linker" in events[0]["reason"]
    assert runner.suspended == {FAST}


def test_a_device_without_disk_space_says_nothing_of_a_candidate(farm: Farm) -> None:
    farm.set(farm_1=1.0)
    (result,) = farm.measure(farm.runner(measure=fill_disk), 1)
    assert is_machine_failure(result.error_msg)
    assert "No space left on device" in str(result.error_msg)


@pytest.mark.parametrize("cause", ["linker", "disk", "death"])
def test_one_device_gives_up_no_candidate_that_it_alone_has_failed(
    farm: Farm, monkeypatch: Any, cause: str
) -> None:
    monkeypatch.setattr(device_pool, "_SUSPECTED_SEC", 0.1)
    monkeypatch.setattr(rpc.lease, "queue_for_device", offer_the_first_for_long)
    farm.set(farm_1=1.0, farm_2=1.0)
    runner = farm.runner(measure=functools.partial(fail_on_first_by, cause))
    assert seconds(farm.measure(runner, 3)) == pytest.approx([1.0, 2.0, 3.0])
    assert {event["board"] for event in farm.events("timing")} == {SLOW}


@pytest.mark.parametrize("number", [0, 1])
def test_a_candidate_that_a_working_device_loses_twice_is_to_blame(
    farm: Farm, monkeypatch: Any, number: int
) -> None:
    """It does not wait for the other device, which others may use for hours."""
    monkeypatch.setattr(rpc.lease, "queue_for_device", offer_the_first_for_long)
    farm.set(farm_1=1.0, farm_2=1.0)
    runner = farm.runner(measure=functools.partial(die_of, f"kernel-{number}"))
    found = farm.measure(runner, 4)
    assert [result.error_msg is not None for result in found] == [n == number for n in range(4)]
    assert not is_machine_failure(found[number].error_msg)
    assert {event["board"] for event in farm.events("timing")} == {FAST}
    (failed,) = [event for event in farm.events("timing") if event["error"]]
    assert failed["elapsed_sec"] >= 0.4  # both times


def test_a_resumed_run_begins_with_a_device_of_known_speed(farm: Farm, monkeypatch: Any) -> None:
    monkeypatch.setattr(device_pool, "_SUSPECTED_SEC", 1e-3)
    farm.set(farm_2=0.5, farm_1=1.0)  # the first one is offered first
    runner = farm.runner(earlier_speeds={FAST: 1.0})
    assert seconds(farm.measure(runner, 4)) == pytest.approx([1.0 + n for n in range(4)])
    assert farm.events("timing")[0]["board"] == FAST


def test_candidates_wait_for_a_device_that_comes_back(farm: Farm, monkeypatch: Any) -> None:
    monkeypatch.setattr(rpc.lease, "queue_for_device", offer_to_who_waits)
    farm.set(farm_1=1.0)
    assert seconds(farm.measure(farm.runner(), 2)) == pytest.approx([1.0, 2.0])


def test_a_worker_that_has_queued_in_vain_ends_no_candidate_of_late(
    farm: Farm, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rpc.lease, "queue_for_device", queue_in_vain)
    farm.set(farm_1=1.0)
    runner = farm.runner(overlap=True)
    (future,) = Runner.run(runner, [RunnerInput("kernel", str(farm.state), [])])
    plan = runner._plan()
    next(plan)
    with pytest.raises(StopIteration):
        plan.throw(WorkerTimeoutError("others use all devices"))
    assert not future.done()


def test_a_worker_that_finds_no_device_ends_no_candidate_of_one_that_has(farm: Farm) -> None:
    farm.set(farm_1=1.0)
    runner = farm.runner(overlap=True)
    connects, queues = runner._plan(), runner._plan()
    next(connects)
    connects.send((FAST, (FAST,)))
    next(queues)
    failed: list[str] = []
    runner._dispatcher.fail_queued = lambda reason, **_: failed.append(reason)
    with pytest.raises(StopIteration):
        queues.throw(WorkerTaskError("the tracker is away"))
    assert not failed
    connects.close()


def test_closing_does_not_wait_for_a_device(farm: Farm, monkeypatch: Any) -> None:
    monkeypatch.setattr(rpc.lease, "queue_for_device", queue_in_vain)
    farm.set(farm_1=1.0)
    runner = farm.runner(overlap=True)
    path = farm.folder / "kernel"
    (future,) = Runner.run(runner, [RunnerInput(str(path), str(farm.state), [])])
    time.sleep(0.2)
    runner.close()
    assert "the runner was closed" in str(future.result().error_msg)


def measure_with_marks(
    artifact_path: str, device_type: str, args_info: Any, options: Any
) -> Timing:
    """Mark begin and end of each measurement; the reference kernel takes longer."""
    folder = Path(device_type).parent
    with (folder / "begun").open("a") as file:
        file.write("x")
    time.sleep(1.5 if "tvm-adaptive-rpc-" in artifact_path else 0.5)
    timing = measure(artifact_path, device_type, args_info, options)
    with (folder / "ended").open("a") as file:
        file.write("x")
    return timing


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_worker_is_killed_while_it_holds_a_device(farm: Farm, overlap: bool) -> None:
    """TVM's server may stop listening when a client dies in the middle of a session."""
    farm.set(farm_1=1.0, farm_2=1.0)
    runner = farm.runner(max_workers=2, measure=measure_with_marks, overlap=overlap)
    for _ in range(2):  # the second time, one device has yet to time the reference kernel
        seconds(farm.measure(runner, 1))
    runner.close()
    begun, ended = ((farm.folder / name).read_text() for name in ("begun", "ended"))
    # Three times, but for a machine so slow that the other device's worker still starts.
    assert len(begun) >= 2
    assert begun == ended
