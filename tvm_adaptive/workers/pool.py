"""Child processes that do the dangerous work: compile a candidate, run a candidate.

The parent keeps the deadline, because a kernel that holds the interpreter outlives any
timer in its own process. A worker is the leader of its own process group, so killing
the group also kills what it had started; it dies with its parent (``PR_SET_PDEATHSIG``
on Linux, end-of-file on its pipe elsewhere). The parent never blocks on a worker: it
writes and reads only what the pipes take at once.

What the machine cannot do (no more processes, no memory, no disk space) is no failure of
the task: a worker that cannot be started is tried again while the others go on, and what
comes of it in the end is a :class:`~tvm_adaptive.errors.MachineError`.

Start and use a :class:`WorkerPool` from one thread: Linux sends the death signal when
the *thread* that started the child ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import selectors
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from tvm_adaptive.errors import (
    MachineError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    machine_failure,
)
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.process import HEADER, Answer, Worker

__all__ = [
    "HEADER",
    "START_PATIENCE_SEC",
    "START_TIMEOUT_SEC",
    "Outcome",
    "Plan",
    "Step",
    "Worker",
    "WorkerPool",
]

# A worker that has not imported its modules by then never will: the slowest import we
# know (all tensor intrinsics of TVM) takes about 15 s on an idle core.
START_TIMEOUT_SEC = 120.0
# So long the machine may be out of processes, memory or descriptors: another program's
# peak, such as a build that uses all cores, is over by then or goes on for long.
START_PATIENCE_SEC = 30.0
# Another try costs a millisecond, and another program's process ends any moment.
_FIRST_PAUSE_SEC = 0.1
_LONGEST_PAUSE_SEC = 5.0
# A worker that died while a process it had forked keeps its pipe open shows no end of
# file; so often we ask whether it still lives.
POLL_SEC = 0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one plan: a value, or the error that took its place."""

    value: Any = None
    error: WorkerError | None = None
    elapsed_sec: float = 0.0  # that the last step took


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that a worker does."""

    doing: str  # for messages: ``"running"``
    function: Callable[..., Any]  # picklable by cloudpickle, as are ``args``
    args: Sequence[Any]
    timeout_sec: float  # deadline of this step, from the moment that the worker starts on it


# What one worker does from being given it to being free again: yields steps, is sent the
# value of each or thrown its WorkerError, and returns the plan's value. After an error it
# may go on only if the worker still lives, which a WorkerTaskError says.
Plan = Generator[Step, Any, Any]


@dataclasses.dataclass
class _Job:
    """A plan in the hands of a worker."""

    index: int
    plan: Plan
    step: Step
    # Goes before the step while the worker is new.
    setup: Step | None = None
    # Whether the worker can be used again.
    is_broken: bool = False
    # Why no worker could be started for it, since when, and when to try again.
    want: MachineError | None = None
    wants_since_sec: float = math.inf
    pause_sec: float = _FIRST_PAUSE_SEC
    retry_sec: float = 0.0

    @property
    def current(self) -> Step:
        return self.setup or self.step

    def postpone(self) -> None:
        """Wait, longer each time, before another worker is started."""
        now = time.monotonic()
        self.setup = None
        self.wants_since_sec = min(self.wants_since_sec, now)
        self.retry_sec = now + self.pause_sec
        self.pause_sec = min(2.0 * self.pause_sec, _LONGEST_PAUSE_SEC)


@dataclasses.dataclass
class _Shift:
    """What one call of :meth:`WorkerPool.stream` has under way."""

    source: Iterator[Plan | None]
    is_open: bool = True
    n_begun: int = 0
    busy: dict[Worker, _Job] = dataclasses.field(default_factory=dict)
    # Those that no worker could be started for.
    waiting: list[_Job] = dataclasses.field(default_factory=list)

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


class WorkerPool:
    """Run a function over many arguments in worker processes that stay."""

    def __init__(
        self,
        max_workers: int,
        *,
        setup: Callable[[], Any] | None = None,
        setups: Sequence[Callable[[], Any]] = (),
        max_uses: int | None = None,
        replace_after_error: bool = False,
        env: dict[str, str] | None = None,
        server: ForkServer | None = None,
        start_patience_sec: float = START_PATIENCE_SEC,
    ) -> None:
        self._idle: list[Worker] = []
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1 but got {max_workers}.")
        if setups and len(setups) != max_workers:
            raise ValueError(f"Got {len(setups)} setups for {max_workers} workers.")
        self.max_workers = max_workers
        self._setup = setup or _no_setup
        self._setups = tuple(setups)
        self._max_uses = max_uses
        self._replace_after_error = replace_after_error
        self._env = env
        self._server = server
        self._start_patience_sec = start_patience_sec
        self._uses: dict[Worker, int] = {}
        # Which of the setups each worker has had.
        self._places: dict[Worker, int] = {}

    def map(
        self, function: Callable[..., Any], tasks: Iterable[Sequence[Any]], timeout_sec: float
    ) -> list[Outcome]:
        """Run ``function(*args)`` for every ``args`` in ``tasks``."""
        plans = [self.plan_of(Step("running", function, args, timeout_sec)) for args in tasks]
        outcomes = [Outcome()] * len(plans)
        for index, outcome in self.stream(plans):
            outcomes[index] = outcome
        return outcomes

    def plan_of(self, step: Step) -> Plan:
        """Return what one task of :meth:`map` is; a subclass may put steps before it."""
        return (yield step)

    def stream(
        self,
        plans: Iterable[Plan | None],
        *,
        wake: int | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Carry out plans, as many at the same time as there are workers."""
        shift = _Shift(iter(plans))
        try:
            while True:
                for job in self._due(shift):
                    yield from _told(job.index, self._staff(job, shift))
                while shift.is_open and shift.n_jobs < self.max_workers:
                    plan = shift.next_plan()
                    if plan is None:
                        break
                    yield from _told(shift.n_begun - 1, self._begin(plan, shift))
                if not shift.n_jobs and not shift.is_open:
                    return
                if is_over is not None and is_over():
                    return
                _wait(shift, wake)
                for worker, job in list(shift.busy.items()):
                    yield from _told(job.index, self._look_after(worker, job, shift))
        finally:
            for worker in shift.busy:
                worker.begin_kill()
            for worker in shift.busy:
                self._discard(worker)
            for job in (*shift.busy.values(), *shift.waiting):
                job.plan.close()

    def close(self) -> None:
        """Kill the workers; the pool can be used again and then starts new ones."""
        for worker in self._idle:
            worker.begin_kill()
        while self._idle:
            self._discard(self._idle.pop())

    def __del__(self) -> None:
        # At the end of the interpreter parts of it may be gone; the workers see the end
        # of their pipes and leave by themselves.
        with contextlib.suppress(Exception):
            self.close()

    def _begin(self, plan: Plan, shift: _Shift) -> Outcome | None:
        try:
            job = _Job(shift.n_begun - 1, plan, next(plan))
        except Exception as end:
            return _ended(end, 0.0)
        return self._staff(job, shift)

    def _due(self, shift: _Shift) -> list[_Job]:
        """Take those for which there is a worker, or another may be tried."""
        now, n_idle = time.monotonic(), len(self._idle)
        due = [job for i, job in enumerate(shift.waiting) if i < n_idle or job.retry_sec <= now]
        shift.waiting = [job for job in shift.waiting if job not in due]
        return due

    def _staff(self, job: _Job, shift: _Shift) -> Outcome | None:
        """Give a plan a worker, or let it wait for one; an Outcome if it ends instead."""
        job.want = None
        worker = self._idle_worker()
        if worker is None:
            try:
                worker = Worker(env=self._env, server=self._server)
            except OSError as error:
                job.want = MachineError(f"a worker process could not be started: {error}")
                if isinstance(error, (FileNotFoundError, PermissionError)):  # for good
                    return _fail(job, job.want, worker_lives=False)
                return self._want_worker(job, shift)
            self._uses[worker] = 0
            job.setup = Step("starting", self._setup_of(worker), (), START_TIMEOUT_SEC)
        self._uses[worker] += 1
        failure = _send(worker, job)
        if failure is None:
            shift.busy[worker] = job
        else:
            self._give_back(worker, job)
        return failure

    def _idle_worker(self) -> Worker | None:
        """Take a worker that waits for a task; one that has ended meanwhile does not."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended():
                return worker
            self._discard(worker)
        return None

    def _want_worker(self, job: _Job, shift: _Shift) -> Outcome | None:
        """Let a plan wait for a worker; an Outcome if it has waited long enough."""
        assert job.want is not None
        job.postpone()
        # Whoever is busy will be free, at its deadline at the latest.
        if shift.busy or time.monotonic() - job.wants_since_sec < self._start_patience_sec:
            shift.waiting.append(job)
            return None
        return _fail(job, job.want, worker_lives=False)

    def _setup_of(self, worker: Worker) -> Callable[[], Any]:
        if not self._setups:
            return self._setup
        taken = set(self._places.values())
        place = next(place for place in range(len(self._setups)) if place not in taken)
        self._places[worker] = place
        return self._setups[place]

    def _look_after(self, worker: Worker, job: _Job, shift: _Shift) -> Outcome | None:
        """Take what a worker has to say; None unless its plan has ended."""
        outcome = self._advance(worker, job)
        if job.want is not None:
            del shift.busy[worker]
            self._discard(worker)
            return self._want_worker(job, shift)
        if outcome is not None:
            del shift.busy[worker]
            self._give_back(worker, job)
        return outcome

    def _advance(self, worker: Worker, job: _Job) -> Outcome | None:
        """Carry a plan on; None while it goes on or wants another worker."""
        elapsed_sec = worker.elapsed_sec
        try:
            answer = _receive(worker, job.current, elapsed_sec)
        except WorkerError as error:
            # An import that takes so long is no task's fault either.
            if job.setup is not None and isinstance(error, (MachineError, WorkerTimeoutError)):
                job.want = MachineError(f"a worker process could not be started: {error}")
                return None
            lives = isinstance(error, WorkerTaskError) and job.setup is None
            job.is_broken |= not lives or self._replace_after_error
            return _fail(job, error, worker_lives=lives, elapsed_sec=elapsed_sec) or (
                _send(worker, job)
            )
        if answer is None:
            return None
        if job.setup is not None:
            job.setup = None
            return _send(worker, job)
        try:
            job.step = job.plan.send(answer.value)
        except Exception as end:
            return _ended(end, elapsed_sec)
        return _send(worker, job)

    def _give_back(self, worker: Worker, job: _Job) -> None:
        used_up = self._max_uses is not None and self._uses[worker] >= self._max_uses
        too_many = len(self._uses) > self.max_workers
        # A worker that was never set up is good for nothing.
        if job.is_broken or used_up or too_many or job.setup is not None:
            self._discard(worker)
        else:
            self._idle.append(worker)

    def _discard(self, worker: Worker) -> None:
        self._uses.pop(worker, None)
        self._places.pop(worker, None)
        worker.kill()


def _receive(worker: Worker, step: Step, elapsed_sec: float) -> Answer | None:
    """Return a worker's answer, None while there is none; raises what went wrong."""
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
    if answer is not None and not answer.succeeded:
        if answer.machine_failure:
            raise MachineError(answer.machine_failure)
        raise WorkerTaskError(str(answer.value))
    return answer


