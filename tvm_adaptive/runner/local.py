"""A runner for this machine that measures each candidate only as long as needed.

What it shares with the runner for remote devices comes first.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from tvm_adaptive._tvm import PyRunner, PyRunnerFuture, RunnerInput, RunnerResult, derived_object
from tvm_adaptive.errors import (
    MACHINE_FAILURE,
    OUT_OF_TIME,
    InvalidOptionError,
    MachineError,
    WorkerError,
    WorkerTimeoutError,
    check_at_least,
    check_positive,
    machine_failure,
    summary_line,
)
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal, write_guarded
from tvm_adaptive.runner.measure import MeasureFunction, MeasureOptions, measure_artifact
from tvm_adaptive.runner.repeats import REPEAT_RULE, REPEAT_SEC, DuetBatch, MeasureArgs, Repeats
from tvm_adaptive.runner.stopping import StoppingRule, make_rule
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import BatchFacts, TrialLog
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.device_session import use_device
from tvm_adaptive.workers.dispatcher import Dispatcher, Job
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import START_TIMEOUT_SEC, Plan, Step, WorkerPool, in_time

logger = logging.getLogger(__name__)

# Before a candidate is measured again that the machine lacked resources for: another
# program's peak may be over.
_RETRY_PAUSE_SEC = 2.0
_WORKER_MODULES = ("tvm_adaptive.runner.measure",)


@dataclasses.dataclass
class Candidate:
    """A candidate in the queue, and what happened to it so far."""

    runner_input: RunnerInput
    facts: BatchFacts | None  # of its batch
    is_retry: bool = False  # after the machine lacked resources
    # of a duet
    batch: DuetBatch | None = None
    place: int = 0  # in the batch; of its own two entries _OPENS and _CLOSES
    lost_on: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (device, error)
    # devices that measured it and then turned out to be unusable
    rejected_on: list[str] = dataclasses.field(default_factory=list)
    spent_sec: float = 0.0  # in all its tries

    def measure_args(self) -> tuple[str, str, Sequence[Any]]:
        """Return the picklable first three arguments of a :data:`MeasureFunction`."""
        given = self.runner_input
        args_info = tuple(info.as_json() for info in given.args_info)
        return str(given.artifact_path), str(given.device_type), args_info


CandidateJob = Job[Candidate, RunnerResult]

# Entries of the queue before and after a batch's candidates, which time its task's anchor.
_OPENS = -1
_CLOSES = -2


def measuring(
    candidate: Candidate, step: Step, time_left: Callable[[], float] | None = None
) -> Plan:
    """Measure a candidate while time is left, and count the seconds as spent on it."""
    start_sec = time.monotonic()
    try:
        return (yield from in_time(step, time_left))
    finally:
        # What exceeds the deadline was the start of a worker.
        candidate.spent_sec += min(time.monotonic() - start_sec, step.timeout_sec)


@derived_object
class MeasurementFuture(PyRunnerFuture):  # type: ignore[misc]
    """A candidate that is queued, being measured or measured; MetaSchedule waits on it.

    ``corrected`` tells its time once its batch is measured, which ``closed`` waits for, or why
    it has none.
    """

    def __init__(
        self,
        answer: Future[RunnerResult],
        time_left: Callable[[], float] | None = None,
        *,
        closed: Future[RunnerResult] | None = None,
        corrected: Callable[[], float | str | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._answers = [answer] if closed is None else [answer, closed]
        self._time_left = time_left
        self._corrected = corrected

    def done(self) -> bool:
        """Say whether the candidate, and what corrects its time, is measured."""
        return all(answer.done() for answer in self._answers)

    def result(self) -> RunnerResult:
        """Wait for exactly one robust time or an error; an error once no time is left."""
        left_sec = math.inf if self._time_left is None else max(0.0, self._time_left())
        try:
            # The longest wait of a lock stands for no limit.
            wait_sec = min(left_sec, threading.TIMEOUT_MAX)
            result, *_ = [answer.result(wait_sec) for answer in self._answers]
            found = None if result.error_msg is not None else self._corrected()
            if isinstance(found, str):
                return RunnerResult(None, found)
            return result if found is None else RunnerResult([found], None)
        except FutureTimeoutError:
            return RunnerResult(None, OUT_OF_TIME)
        # An exception would end MetaSchedule's loop, which calls this.
        except Exception as error:
            return RunnerResult(None, f"the candidate could not be measured: {error!r}")


class QueueingRunner(PyRunner):  # type: ignore[misc]
    """Queues candidates, and turns outcomes of measurements into results and journal events."""

    _wait_left: Callable[[], float] | None = None  # the longest wait for a result

    def __init__(
        self,
        pool: WorkerPool,
        *,
        overlap: bool,
        trial_log: TrialLog | None,
        race: bool,
        journal: JournalWriter | None,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._trial_log = trial_log
        self._race = race
        self._journal: JournalWriter = journal or NullJournal()
        self._dispatcher: Dispatcher[Candidate, RunnerResult] = Dispatcher(
            pool, self._plan, self._give_up, overlap=overlap, may_end=self._may_end
        )

    @property
    def _race_noise(self) -> float | None:
        """The noise of the machine that a race allows for; None without races."""
        if not self._race or self._trial_log is None:
            return None
        return self._trial_log.noise.relative_error

    def run(self, runner_inputs: list[RunnerInput]) -> list[MeasurementFuture]:
        """Measure a batch, in its order; never raises for a candidate's failure."""
        # A copy for this batch: by the time that it is measured, a search may have set others.
        facts = None if self._trial_log is None else copy.copy(self._trial_log.batch_facts)
        return self._queue([Candidate(each, facts) for each in runner_inputs])

    def close(self) -> None:
        """End the workers; a later :meth:`run` starts new ones."""
        self._dispatcher.close()

    def _queue(self, candidates: Sequence[Candidate]) -> list[MeasurementFuture]:
        """Queue a batch."""
        answers = self._dispatcher.submit(candidates)
        return [MeasurementFuture(answer, self._wait_left) for answer in answers]

    def _plan(self) -> Plan:
        """Measure queued candidates in a worker."""
        raise NotImplementedError

    def _give_up(self, job: CandidateJob, reason: str) -> RunnerResult:
        raise NotImplementedError

    def _may_end(self) -> bool:
        """Say whether busy workers may be killed when nothing is left to do."""
        return True

    def _timed(self, job: CandidateJob, timing: Any, **where: Any) -> RunnerResult:
        """Return the result of a measurement, offer its time, write its event."""
        facts = job.task.facts
        if not isinstance(timing, Timing):
            message = f"Error: expected the measuring function's Timing, got {timing!r}"
            return self._fail(job, message, **where)
        if not (math.isfinite(timing.mean_sec) and timing.mean_sec > 0):
            message = f"Error: measured {timing.mean_sec} s, which is no time"
            return self._fail(job, message, **where)
        if facts is not None and timing.mean_sec < facts.floor_sec:
            message = (
                f"Error: measured {timing.mean_sec:.3g} s, faster than the operations of the "
                f"task can be done ({facts.floor_sec:.3g} s): the kernel does not do them"
            )
            return self._fail(job, message, **where)
        self._write("timing", index=job.index, error=None, **dataclasses.asdict(timing), **where)
        if self._trial_log is not None:
            artifact = str(job.task.runner_input.artifact_path)
            self._trial_log.note_timing(artifact, timing.mean_sec, timing.stderr_sec)
        if facts is not None:
            facts.offer(float(timing.mean_sec))
        return RunnerResult([float(timing.mean_sec)], None)

    def _failed(self, job: CandidateJob, error: Exception, **where: Any) -> RunnerResult:
        """Return the error result of a candidate without a time."""
        if isinstance(error, WorkerError):
            cause = "Timeout" if isinstance(error, WorkerTimeoutError) else "Error"
            origin = MACHINE_FAILURE if isinstance(error, MachineError) else ""
            text, short = f"{cause}: {error}", origin + summary_line(error)
            return self._fail(job, text, short, origin=origin, **where)
        # A defect of this package; C++ called us: an exception would end the whole run.
        name = type(self).__name__
        logger.error("%s could not measure candidate %d", name, job.index, exc_info=error)
        self._write("error", where=f"{name}.run", message=repr(error))
        origin = MACHINE_FAILURE if machine_failure(error) else ""
        return self._fail(job, f"could not measure: {error!r}", origin=origin)

    def _fail(
        self,
        job: CandidateJob,
        message: str,
        short: str | None = None,
        *,
        origin: str = "",
        **where: Any,
    ) -> RunnerResult:
        """Return an error result; the journal gets ``short`` if given, else the message."""
        name = type(self).__name__
        logger.debug("%s, candidate %d: %s", name, job.index, message)
        self._write(
            "timing",
            index=job.index,
            error=short or origin + message,
            elapsed_sec=job.task.spent_sec,
            **where,
        )
        return RunnerResult(None, f"{origin}{name}: {message}")

    def _write(self, event: str, **fields: Any) -> None:
        write_guarded(self._journal, event, **fields)


