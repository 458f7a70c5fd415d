"""Child processes that do the dangerous work: compile a candidate, run a candidate.

The parent keeps the deadline, because a kernel that holds the interpreter outlives any
timer in its own process. A worker is the leader of its own process group, so killing
the group also kills what it had started; it dies with its parent (``PR_SET_PDEATHSIG``
on Linux, end-of-file on its pipe elsewhere). The parent never blocks on a worker: it
writes and reads only what the pipes take at once.

Start and use a :class:`WorkerPool` from one thread: Linux sends the death signal when
the *thread* that started the child ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tvm_adaptive.errors import (
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
)
from tvm_adaptive.fork_server import ForkServer
from tvm_adaptive.worker_process import HEADER, Worker

__all__ = ["HEADER", "START_TIMEOUT_SEC", "Outcome", "Worker", "WorkerPool"]

# A worker that has not imported its modules by then never will: the slowest import we
# know (all tensor intrinsics of TVM) takes about 15 s on an idle core.
START_TIMEOUT_SEC = 120.0
# A worker that died while a process it had forked keeps its pipe open shows no end of
# file; so often we ask whether it still lives.
POLL_SEC = 0.5
_STARTING = "starting"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one task: a value, or the error that took its place."""

    value: Any = None
    error: WorkerError | None = None
    elapsed_sec: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Step:
    """One thing that a worker does for a task, with a deadline of its own."""

    doing: str
    function: Callable[..., Any]
    args: Sequence[Any]
    timeout_sec: float


@dataclasses.dataclass
class _Job:
    """A task in the hands of a worker; the last step is the task itself."""

    index: int
    steps: list[_Step]

    @property
    def timeout_sec(self) -> float:
        return self.steps[0].timeout_sec


class WorkerPool:
    """Run a function over many arguments in worker processes that stay.

    Parameters
    ----------
    max_workers : int
        Processes at the most; they start when first needed.
    setup : callable or None
        Called once in each new worker, outside any task's deadline.
    max_uses : int or None
        Tasks after which a worker is replaced (bounds a leak); None for no limit.
    replace_after_error : bool
        Replace the worker also when the function only raised: after a device error the
        process can no longer be trusted.
    env : dict of str to str, or None
        Variables added to the workers' environment.
    server : ForkServer or None
        Forks the workers, in milliseconds; it outlives the pool. None starts each as
        a new program, which imports what it needs itself.
    """

    def __init__(
        self,
        max_workers: int,
        *,
        setup: Callable[[], Any] | None = None,
        max_uses: int | None = None,
        replace_after_error: bool = False,
        env: dict[str, str] | None = None,
        server: ForkServer | None = None,
    ) -> None:
        self._idle: list[Worker] = []
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1 but got {max_workers}.")
        self.max_workers = max_workers
        self._setup = setup or _no_setup
        self._max_uses = max_uses
        self._replace_after_error = replace_after_error
        self._env = env
        self._server = server
        self._uses: dict[Worker, int] = {}

    def map(
        self,
        function: Callable[..., Any],
        tasks: Iterable[Sequence[Any]],
        timeout_sec: float,
        *,
        prepare: Callable[[], Any] | None = None,
        prepare_timeout_sec: float = START_TIMEOUT_SEC,
    ) -> list[Outcome]:
        """Run ``function(*args)`` for every ``args`` in ``tasks``.

        Parameters
        ----------
        function : callable
            Picklable by cloudpickle.
        tasks : iterable of argument tuples
        timeout_sec : float
            Deadline of each task, from the moment a worker starts on it.
        prepare : callable or None
            Called in the worker before each task, e.g. to queue for a device; its time
            does not count against the task's deadline. If it fails, so does the task.
        prepare_timeout_sec : float
            Deadline of ``prepare``.

        Returns
        -------
        list of Outcome
            In the order of ``tasks``; a task that failed carries its error, also when
            it could not be sent or no worker could be started.
        """
        queue = list(enumerate(tasks))[::-1]
        outcomes: list[Outcome] = [Outcome()] * len(queue)
        busy: dict[Worker, _Job] = {}
        try:
            while queue or busy:
                while queue and len(busy) < self.max_workers:
                    index, args = queue.pop()
                    steps = [_Step("running", function, args, timeout_sec)]
                    if prepare is not None:
                        steps.insert(0, _Step("preparing", prepare, (), prepare_timeout_sec))
                    failure = self._begin(_Job(index, steps), busy)
                    if failure is not None:
                        outcomes[index] = failure
                for worker in _wait(busy) if busy else ():
                    job = busy[worker]
                    outcome = _advance(worker, job)
                    if outcome is not None:
                        outcomes[job.index] = outcome
                        del busy[worker]
                        self._give_back(worker, job, outcome)
        finally:
            for worker in busy:
                self._discard(worker)
        return outcomes

    def close(self) -> None:
        """Kill the workers; the pool can be used again and then starts new ones."""
        while self._idle:
            self._discard(self._idle.pop())

    def __del__(self) -> None:
        # At the end of the interpreter parts of it may be gone; the workers see the end
        # of their pipes and leave by themselves.
        with contextlib.suppress(Exception):
            self.close()

    def _begin(self, job: _Job, busy: dict[Worker, _Job]) -> Outcome | None:
        if self._idle:
            worker = self._idle.pop()
        else:
            try:
                worker = Worker(env=self._env, server=self._server)
            except OSError as error:
                text = f"a worker process could not be started: {error}"
                return Outcome(error=WorkerDiedError(text))
            self._uses[worker] = 0
            job.steps.insert(0, _Step(_STARTING, self._setup, (), START_TIMEOUT_SEC))
        busy[worker] = job
        self._uses[worker] += 1
        failure = _send(worker, job)
        if failure is not None:
            del busy[worker]
            self._give_back(worker, job, failure)
        return failure

    def _give_back(self, worker: Worker, job: _Job, outcome: Outcome) -> None:
        broken = outcome.error is not None and (
            self._replace_after_error
            or not isinstance(outcome.error, WorkerTaskError)
            or job.steps[0].doing == _STARTING
        )
        used_up = self._max_uses is not None and self._uses[worker] >= self._max_uses
        if broken or used_up:
            self._discard(worker)
        else:
            self._idle.append(worker)

    def _discard(self, worker: Worker) -> None:
        self._uses.pop(worker, None)
        worker.kill()


