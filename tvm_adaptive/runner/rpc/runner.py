"""The adaptive runner for devices behind TVM's RPC tracker."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import PyRunner, RPCConfig, RunnerInput, derived_object
from tvm_adaptive.errors import (
    InvalidOptionError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    summary_line,
)
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.runner.futures import FinishedFuture, PendingFuture
from tvm_adaptive.runner.local import (
    Candidate,
    TimingLog,
    as_task,
    checked_timeout,
    make_options,
    send,
    with_race,
)
from tvm_adaptive.runner.measure import MeasureFunction
from tvm_adaptive.runner.racing import RACED
from tvm_adaptive.runner.rpc.device_pool import BoardRules, DevicePool
from tvm_adaptive.runner.rpc.lease import (
    CONNECT_TIMEOUT_SEC,
    SERVER_WAIT_SEC,
    SESSION_GRACE_SEC,
    Refusal,
    measure_leased,
    measure_remote,
    open_session,
    queue_for_device,
    release,
)
from tvm_adaptive.runner.rpc.leased_worker import devices_of, no_device
from tvm_adaptive.runner.stopping import StoppingRule
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import Incumbent, TrialLog
from tvm_adaptive.workers.dispatcher import Dispatcher, Job
from tvm_adaptive.workers.fork_server import ForkServer, new_fork_server
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# How long one keeps a device: others use the farm, too, and after a kernel that hangs the
# server keeps it blocked until the session's end.
LEASE_SEC = 15.0
# A candidate whose device is lost is measured on another, once: the next time it is the
# candidate that kills devices.
MAX_MOVES = 1
# Devices that may measure a candidate and then turn out too slow, or unable to run the
# reference kernel. As many as there are at a farm's start, when nothing is known of them.
MAX_REFUSALS = 5
# Times in a row, on whatever devices: then the reference kernel is at fault, not they.
MAX_REFERENCE_FAILURES = 3
_WORKER_MODULES = ("tvm_adaptive.runner.rpc.lease",)

_CandidateJob = Job[Candidate, FinishedFuture]


@derived_object
class AdaptiveRPCRunner(PyRunner):  # type: ignore[misc]
    """Measure candidates on remote devices; ``runner="adaptive-rpc"``.

    Every wait has an end: a tracker that does not answer, a key that nobody serves, a
    server that dies or a kernel that hangs gives error results, never a run that
    stands still. Queueing for a device does not count as measuring.

    A candidate whose device is lost is measured on another; a device that goes on failing
    is left alone for a while. Devices are of one kind, and may differ in speed: the first
    candidate that succeeds is timed on each of them, and times are given as the first
    device would have them.

    Parameters
    ----------
    rpc_config : RPCConfig or None
        Tracker, key and session priority. What is None there, TVM reads from
        ``TVM_TRACKER_HOST``, ``TVM_TRACKER_PORT`` and ``TVM_TRACKER_KEY``.
    timeout_sec : float or None
        Deadline of one candidate from the moment it has a device; None (default) for
        the configuration's ``session_timeout_sec``.
    queue_timeout_sec : float
        Longest wait of a candidate for a device that others use. Default 600.
    rule : str or StoppingRule
        As for :class:`~tvm_adaptive.runner.local.AdaptiveRunner`, like the next two.
        Default ``"precision"``.
    min_repeat_ms : float
        Default 0.
    max_sec : float or None
        Default None.
    device_index : int
        Of each server's devices of the candidates' type. Default 0.
    cpu_cache_flush : bool
        Flush the CPU's caches before each single run. Default False.
    max_workers : int or None
        Devices to use at the same time; None (default) for as many as the tracker has
        with the key.
    measure : callable
        As for :class:`~tvm_adaptive.runner.local.AdaptiveRunner`; called in a worker
        that holds a session.
    boards : BoardRules or None
        When a device is left alone, and when its speed is measured; None (default) for
        the default rules.
    trial_log : TrialLog or None
        Gets the standard error of each time.
    race : bool
        Race candidates against the log's incumbent, which a search has to set. Default
        True; False, or no log, measures all alike.
    overlap : bool
        Measure in the background: :meth:`run` returns at once, and the next batch may be
        made meanwhile. Default False; not where the devices are this machine.
    time_left : callable or None
        Returns the seconds that are left for measuring, e.g. of a run's budget. In the
        background, no result is waited for longer. Default None: no limit.
    server : ForkServer or None
        Forks the workers; None for one of its own.
    journal : JournalWriter or None
        Gets one ``"timing"`` event per candidate, with the ``board`` that measured it,
        ``"board"`` events when a device fails, is left alone or is calibrated, and one
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
        device_index: int = 0,
        cpu_cache_flush: bool = False,
        max_workers: int | None = None,
        measure: MeasureFunction = measure_remote,
        boards: BoardRules | None = None,
        trial_log: TrialLog | None = None,
        race: bool = True,
        overlap: bool = False,
        time_left: Callable[[], float] | None = None,
        server: ForkServer | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        super().__init__()
        self.rpc_config = complete_config(rpc_config)
        if timeout_sec is None:
            timeout_sec = float(self.rpc_config.session_timeout_sec)
        self.timeout_sec = checked_timeout(timeout_sec)
        self.queue_timeout_sec = checked_timeout(queue_timeout_sec)
        self.options = make_options(
            rule=rule,
            min_repeat_ms=min_repeat_ms,
            max_sec=max_sec,
            device_index=device_index,
            cpu_cache_flush=cpu_cache_flush,
        )
        if max_workers is not None and max_workers < 1:
            raise InvalidOptionError(
                f"max_workers must be at least 1 but got {max_workers}. Leave it out to use "
                "every device that the tracker has with the key."
            )
        self.max_workers = max_workers
        self.overlap = overlap
        self._time_left = time_left
        self._measure = measure
        self._incumbent = trial_log.incumbent if trial_log is not None and race else None
        self._log = TimingLog("AdaptiveRPCRunner", journal, trial_log)
        self._boards = DevicePool(boards or BoardRules(), self._log.write)
        self._reference: tuple[Any, ...] | None = None
        self._n_references = 0
        self._n_reference_failures = 0
        # Monotonic time at which a device last measured a candidate.
        self._served_sec = -math.inf
        self._scratch = ScratchFolder("rpc")
        self._n_leased = 0
        self._own_server = None if server else new_fork_server(_WORKER_MODULES)
        self._pool = WorkerPool(1, server=server or self._own_server, replace_after_error=True)
        self._dispatcher: Dispatcher[Candidate, FinishedFuture] = Dispatcher(
            self._pool, self._plan, self._give_up, overlap=overlap
        )
        self._look_at_tracker()

    @property
    def n_devices(self) -> int:
        """Devices that are used at the same time, as far as is known."""
        return self._pool.max_workers

    def run(self, runner_inputs: list[RunnerInput]) -> list[FinishedFuture] | list[PendingFuture]:
        """Measure a batch; never raises for what a candidate or a device does.

        Parameters
        ----------
        runner_inputs : list of RunnerInput

        Returns
        -------
        list of FinishedFuture or PendingFuture
            In the order of ``runner_inputs``; all done unless measured in the background.
        """
        return send(
            self._dispatcher,
            runner_inputs,
            self._incumbent,
            overlap=self.overlap,
            time_left=self._time_left,
        )

    def close(self) -> None:
        """End the workers and give the devices back; tell the journal what each one did."""
        if self._scratch.path.exists():  # not closed yet
            self._log.write("boards", boards=self._boards.as_fields())
        self._dispatcher.close()
        self._pool.close()
        if self._own_server is not None:
            self._own_server.close()
        self._scratch.remove()

    def _plan(self) -> Plan:
        """Lease a device, and measure on it what is queued."""
        address = ""
        session_sec = math.ceil(LEASE_SEC + self.timeout_sec) + SESSION_GRACE_SEC
        lease = (self.rpc_config, self._boards.avoided(), SERVER_WAIT_SEC)
        try:
            address, present = yield Step(
                "queueing for a device", queue_for_device, lease, self.queue_timeout_sec
            )
            self._see(present)
            yield Step(
                f"connecting to {address}", open_session, (session_sec,), CONNECT_TIMEOUT_SEC
            )
            # Before a candidate is taken: a device that is of no use should cost none.
            is_usable = yield from self._calibrate(address)
        except WorkerError as error:
            self._without_device(address, error)
            return
        if is_usable:
            is_usable = yield from self._measure_queued(address)
        else:
            self._fail_stalled(f"{address} is not fit to measure on")
        if is_usable:
            yield Step("releasing the device", release, (), CONNECT_TIMEOUT_SEC)

    def _measure_queued(self, address: str) -> Generator[Step, Any, bool]:
        """Measure candidates while there are any and the lease lasts."""
        self._n_leased += 1
        end_sec = time.monotonic() + LEASE_SEC
        try:
            is_usable = True
            while is_usable and time.monotonic() < end_sec:
                job = self._dispatcher.take()
                if job is None:
                    break
                is_usable = yield from self._measure_on(address, job)
            return is_usable
        finally:
            self._n_leased -= 1

    def _measure_on(self, address: str, job: _CandidateJob) -> Generator[Step, Any, bool]:
        """Measure one candidate, which gets an answer or is queued again."""
        best = job.task.best
        try:
            task = as_task(job.task.runner_input)
            args = (self._measure, *task, with_race(self.options, self._best_on(address, best)))
            timing = yield Step("running", measure_leased, args, self.timeout_sec)
            if isinstance(timing, Refusal):
                self._refused(address, job, timing)
                return False
            if isinstance(timing, Timing):
                self._keep_reference(address, task, timing)
                if not (yield from self._calibrate(address)):
                    self._measured_in_vain(address, job)
                    return False
                timing = self._boards.comparable(address, timing)
        except WorkerError as error:
            self._lost(address, job, error)
            return False
        except Exception as error:  # of ours
            self._dispatcher.settle(job, self._log.broken(job.index, error))
            return False
        self._boards.served(address)
        self._served_sec = time.monotonic()
        for suspect, reason in job.task.lost_on:
            # Here the candidate did no harm.
            self._boards.fault(suspect, reason)
        self._dispatcher.settle(job, self._log.timed(job, timing, board=address))
        return True

    def _refused(self, address: str, job: _CandidateJob, refusal: Refusal) -> None:
        if refusal.device_lives:
            error = WorkerTaskError(refusal.text)
            self._dispatcher.settle(job, self._log.failed(job.index, error, board=address))
        else:
            self._lost(address, job, WorkerDiedError(refusal.text))

    def _lost(self, address: str, job: _CandidateJob, error: WorkerError) -> None:
        """Queue a candidate again whose device was lost, or give it up: it kills devices."""
        if len(job.task.lost_on) < MAX_MOVES:
            job.task.lost_on.append((address, summary_line(error)))
            self._dispatcher.put_back(job)
        else:
            self._dispatcher.settle(job, self._log.failed(job.index, error, board=address))

    def _measured_in_vain(self, address: str, job: _CandidateJob) -> None:
        """Queue a candidate again whose time is worth nothing, or give it up."""
        job.task.refused_by.append(address)
        if len(job.task.refused_by) < MAX_REFUSALS:
            self._dispatcher.put_back(job)
        else:
            by = ", ".join(job.task.refused_by)
            reason = f"no device that measured it could be calibrated: {by}"
            self._dispatcher.settle(job, self._give_up(job, reason))

    def _without_device(self, address: str, error: WorkerError) -> None:
        if address:
            self._boards.fault(address, summary_line(error))
            self._fail_stalled(summary_line(error))
        elif not self._n_leased:
            self._dispatcher.fail_queued(no_device(self.rpc_config, summary_line(error)))

    def _fail_stalled(self, reason: str) -> None:
        """Give up what has waited for too long, if no device has measured anything since."""
        if time.monotonic() - self._served_sec >= self.queue_timeout_sec:
            self._dispatcher.fail_queued(
                f"no device for {self.queue_timeout_sec:g} s: {reason}",
                waited_sec=self.queue_timeout_sec,
            )

    def _calibrate(self, address: str) -> Generator[Step, Any, bool]:
        """Time the reference kernel on a device if that is due; say whether it can be used."""
        while self._has_reference() and self._boards.needs_calibration(address):
            reference = self._reference
            args = (self._measure, *(reference or ()), self.options)
            try:
                timing = yield Step("calibrating", measure_leased, args, self.timeout_sec)
            except WorkerError as error:  # the worker may be gone: nothing more can be done
                self._reference_failed(address, summary_line(error))
                return False
            if reference is not self._reference:
                continue  # another one was chosen meanwhile
            if isinstance(timing, Timing):
                self._n_reference_failures = 0
                if self._boards.calibrate(address, timing):
                    return True
                yield Step("releasing the device", release, (), CONNECT_TIMEOUT_SEC)
                return False
            self._reference_failed(address, summary_line(getattr(timing, "text", repr(timing))))
            return False
        return True

    def _reference_failed(self, address: str, why: str) -> None:
        """Note a fault of a device, or of a reference kernel that fails again and again."""
        self._n_reference_failures += 1
        if self._n_reference_failures >= MAX_REFERENCE_FAILURES:
            self._reference = None
        self._boards.fault(address, f"the reference kernel failed: {why}")

    def _has_reference(self) -> bool:
        """Say whether there is a reference kernel; one whose file has vanished is forgotten."""
        if self._reference is not None and not Path(self._reference[0]).is_file():
            self._reference = None
        return self._reference is not None

    def _keep_reference(self, address: str, task: tuple[Any, ...], timing: Timing) -> None:
        """Keep a candidate that succeeded if there is no reference kernel.

        A copy, for its batch's artifacts will be removed. Where it follows an earlier one,
        only a device whose speed is known can say how the two compare.
        """
        is_time = 0.0 < timing.mean_sec < math.inf and timing.reason != RACED
        if self._has_reference() or not is_time or not self._boards.can_restart(address):
            return
        path, *rest = task
        kept = self._scratch.path / f"{self._n_references}-{Path(path).name}"
        with contextlib.suppress(OSError):  # there is none, or no room for it
            self._scratch.path.mkdir(mode=0o700, exist_ok=True)
            shutil.copyfile(path, kept)
            self._reference = (str(kept), *rest)
            self._n_references += 1
            self._n_reference_failures = 0
            self._boards.restart(address, timing)

    def _best_on(self, address: str, best: Incumbent | None) -> Incumbent | None:
        """Return the incumbent's time as the device would have it."""
        if best is None or best.seconds is None:
            return None
        return Incumbent(best.seconds / self._boards.speed(address), best.floor_sec)

    def _give_up(self, job: _CandidateJob, reason: str) -> FinishedFuture:
        return self._log.fail(job.index, reason)

    def _look_at_tracker(self) -> None:
        """Learn which devices there are."""
        self._see(devices_of(self._pool, self.rpc_config))

    def _see(self, present: tuple[str, ...]) -> None:
        self._boards.see(present)
        self._pool.max_workers = max(1, min(len(present), self.max_workers or len(present)))


def complete_config(rpc_config: RPCConfig | None) -> RPCConfig:
    """Fill in what a configuration leaves to TVM's environment variables."""
    try:
        return RPCConfig._normalized(rpc_config)
    except ValueError as error:
        raise InvalidOptionError(f"rpc_config is not complete: {error}") from error
