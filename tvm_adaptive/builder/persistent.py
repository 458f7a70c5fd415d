"""A builder whose worker processes stay for the whole run; TVM's starts new ones per batch."""

from __future__ import annotations

import collections
import dataclasses
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    BuilderInput,
    BuilderResult,
    PyBuilder,
    derived_object,
    module_key,
    save_json,
    save_param_dict,
)
from tvm_adaptive.builder.compile import BuildFunction, CompileTask, compile_candidate
from tvm_adaptive.errors import (
    MACHINE_FAILURE,
    MachineError,
    OutOfTimeError,
    WorkerDiedError,
    WorkerTimeoutError,
    check_at_least,
    check_positive,
    is_machine_failure,
    machine_failure,
)
from tvm_adaptive.measure_callback.journal import JournalWriter, NullJournal, write_guarded
from tvm_adaptive.values.trial_log import TrialLog
from tvm_adaptive.workers.cores import n_build_workers, usable_physical_cores
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.pool import Outcome, Step, WorkerPool, in_time
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# Fewer compilations do not predict the next; the warm-up of a task has four.
_MIN_RECENT = 4
# Tasks differ, and a run alternates between them.
_N_RECENT = 256
# A shorter limit gains nothing, and a moment of load on the machine must not look like a
# candidate without end.
_LEAST_PATIENCE_SEC = 3.0
# A build that failed for lack of resources is repeated once, after another program's peak.
_RETRY_PAUSE_SEC = 2.0
# More than an artifact takes.
_PROBE_BYTES = 1 << 20
_WORKER_MODULES = ("tvm_adaptive.builder.compile",)


