"""Tasks on leased devices: the devices are scripted, the worker is real."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tvm.s_tir.meta_schedule.runner import RPCConfig

from tvm_adaptive.errors import (
    DeviceUnreachableError,
    MachineError,
    NoDeviceError,
    WorkerTimeoutError,
)
from tvm_adaptive.runner.rpc import leased_worker
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.workers import pool as pools

# Workers cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

DEVICES = ("farm:1", "farm:2")


class Session:
    """The session of a device, which is gone once a file names it."""

    def __init__(self, address: str, gone: Path) -> None:
        self.address = address
        self.gone = gone

    def get_function(self, name: str) -> str:
        if self.address in self.gone.read_text():
            raise OSError("connection reset")
        return self.address


def offer_device(config: Any, avoided: Any, wait_sec: float) -> tuple[str, tuple[str, ...]]:
    """Offer the first device that is there and not avoided, or else the first one."""
    from tvm_adaptive.runner.rpc import lease

    gone = Path(config.tracker_host).read_text()
    present = tuple(address for address in DEVICES if address not in gone)
    if not present:
        raise OSError("no server is left")
    address = min(present, key=lambda each: each in avoided)
    host, _, port = address.partition(":")
    lease._Lease.offer = (host, int(port), config.tracker_host)
    return address, present


def connect(timeout_sec: int) -> None:
    from tvm_adaptive.runner.rpc import lease
    from tvm_adaptive.workers import device_session

    assert lease._Lease.offer is not None
    host, port, note = lease._Lease.offer
    device_session.move_to(Session(f"{host}:{port}", Path(note)))
    lease._Lease.end_sec = time.monotonic() + timeout_sec


def where() -> Any:
    from tvm_adaptive.workers import device_session

    return device_session.function("any") if device_session.is_elsewhere() else "here"


def fail() -> None:
    raise ArithmeticError("its own fault")


@pytest.fixture
def gone(tmp_path: Path) -> Path:
    """Return the file that names the devices that are gone."""
    path = tmp_path / "gone"
    path.write_text("")
    return path


@pytest.fixture
def pool(gone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeasingPool]:
    monkeypatch.setattr(leased_worker, "queue_for_device", offer_device)
    monkeypatch.setattr(leased_worker, "open_session", connect)
    server = pools.ForkServer(("tvm_adaptive.runner.rpc.lease",))
    config = RPCConfig(str(gone), 1, "board", 1, 5)
    with contextlib.closing(LeasingPool(config, server=server)) as pool:
        yield pool


def error_of(pool: LeasingPool, function: Callable[..., Any], *args: Any, limit_sec: float) -> Any:
    (outcome,) = pool.map(function, [args], limit_sec)
    return outcome.error


def test_tasks_stay_on_a_device_as_long_as_it_is_there(pool: LeasingPool, gone: Path) -> None:
    def found() -> list[Any]:
        return [outcome.value for outcome in pool.map(where, [()] * 2, 30.0)]

    assert found() == ["farm:1"] * 2
    assert "its own fault" in str(error_of(pool, fail, limit_sec=30.0))
    assert found() == ["farm:1"] * 2
    assert isinstance(error_of(pool, time.sleep, 60.0, limit_sec=0.5), WorkerTimeoutError)
    assert found() == ["farm:1"] * 2
    gone.write_text("farm:1")
    assert found() == ["farm:2"] * 2
    assert pool.address == "farm:2"
    gone.write_text("")
    assert found() == ["farm:2"] * 2


def test_suspended_devices_are_avoided_while_there_are_others(
    pool: LeasingPool, gone: Path
) -> None:
    suspended: set[str] = set()
    pool._suspended = suspended
    suspended.add("farm:1")  # later, by the search
    assert pool.map(where, [()], 30.0)[0].value == "farm:2"
    gone.write_text("farm:2")
    assert pool.map(where, [()], 30.0)[0].value == "farm:1"
    gone.write_text("")
    pool.release()
    assert pool.map(where, [()], 30.0)[0].value == "farm:2"


def test_a_device_that_is_passed_over_is_avoided_while_there_are_others(
    pool: LeasingPool, gone: Path
) -> None:
    assert pool.map(where, [()], 30.0)[0].value == "farm:1"
    assert pool.pass_over()
    assert pool.map(where, [()], 30.0)[0].value == "farm:2"
    gone.write_text("farm:2")
    assert pool.map(where, [()], 30.0)[0].value == "farm:1"
    gone.write_text("")
    pool.release()
    assert pool.map(where, [()], 30.0)[0].value == "farm:2"
    pool.forgive("farm:1")
    assert not pool._unfit


def fill_disk_of_the_first() -> Any:
    import errno

    if where() == "farm:1":
        raise OSError(errno.ENOSPC, "No space left on device")
    return where()


def test_a_device_that_lacks_disk_space_is_passed_over(pool: LeasingPool) -> None:
    full, other = pool.map(fill_disk_of_the_first, [()] * 2, 30.0)
    assert isinstance(full.error, MachineError)
    assert other.value == "farm:2"


def lose_the_device(gone: str) -> None:
    """Fail, and let the present device be gone."""
    with open(gone, "a") as file:
        file.write(f"{where()} ")
    raise ArithmeticError("its own fault")


@pytest.mark.parametrize("moves", [True, False])
def test_a_task_that_is_to_stay_is_not_tried_elsewhere(
    pool: LeasingPool, gone: Path, moves: bool
) -> None:
    pool.moves = moves
    error_of(pool, lose_the_device, str(gone), limit_sec=30.0)
    assert gone.read_text().split() == ["farm:1", "farm:2"][: 1 + moves]


def kept() -> int:
    """Return how much of the device the worker holds, and hold something."""
    from tvm_adaptive.workers import device_session

    cache = device_session.cache("test")
    cache[len(cache)] = device_session.function("any")
    return len(cache)


def test_a_device_that_is_given_back_is_let_go(pool: LeasingPool) -> None:
    pool.release()  # there is none yet
    assert [outcome.value for outcome in pool.map(kept, [()] * 2, 30.0)] == [1, 2]
    pool.release()
    assert pool.map(where, [()], 30.0)[0].value == "farm:1"
    assert pool.map(kept, [()], 30.0)[0].value == 1


def test_without_a_device_no_task_runs(pool: LeasingPool, gone: Path) -> None:
    assert pool.map(where, [()], 30.0)[0].value == "farm:1"
    gone.write_text("farm:1 farm:2")
    first = error_of(pool, where, limit_sec=30.0)
    assert isinstance(first, NoDeviceError)
    assert "no device could be leased: OSError: no server is left" in str(first)
    gone.write_text("")
    assert 0.0 < pool.pause_sec <= leased_worker.RETRY_PAUSE_SEC
    # The next task does not queue again so soon.
    assert str(error_of(pool, where, limit_sec=30.0)) == str(first)
    pool._retry_sec = 0.0
    assert pool.map(where, [()], 30.0)[0].value == "farm:1"


def connect_to_the_second(timeout_sec: int) -> None:
    from tvm_adaptive.runner.rpc import lease

    assert lease._Lease.offer is not None
    if lease._Lease.offer[1] == 1:
        raise OSError("mismatched key")
    connect(timeout_sec)


def die_unless_the_second(timeout_sec: int) -> None:
    import os

    from tvm_adaptive.runner.rpc import lease

    assert lease._Lease.offer is not None
    if lease._Lease.offer[1] == 1:
        os._exit(1)
    connect(timeout_sec)


def test_a_device_that_gives_no_session_is_passed_over(
    pool: LeasingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_worker, "open_session", connect_to_the_second)
    outcomes = pool.map(where, [()] * 2, 30.0)
    assert [outcome.value for outcome in outcomes] == ["farm:2"] * 2


def test_a_device_that_ends_its_worker_is_avoided_from_the_next_task_on(
    pool: LeasingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_worker, "open_session", die_unless_the_second)
    outcomes = pool.map(where, [()] * 2, 30.0)
    assert isinstance(outcomes[0].error, DeviceUnreachableError)
    assert outcomes[1].value == "farm:2"


def test_where_no_device_gives_a_session_the_farm_has_none_for_a_while(
    pool: LeasingPool, gone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone.write_text("farm:2")
    monkeypatch.setattr(leased_worker, "open_session", connect_to_the_second)
    first = error_of(pool, where, limit_sec=30.0)
    assert isinstance(first, NoDeviceError)
    assert not isinstance(first, DeviceUnreachableError)
    gone.write_text("")
    assert str(error_of(pool, where, limit_sec=30.0)) == str(first)