def _send(worker: Worker, job: _Job) -> Outcome | None:
    """Start a plan's next step; an Outcome if the plan ends for not being able to."""
    while True:
        step = job.current
        try:
            worker.send(step.function, step.args)
        except Exception as error:  # cloudpickle: whatever the argument's own pickling raises
            text = f"the task could not be sent to a worker: {error!r}"
            kind = MachineError if machine_failure(error) else WorkerTaskError
            failure = _fail(job, kind(text), worker_lives=job.setup is None)
            if failure is not None:
                return failure
        else:
            return None


def _fail(
    job: _Job, error: WorkerError, *, worker_lives: bool, elapsed_sec: float = 0.0
) -> Outcome | None:
    """Tell a plan of an error; None if it goes on with another step."""
    try:
        job.step = job.plan.throw(error)
    except Exception as end:
        return _ended(end, elapsed_sec)
    if worker_lives:
        return None
    job.plan.close()
    return Outcome(error=error, elapsed_sec=elapsed_sec)


def _ended(end: Exception, elapsed_sec: float) -> Outcome:
    if isinstance(end, StopIteration):
        return Outcome(value=end.value, elapsed_sec=elapsed_sec)
    if isinstance(end, WorkerError):
        return Outcome(error=end, elapsed_sec=elapsed_sec)
    # A mistake in one plan must not cost the others.
    return Outcome(error=WorkerTaskError(f"the plan failed: {end!r}"), elapsed_sec=elapsed_sec)


def _told(index: int, outcome: Outcome | None) -> Iterator[tuple[int, Outcome]]:
    if outcome is not None:
        yield index, outcome


def _wait(shift: _Shift, wake: int | None) -> None:
    """Wait until a worker can be read, written, given up or tried again, or for POLL_SEC."""
    now = time.monotonic()
    left_secs = [job.current.timeout_sec - worker.elapsed_sec for worker, job in shift.busy.items()]
    left_secs += [job.retry_sec - now for job in shift.waiting]
    with selectors.PollSelector() as selector:  # needs no descriptor, there may be none left
        for worker in shift.busy:
            selector.register(worker, selectors.EVENT_READ)
            unsent = worker.unsent_fileno()
            if unsent is not None:
                selector.register(unsent, selectors.EVENT_WRITE)
        if wake is not None:
            selector.register(wake, selectors.EVENT_READ)
        selector.select(max(0.0, min([POLL_SEC, *left_secs])))


def _no_setup() -> None:
    return None
