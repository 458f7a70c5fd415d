"""The adaptive runner for devices behind TVM's RPC tracker."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import PyRunner, RPCConfig, RunnerInput, derived_object
from tvm_adaptive.asides import Incumbent, TimingErrors
from tvm_adaptive.dispatch import Dispatcher, Job
from tvm_adaptive.errors import (
    InvalidOptionError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    essence,
)
from tvm_adaptive.fork_server import ForkServer, new_fork_server
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.records import Timing
from tvm_adaptive.runner.boards import BoardRules, Boards
from tvm_adaptive.runner.futures import FinishedFuture, PendingFuture
from tvm_adaptive.runner.lease import (
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
from tvm_adaptive.runner.leasing import devices_of, no_device
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
from tvm_adaptive.runner.stopping import StoppingRule
from tvm_adaptive.workers import Plan, Step, WorkerPool

# How long one keeps a device: others use the farm, too, and after a kernel that hangs the
# server keeps it blocked until the session's end.
LEASE_SEC = 15.0
# A candidate whose device is lost is measured on another, once: the next time it is the
# candidate that kills devices.
MAX_MOVES = 1
_WORKER_MODULES = ("tvm_adaptive.runner.lease",)

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
    incumbent : Incumbent or None
        Candidates are raced against it; a search has to keep it. None measures all alike.
    timing_errors : TimingErrors or None
        Is told the standard error of each time.
    overlap : bool
        Measure in the background: :meth:`run` returns at once, and the next batch may be
        made meanwhile. Default False; not where the devices are this machine.
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
        incumbent: Incumbent | None = None,
        timing_errors: TimingErrors | None = None,
        overlap: bool = False,
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
        self._measure = measure
        self._incumbent = incumbent
        self._log = TimingLog("AdaptiveRPCRunner", journal, timing_errors)
        self._boards = Boards(boards or BoardRules(), self._log.write)
        self._reference: tuple[Any, ...] | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="tvm-adaptive-rpc-"))
        self._cleanup = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
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
        return send(self._dispatcher, runner_inputs, self._incumbent, overlap=self.overlap)

    def close(self) -> None:
        """End the workers and give the devices back; tell the journal what each one did."""
        if self._scratch.exists():  # not closed yet
            self._log.write("boards", boards=self._boards.as_fields())
        self._dispatcher.close()
        self._pool.close()
        if self._own_server is not None:
            self._own_server.close()
        self._cleanup()

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
        except WorkerError as error:
            self._without_device(address, error)
            return
        self._n_leased += 1
        end_sec = time.monotonic() + LEASE_SEC
        try:
            is_usable = True
            while is_usable and time.monotonic() < end_sec:
                job = self._dispatcher.take()
                if job is None:
                    break
                is_usable = yield from self._measure_on(address, job)
        finally:
            self._n_leased -= 1
        if is_usable:
            yield Step("releasing the device", release, (), CONNECT_TIMEOUT_SEC)

    def _measure_on(self, address: str, job: _CandidateJob) -> Generator[Step, Any, bool]:
        """Measure one candidate, which gets an answer or is queued again.

        Returns
        -------
        bool
            Whether the device can be used for another one.
        """
        best = job.task.best
        try:
            task = as_task(job.task.runner_input)
            args = (self._measure, *task, with_race(self.options, self._best_on(address, best)))
            timing = yield Step("running", measure_leased, args, self.timeout_sec)
            if isinstance(timing, Refusal):
                self._refused(address, job, timing)
                return False
            if isinstance(timing, Timing):
                self._keep_reference(task)
                if not (yield from self._calibrate(address)):
                    self._dispatcher.put_back(job)
                    return False
                timing = self._boards.comparable(address, timing)
        except WorkerError as error:
            self._lost(address, job, error)
            return False
        except Exception as error:  # of ours
            self._dispatcher.settle(job, self._log.broken(job.index, error))
            return False
        self._boards.served(address)
        for suspect, reason in job.task.lost_on:
            # Here the candidate did no harm.
            self._boards.fault(suspect, reason)
        self._dispatcher.settle(job, self._log.timed(job.index, timing, best, board=address))
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
            job.task.lost_on.append((address, essence(error)))
            self._dispatcher.put_back(job)
        else:
            self._dispatcher.settle(job, self._log.failed(job.index, error, board=address))

    def _without_device(self, address: str, error: WorkerError) -> None:
        if address:
            self._boards.fault(address, essence(error))
            self._dispatcher.fail_queued(
                f"no device for {self.queue_timeout_sec:g} s: {essence(error)}",
                waited_sec=self.queue_timeout_sec,
            )
        elif not self._n_leased:
            self._dispatcher.fail_queued(no_device(self.rpc_config, essence(error)))

    def _calibrate(self, address: str) -> Generator[Step, Any, bool]:
        """Time the reference kernel on a device if that is due; say whether it can be used."""
        if not self._boards.needs_calibration(address) or self._reference is None:
            return True
        args = (self._measure, *self._reference, self.options)
        timing = yield Step("calibrating", measure_leased, args, self.timeout_sec)
        if not isinstance(timing, Timing):
            self._boards.fault(address, "the reference kernel failed")
            return False
        return self._boards.calibrate(address, timing)

    def _keep_reference(self, task: tuple[Any, ...]) -> None:
        """Keep the first candidate that succeeds: its batch's artifacts will be removed."""
        if self._reference is None:
            path, *rest = task
            kept = self._scratch / Path(path).name
            if Path(path).is_file():
                shutil.copyfile(path, kept)
                self._reference = (str(kept), *rest)

    def _best_on(self, address: str, best: Incumbent | None) -> Incumbent | None:
        """Return the incumbent's time as the device would have it."""
        if best is None or best.seconds is None:
            return None
        return Incumbent(best.seconds / self._boards.speed(address), best.floor_sec)

    def _give_up(self, job: _CandidateJob, reason: str) -> FinishedFuture:
        return self._log.fail(job.index, reason)

    def _look_at_tracker(self) -> None:
        """Learn which devices there are.

        Raises
        ------
        InvalidOptionError
            When there is none, or no tracker.
        """
        self._see(devices_of(self._pool, self.rpc_config))

    def _see(self, present: tuple[str, ...]) -> None:
        self._boards.see(present)
        self._pool.max_workers = max(1, min(len(present), self.max_workers or len(present)))


def complete_config(rpc_config: RPCConfig | None) -> RPCConfig:
    """Fill in what a configuration leaves to TVM's environment variables.

    Raises
    ------
    InvalidOptionError
        When host, port or key are not said there either.
    """
    try:
        return RPCConfig._normalized(rpc_config)
    except ValueError as error:
        raise InvalidOptionError(f"rpc_config is not complete: {error}") from error