@derived_object
class PersistentBuilder(PyBuilder):  # type: ignore[misc]
    """Compile candidates in worker processes that stay; ``builder="persistent"``.

    A compilation that crashes, hangs or fails costs one error result. One that fails
    because the machine is out of processes, memory or disk space is repeated once; the
    message of a second such failure begins with ``errors.MACHINE_FAILURE``.

    Parameters
    ----------
    max_workers : int or None
        Worker processes at the most; None for the physical cores this process may use,
        or fewer where there is memory for fewer.
    timeout_sec : float
        Deadline of one compilation; the start of a worker does not count.
    patience : float or None
        A compilation ends after so many times the median of earlier ones, but not before
        3 s. A few candidates that unroll excessively take as long as all others of a batch
        together, and are hardly ever among the best. Default None: only ``timeout_sec``
        ends it.
    time_left : callable or None
        Returns the seconds that are left for building, e.g. of a run's budget. Later
        candidates get an error that :func:`~tvm_adaptive.errors.is_out_of_time` knows.
        Default None: no limit.
    max_uses : int
        Compilations after which a worker is replaced, in case that something leaks.
        After 500, a new worker costs less than 1 % of the time.
    artifact_dir : str, Path or None
        Where the artifacts go, each in a folder of its own. None for a temporary
        folder that :meth:`close`, or the end of the process, removes.
    link : bool
        Link candidates here, for runners that measure on this machine: saves them 26 ms
        each. Default False: an archive, which the process that loads it links, as RPC
        needs.
    build_function : callable or None
        ``(mod, target, params) -> runtime Module``, run in the worker; must be
        picklable by cloudpickle. None builds as TVM's own builder does.
    trial_log : TrialLog or None
        Gets the seconds of each build, divided by the number of workers.
    server : ForkServer or None
        Forks the workers; None for one of its own.
    journal : JournalWriter or None
        Gets one ``"build"`` event per batch: ``n``, ``n_errors``, ``seconds``.

    Raises
    ------
    InvalidOptionError
        When an option is out of range.
    """

    def __init__(
        self,
        *,
        max_workers: int | None = None,
        timeout_sec: float = 30.0,
        patience: float | None = None,
        time_left: Callable[[], float] | None = None,
        max_uses: int = 500,
        artifact_dir: str | Path | None = None,
        link: bool = False,
        build_function: BuildFunction | None = None,
        trial_log: TrialLog | None = None,
        server: ForkServer | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        super().__init__()
        if max_workers is None:
            max_workers = n_build_workers(usable_physical_cores())
        check_at_least("max_workers", max_workers, 1)
        check_at_least("max_uses", max_uses, 1)
        check_positive("timeout_sec", timeout_sec)
        check_at_least("patience", patience, 1)
        self.max_workers = max_workers
        self.timeout_sec = timeout_sec
        self.patience = patience
        self._time_left = time_left
        self._recent_sec: collections.deque[float] = collections.deque(maxlen=_N_RECENT)
        self.journal: JournalWriter = journal or NullJournal()
        self._link = link
        self._trial_log = trial_log
        self._build_function = build_function
        if artifact_dir is not None:
            Path(artifact_dir).mkdir(parents=True, exist_ok=True)
            artifact_dir = Path(artifact_dir).resolve()
        # Files that a killed compilation leaves in TMPDIR are removed with this folder.
        self._scratch = ScratchFolder("build", artifact_dir)
        self._root = self._scratch.path if artifact_dir is None else artifact_dir
        self._pool = WorkerPool(
            max_workers,
            max_uses=max_uses,
            server=server,
            modules=_WORKER_MODULES,
            # Linkers say in English then that a disk is full.
            env={"TMPDIR": str(self._scratch.path), "LC_ALL": "C"},
        )

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Compile a batch, in its order; never raises for what a candidate does."""
        start_sec = time.monotonic()
        try:
            results = self._build(list(build_inputs))
        except Exception as error:  # C++ called us: an exception would end the whole run
            logger.exception("PersistentBuilder could not build a batch")
            self._write("error", where="PersistentBuilder.build", message=repr(error))
            message = _message("the batch could not be built", error)
            results = [BuilderResult(None, message) for _ in build_inputs]
        n_errors = sum(result.error_msg is not None for result in results)
        seconds = round(time.monotonic() - start_sec, 6)
        self._write("build", n=len(results), n_errors=n_errors, seconds=seconds)
        return results

    def close(self) -> None:
        """End the workers and remove the temporary folder, if any; later inputs get errors then."""
        self._pool.close()
        self._scratch.remove()

    def _build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        results = self._attempt(dict(enumerate(build_inputs)))
        failed = {
            index: build_inputs[index]
            for index, result in results.items()
            if is_machine_failure(result.error_msg)
        }
        if failed:
            logger.warning(
                "%d of %d builds failed for lack of resources; they are repeated in %g s",
                len(failed),
                len(build_inputs),
                _RETRY_PAUSE_SEC,
            )
            time.sleep(_RETRY_PAUSE_SEC)
            results |= self._attempt(failed)
        return [results[index] for index in range(len(build_inputs))]

    def _attempt(self, build_inputs: dict[int, BuilderInput]) -> dict[int, BuilderResult]:
        """Compile each input once."""
        results: dict[int, BuilderResult] = {}
        tasks: dict[int, CompileTask] = {}
        for index, build_input in build_inputs.items():
            try:
                tasks[index] = self._task(build_input)
            except Exception as error:
                message = _message("the input could not be prepared", error)
                results[index] = BuilderResult(None, message)
        limit_sec = self._deadline_sec()
        steps = [
            Step("compiling", compile_candidate, (each,), limit_sec) for each in tasks.values()
        ]
        outcomes = dict(self._pool.stream(in_time(step, self._time_left) for step in steps))
        for place, (index, task) in enumerate(tasks.items()):
            outcome = outcomes[place]
            # LLVM ends the process when it cannot write.
            if isinstance(outcome.error, WorkerDiedError) and (problem := self._disk_problem()):
                outcome = dataclasses.replace(outcome, error=MachineError(problem))
            results[index] = _result(outcome)
            if outcome.error is not None:
                shutil.rmtree(task.directory, ignore_errors=True)
            # Such failures say nothing of a candidate's build time.
            if isinstance(outcome.error, MachineError | OutOfTimeError):
                continue
            # One that failed at once says nothing of how long builds take.
            if outcome.error is None or isinstance(outcome.error, WorkerTimeoutError):
                self._recent_sec.append(outcome.elapsed_sec)
            if self._trial_log is not None:
                key = module_key(build_inputs[index].mod)
                self._trial_log.note(key, build_sec=outcome.elapsed_sec / self.max_workers)
        return results

    def _disk_problem(self) -> str:
        """Return why nothing can be written where artifacts are; "" if it can."""
        try:
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as error:
            return machine_failure(error)
        return ""

    def _deadline_sec(self) -> float:
        """Return the seconds that a compilation of the next batch may take."""
        if self.patience is None or len(self._recent_sec) < _MIN_RECENT:
            return self.timeout_sec
        patience_sec = self.patience * statistics.median(self._recent_sec)
        return min(self.timeout_sec, max(_LEAST_PATIENCE_SEC, patience_sec))

    def _write(self, event: str, **fields: Any) -> None:
        write_guarded(self.journal, event, **fields)

    def _task(self, build_input: BuilderInput) -> CompileTask:
        params = build_input.params
        return CompileTask(
            mod_json=save_json(build_input.mod),
            target_json=save_json(build_input.target),
            params=None if params is None else bytes(save_param_dict(dict(params))),
            directory=tempfile.mkdtemp(prefix="candidate-", dir=self._root),
            build_function=self._build_function,
            link=self._link,
        )


def _result(outcome: Outcome) -> BuilderResult:
    if outcome.error is None:
        return BuilderResult(str(outcome.value), None)
    cause = "Timeout" if isinstance(outcome.error, WorkerTimeoutError) else "Error"
    origin = MACHINE_FAILURE if isinstance(outcome.error, MachineError) else ""
    return BuilderResult(None, f"{origin}PersistentBuilder: {cause}: {outcome.error}")


def _message(what: str, error: Exception) -> str:
    """Return the error message of a failure in this process."""
    origin = MACHINE_FAILURE if machine_failure(error) else ""
    return f"{origin}PersistentBuilder: {what}: {error!r}"