@derived_object
class AdaptiveRunner(QueueingRunner):
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
    duet : bool
        Time each task's anchor, one of its fastest candidates, again with every batch, and
        correct times by it (see :mod:`tvm_adaptive.runner.duet`). Needs a log whose search
        names the task, one device, and a rule that leaves the runs per micro-batch open.
        Default True.
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
        runner's life, repeats of anchors included), ``error``, and the fields of
        :class:`~tvm_adaptive.Timing`, as measured; of a failure, ``elapsed_sec`` of all its
        tries. A ``"duet"`` event per batch has its candidates' ``indices``, ``raw_sec``,
        ``corrected_sec`` and ``relative_errors``, the anchor's ``anchor_sec`` and
        ``repeats_sec``, the ``noise`` and ``elapsed_sec``.

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
        duet: bool = True,
        overlap: bool = False,
        time_left: Callable[[], float] | None = None,
        server: ForkServer | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        check_positive("timeout_sec", timeout_sec)
        check_at_least("max_uses", max_uses, 1)
        if not devices or min(devices) < 0 or len(set(devices)) < len(devices):
            raise InvalidOptionError(
                f"devices must be different numbers from 0 on but got {list(devices)}; (0, 1) "
                "are the first two."
            )
        self.timeout_sec = timeout_sec
        self.options = MeasureOptions(
            rule=make_rule(rule) if isinstance(rule, str) else rule,
            min_repeat_ms=min_repeat_ms,
            max_sec=max_sec,
            cpu_cache_flush=cpu_cache_flush,
        )
        self.n_devices = len(devices)
        self.suspended: frozenset[str] = frozenset()  # only those of a farm are
        self._measure = measure
        self._time_left = time_left
        pool = WorkerPool(
            len(devices),
            setups=[functools.partial(use_device, index) for index in devices],
            max_uses=max_uses,
            server=server,
            modules=_WORKER_MODULES,
            replace_after_error=True,
            env=thread_env(n_threads),
        )
        super().__init__(pool, overlap=overlap, trial_log=trial_log, race=race, journal=journal)
        is_open = self.options.rule.runs_per_batch is None
        self._repeats: Repeats | None = None
        if duet and trial_log is not None and is_open and len(devices) == 1:
            self._repeats = Repeats(trial_log, self._journal)
            trial_log.has_anchors = True

    def close(self) -> None:
        """End the workers and forget the anchors; a later :meth:`run` starts new ones."""
        super().close()
        if self._repeats is not None:
            self._repeats.close()

    def _queue(self, candidates: Sequence[Candidate]) -> list[MeasurementFuture]:
        """Queue a batch, between the two entries that time its task's anchor."""
        facts = candidates[0].facts if candidates else None
        if self._repeats is None or facts is None or not facts.task:
            return super()._queue(candidates)
        device_type = str(candidates[0].runner_input.device_type)
        batch = DuetBatch(self._repeats, facts, device_type)
        for place, candidate in enumerate(candidates):
            candidate.batch, candidate.place = batch, place
        opens, closes = (
            dataclasses.replace(candidates[0], place=place) for place in (_OPENS, _CLOSES)
        )
        _, *answers, closed = self._dispatcher.submit([opens, *candidates, closes])
        return [
            MeasurementFuture(
                answer,
                self._wait_left,
                closed=closed,
                corrected=functools.partial(batch.corrected, place),
            )
            for place, answer in enumerate(answers)
        ]

    def _plan(self) -> Plan:
        """Measure the next candidate, or the anchor; it gets an answer in any case."""
        job = self._dispatcher.take()
        if job is None:
            return
        batch, place = job.task.batch, job.task.place
        if batch is not None and place < 0:
            yield from self._time_anchor(job, batch)
            return
        try:
            if job.task.is_retry:
                yield Step("pausing", time.sleep, (_RETRY_PAUSE_SEC,), START_TIMEOUT_SEC)
            options = self.options.for_batch(job.task.facts, noise=self._race_noise)
            args = (*job.task.measure_args(), options)
            step = Step("running", self._measure, args, self.timeout_sec)
            timing = yield from measuring(job.task, step, self._time_left)
            answer = self._timed(job, timing)
            if batch is not None and answer.error_msg is None:
                batch.note(place, job.index, job.task.measure_args(), timing)
        except Exception as error:
            if isinstance(error, MachineError) and not job.task.is_retry:
                logger.warning("candidate %d is measured once more: %s", job.index, error)
                job.task.is_retry = True
                self._dispatcher.put_back(job)
                return
            answer = self._failed(job, error)
        self._dispatcher.settle(job, answer)

    def _time_anchor(self, job: CandidateJob, batch: DuetBatch) -> Plan:
        """Time a task's anchor; a failure costs no candidate."""
        make_steps = batch.open if job.task.place == _OPENS else batch.close
        try:
            yield from make_steps(functools.partial(self._again, job.task.facts))
        except Exception as error:  # a defect of this package
            logger.exception("the times of a batch are not corrected")
            self._write("error", where="duet", message=repr(error))
        finally:
            self._dispatcher.settle(job, RunnerResult(None, "no candidate"))

    def _again(
        self, facts: BatchFacts | None, kernel: MeasureArgs, is_kept: bool
    ) -> Generator[Step, Any, Any]:
        """Time a kernel that has been measured before."""
        max_sec = max(REPEAT_SEC, self.options.max_sec or 0.0)
        options = dataclasses.replace(
            self.options.for_batch(facts), rule=REPEAT_RULE, max_sec=max_sec, is_kept=is_kept
        )
        step = Step("timing again", self._measure, (*kernel, options), self.timeout_sec)
        return (yield from in_time(step, self._time_left))

    def _give_up(self, job: CandidateJob, reason: str) -> RunnerResult:
        message = f"Error: could not measure: {reason}"
        if job.task.place < 0:
            return RunnerResult(None, message)
        return self._fail(job, message, origin=MACHINE_FAILURE)
