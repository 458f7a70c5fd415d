"""Lanes that are processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import socket
from concurrent.futures import Future
from typing import Any

from tvm_adaptive.errors import (
    InvalidOptionError,
    LaneError,
    WorkerError,
    WorkerTaskError,
    summary_line,
)
from tvm_adaptive.tuning.interrupts import keeping_handlers
from tvm_adaptive.tuning.lanes.fill import fill
from tvm_adaptive.tuning.lanes.request import REQUEST_TIMEOUT_SEC, Answer, SearchRequest
from tvm_adaptive.workers.dispatcher import Dispatcher, Job
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Plan, Step, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# A dead process loses its request, which may be what killed it.
MAX_TRIES = 2
# Ray restarts a task whose node dies; a task that kills nodes must not be restarted for ever.
_MAX_RETRIES = 2
# Processors of a lane, where a node has as many.
CPUS_PER_LANE = 2
# A head answers within milliseconds; this allows for a slow network.
_CONNECT_TIMEOUT_SEC = 5.0


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
        self._dispatcher.close(abandon=True)
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
            self._tries.pop(job, None)
            self._dispatcher.settle(job, result)

    def _give_up(self, job: Job[SearchRequest, Answer], reason: str) -> LaneError:
        self._tries.pop(job, None)
        return LaneError(reason)


class RayLanes:
    """Tasks of a Ray cluster, one request each; a dead node's requests are answered elsewhere."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise InvalidOptionError('Ray is missing: pip install "tvm-adaptive[ray]".') from error
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _check_address(address)
            try:
                with keeping_handlers():
                    ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except Exception as error:
                raise _no_cluster(address, error) from error
        # A lane runs on one node; one that no node has room for would wait for ever.
        nodes = self._cpus_of_nodes()
        self._cpus = max(1, min(CPUS_PER_LANE, max(nodes, default=1)))
        self.n_lanes = max(1, sum(node // self._cpus for node in nodes))
        self._fill = ray.remote(num_cpus=self._cpus, max_retries=_MAX_RETRIES)(fill)
        self._pending: dict[int, Any] = {}

    def submit(self, request: SearchRequest) -> Future[Answer]:
        """Queue a request; it is answered elsewhere if its node is lost."""
        answer: Future[Answer] = Future()
        if not self.is_alive():
            answer.set_result(LaneError("no node of the cluster is left"))
            return answer
        try:
            task = self._fill.remote(request)
            inner: Future[Any] = task.future()
        except Exception as error:  # Ray's own
            answer.set_result(LaneError(summary_line(error)))
            return answer

        def pass_on(done: Future[Any]) -> None:
            self._pending.pop(id(task), None)
            try:
                answer.set_result(done.result())
            except BaseException as error:  # Ray's own, and cancelled at the end
                answer.set_result(LaneError(summary_line(error)))

        self._pending[id(task)] = task
        inner.add_done_callback(pass_on)
        return answer

    def is_alive(self) -> bool:
        """Return whether any node is left to answer a request."""
        try:
            return max(self._cpus_of_nodes(), default=0) >= self._cpus
        except Exception as error:  # Ray's own; the program may have left the cluster
            logger.warning("the cluster does not answer: %s", summary_line(error))
            return False

    def close(self) -> None:
        """Cancel pending requests, and leave the cluster unless it is the program's own."""
        for task in list(self._pending.values()):
            with contextlib.suppress(Exception):  # Ray's own; the program may have left the cluster
                self._ray.cancel(task, force=True)
        if self._is_ours:
            with keeping_handlers():
                self._ray.shutdown()

    def _cpus_of_nodes(self) -> list[int]:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return [int(node["Resources"].get("CPU", 0)) for node in nodes]


def _check_address(address: str) -> None:
    """Raise unless a server listens at an address; Ray itself retries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        host = host.strip("[]")  # of an IPv6 address
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_SEC).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> InvalidOptionError:
    return InvalidOptionError(
        f"The Ray cluster at {address} cannot be joined ({summary_line(error)}). Look at it with: "
        f"ray status --address {address}"
    )
