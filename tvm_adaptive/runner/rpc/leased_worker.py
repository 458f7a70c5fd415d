"""A worker that calls functions on a leased device, for play-offs and networks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Set
from typing import Any

from tvm_adaptive._tvm import RPCConfig
from tvm_adaptive.errors import (
    DeviceUnreachableError,
    InvalidOptionError,
    MachineError,
    NoDeviceError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    summary_line,
)
from tvm_adaptive.runner.rpc.lease import (
    CONNECT_TIMEOUT_SEC,
    SERVER_WAIT_SEC,
    SESSION_GRACE_SEC,
    held_device,
    is_device_alive,
    known_devices,
    open_session,
    queue_for_device,
    release,
)
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool

# A device is kept this long beyond the next task's deadline: a play-off with its builds takes
# some seconds, and needs one device for all its rounds.
HOLD_SEC = 60.0
# Wait after a farm had no device: the end of a run has dozens of tasks, and not each of them
# should queue in vain.
RETRY_PAUSE_SEC = 60.0
# The queue timeout of the next try; the first one has waited for all of them.
RETRY_QUEUE_SEC = 30.0
# The device of the task before is preferred for so long; others may use it meanwhile. Each offer
# that is refused blocks another device for some 8 s.
_PREFER_SEC = 20.0
# What a task ends with, besides its own faults, on a device that has lost its power.
LOST_DEVICE = (WorkerTimeoutError, WorkerDiedError, DeviceUnreachableError)
# A tracker offers a device that has lost its power until the connection to it has ended. Where
# several in a row give no session, the farm has none.
_MAX_OFFERS = 3


class LeasingPool(WorkerPool):
    """One worker whose tasks run on a leased device, the same one as long as the farm has it."""

    def __init__(
        self,
        farm: RPCConfig,
        *,
        server: ForkServer | None = None,
        queue_timeout_sec: float = 600.0,
        time_left: Callable[[], float] | None = None,
        suspended: Set[str] = frozenset(),
    ) -> None:
        super().__init__(1, server=server, replace_after_error=True)
        self.farm = farm
        self.queue_timeout_sec = queue_timeout_sec
        self._suspended = suspended  # devices to avoid; it may grow
        self._time_left = time_left or (lambda: math.inf)
        self.address = ""
        self._present: tuple[str, ...] = ()
        self._failure = ""  # of the last lease
        self._avoided: set[str] = set()  # gave no session, or lacked disk space, since the last one
        self._unfit: set[str] = set()  # untuned functions fail there
        self.moves = True  # a task whose device dies is tried on another one
        self._retry_sec = -math.inf

    def plan_of(self, step: Step) -> Plan:
        """Lease a device before a task; a task whose device dies gets one more try."""
        if step.function is release:
            return (yield step)
        needed_sec = step.timeout_sec + SESSION_GRACE_SEC
        held = short_step("asking for the device", held_device, needed_sec)
        yield from self._ensure_device(needed_sec, held)
        try:
            return (yield from self._run(step, needed_sec))
        except MachineError:  # its disk may be full; others have room
            self._avoided.add(self.address)
            raise

    @property
    def pause_sec(self) -> float:
        """Seconds until a farm that had no device is asked again."""
        return max(0.0, self._retry_sec - time.monotonic())

    def pass_over(self) -> bool:
        """Avoid the present device from now on; return whether the farm has another one."""
        self._unfit.add(self.address)
        self.release()
        return not self._unfit.issuperset(self._present)

    def forgive(self, address: str) -> None:
        """Use a device again that was passed over: others fail as well."""
        self._unfit.discard(address)

    def release(self) -> None:
        """Give the device back, which others may need before the next task."""
        if self.address:
            self.map(release, [()], CONNECT_TIMEOUT_SEC)

    def _run(self, step: Step, needed_sec: float) -> Plan:
        """Run a task; if its device dies, on another one."""
        try:
            return (yield step)
        except WorkerTaskError:
            if not self.moves or (yield short_step("looking for the device", is_device_alive)):
                raise
        yield from self._ensure_device(needed_sec, None)
        return (yield step)

    def _ensure_device(self, needed_sec: float, held: Step | None) -> Plan:
        try:
            if held is not None and (yield held):
                return
            if time.monotonic() >= self._retry_sec:
                yield from self._lease(math.ceil(HOLD_SEC + needed_sec))
                return
        except DeviceUnreachableError:
            raise
        except WorkerError as error:
            self._failure = f"no device could be leased: {summary_line(error)}"
            self._retry_sec = time.monotonic() + RETRY_PAUSE_SEC
            raise NoDeviceError(self._failure) from error
        raise NoDeviceError(self._failure)

    def _lease(self, session_sec: int) -> Plan:
        """Lease the first device that gives a session, of a few that are offered."""
        for n_left in reversed(range(_MAX_OFFERS)):
            yield from self._queue()
            try:
                yield short_step(f"connecting to {self.address}", open_session, session_sec)
                break
            except WorkerError as error:
                self._avoided.add(self.address)
                if not isinstance(error, WorkerTaskError):  # no worker is left to ask again
                    raise DeviceUnreachableError(summary_line(error)) from error
                if not n_left:
                    raise
        self._failure = ""
        self._avoided.clear()

    def _queue(self) -> Plan:
        avoided = frozenset(self._suspended | self._avoided | self._unfit)
        if self.address in set(self._present) - avoided:
            avoided |= set(self._present) - {self.address}
        queue_sec = min(self.queue_timeout_sec, RETRY_QUEUE_SEC if self._failure else math.inf)
        self.address, self._present = yield Step(
            "queueing for a device",
            queue_for_device,
            (self.farm, dict.fromkeys(avoided, _PREFER_SEC), SERVER_WAIT_SEC),
            min(queue_sec, max(0.0, self._time_left())),
        )


def short_step(doing: str, function: Callable[..., Any], *args: Any) -> Step:
    """Return a step that takes no longer than the start of a session."""
    return Step(doing, function, args, CONNECT_TIMEOUT_SEC)


def devices_of(farm: RPCConfig) -> tuple[str, ...]:
    """Return the addresses of a farm's devices; wait some seconds for the first."""
    try:
        devices = known_devices(farm, SERVER_WAIT_SEC)
    except Exception as error:  # what is no tracker may answer anything
        raise InvalidOptionError(no_device(farm, summary_line(error))) from error
    if not devices:
        raise InvalidOptionError(no_device(farm, f"no server with the key {farm.tracker_key!r}"))
    return devices


def no_device(farm: RPCConfig, why: str) -> str:
    """Return the message for a farm that gives no device."""
    return (
        f"the RPC tracker at {farm.tracker_host}:{farm.tracker_port} gives no device "
        f"({why}). Look which keys it has with: python -m tvm.exec.query_rpc_tracker "
        f"--host {farm.tracker_host} --port {farm.tracker_port}"
    )


def check_farm(farm: RPCConfig | None) -> None:
    """Raise InvalidOptionError if there is a farm without a device."""
    if farm is not None:
        devices_of(farm)
