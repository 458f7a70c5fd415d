"""A runner for this machine that measures each candidate only as long as it must."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    PyRunner,
    RunnerInput,
    derived_object,
)
from tvm_adaptive.errors import (
    MACHINE_FAILURE,
    OUT_OF_TIME,
    InvalidOptionError,
    MachineError,
    OutOfTimeError,
    WorkerError,
    WorkerTimeoutError,
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
from tvm_adaptive.workers.fork_server import ForkServer, new_fork_server
from tvm_adaptive.workers.pool import START_TIMEOUT_SEC, Plan, Step, WorkerPool

logger = logging.getLogger(__name__)

# Before what the machine had no room for is tried again: another program's peak.
_RETRY_PAUSE_SEC = 2.0
_WORKER_MODULES = ("tvm_adaptive.runner.measure",)


@derived_object
class AdaptiveRunner(PyRunner):  # type: ignore[misc]
    """Measure candidates on this machine; ``runner="adaptive"``.

    Candidates are measured one after the other in a worker process of their own, so
    that nothing else of the run disturbs a time; with several devices, in one for each.
    A candidate that crashes, hangs, exits or reports an impossible time costs one error
    result and a new worker. One that fails because the machine is out of processes or
    memory is measured once more.

    Parameters
    ----------
    timeout_sec : float
        Deadline of one candidate, kept by this process; the start of a worker does not
        count. Default 30.
    rule : str or StoppingRule
        When to stop measuring: ``"precision"`` (default), ``"paper"``, ``"cv"``, or an
        object of your own (see :mod:`tvm_adaptive.runner.stopping`).
    min_repeat_ms : float
        Least total duration of the micro-batches if the rule goes to its maximum.
        Default 0.
    max_sec : float or None
        Most seconds to measure a candidate; None (default) for 0.1, or for 5 when the
        rule fixes its runs per micro-batch.
    devices : sequence of int
        Which devices of the candidates' type, each with a worker of its own. They must be
        alike: their times are compared. Default ``(0,)``.
    cpu_cache_flush : bool
        Flush the CPU's caches before each single run. Default False.
    n_threads : int or None
        Threads of a CPU kernel; None (default) for the physical cores that this process
        may use. TVM's own choice is half the processors.
    max_uses : int
        Candidates after which the worker is replaced, which bounds what loaded
        artifacts keep in memory. Default 256.
    measure : callable
        ``(artifact_path, device_type, args_info, options) -> Timing``, called in the
        worker; a module-level function, picklable by cloudpickle.
    trial_log : TrialLog or None
        Gets the standard error of each time.
    race : bool
        Race candidates against the log's incumbent, which a search has to set. Default
        True; False, or no log, measures all alike.
    overlap : bool
        Measure in the background: :meth:`run` returns at once, and the next batch may be
        made meanwhile. Not for the CPU that also builds. Default False.
    time_left : callable or None
        Returns the seconds that are left for measuring, e.g. of a run's budget. What is not
        measured by then is answered with an error that
        :func:`~tvm_adaptive.errors.is_out_of_time` knows. Default None: no limit.
    server : ForkServer or None
        Forks the worker; None for one of its own.
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
        self.timeout_sec = checked_timeout(timeout_sec)
        self.options = make_options(
            rule=rule,
            min_repeat_ms=min_repeat_ms,
            max_sec=max_sec,
            cpu_cache_flush=cpu_cache_flush,
        )
        self.devices = checked_devices(devices)
        if max_uses < 1:
            raise InvalidOptionError(f"max_uses must be at least 1 but got {max_uses}.")
        self._measure = measure
        self._incumbent = trial_log.incumbent if trial_log is not None and race else None
        self._log = TimingLog("AdaptiveRunner", journal, trial_log)
        self._own_server = None if server else new_fork_server(_WORKER_MODULES)
        self._pool = WorkerPool(
            len(self.devices),
            setups=[functools.partial(use_device, index) for index in self.devices],
            max_uses=max_uses,
            server=server or self._own_server,
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
        """Measure a batch; never raises for what a candidate does.

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
        """End the workers; a later :meth:`run` starts new ones."""
        self._dispatcher.close()
        self._pool.close()
        if self._own_server is not None:
            self._own_server.close()

    def _plan(self) -> Plan:
        """Measure the next candidate; whatever happens, it gets an answer."""
        job = self._dispatcher.take()
        if job is None:
            return
        best = job.task.best
        limit_sec = self.timeout_sec
        try:
            if job.task.machine_failures:
                yield Step("pausing", time.sleep, (_RETRY_PAUSE_SEC,), START_TIMEOUT_SEC)
            if self._time_left is not None:
                limit_sec = min(limit_sec, self._time_left())
            if limit_sec <= 0:
                raise OutOfTimeError(OUT_OF_TIME)
            options = with_race(self.options, best)
            args = (*as_task(job.task.runner_input), options)
            timing = yield Step("running", self._measure, args, limit_sec)
            answer = self._log.timed(job, timing)
        except WorkerTimeoutError as error:
            late = OutOfTimeError(OUT_OF_TIME) if limit_sec < self.timeout_sec else error
            answer = self._log.failed(job.index, late)
        except WorkerError as error:
            if isinstance(error, MachineError) and not job.task.machine_failures:
                logger.warning("candidate %d is measured once more: %s", job.index, error)
                job.task.machine_failures.append(str(error))
                self._dispatcher.put_back(job)
                return
            answer = self._log.failed(job.index, error)
        except Exception as error:  # of ours
            answer = self._log.broken(job.index, error)
        self._dispatcher.settle(job, answer)

    def _give_up(self, job: Job[Candidate, FinishedFuture], reason: str) -> FinishedFuture:
        message = f"Error: could not measure: {reason}"
        return self._log.fail(job.index, message, origin=MACHINE_FAILURE)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What is measured, and against what."""

    runner_input: RunnerInput
    best: Incumbent | None  # of the candidate's task; each batch has its own
    # remote devices that were lost under it, and how
    lost_on: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    # what this machine could not do when it was to be measured
    machine_failures: list[str] = dataclasses.field(default_factory=list)
    # remote devices that measured it and then turned out to be of no use
    refused_by: list[str] = dataclasses.field(default_factory=list)


class TimingLog:
    """Turn what became of candidates into results, and tell the journal of each."""

    def __init__(
        self,
        name: str,
        journal: JournalWriter | None,
        trial_log: TrialLog | None = None,
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
        """Return the error result of a candidate that brought no time.

        It begins with :data:`~tvm_adaptive.errors.MACHINE_FAILURE` if the candidate is not
        to blame.
        """
        cause = "Timeout" if isinstance(error, WorkerTimeoutError) else "Error"
        origin = MACHINE_FAILURE if isinstance(error, MachineError) else ""
        text, short = f"{cause}: {error}", origin + summary_line(error)
        return self.fail(index, text, short, origin=origin, **where)

    def broken(self, index: int, error: Exception) -> FinishedFuture:
        """Return the error result of a candidate that could not be measured for our fault."""
        # C++ called us: an exception would end the whole run.
        logger.error("%s could not measure candidate %d", self._name, index, exc_info=error)
        self.write("error", where=f"{self._name}.run", error=repr(error))
        origin = MACHINE_FAILURE if machine_failure(error) else ""
        return self.fail(index, f"could not measure: {error!r}", origin=origin)

    def fail(
        self,
        index: int,
        message: str,
        short: str | None = None,
        *,
        origin: str = "",
        **where: Any,
    ) -> FinishedFuture:
        """Return an error result and write its ``"timing"`` event, in ``short`` if given."""
        logger.debug("%s, candidate %d: %s", self._name, index, message)
        self.write("timing", index=index, error=short or origin + message, **where)
        return FinishedFuture(None, f"{origin}{self._name}: {message}")

    def write(self, event: str, **fields: Any) -> None:
        """Tell the journal."""
        try:
            self._journal.write(event, **fields)
        except Exception:  # a full disk must not cost a measurement
            logger.exception("%s could not write to the journal", self._name)


def send(
    dispatcher: Dispatcher[Candidate, FinishedFuture],
    runner_inputs: Sequence[RunnerInput],
    incumbent: Incumbent | None,
    *,
    overlap: bool,
    time_left: Callable[[], float] | None = None,
) -> list[FinishedFuture] | list[PendingFuture]:
    """Give a batch to devices; return what MetaSchedule is given for it.

    In the background, results are waited for as long as there is time left.
    """
    # One for the batch: another task's by the time that it is measured.
    best = copy.copy(incumbent)
    answers = dispatcher.submit([Candidate(each, best) for each in runner_inputs])
    if overlap:
        return [PendingFuture(answer, time_left) for answer in answers]
    return [answer.result() for answer in answers]


def make_options(
    *,
    rule: str | StoppingRule,
    min_repeat_ms: float,
    max_sec: float | None,
    cpu_cache_flush: bool,
    device_index: int = 0,
) -> MeasureOptions:
    """Check a runner's options and bundle what travels to its workers."""
    if not min_repeat_ms >= 0:
        raise InvalidOptionError(f"min_repeat_ms must be at least 0 but got {min_repeat_ms}.")
    if max_sec is not None and not max_sec > 0:
        raise InvalidOptionError(
            f"max_sec must be above 0 but got {max_sec}. Leave it out for the default."
        )
    if device_index < 0:
        raise InvalidOptionError(f"device_index must be at least 0 but got {device_index}.")
    return MeasureOptions(
        rule=make_rule(rule) if isinstance(rule, str) else rule,
        min_repeat_ms=min_repeat_ms,
        max_sec=max_sec,
        device_index=device_index,
        cpu_cache_flush=cpu_cache_flush,
    )


def checked_devices(devices: Sequence[int]) -> tuple[int, ...]:
    """Return the devices if they can be used, else raise InvalidOptionError."""
    if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
        raise InvalidOptionError(
            f"devices must be different numbers from 0 on but got {list(devices)}; (0, 1) are "
            "the first two."
        )
    return tuple(devices)


def with_race(options: MeasureOptions, incumbent: Incumbent | None) -> MeasureOptions:
    """Return the options with a race against the incumbent, where there is one."""
    if incumbent is None or incumbent.seconds is None:
        return options
    return dataclasses.replace(options, race=Race(incumbent.seconds))


def checked_timeout(timeout_sec: float) -> float:
    """Return ``timeout_sec`` if it is above 0, else raise InvalidOptionError."""
    if not timeout_sec > 0:
        raise InvalidOptionError(
            f"timeout_sec must be above 0 but got {timeout_sec}. Give the seconds that "
            "measuring one candidate may take."
        )
    return timeout_sec


def as_task(runner_input: RunnerInput) -> tuple[str, str, Sequence[Any]]:
    """Return the artifact's path, device type and arguments in a form that can travel."""
    args_info = tuple(info.as_json() for info in runner_input.args_info)
    return str(runner_input.artifact_path), str(runner_input.device_type), args_info
