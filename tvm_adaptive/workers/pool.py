"""A pool of child processes that do the dangerous work: compile a candidate, run a candidate.

The parent keeps the deadlines, because a kernel that holds the interpreter outlives any
timer in its own process. A worker leads its own process group, so that killing the group
also kills what the worker has started. The parent never blocks on a worker: it writes and
reads only what the pipes take at once. Only one thread at a time may use a pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import selectors
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from tvm_adaptive.errors import (
    OUT_OF_TIME,
    MachineError,
    OutOfTimeError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    machine_failure,
)
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.process import Worker

# A worker that has not imported its modules by then never will: the slowest known import
# (all tensor intrinsics of TVM) takes about 15 s on an idle core.
START_TIMEOUT_SEC = 120.0
# Another program's peak use of processes, memory or descriptors, such as a build on all
# cores, is over by then or lasts for long.
START_PATIENCE_SEC = 30.0
# A retry costs a millisecond, and another program's process may end at any moment.
_FIRST_PAUSE_SEC = 0.1
_LONGEST_PAUSE_SEC = 5.0
# The pipe of a dead worker shows no end-of-file while a process that it forked keeps the
# pipe open; the pool checks so often whether the worker still lives.
POLL_SEC = 0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The value of one plan, or the error that took its place."""

    value: Any = None
    error: WorkerError | None = None
    elapsed_sec: float = 0.0  # of the last step


@dataclasses.dataclass(frozen=True)
class Step:
    """One function call in a worker."""

    doing: str  # for messages: ``"running"``
    function: Callable[..., Any]  # picklable by cloudpickle, as are ``args``
    args: Sequence[Any]
    timeout_sec: float  # from the moment that the worker starts the step


# The steps that one worker runs for one task. The pool sends a plan the value of each step
# or throws its WorkerError into it; a plan returns its value. After an error a plan may
# yield another step only if the worker still lives, which a WorkerTaskError says.
Plan = Generator[Step, Any, Any]


def in_time(step: Step, time_left: Callable[[], float] | None) -> Plan:
    """Run a step while time is left; raises OutOfTimeError if that ends first."""
    left_sec = math.inf if time_left is None else time_left()
    if left_sec <= 0:
        raise OutOfTimeError(OUT_OF_TIME)
    limit_sec = min(step.timeout_sec, left_sec)
    try:
        return (yield dataclasses.replace(step, timeout_sec=limit_sec))
    except WorkerTimeoutError as error:
        if limit_sec < step.timeout_sec:
            raise OutOfTimeError(OUT_OF_TIME) from error
        raise


@dataclasses.dataclass(eq=False)
class _Job:
    """A plan that runs in a worker, waits for one, or has ended."""

    index: int
    plan: Plan
    step: Step = dataclasses.field(init=False)
    outcome: Outcome | None = None  # once the plan has ended
    setup: Step | None = None  # comes before the step while the worker is new
    is_broken: bool = False  # the worker cannot be used again
    waits_since_sec: float = math.inf  # since when no worker could be started
    pause_sec: float = _FIRST_PAUSE_SEC
    retry_sec: float = 0.0

    @property
    def current(self) -> Step:
        return self.setup or self.step

    def advance(self, resume: Callable[[], Step], elapsed_sec: float = 0.0) -> None:
        """Resume the plan, to its next step or its end."""
        try:
            self.step = resume()
        except StopIteration as end:
            self.outcome = Outcome(end.value, elapsed_sec=elapsed_sec)
        except WorkerError as error:
            self.outcome = Outcome(error=error, elapsed_sec=elapsed_sec)
        except Exception as error:  # a mistake in one plan must not cost the others
            mistake = WorkerTaskError(f"the plan failed: {error!r}")
            self.outcome = Outcome(error=mistake, elapsed_sec=elapsed_sec)

    def fail(self, error: WorkerError, elapsed_sec: float = 0.0, *, worker_lives: bool) -> None:
        """Throw an error into the plan, which can continue only if its worker lives."""
        self.advance(functools.partial(self.plan.throw, error), elapsed_sec)
        if self.outcome is None and not worker_lives:
            self.plan.close()
            self.outcome = Outcome(error=error, elapsed_sec=elapsed_sec)

    def postpone(self) -> None:
        """Schedule another start of a worker, each time after a longer pause."""
        now = time.monotonic()
        self.setup = None
        self.waits_since_sec = min(self.waits_since_sec, now)
        self.retry_sec = now + self.pause_sec
        self.pause_sec = min(2.0 * self.pause_sec, _LONGEST_PAUSE_SEC)


