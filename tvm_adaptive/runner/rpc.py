"""The adaptive runner for devices behind TVM's RPC tracker."""

from __future__ import annotations

import copy
import functools
import math

from tvm_adaptive._tvm import PyRunner, RPCConfig, RunnerInput, derived_object
from tvm_adaptive.asides import Incumbent, TimingErrors
from tvm_adaptive.errors import InvalidOptionError, essence
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.runner.background import Background, FinishedFuture, PendingFuture
from tvm_adaptive.runner.local import (
    TimingLog,
    as_task,
    checked_timeout,
    make_options,
    with_race,
)
from tvm_adaptive.runner.measure import (
    MeasureFunction,
    acquire_session,
    count_servers,
    measure_remote,
    warm_up,
)
from tvm_adaptive.runner.stopping import StoppingRule
from tvm_adaptive.workers import WorkerPool

# The server ends a session this long after our own deadline: ours gives the better
# message, the server's frees a device whose client is gone.
SESSION_GRACE_SEC = 5
# Time for a server to register, at the start or again after a restart.
SERVER_WAIT_SEC = 10.0
# The same for a candidate that queues already: the others of its share queue behind it.
QUEUED_SERVER_WAIT_SEC = 2.0
# What one look at the tracker may take on top of waiting for a server.
TRACKER_TIMEOUT_SEC = 10.0
# Between two looks at the tracker each worker gets this many candidates: enough that
# the devices rarely idle at the end of a share, few to lose when all devices vanish.
SHARE_PER_WORKER = 4


@derived_object
class AdaptiveRPCRunner(PyRunner):  # type: ignore[misc]
    """Measure candidates on remote devices; ``runner="adaptive-rpc"``.

    Every wait has an end: a tracker that does not answer, a key that nobody serves, a
    server that dies or a kernel that hangs gives error results, never a run that
    stands still. Queueing for a device does not count as measuring.

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
        As for :class:`~tvm_adaptive.runner.local.AdaptiveRunner`, like the next four.
        Default ``"precision"``.
    min_repeat_ms : float
        Default 0.
    max_sec : float or None
        Default None.
    device_index : int
        Default 0.
    cpu_cache_flush : bool
        Default False.
    max_workers : int or None
        Devices to use at the same time; None (default) for as many as the tracker has
        with the key.
    measure : callable
        As for :class:`~tvm_adaptive.runner.local.AdaptiveRunner`; called in a worker
        that holds a session.
    incumbent : Incumbent or None
        Candidates are raced against it; a search has to keep it. None measures all alike.
    timing_errors : TimingErrors or None
        Is told the standard error of each time.
    overlap : bool
        Measure in the background: :meth:`run` returns at once, and the next batch may be
        made meanwhile. Default False; not where the devices are this machine.
    journal : JournalWriter or None
        Gets one ``"timing"`` event per candidate.

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
        incumbent: Incumbent | None = None,
        timing_errors: TimingErrors | None = None,
        overlap: bool = False,
        journal: JournalWriter | None = None,
    ) -> None:
        super().__init__()
        self.rpc_config = _complete(rpc_config)
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
        self._measure = measure
        self._incumbent = incumbent
        self._log = TimingLog("AdaptiveRPCRunner", journal, timing_errors)
        self._background = Background(overlap)
        self._pool = WorkerPool(1, setup=warm_up, replace_after_error=True)
        problem = self._look_at_tracker()
        if problem is not None:
            raise InvalidOptionError(problem)

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
        inputs = list(runner_inputs)
        # Another task's by the time that a batch in the background is measured.
        best = copy.copy(self._incumbent)
        run = functools.partial(self._run, inputs, best)
        measure = functools.partial(self._log.guard, run, len(inputs))
        return self._background.run(measure, len(inputs))

    def close(self) -> None:
        """End the workers; a later :meth:`run` starts new ones."""
        self._background.close()
        self._pool.close()

    def _run(
        self, runner_inputs: list[RunnerInput], best: Incumbent | None
    ) -> list[FinishedFuture]:
        left = runner_inputs
        futures: list[FinishedFuture] = []
        while left:
            problem = self._look_at_tracker()
            if problem is not None:
                return futures + [self._log.fail(problem) for _ in left]
            n = SHARE_PER_WORKER * self._pool.max_workers
            share, left = left[:n], left[n:]
            measure = functools.partial(self._run_share, share, best)
            futures += self._log.guard(measure, len(share))
        return futures

    def _run_share(
        self, runner_inputs: list[RunnerInput], best: Incumbent | None
    ) -> list[FinishedFuture]:
        options = with_race(self.options, best)
        session_timeout_sec = math.ceil(self.timeout_sec) + SESSION_GRACE_SEC
        outcomes = self._pool.map(
            self._measure,
            [(*as_task(each), options) for each in runner_inputs],
            self.timeout_sec,
            prepare=functools.partial(
                acquire_session, self.rpc_config, session_timeout_sec, QUEUED_SERVER_WAIT_SEC
            ),
            prepare_timeout_sec=self.queue_timeout_sec,
        )
        return [self._log.finish(outcome, best) for outcome in outcomes]

    def _look_at_tracker(self) -> str | None:
        """Set the number of workers to that of devices; return what is wrong, or None."""
        task = (self.rpc_config, SERVER_WAIT_SEC)
        # In a worker, as everything that can hang: the deadline is kept here.
        (outcome,) = self._pool.map(count_servers, [task], SERVER_WAIT_SEC + TRACKER_TIMEOUT_SEC)
        config = self.rpc_config
        tracker = f"{config.tracker_host}:{config.tracker_port}"
        command = (
            "python -m tvm.exec.query_rpc_tracker "
            f"--host {config.tracker_host} --port {config.tracker_port}"
        )
        if outcome.error is not None:
            return (
                f"the RPC tracker at {tracker} cannot be reached "
                f"({essence(outcome.error)}). Look at it with: {command}"
            )
        if outcome.value == 0:
            return (
                f"the RPC tracker at {tracker} has no server with the key "
                f"{config.tracker_key!r}. Look which keys it has with: {command}"
            )
        self._pool.max_workers = self.max_workers or outcome.value
        return None


def _complete(rpc_config: RPCConfig | None) -> RPCConfig:
    try:
        return RPCConfig._normalized(rpc_config)
    except ValueError as error:
        raise InvalidOptionError(f"rpc_config is not complete: {error}") from error
