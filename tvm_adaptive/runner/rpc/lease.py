"""Lease a remote device, one at a time, and measure on it, inside a worker.

TVM's own client does not say which device the tracker gave it; this one does.
"""

from __future__ import annotations

import dataclasses
import math
import select
import socket
import struct
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tvm_adaptive._tvm import RPCConfig, rpc_base, rpc_connect
from tvm_adaptive.errors import AdaptiveError, machine_failure
from tvm_adaptive.runner.measure import RANDOM_FILL
from tvm_adaptive.workers import device_session

# Interval between two looks at the tracker while waiting for a device or a server.
TRACKER_POLL_SEC = 1.0
# A tracker answers within milliseconds; this much allows for a slow network.
TRACKER_TIMEOUT_SEC = 5.0
# For one look at the tracker or the start of a session, on top of waiting.
CONNECT_TIMEOUT_SEC = 10.0
# For a server to register, at the start or after a restart.
SERVER_WAIT_SEC = 10.0
# The server ends a session this long after our own deadline. Ours gives the better
# message; the server's frees a device whose client is gone.
SESSION_GRACE_SEC = 5


@dataclasses.dataclass(frozen=True)
class FailedMeasurement:
    """A measurement that raised an exception."""

    traceback: str
    is_device_alive: bool  # then the candidate is at fault, unless there is the next
    machine_failure: str = ""  # what a machine lacked: processes, memory or disk space


class _Lease:
    """The device of this worker."""

    offer: tuple[str, int, str] | None = None  # from the tracker: host, port, key to show there
    end_sec = -math.inf  # monotonic time of the session's end


def address_of(host: str, port: int) -> str:
    """Return the name of a device: where its server listens."""
    return f"{host}:{port}"


def known_devices(config: RPCConfig, wait_sec: float) -> tuple[str, ...]:
    """Return the addresses of the devices with the key; wait up to ``wait_sec`` for the first."""
    end_sec = time.monotonic() + wait_sec
    while True:
        is_late = time.monotonic() >= end_sec
        try:
            devices = _ask_devices(config)
        except OSError:
            if is_late:
                raise
            devices = ()
        if devices or is_late:
            return devices
        time.sleep(TRACKER_POLL_SEC)


def queue_for_device(
    config: RPCConfig,
    avoided: Mapping[str, float],
    wait_sec: float,
    waits_for_server: bool = False,
) -> tuple[str, tuple[str, ...]]:
    """Return the address of the device that the tracker offers next, and those of all.

    An avoided one is only accepted if there is no other, or after the seconds of its own. A
    tracker that is away is asked again for ``wait_sec``, and so is one that has no server with
    the key, unless ``waits_for_server``: then the caller's deadline ends the wait.
    """
    release()
    start_sec = time.monotonic()
    while True:
        host, port, key = _request(config, wait_sec, waits_for_server)
        devices = known_devices(config, wait_sec)
        address = address_of(host, port)
        has_rested = time.monotonic() - start_sec >= avoided.get(address, 0.0)
        if has_rested or set(devices) <= set(avoided):
            _Lease.offer = (host, port, key)
            return address, devices


def open_session(timeout_sec: int) -> None:
    """Connect to the device that the tracker offered."""
    assert _Lease.offer is not None
    host, port, key = _Lease.offer
    device_session.move_to(rpc_connect(host, port, key, timeout_sec))
    _Lease.end_sec = time.monotonic() + timeout_sec


def held_device(needed_sec: float) -> str | None:
    """Return the address of this worker's device; None if its session ends too soon."""
    if _Lease.offer is None or not device_session.is_elsewhere():
        return None
    host, port, _ = _Lease.offer
    return address_of(host, port) if time.monotonic() + needed_sec <= _Lease.end_sec else None


def release() -> None:
    """Give the device back, if there is one."""
    device_session.move_to(None)
    _Lease.offer = None


def measure_leased(measure: Callable[..., Any], *args: Any) -> Any:
    """Call a measuring function; if it raises, find out whether the device is alive."""
    try:
        return measure(*args)
    except Exception as error:
        text = traceback.format_exc()
        return FailedMeasurement(text, is_device_alive(), machine_failure(error))


def is_device_alive() -> bool:
    """Say whether this worker's device still answers."""
    try:
        device_session.function(RANDOM_FILL)
    except Exception:
        return False
    return True


def _ask_devices(config: RPCConfig) -> tuple[str, ...]:
    with _tracker(config) as tracker:
        rpc_base.sendjson(tracker, [rpc_base.TrackerCode.SUMMARY])
        summary = _answer_of(tracker)
    servers = [
        server
        for server in summary["server_info"]
        if server["key"].partition(":")[2] == config.tracker_key
    ]
    return tuple(sorted(address_of(*server["addr"]) for server in servers))


def _request(config: RPCConfig, wait_sec: float, waits_for_server: bool) -> tuple[str, int, str]:
    """Wait for a device; a tracker that is away is asked again for ``wait_sec``."""
    while True:
        try:
            return _request_once(config, wait_sec, waits_for_server)
        except OSError:
            time.sleep(TRACKER_POLL_SEC)
            known_devices(config, wait_sec)  # raises if the tracker stays away


def _request_once(
    config: RPCConfig, wait_sec: float, waits_for_server: bool
) -> tuple[str, int, str]:
    with _tracker(config) as tracker:
        priority = config.session_priority
        rpc_base.sendjson(tracker, [rpc_base.TrackerCode.REQUEST, config.tracker_key, "", priority])
        while not select.select([tracker], [], [], TRACKER_POLL_SEC)[0]:
            if not known_devices(config, wait_sec) and not waits_for_server:
                raise AdaptiveError(f"no server with the key {config.tracker_key!r} is left")
        host, port, key = _answer_of(tracker)
    return host, port, key


def _tracker(config: RPCConfig) -> socket.socket:
    """Connect to the tracker; TVM's own connection retries for a minute."""
    address = (config.tracker_host, config.tracker_port)
    tracker = socket.create_connection(address, TRACKER_TIMEOUT_SEC)
    try:
        magic = struct.pack("<i", rpc_base.RPC_TRACKER_MAGIC)
        tracker.sendall(magic)
        if rpc_base.recvall(tracker, len(magic)) != magic:
            raise OSError(f"{address_of(*address)} is no RPC tracker")
    except BaseException:
        tracker.close()
        raise
    return tracker


def _answer_of(tracker: socket.socket) -> Any:
    code, value = rpc_base.recvjson(tracker)
    if code != rpc_base.TrackerCode.SUCCESS:
        raise OSError(f"the tracker answered {code}")
    return value