def _advance(worker: Worker, job: _Job) -> Outcome | None:
    """Take what a worker has to say; None while the job goes on."""
    elapsed = time.monotonic() - worker.started_sec
    try:
        worker.flush()
        answer = worker.receive()
        if answer is None and elapsed >= job.timeout_sec:
            text = f"timeout: killed after {job.timeout_sec:g} s of {job.steps[0].doing}"
            raise WorkerTimeoutError(text)
        if answer is None:
            return None
        succeeded, value = answer
        if not succeeded:
            raise WorkerTaskError(str(value))
    except WorkerError as error:
        return Outcome(error=error, elapsed_sec=elapsed)
    except Exception as error:  # an answer that cannot be unpickled
        text = f"the worker's answer could not be read: {error!r}"
        return Outcome(error=WorkerDiedError(text), elapsed_sec=elapsed)
    job.steps.pop(0)
    return _send(worker, job) if job.steps else Outcome(value=value, elapsed_sec=elapsed)


def _send(worker: Worker, job: _Job) -> Outcome | None:
    """Start the next step of a job; an Outcome if it cannot even be sent."""
    try:
        worker.send(job.steps[0].function, job.steps[0].args)
    except Exception as error:  # cloudpickle: whatever the argument's own pickling raises
        text = f"the task could not be sent to a worker: {error!r}"
        return Outcome(error=WorkerTaskError(text))
    return None


def _wait(busy: dict[Worker, _Job]) -> list[Worker]:
    """Wait until a worker can be read, written or given up, or for POLL_SEC."""
    now = time.monotonic()
    first_end = min(worker.started_sec + job.timeout_sec for worker, job in busy.items())
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker, selectors.EVENT_READ)
            unsent = worker.unsent_fileno()
            if unsent is not None:
                selector.register(unsent, selectors.EVENT_WRITE)
        selector.select(min(POLL_SEC, max(0.0, first_end - now)))
    return list(busy)


def _no_setup() -> None:
    return None