@dataclasses.dataclass
class _Stream:
    """The state of one call of :meth:`WorkerPool.stream`."""

    source: Iterator[Plan | None]
    is_open: bool = True
    n_begun: int = 0
    busy: dict[Worker, _Job] = dataclasses.field(default_factory=dict)
    waiting: list[_Job] = dataclasses.field(default_factory=list)  # no worker could be started

    @property
    def n_jobs(self) -> int:
        return len(self.busy) + len(self.waiting)

    def next_plan(self) -> Plan | None:
        """Return and count the next plan; None if there is none now."""
        try:
            plan = next(self.source)
        except StopIteration:
            self.is_open = False
            return None
        self.n_begun += plan is not None
        return plan

    def take_due(self, n_idle: int) -> list[_Job]:
        """Take the waiting jobs that an idle worker can run, or whose retry is due."""
        now = time.monotonic()
        due = [job for i, job in enumerate(self.waiting) if i < n_idle or job.retry_sec <= now]
        self.waiting = [job for job in self.waiting if job not in due]
        return due

    def wait(self, wake: int | None) -> None:
        """Wait for a pipe, a deadline or a retry, at most POLL_SEC."""
        now = time.monotonic()
        left_secs = [job.current.timeout_sec - w.elapsed_sec for w, job in self.busy.items()]
        left_secs += [job.retry_sec - now for job in self.waiting]
        with selectors.PollSelector() as selector:  # works without a free descriptor
            for worker in self.busy:
                selector.register(worker, selectors.EVENT_READ)
                unsent = worker.unsent_fileno()
                if unsent is not None:
                    selector.register(unsent, selectors.EVENT_WRITE)
            if wake is not None:
                selector.register(wake, selectors.EVENT_READ)
            selector.select(max(0.0, min([POLL_SEC, *left_secs])))


