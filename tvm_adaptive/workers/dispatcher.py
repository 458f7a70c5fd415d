"""One queue of candidates of all batches and tasks for all devices."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from tvm_adaptive.workers.pool import Plan, WorkerPool

logger = logging.getLogger(__name__)

_CLOSED = "the runner was closed"

_TaskT = TypeVar("_TaskT")
_ResultT = TypeVar("_ResultT")


@dataclasses.dataclass(eq=False)
class Job(Generic[_TaskT, _ResultT]):
    """A queued candidate."""

    index: int  # counted from 0 over the runner's life
    task: _TaskT  # for the device's plan
    answer: Future[_ResultT]
    queued_sec: float  # monotonic time


class Dispatcher(Generic[_TaskT, _ResultT]):
    """Gives queued candidates to the workers of a pool; with ``overlap``, in a thread."""

    def __init__(
        self,
        pool: WorkerPool,
        make_plan: Callable[[], Plan],
        give_up: Callable[[Job[_TaskT, _ResultT], str], _ResultT],
        *,
        overlap: bool,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pool = pool
        self._make_plan = make_plan
        self._give_up = give_up
        self._overlap = overlap
        # Whether workers that are busy when nothing is left to do may be killed.
        self._may_end = may_end
        self._queue: collections.deque[Job[_TaskT, _ResultT]] = collections.deque()
        self._open: set[Job[_TaskT, _ResultT]] = set()
        self._lock = threading.Lock()
        self._n_jobs = 0
        self._thread: threading.Thread | None = None
        self._wakes: tuple[int, int] | None = None
        self._is_closing = False
        self._is_abandoned = False

    def submit(self, tasks: Sequence[_TaskT]) -> list[Future[_ResultT]]:
        """Queue a batch; without overlap, return when all candidates are measured."""
        now_sec = time.monotonic()
        with self._lock:
            jobs = [
                Job[_TaskT, _ResultT](index, task, Future(), now_sec)
                for index, task in enumerate(tasks, self._n_jobs)
            ]
            self._n_jobs += len(jobs)
            self._open.update(jobs)
            self._queue.extend(jobs)
        if self._overlap:
            try:
                self._wake_thread()
            except BaseException:  # nobody would wait for them
                self._give_up_all("they could not be queued")
                raise
        else:
            self._serve()
        return [job.answer for job in jobs]

    def take(self) -> Job[_TaskT, _ResultT] | None:
        """Return the next candidate; None if none is queued."""
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def put_back(self, job: Job[_TaskT, _ResultT]) -> None:
        """Queue a candidate again, first of all; fail it while closing."""
        with self._lock:
            is_closing = self._is_closing
            if not is_closing:
                self._queue.appendleft(job)
        if is_closing:
            self.settle(job, self._give_up(job, _CLOSED))

    def settle(self, job: Job[_TaskT, _ResultT], result: _ResultT) -> None:
        """Answer a candidate."""
        with self._lock:
            self._open.discard(job)
        job.answer.set_result(result)

    def fail_queued(self, reason: str, *, waited_sec: float = 0.0) -> None:
        """Fail the candidates that no device has taken for so many seconds."""
        before_sec = time.monotonic() - waited_sec
        with self._lock:
            late = [job for job in self._queue if job.queued_sec <= before_sec]
            for job in late:
                self._queue.remove(job)
        for job in late:
            self.settle(job, self._give_up(job, reason))

    def close(self, *, abandon: bool = False) -> None:
        """Fail queued candidates, end the thread and the workers.

        What a worker is at is waited for, or with ``abandon`` fails, too.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._lock:
                self._is_closing = True
                self._is_abandoned = abandon
            self.fail_queued(_CLOSED)
            self._signal()
            thread.join()
            self._give_up_all(_CLOSED)
            self._is_closing = self._is_abandoned = False
        wakes, self._wakes = self._wakes, None
        for descriptor in wakes or ():
            os.close(descriptor)
        self._pool.close()

    def _wake_thread(self) -> None:
        if self._wakes is None:
            self._wakes = os.pipe()
            for descriptor in self._wakes:
                os.set_blocking(descriptor, False)
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="tvm-adaptive-runner", daemon=True)
            thread.start()  # raises where there may be no more threads
            self._thread = thread
        self._signal()

    def _signal(self) -> None:
        if self._wakes is not None:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread anyway
                os.write(self._wakes[1], b"w")

    def _serve(self) -> None:
        wake = self._wakes[0] if self._overlap and self._wakes else None
        while not self._is_over():
            try:
                # A wait for a device that others use may be long: closing does not wait.
                stream = self._pool.stream(
                    self._plans(), wake=wake, is_over=lambda: self._is_over() and self._may_end()
                )
                with contextlib.closing(stream) as ended:
                    for _, outcome in ended:
                        if outcome.error is not None:
                            logger.debug("a device's plan ended: %s", outcome.error)
            except Exception as error:  # a defect of this package must not cost later batches
                logger.exception("candidates could not be given to devices")
                self._give_up_all(repr(error))
            except BaseException:  # an interrupt: nobody would settle the open candidates
                self._give_up_all("interrupted")
                raise

    def _plans(self) -> Iterator[Plan | None]:
        while not self._is_over():
            if self._wakes is not None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes[0], 1 << 16)
            yield self._make_plan() if self._queue else None

    def _is_over(self) -> bool:
        return self._is_abandoned or (not self._open and (self._is_closing or not self._overlap))

    def _give_up_all(self, reason: str) -> None:
        with self._lock:
            self._queue.clear()
            jobs = sorted(self._open, key=lambda job: job.index)
        for job in jobs:
            self.settle(job, self._give_up(job, reason))
