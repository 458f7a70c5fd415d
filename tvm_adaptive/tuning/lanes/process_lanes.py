"""Lanes that are processes of this machine."""

from __future__ import annotations

from concurrent.futures import Future

from tvm_adaptive.errors import LaneError, WorkerError, WorkerTaskError, summary_line
from tvm_adaptive.tuning.lanes.fill import fill
from tvm_adaptive.tuning.lanes.request import REQUEST_TIMEOUT_SEC, Answer, SearchRequest
from tvm_adaptive.workers.dispatcher import Dispatcher, Job
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# A dead process loses its request, which may be what killed it.
MAX_TRIES = 2


class ProcessLanes:
    """Processes that search and build, one request at a time each."""

    def __init__(self, n_lanes: int, server: ForkServer | None = None) -> None:
        self.n_lanes = n_lanes
        # Lanes are killed in the end; their files are removed with this folder.
        self._scratch = ScratchFolder("lanes")
        self._pool = WorkerPool(n_lanes, server=server, env={"TMPDIR": str(self._scratch.path)})
        self._tries: dict[Job[SearchRequest, Answer], int] = {}
        self._dispatcher: Dispatcher[SearchRequest, Answer] = Dispatcher(
            self._pool, self._plan, self._give_up, overlap=True
        )

    def submit(self, request: SearchRequest) -> Future[Answer]:
        """Queue a request; it is tried once more if its process dies."""
        (answer,) = self._dispatcher.submit([request])
        return answer

    def is_alive(self) -> bool:
        """Return True: a process that dies is replaced."""
        return True

    def close(self) -> None:
        """Cancel pending requests and end the processes."""
        self._dispatcher.close()
        self._scratch.remove()

    def _plan(self) -> Plan:
        job = self._dispatcher.take()
        if job is None:
            return
        try:
            result = yield Step("searching and building", fill, (job.task,), REQUEST_TIMEOUT_SEC)
        except WorkerError as error:
            self._tries[job] = self._tries.get(job, 0) + 1
            # An exception of the code itself would be raised again.
            if isinstance(error, WorkerTaskError) or self._tries[job] >= MAX_TRIES:
                self._dispatcher.settle(job, self._give_up(job, summary_line(error)))
            else:
                self._dispatcher.put_back(job)
        else:
            self._dispatcher.settle(job, result)

    def _give_up(self, job: Job[SearchRequest, Answer], reason: str) -> LaneError:
        self._tries.pop(job, None)
        return LaneError(reason)