class WorkerPool:
    """Run functions in worker processes that stay for the next task."""

    def __init__(
        self,
        max_workers: int,
        *,
        setup: Callable[[], Any] = lambda: None,
        setups: Sequence[Callable[[], Any]] = (),
        max_uses: int | None = None,
        replace_after_error: bool = False,
        env: dict[str, str] | None = None,
        server: ForkServer | None = None,
        modules: Sequence[str] = (),
        start_patience_sec: float = START_PATIENCE_SEC,
    ) -> None:
        self._idle: list[Worker] = []
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1 but got {max_workers}.")
        if setups and len(setups) != max_workers:
            raise ValueError(f"Got {len(setups)} setups for {max_workers} workers.")
        self.max_workers = max_workers
        self._setup = setup
        self._setups = tuple(setups)  # one for each worker instead
        self._max_uses = max_uses
        self._replace_after_error = replace_after_error
        self._env = env
        # Without a server the pool has its own, which imports the modules.
        self._owns_server = server is None
        self._server = server or ForkServer(modules)
        self._start_patience_sec = start_patience_sec
        self._uses: dict[Worker, int] = {}
        self._setup_indices: dict[Worker, int] = {}

    def map(
        self, function: Callable[..., Any], tasks: Iterable[Sequence[Any]], timeout_sec: float
    ) -> list[Outcome]:
        """Run ``function(*args)`` for every ``args`` in ``tasks``."""
        plans = [self.plan_of(Step("running", function, args, timeout_sec)) for args in tasks]
        outcomes = dict(self.stream(plans))
        return [outcomes[index] for index in range(len(plans))]

    def plan_of(self, step: Step) -> Plan:
        """Return the plan of one task of :meth:`map`; subclasses may add steps."""
        return (yield step)

    def stream(
        self,
        plans: Iterable[Plan | None],
        *,
        wake: int | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Run plans, as many at the same time as there are workers; yield index and outcome.

        None among the plans stands for one that may come when ``wake`` becomes readable.
        """
        stream = _Stream(iter(plans))
        try:
            while True:
                yield from self._start_jobs(stream)
                if not stream.n_jobs and not stream.is_open:
                    return
                if is_over is not None and is_over():
                    return
                # A further plan is of no use while all workers are busy.
                stream.wait(wake if stream.n_jobs < self.max_workers else None)
                for worker, job in list(stream.busy.items()):
                    self._poll(worker, job, stream)
                    if job.outcome is not None:
                        yield job.index, job.outcome
        finally:
            for worker in stream.busy:
                worker.begin_kill()
            for worker in stream.busy:
                self._discard(worker)
            for job in (*stream.busy.values(), *stream.waiting):
                job.plan.close()

    def close(self) -> None:
        """Kill the workers; a later use of the pool starts new ones."""
        for worker in self._idle:
            worker.begin_kill()
        while self._idle:
            self._discard(self._idle.pop())
        if self._owns_server:
            self._server.close()

    def __del__(self) -> None:
        # At the end of the interpreter parts of it may be gone; the workers see the end
        # of their pipes and leave by themselves.
        with contextlib.suppress(Exception):
            self.close()

    def _start_jobs(self, stream: _Stream) -> Iterator[tuple[int, Outcome]]:
        """Give workers to due jobs and to new plans; yield those that end at once."""
        for job in stream.take_due(len(self._idle)):
            self._assign(job, stream)
            if job.outcome is not None:
                yield job.index, job.outcome
        while stream.is_open and stream.n_jobs < self.max_workers:
            plan = stream.next_plan()
            if plan is None:
                return
            job = _Job(stream.n_begun - 1, plan)
            job.advance(functools.partial(next, plan))
            if job.outcome is None:
                self._assign(job, stream)
            if job.outcome is not None:
                yield job.index, job.outcome

    def _assign(self, job: _Job, stream: _Stream) -> None:
        """Give a job a worker or let it wait for one."""
        worker = self._idle_worker()
        if worker is None:
            try:
                worker = Worker(self._server, self._env)
            except OSError as error:
                self._wait_for_worker(job, error, stream)
                return
            self._uses[worker] = 0
            job.setup = Step("starting", self._setup_of(worker), (), START_TIMEOUT_SEC)
        self._uses[worker] += 1
        _send(worker, job)
        if job.outcome is None:
            stream.busy[worker] = job
        else:
            self._release(worker, job)

    def _idle_worker(self) -> Worker | None:
        """Take an idle worker that has not ended."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended():
                return worker
            self._discard(worker)
        return None

    def _wait_for_worker(self, job: _Job, error: Exception, stream: _Stream) -> None:
        """Let a job wait for a worker, or fail it if it has waited long enough."""
        job.postpone()
        is_permanent = isinstance(error, (FileNotFoundError, PermissionError))
        is_late = time.monotonic() - job.waits_since_sec >= self._start_patience_sec
        # A busy worker is free at its deadline at the latest.
        if is_permanent or (is_late and not stream.busy):
            failure = MachineError(f"a worker process could not be started: {error}")
            job.fail(failure, worker_lives=False)
        else:
            stream.waiting.append(job)

    def _setup_of(self, worker: Worker) -> Callable[[], Any]:
        if not self._setups:
            return self._setup
        taken = self._setup_indices.values()
        index = next(index for index in range(len(self._setups)) if index not in taken)
        self._setup_indices[worker] = index
        return self._setups[index]

    def _poll(self, worker: Worker, job: _Job, stream: _Stream) -> None:
        """Take a busy worker's answer, if any, and continue its job."""
        elapsed_sec = worker.elapsed_sec
        try:
            answer = _receive(worker, job.current, elapsed_sec)
        except WorkerError as error:
            # An import that takes so long is no task's fault either.
            if job.setup is not None and isinstance(error, (MachineError, WorkerTimeoutError)):
                del stream.busy[worker]
                self._discard(worker)
                self._wait_for_worker(job, error, stream)
                return
            lives = isinstance(error, WorkerTaskError) and job.setup is None
            job.is_broken |= not lives or self._replace_after_error
            job.fail(error, elapsed_sec, worker_lives=lives)
        else:
            if answer is None:
                return
            if job.setup is not None:
                job.setup = None
            else:
                job.advance(functools.partial(job.plan.send, answer[0]), elapsed_sec)
        _send(worker, job)
        if job.outcome is not None:
            del stream.busy[worker]
            self._release(worker, job)

    def _release(self, worker: Worker, job: _Job) -> None:
        used_up = self._max_uses is not None and self._uses[worker] >= self._max_uses
        too_many = len(self._uses) > self.max_workers
        # A worker whose setup did not end is of no use.
        if job.is_broken or used_up or too_many or job.setup is not None:
            self._discard(worker)
        else:
            self._idle.append(worker)

    def _discard(self, worker: Worker) -> None:
        self._uses.pop(worker, None)
        self._setup_indices.pop(worker, None)
        worker.kill()


def _receive(worker: Worker, step: Step, elapsed_sec: float) -> tuple[Any] | None:
    """Return a step's value in a tuple, None while there is none; raise its error."""
    try:
        worker.flush()
        answer = worker.receive()
    except WorkerError:
        raise
    except Exception as error:  # an answer that cannot be unpickled
        text = f"the worker's answer could not be read: {error!r}"
        raise (MachineError if machine_failure(error) else WorkerDiedError)(text) from error
    if answer is None and elapsed_sec >= step.timeout_sec:
        text = f"timeout: killed after {step.timeout_sec:g} s of {step.doing}"
        raise WorkerTimeoutError(text)
    return answer


def _send(worker: Worker, job: _Job) -> None:
    """Start the job's next step that can be sent, if it has any."""
    while job.outcome is None:
        try:
            worker.send(job.current.function, job.current.args)
            return
        except Exception as error:  # cloudpickle: whatever the argument's own pickling raises
            text = f"the task could not be sent to a worker: {error!r}"
            kind = MachineError if machine_failure(error) else WorkerTaskError
            job.fail(kind(text), worker_lives=job.setup is None)
