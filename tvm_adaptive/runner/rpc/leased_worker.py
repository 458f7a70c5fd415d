"""A worker that does what it is given on a device of a farm: for play-offs and networks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from tvm_adaptive._tvm import RPCConfig
from tvm_adaptive.errors import (
    InvalidOptionError,
    NoDeviceError,
    WorkerError,
    WorkerTaskError,
    summary_line,
)
from tvm_adaptive.runner.rpc.lease import (
    CONNECT_TIMEOUT_SEC,
    SERVER_WAIT_SEC,
    SESSION_GRACE_SEC,
    device_lives,
    held_device,
    known_devices,
    open_session,
    queue_for_device,
)
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool

# How long a device is kept, beyond what the next task may take: a play-off with its builds
# takes some seconds, and wants one device for all its rounds.
HOLD_SEC = 60.0
# A farm that had no device is asked again only after so long: a run's end has dozens of
# tasks, and none of them should wait in vain by itself.
ASK_AGAIN_SEC = 60.0
# How long one queues then: the first task has waited in full, for all of them.
QUEUE_AGAIN_SEC = 30.0


class LeasingPool(WorkerPool):
    """One worker whose tasks run where a device is leased for it.

    The worker's modules are loaded through :mod:`tvm_adaptive.workers.device_session`. The same
    device is taken again after an error as long as the farm has it.
    """

    def __init__(
        self,
        farm: RPCConfig,
        *,
        server: ForkServer | None = None,
        queue_timeout_sec: float = 600.0,
        time_left: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(1, server=server, replace_after_error=True)
        self.farm = farm
        self.queue_timeout_sec = queue_timeout_sec
        self._time_left = time_left
        self.address = ""
        self._present: tuple[str, ...] = ()
        self._refusal = ""
        self._ask_again_sec = -math.inf

    def plan_of(self, step: Step) -> Plan:
        """Lease a device before a task, unless there is one.

        A task whose device dies gets one more try, on another device if there is one: the
        second time it is the task that kills devices.
        """
        needed_sec = step.timeout_sec + SESSION_GRACE_SEC
        yield from self._have_device(needed_sec)
        try:
            return (yield step)
        except WorkerTaskError:
            looking = Step("looking for the device", device_lives, (), CONNECT_TIMEOUT_SEC)
            if (yield looking):
                raise
        yield from self._have_device(needed_sec, again=True)
        return (yield step)

    def _have_device(self, needed_sec: float, *, again: bool = False) -> Plan:
        held = Step("asking for the device", held_device, (needed_sec,), CONNECT_TIMEOUT_SEC)
        try:
            if not again and (yield held):
                return
            if time.monotonic() >= self._ask_again_sec:
                yield from self._lease(math.ceil(HOLD_SEC + needed_sec))
                return
        except WorkerError as error:
            self._refusal = f"no device could be leased: {summary_line(error)}"
            self._ask_again_sec = time.monotonic() + ASK_AGAIN_SEC
            raise NoDeviceError(self._refusal) from error
        raise NoDeviceError(self._refusal)

    def _lease(self, session_sec: int) -> Plan:
        others = set(self._present) - {self.address}
        avoided = frozenset(others) if self.address in self._present else frozenset()
        queue_sec = self.queue_timeout_sec
        if self._refusal:
            queue_sec = min(queue_sec, QUEUE_AGAIN_SEC)
        self.address, self._present = yield Step(
            "queueing for a device",
            queue_for_device,
            (self.farm, avoided, SERVER_WAIT_SEC),
            min(queue_sec, self._time_left_sec()),
        )
        yield Step(
            f"connecting to {self.address}", open_session, (session_sec,), CONNECT_TIMEOUT_SEC
        )
        self._refusal = ""

    def _time_left_sec(self) -> float:
        return math.inf if self._time_left is None else max(0.0, self._time_left())


def devices_of(pool: WorkerPool, farm: RPCConfig) -> tuple[str, ...]:
    """Return the addresses of a farm's devices, waiting some seconds for the first."""
    (outcome,) = pool.map(
        known_devices, [(farm, SERVER_WAIT_SEC)], SERVER_WAIT_SEC + CONNECT_TIMEOUT_SEC
    )
    if outcome.error is not None:
        raise InvalidOptionError(no_device(farm, summary_line(outcome.error)))
    if not outcome.value:
        raise InvalidOptionError(no_device(farm, f"no server with the key {farm.tracker_key!r}"))
    found: tuple[str, ...] = outcome.value
    return found


def no_device(farm: RPCConfig, why: str) -> str:
    """Return what to tell, and what to do, when a farm gives no device."""
    return (
        f"the RPC tracker at {farm.tracker_host}:{farm.tracker_port} gives no device "
        f"({why}). Look which keys it has with: python -m tvm.exec.query_rpc_tracker "
        f"--host {farm.tracker_host} --port {farm.tracker_port}"
    )


def check_farm(farm: RPCConfig | None, server: ForkServer | None = None) -> None:
    """Raise InvalidOptionError if there is a farm without a device; see :func:`devices_of`."""
    if farm is None:
        return
    with contextlib.closing(WorkerPool(1, server=server)) as pool:
        devices_of(pool, farm)
