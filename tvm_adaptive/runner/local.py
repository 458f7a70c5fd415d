"""A runner for this machine that measures each candidate only as long as needed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import PyRunner, RunnerInput, derived_object
from tvm_adaptive.errors import (
    MACHINE_FAILURE,
    InvalidOptionError,
    MachineError,
    WorkerError,
    WorkerTimeoutError,
    check_at_least,
    check_positive,
    machine_failure,
    summary_line,
)
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal
from tvm_adaptive.runner.futures import FinishedFuture, PendingFuture
from tvm_adaptive.runner.measure import (
    MeasureFunction,
    MeasureOptions,
    measure_artifact,
    use_device,
)
from tvm_adaptive.runner.racing import Race
from tvm_adaptive.runner.stopping import StoppingRule, make_rule
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import Incumbent, TrialLog
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.dispatcher import Dispatcher, Job
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import START_TIMEOUT_SEC, Plan, Step, WorkerPool, in_time

logger = logging.getLogger(__name__)

# Before a candidate is measured again that the machine lacked resources for: another
# program's peak may be over.
_RETRY_PAUSE_SEC = 2.0
_WORKER_MODULES = ("tvm_adaptive.runner.measure",)


@derived_object
class AdaptiveRunner(PyRunner):  # type: ignore[misc]
    """Measure candidates on this machine; ``runner="adaptive"``.

    Candidates are measured one after the other in a separate worker process, so that
    nothing else of the run disturbs their times; several devices have one worker each. A
    candidate that crashes, hangs, exits or reports an impossible time costs one error
    result and a new worker. One that fails because the machine is out of processes or
    memory is measured once more.

    Parameters
    ----------
    timeout_sec : float
        Deadline of one candidate, without the start of a worker. Default 30.
    rule : str or StoppingRule
        When to stop measuring: ``"precision"`` (default), ``"paper"``, ``"cv"``, or an
        object of your own (see :mod:`tvm_adaptive.runner.stopping`).
    min_repeat_ms : float
        Least total duration of the micro-batches if the rule reaches its maximum.
        Default 0.
    max_sec : float or None
        Most seconds to measure a candidate; None (default) for 0.1, or 5 when the rule
        fixes its runs per micro-batch.
    devices : sequence of int
        Devices of the candidates' type, each with its own worker. They must be alike, as
        their times are compared. Default ``(0,)``.
    cpu_cache_flush : bool
        Flush the CPU's caches before each single run. Default False.
    n_threads : int or None
        Threads of a CPU kernel; None (default) for the physical cores that this process
        may use.
    max_uses : int
        Candidates after which the worker is replaced, which bounds the memory of loaded
        artifacts. Default 256.
    measure : callable
        ``(artifact_path, device_type, args_info, options) -> Timing``, called in the
        worker; a module-level function, picklable by cloudpickle.
    trial_log : TrialLog or None
        Gets the standard error of each time.
    race : bool
        Race candidates against the log's incumbent, which a search has to set. Default
        True; False, or no log, measures all alike.
    overlap : bool
        Measure in the background: :meth:`run` returns at once. Not for the CPU that also
        builds. Default False.
    time_left : callable or None
        Returns the seconds left for measuring. Candidates not measured by then get an
        error that :func:`~tvm_adaptive.errors.is_out_of_time` recognizes. Default None: no
        limit.
    server : ForkServer or None
        Forks the workers; None for an own one.
    journal : JournalWriter or None
        Gets one ``"timing"`` event per candidate: ``index`` (counted from 0 over the
        runner's life), ``error``, and the fields of :class:`~tvm_adaptive.Timing`.

    Raises
    ------
    InvalidOptionError
        When an option is out of range or a rule's name is unknown.
    """

    def __init__(
        self,
        *,
        timeout_sec: float = 30.0,
        rule: str | StoppingRule = "precision",
        min_repeat_ms: float = 0.0,
        max_sec: float | None = None,
        devices: Sequence[int] = (0,),
        cpu_cache_flush: bool = False,
        n_threads: int | None = None,
        max_uses: int = 256,
        measure: MeasureFunction = measure_artifact,
        trial_log: TrialLog | None = None,
        race: bool = True,
        overlap: bool = False,
        time_left: Callable[[], float] | None = None,
        server: ForkServer | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        super().__init__()
        self._time_left = time_left
        check_positive("timeout_sec", timeout_sec)
        self.timeout_sec = timeout_sec
        self.options = MeasureOptions(
            rule=make_rule(rule) if isinstance(rule, str) else rule,
            min_repeat_ms=min_repeat_ms,
            max_sec=max_sec,
            cpu_cache_flush=cpu_cache_flush,
        )
        if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
            raise InvalidOptionError(
                f"devices must be different numbers from 0 on but got {list(devices)}; (0, 1) "
                "are the first two."
            )
        self.devices = tuple(devices)
        check_at_least("max_uses", max_uses, 1)
        self._measure = measure
        self._incumbent = trial_log.incumbent if trial_log is not None and race else None
        self._log = TimingLog("AdaptiveRunner", journal, trial_log)
        self._pool = WorkerPool(
            len(self.devices),
            setups=[functools.partial(use_device, index) for index in self.devices],
            max_uses=max_uses,
            server=server,
            modules=_WORKER_MODULES,
            replace_after_error=True,
            env=thread_env(n_threads),
        )
        self.overlap = overlap
        self._dispatcher: Dispatcher[Candidate, FinishedFuture] = Dispatcher(
            self._pool, self._plan, self._give_up, overlap=overlap
        )

    @property
    def n_devices(self) -> int:
        """Devices that measure at the same time."""
        return len(self.devices)

    def run(self, runner_inputs: list[RunnerInput]) -> list[FinishedFuture] | list[PendingFuture]:
        """Measure a batch, in its order; never raises for a candidate's failure."""
        return submit_batch(self._dispatcher, runner_inputs, self._incumbent, overlap=self.overlap)

    def close(self) -> None:
        """End the workers; a later :meth:`run` starts new ones."""
        self._dispatcher.close()

    def _plan(self) -> Plan:
        """Measure the next candidate; it gets an answer in any case."""
        job = self._dispatcher.take()
        if job is None:
            return
        try:
            if job.task.is_retry:
                yield Step("pausing", time.sleep, (_RETRY_PAUSE_SEC,), START_TIMEOUT_SEC)
            options = with_race(self.options, job.task.best)
            args = (*measure_args(job.task.runner_input), options)
            step = Step("running", self._measure, args, self.timeout_sec)
            timing = yield from in_time(step, self._time_left)
            answer = self._log.timed(job, timing)
        except WorkerError as error:
            if isinstance(error, MachineError) and not job.task.is_retry:
                logger.warning("candidate %d is measured once more: %s", job.index, error)
                job.task.is_retry = True
                self._dispatcher.put_back(job)
                return
            answer = self._log.failed(job.index, error)
        except Exception as error:  # a defect of this package
            answer = self._log.internal_error(job.index, error)
        self._dispatcher.settle(job, answer)

    def _give_up(self, job: Job[Candidate, FinishedFuture], reason: str) -> FinishedFuture:
        message = f"Error: could not measure: {reason}"
        return self._log.fail(job.index, message, origin=MACHINE_FAILURE)


@dataclasses.dataclass
class Candidate:
    """A candidate in the queue, and what happened to it so far."""

    runner_input: RunnerInput
    best: Incumbent | None  # of its batch
    is_retry: bool = False  # after the machine lacked resources
    lost_on: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (device, error)
    # devices that measured it and then turned out to be unusable
    rejected_on: list[str] = dataclasses.field(default_factory=list)


class TimingLog:
    """Turns outcomes of measurements into results and writes their journal events."""

    def __init__(
        self, name: str, journal: JournalWriter | None, trial_log: TrialLog | None
    ) -> None:
        self._name = name
        self._trial_log = trial_log
        self._journal: JournalWriter = journal or NullJournal()

    def timed(
        self, job: Job[Candidate, FinishedFuture], timing: Any, **where: Any
    ) -> FinishedFuture:
        """Return the result of a measurement, offer its time, write its event."""
        index, best = job.index, job.task.best
        if not isinstance(timing, Timing):
            message = f"Error: expected the measuring function's Timing, got {timing!r}"
            return self.fail(index, message, **where)
        if not (math.isfinite(timing.mean_sec) and timing.mean_sec > 0):
            message = f"Error: measured {timing.mean_sec} s, which is no time"
            return self.fail(index, message, **where)
        if best is not None and timing.mean_sec < best.floor_sec:
            message = (
                f"Error: measured {timing.mean_sec:.3g} s, faster than the operations of the "
                f"task can be done ({best.floor_sec:.3g} s): the kernel does not do them"
            )
            return self.fail(index, message, **where)
        self.write("timing", index=index, error=None, **timing.as_fields(), **where)
        if self._trial_log is not None:
            artifact = str(job.task.runner_input.artifact_path)
            self._trial_log.note_timing(artifact, timing.mean_sec, timing.stderr_sec)
        if best is not None:
            best.offer(float(timing.mean_sec))
        return FinishedFuture(float(timing.mean_sec), None)

    def failed(self, index: int, error: WorkerError, **where: Any) -> FinishedFuture:
        """Return the error result of a candidate without a time."""
        cause = "Timeout" if isinstance(error, WorkerTimeoutError) else "Error"
        origin = MACHINE_FAILURE if isinstance(error, MachineError) else ""
        text, short = f"{cause}: {error}", origin + summary_line(error)
        return self.fail(index, text, short, origin=origin, **where)

    def internal_error(self, index: int, error: Exception) -> FinishedFuture:
        """Return the error result of a candidate that met a defect of this package."""
        # C++ called us: an exception would end the whole run.
        logger.error("%s could not measure candidate %d", self._name, index, exc_info=error)
        self.write("error", where=f"{self._name}.run", error=repr(error))
        origin = MACHINE_FAILURE if machine_failure(error) else ""
        return self.fail(index, f"could not measure: {error!r}", origin=origin)

    def fail(
        self, index: int, message: str, short: str | None = None, *, origin: str = "", **where: Any
    ) -> FinishedFuture:
        """Return an error result; the journal gets ``short`` if given, else the message."""
        logger.debug("%s, candidate %d: %s", self._name, index, message)
        self.write("timing", index=index, error=short or origin + message, **where)
        return FinishedFuture(None, f"{origin}{self._name}: {message}")

    def write(self, event: str, **fields: Any) -> None:
        """Write to the journal; never raises."""
        try:
            self._journal.write(event, **fields)
        except Exception:  # a full disk must not cost a measurement
            logger.exception("%s could not write to the journal", self._name)


def submit_batch(
    dispatcher: Dispatcher[Candidate, FinishedFuture],
    runner_inputs: Sequence[RunnerInput],
    incumbent: Incumbent | None,
    *,
    overlap: bool,
    time_left: Callable[[], float] | None = None,
) -> list[FinishedFuture] | list[PendingFuture]:
    """Queue a batch and return its futures; without ``overlap``, once it is measured."""
    # A copy for this batch: by the time that it is measured, a search may have set another.
    best = copy.copy(incumbent)
    answers = dispatcher.submit([Candidate(each, best) for each in runner_inputs])
    if overlap:
        return [PendingFuture(answer, time_left) for answer in answers]
    return [answer.result() for answer in answers]


def with_race(options: MeasureOptions, incumbent: Incumbent | None) -> MeasureOptions:
    """Return the options with a race against the incumbent, if there is one."""
    if incumbent is None or incumbent.seconds is None:
        return options
    return dataclasses.replace(options, race=Race(incumbent.seconds))


def measure_args(runner_input: RunnerInput) -> tuple[str, str, Sequence[Any]]:
    """Return the picklable first three arguments of a :data:`MeasureFunction`."""
    args_info = tuple(info.as_json() for info in runner_input.args_info)
    return str(runner_input.artifact_path), str(runner_input.device_type), args_info
