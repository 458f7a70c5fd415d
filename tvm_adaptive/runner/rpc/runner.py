"""A runner for devices behind TVM's RPC tracker."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import RPCConfig, RunnerResult, derived_object
from tvm_adaptive.errors import (
    MACHINE_FAILURE,
    InvalidOptionError,
    MachineError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    check_at_least,
    check_positive,
    summary_line,
)
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.runner.evaluator import RACED
from tvm_adaptive.runner.local import (
    Candidate,
    CandidateJob,
    MeasurementFuture,
    QueueingRunner,
    measuring,
)
from tvm_adaptive.runner.measure import MeasureFunction, MeasureOptions, measure_artifact
from tvm_adaptive.runner.rpc import lease
from tvm_adaptive.runner.rpc.device_pool import BoardRules, DevicePool
from tvm_adaptive.runner.rpc.leased_worker import devices_of, no_device, short_step
from tvm_adaptive.runner.stopping import StoppingRule, make_rule
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import BatchFacts, TrialLog
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# Others use the farm, too, and after a kernel that hangs the server blocks the device until
# the session's end.
LEASE_SEC = 15.0
# Devices that may measure a candidate and then turn out too slow, or unable to run the
# reference kernel: as many as a farm may have at the start, when nothing is known of them.
MAX_REJECTIONS = 5
# In a row, unless on one device that has measured others: the reference kernel is at fault.
MAX_REFERENCE_FAILURES = 3
_WORKER_MODULES = ("tvm_adaptive.runner.rpc.lease",)


@derived_object
class AdaptiveRPCRunner(QueueingRunner):
    """Measure candidates on remote devices; ``runner="adaptive-rpc"``.

    Every wait is limited: a tracker that does not answer, a key without a server, a server
    that dies or a kernel that hangs gives error results. Queueing for a device does not
    count as measuring.

    A candidate whose device is lost is measured on another, or on the same one once that has
    timed something else. So is one that fails on a device that has measured nothing yet. A
    device that fails repeatedly is quarantined. Devices are of one kind and may differ in
    speed: the first candidate that succeeds is timed on each of them, and times are given for
    the first device.

    Parameters not described here are those of :class:`~tvm_adaptive.AdaptiveRunner`.

    Parameters
    ----------
    rpc_config : RPCConfig or None
        Tracker, key and session priority. TVM reads missing ones from
        ``TVM_TRACKER_HOST``, ``TVM_TRACKER_PORT`` and ``TVM_TRACKER_KEY``.
    timeout_sec : float or None
        Deadline of one candidate once it has a device; None (default) for the
        configuration's ``session_timeout_sec``.
    queue_timeout_sec : float
        Longest wait of a candidate for a device that others use or that is away. Default 600.
    max_workers : int or None
        Devices to use at the same time; None (default) for all that the tracker has with
        the key.
    measure : callable
        Called in a worker with a session.
    boards : BoardRules or None
        When a device is quarantined, and when its speed is measured; None (default) for the
        default rules.
    earlier_speeds : mapping of str to float, or None
        Speeds of devices by their addresses, relative to the first one, as earlier attempts
        at a run measured them: times are given for the same device then. Default None.
    time_left : callable or None
        Returns the seconds left for measuring; no result is waited for longer. Default
        None: no limit.
    journal : JournalWriter or None
        Gets one ``"timing"`` event per candidate, with the ``board`` that measured it,
        ``"board"`` events when a device fails, is quarantined or is calibrated, and one
        ``"boards"`` event at the end.

    Raises
    ------
    InvalidOptionError
        When an option is out of range, the tracker cannot be reached or knows no
        server with the key.
    """

    def __init__(
        self,
        rpc_config: RPCConfig | None = None,
        *,
        timeout_sec: float | None = None,
        queue_timeout_sec: float = 600.0,
        rule: str | StoppingRule = "precision",
        min_repeat_ms: float = 0.0,
        max_sec: float | None = None,
        cpu_cache_flush: bool = False,
        max_workers: int | None = None,
        measure: MeasureFunction = measure_artifact,
        boards: BoardRules | None = None,
        earlier_speeds: Mapping[str, float] | None = None,
        trial_log: TrialLog | None = None,
        race: bool = True,
        overlap: bool = False,
        time_left: Callable[[], float] | None = None,
        server: ForkServer | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        self.rpc_config = complete_config(rpc_config)
        if timeout_sec is None:
            timeout_sec = float(self.rpc_config.session_timeout_sec)
        check_positive("timeout_sec", timeout_sec)
        if math.isinf(timeout_sec):
            raise InvalidOptionError("timeout_sec must be finite: a device is leased for as long.")
        check_positive("queue_timeout_sec", queue_timeout_sec)
        self.timeout_sec = timeout_sec
        self.queue_timeout_sec = queue_timeout_sec
        self.options = MeasureOptions(
            rule=make_rule(rule) if isinstance(rule, str) else rule,
            min_repeat_ms=min_repeat_ms,
            max_sec=max_sec,
            cpu_cache_flush=cpu_cache_flush,
        )
        check_at_least("max_workers", max_workers, 1)
        self.max_workers = max_workers
        self._wait_left = time_left
        self._measure = measure
        self._devices = DevicePool(
            boards or BoardRules(), self._write, earlier_speeds=earlier_speeds
        )
        self._reference: tuple[Any, ...] | None = None
        self._n_references = 0
        self._reference_failures: list[str] = []  # on which devices, in a row
        self._last_success_sec = -math.inf  # monotonic time
        self._scratch = ScratchFolder("rpc")
        self._n_sessions = 0  # workers that connect to a device or hold one
        pool = WorkerPool(1, server=server, modules=_WORKER_MODULES, replace_after_error=True)
        self.overlap = overlap
        # In a thread in any case: the caller waits for a device as long as time is left.
        super().__init__(pool, overlap=True, trial_log=trial_log, race=race, journal=journal)
        self._set_present(devices_of(self.rpc_config))

    @property
    def n_devices(self) -> int:
        """Devices that are used at the same time, as far as is known."""
        return self._pool.max_workers

    @property
    def suspended(self) -> frozenset[str]:
        """The addresses of the devices that are not used for now."""
        return self._devices.avoided()

    def close(self) -> None:
        """End the workers, give the devices back, and write the ``"boards"`` event."""
        if self._scratch.path.exists():  # not closed yet
            self._write("boards", boards=self._devices.as_fields())
        super().close()
        self._scratch.remove()

    def _queue(self, candidates: Sequence[Candidate]) -> list[MeasurementFuture]:
        futures = super()._queue(candidates)
        if not self.overlap:
            for each in futures:
                each.result()
        return futures

    def _plan(self) -> Plan:
        """Lease a device and measure what is queued."""
        wanted = (self.rpc_config, self._devices.rests(), lease.SERVER_WAIT_SEC, True)
        try:
            address, present = yield Step(
                "queueing for a device", lease.queue_for_device, wanted, self.queue_timeout_sec
            )
        except WorkerTimeoutError as error:  # others use all devices, or none is left
            self._fail_stalled(no_device(self.rpc_config, summary_line(error)))
            return
        except WorkerError as error:
            if not self._n_sessions:
                self._dispatcher.fail_queued(no_device(self.rpc_config, summary_line(error)))
            return
        self._set_present(present)
        self._n_sessions += 1
        try:
            yield from self._use(address)
        except Exception as error:  # a defect of this package: the next session would end alike
            logger.exception("%s could not be used", address)
            self._write("error", where="AdaptiveRPCRunner", message=repr(error))
            self._dispatcher.fail_queued(f"{address} could not be used: {error!r}")
        finally:
            self._n_sessions -= 1

    def _use(self, address: str) -> Plan:
        """Measure queued candidates on a device that was offered."""
        # The reference kernel, where it is due, and the last candidate.
        n_runs = 1 + (self._has_reference() and self._devices.needs_calibration(address))
        session_sec = math.ceil(LEASE_SEC + n_runs * self.timeout_sec) + lease.SESSION_GRACE_SEC
        try:
            yield short_step(f"connecting to {address}", lease.open_session, session_sec)
            # Before a candidate is taken: an unusable device should cost none.
            is_usable = yield from self._calibrate(address)
        except WorkerError as error:
            self._devices.note_fault(address, summary_line(error))
            self._fail_stalled(summary_line(error))
            return
        if not is_usable:
            why = self._devices.device(address).last_fault
            self._fail_stalled(f"{address} is not fit to measure on: {why}")
        elif (yield from self._measure_queued(address)):
            yield from self._release()

    def _measure_queued(self, address: str) -> Generator[Step, Any, bool]:
        """Measure candidates until the queue is empty or the lease ends."""
        end_sec = time.monotonic() + LEASE_SEC
        while time.monotonic() < end_sec:
            job = self._take(address)
            if job is None:
                break
            if not (yield from self._measure_on(address, job)):
                return False
        return True

    def _take(self, address: str) -> CandidateJob | None:
        """Take the next candidate; a device that may be at fault takes those last that it lost."""
        lost: list[CandidateJob] = []
        job = self._dispatcher.take()
        if self._devices.may_be_at_fault(address):
            while job is not None and address in dict(job.task.lost_on):
                lost.append(job)
                job = self._dispatcher.take()
        for each in reversed(lost):
            self._dispatcher.put_back(each)
        return job or self._dispatcher.take()

    def _measure_on(self, address: str, job: CandidateJob) -> Generator[Step, Any, bool]:
        """Measure one candidate, or queue it again; return whether the device is usable."""
        try:
            task = job.task.measure_args()
            options = self.options.for_batch(
                self._facts_on(address, job.task.facts), noise=self._race_noise
            )
            args = (self._measure, *task, options)
            step = Step("running", lease.measure_leased, args, self.timeout_sec)
            timing = yield from measuring(job.task, step)
            if isinstance(timing, lease.FailedMeasurement):
                if not timing.is_device_alive:
                    raise WorkerDiedError(timing.traceback)
                if timing.machine_failure:
                    yield from self._release()
                    raise MachineError(timing.machine_failure)
                failure = WorkerTaskError(timing.traceback)
                if self._devices.suspect(address):  # e.g. it has no linker
                    self._move(address, job, failure)
                else:
                    self._devices.note_failure(address)
                    self._dispatcher.settle(job, self._failed(job, failure, board=address))
                yield from self._release()
                return False
            if isinstance(timing, Timing):
                self._keep_reference(address, job.task, timing)
                if not (yield from self._calibrate(address)):
                    self._reject_timing(address, job)
                    return False
                timing = self._devices.comparable(address, timing)
        except WorkerError as error:
            self._move(address, job, error)
            return False
        except Exception as error:  # a defect of this package
            self._dispatcher.settle(job, self._failed(job, error))
            return False
        self._devices.note_success(address)
        self._last_success_sec = time.monotonic()
        for suspect, reason in job.task.lost_on:  # not the candidate's fault, as is known now
            self._devices.note_fault(suspect, reason)
        self._dispatcher.settle(job, self._timed(job, timing, board=address))
        return True

    def _move(self, address: str, job: CandidateJob, error: WorkerError) -> None:
        """Queue a candidate again that its device has failed, or give it up after another.

        It is also given up after the same one, if that has timed something else in between or
        is the only one.
        """
        lost_on = [each for each, _ in job.task.lost_on]
        is_in_doubt = lost_on == [address] and self._devices.may_be_at_fault(address)
        self._devices.note_loss(address)
        if lost_on and not is_in_doubt:
            self._dispatcher.settle(job, self._failed(job, error, board=address))
        else:
            if not lost_on:
                job.task.lost_on.append((address, summary_line(error)))
            self._dispatcher.put_back(job)
        # Its next candidate might end alike.
        if is_in_doubt or isinstance(error, MachineError | WorkerTaskError):
            self._devices.rest(address)
            self._fail_stalled(summary_line(error))

    def _reject_timing(self, address: str, job: CandidateJob) -> None:
        """Queue a candidate again that an unusable device has measured, or give it up."""
        job.task.rejected_on.append(address)
        if len(job.task.rejected_on) < MAX_REJECTIONS:
            self._dispatcher.put_back(job)
        else:
            by = ", ".join(job.task.rejected_on)
            reason = f"no device that measured it could be calibrated: {by}"
            self._dispatcher.settle(job, self._give_up(job, reason))

    def _fail_stalled(self, reason: str) -> None:
        """Give up what has waited too long, if no device has measured anything since."""
        if time.monotonic() - self._last_success_sec >= self.queue_timeout_sec:
            self._dispatcher.fail_queued(
                f"no device for {self.queue_timeout_sec:g} s: {reason}",
                waited_sec=self.queue_timeout_sec,
            )

    def _calibrate(self, address: str) -> Generator[Step, Any, bool]:
        """Time the reference kernel on a device if necessary; return whether to use it."""
        while self._has_reference() and self._devices.needs_calibration(address):
            reference = self._reference
            args = (self._measure, *(reference or ()), self.options)
            try:
                timing = yield Step("calibrating", lease.measure_leased, args, self.timeout_sec)
            except WorkerError as error:  # the worker may be gone
                self._reference_failed(address, summary_line(error))
                return False
            if reference is not self._reference:
                continue  # another one was chosen meanwhile
            if isinstance(timing, Timing):
                self._reference_failures.clear()
                if self._devices.calibrate(address, timing):
                    return True
                yield from self._release()
                return False
            text = timing.traceback if isinstance(timing, lease.FailedMeasurement) else repr(timing)
            self._reference_failed(address, summary_line(text))
            yield from self._release()
            return False
        if not self._has_reference() and self._devices.waits_for_others(address):
            yield from self._release()
            return False
        return True

    def _release(self) -> Plan:
        """Give the device back, so that others need not wait for the session's end."""
        with contextlib.suppress(WorkerError):  # the worker has its answer already
            yield short_step("releasing the device", lease.release)

    def _reference_failed(self, address: str, why: str) -> None:
        """Note a device's fault; drop a reference kernel that fails repeatedly."""
        self._reference_failures.append(address)
        n_failures, n_devices = len(self._reference_failures), len(set(self._reference_failures))
        # On one device alone, which has measured others, the device is at fault.
        is_devices = n_devices == 1 and self._devices.device(address).n_timings > 0
        if n_failures >= MAX_REFERENCE_FAILURES and not is_devices:
            self._reference = None
        self._devices.note_fault(address, f"the reference kernel failed: {why}")

    def _has_reference(self) -> bool:
        """Say whether there is a reference kernel whose file still exists."""
        if self._reference is not None and not Path(self._reference[0]).is_file():
            self._reference = None
        return self._reference is not None

    def _keep_reference(self, address: str, candidate: Candidate, timing: Timing) -> None:
        """Copy a candidate that succeeded as the reference kernel, if there is none."""
        floor_sec = 0.0 if candidate.facts is None else candidate.facts.floor_sec
        is_time = 0.0 < timing.mean_sec < math.inf and timing.mean_sec >= floor_sec
        is_time &= timing.reason != RACED
        if self._has_reference() or not is_time or not self._devices.can_restart(address):
            return
        path, *rest = candidate.measure_args()
        with contextlib.suppress(OSError):  # no such file, or no disk space
            if not self._scratch.path.exists():  # closed and used again
                self._scratch = ScratchFolder("rpc")
            kept = self._scratch.path / f"{self._n_references}-{Path(path).name}"
            shutil.copyfile(path, kept)
            self._reference = (str(kept), *rest)
            self._n_references += 1
            self._reference_failures.clear()
            self._devices.restart(address, timing)

    def _facts_on(self, address: str, facts: BatchFacts | None) -> BatchFacts | None:
        """Return what is known with the incumbent's time scaled to the device."""
        if facts is None or facts.incumbent_sec is None:
            return facts
        scaled_sec = facts.incumbent_sec / self._devices.speed(address)
        return dataclasses.replace(facts, incumbent_sec=scaled_sec)

    def _give_up(self, job: CandidateJob, reason: str) -> RunnerResult:
        return self._fail(job, reason, origin=MACHINE_FAILURE)  # it was not tried

    def _may_end(self) -> bool:
        """Say whether workers may be killed: TVM's server may not survive it in a session."""
        return not self._n_sessions

    def _set_present(self, present: tuple[str, ...]) -> None:
        self._devices.present = present
        self._pool.max_workers = max(1, min(len(present), self.max_workers or len(present)))


def complete_config(rpc_config: RPCConfig | None) -> RPCConfig:
    """Complete a configuration from TVM's environment variables."""
    try:
        return RPCConfig._normalized(rpc_config)
    except ValueError as error:
        raise InvalidOptionError(f"rpc_config is not complete: {error}") from error
