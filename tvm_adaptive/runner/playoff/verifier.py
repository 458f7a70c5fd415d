"""Build finalists and compare what they compute with the untuned module."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import Builder, BuilderInput, IRModule, Target, module_key
from tvm_adaptive._tvm.default_schedules import with_default_schedules
from tvm_adaptive._tvm.tensor_functions import weights_of
from tvm_adaptive.errors import (
    MACHINE_FAILURE,
    OUT_OF_TIME,
    MachineError,
    NoDeviceError,
    OutOfTimeError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    is_machine_failure,
    is_out_of_time,
    summary_line,
)
from tvm_adaptive.runner.playoff.finalist import (
    BUILD_FAILED,
    SAME,
    SCHEDULE_FAILED,
    Finalist,
    PlayoffOptions,
)
from tvm_adaptive.runner.playoff.modules import (
    buffers_of,
    longest_sums,
    scheduled,
    with_plain_weights,
)
from tvm_adaptive.runner.playoff.worker import (
    Kernel,
    KernelCheck,
    check,
    run_neighbours,
    run_reference,
    time_once,
)
from tvm_adaptive.runner.rpc.leased_worker import LOST_DEVICE, LeasingPool
from tvm_adaptive.values.agreement import N_PERTURBED_PAIRS, tolerance
from tvm_adaptive.workers.pool import Outcome, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

# Where the machine lacks memory or processes: another program's peak may be over after a pause.
_TRIES = 2
_RETRY_PAUSE_SEC = 2.0


@dataclasses.dataclass
class Entry:
    """A finalist with its module and its kernels: one to time, one to check."""

    finalist: Finalist
    mod: IRModule | None = None
    timed: Kernel | None = None
    plain: Kernel | None = None

    @property
    def is_fit(self) -> bool:
        """Whether it was built and not disqualified."""
        return self.timed is not None and not self.finalist.disqualified

    @property
    def is_checked(self) -> bool:
        """Whether it was built and gave the reference's results."""
        return self.is_fit and self.finalist.is_sound


class Verifier:
    """Builds, checks and times the finalists of one task in the worker of a pool."""

    def __init__(
        self, target: Target, builder: Builder, pool: WorkerPool, options: PlayoffOptions
    ) -> None:
        self.options = options
        self._target = target
        self._builder = builder
        self._pool = pool
        self._end_sec = time.monotonic() + options.limit_sec
        self._folder = ScratchFolder("playoff", options.scratch_dir)
        self._artifacts: list[str] = []
        self._seen: set[int] = set()  # modules
        self._reference = str(self._folder.path / "reference")
        self._rtol = 0.0
        self._call_sec = options.timeout_sec
        self._untuned: Kernel | None = None
        # Why its neighbours are not known; None before they were asked for.
        self._no_neighbours: str | None = None
        # A device that has lost its power looks like a kernel that hangs, until another one
        # has run the same kernel.
        self._not_of_kernels: tuple[type[WorkerError], ...] = (MachineError,)
        if isinstance(pool, LeasingPool):
            self._not_of_kernels += LOST_DEVICE

    def close(self) -> None:
        """Remove the artifacts."""
        self._folder.remove()
        for path in self._artifacts:
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)

    def left_sec(self) -> float:
        """Return the seconds left; raise OutOfTimeError if there are none."""
        left_sec = self._end_sec - time.monotonic()
        if left_sec <= 0:
            raise OutOfTimeError(OUT_OF_TIME)
        return left_sec

    def prepare_reference(self, mod: IRModule) -> str:
        """Run the untuned module; return why that failed, or an empty string."""
        try:
            ((kernel, error),) = self._kernels([with_default_schedules(mod, self._target)])
            if kernel is None:
                return error
            self._untuned = kernel
            self._rtol = tolerance([dtype for dtype, _ in kernel.buffers], longest_sums(mod))
            outcome = self._run_untuned(kernel)
            if isinstance(self._pool, LeasingPool):
                # A slow link: a check sends and fetches as much.
                self._call_sec = max(self._call_sec, 2.0 * outcome.elapsed_sec)
        except (NoDeviceError, OutOfTimeError, MachineError):
            raise
        except Exception as error:  # e.g. a type that numpy does not know
            return repr(error)
        return "" if outcome.error is None else summary_line(outcome.error)

    def _run_untuned(self, kernel: Kernel) -> Outcome:
        """Run the untuned module; on another device of a farm if the first one cannot."""
        task = (kernel, self.options.seed, self._reference)
        timeout_sec = self.options.reference_timeout_sec
        outcome = self._call(run_reference, task, timeout_sec)
        if isinstance(outcome.error, WorkerTaskError) and isinstance(self._pool, LeasingPool):
            first = self._pool.address
            if self._pool.pass_over():
                outcome = self._call(run_reference, task, timeout_sec)
            if outcome.error is not None:
                self._pool.forgive(first)
        return outcome

    def build_timed(self, entries: Sequence[Entry]) -> None:
        """Build the kernels to time of those that were not built yet."""
        jobs: list[tuple[Entry, IRModule]] = []
        for entry in entries:
            if entry.timed is not None or entry.finalist.disqualified:
                continue
            try:
                entry.mod = mod = scheduled(entry.finalist.record)
            except Exception as error:
                entry.finalist.disqualified = f"{SCHEDULE_FAILED}{error}"
                continue
            key = module_key(mod)
            if key in self._seen:
                entry.finalist.disqualified = SAME
                continue
            self._seen.add(key)
            jobs.append((entry, mod))
        built = self._kernels([mod for _, mod in jobs])
        for (entry, _), (kernel, problem) in zip(jobs, built, strict=True):
            entry.timed = kernel
            if problem:
                entry.finalist.disqualified = f"{BUILD_FAILED}{problem}"

    def check(self, entries: Sequence[Entry]) -> None:
        """Build the kernels to check, and disqualify those with wrong results."""
        self._build_plain(entries)
        for entry in entries:
            finalist = entry.finalist
            if finalist.disqualified or entry.plain is None:
                continue
            task = (entry.plain, self.options.seed, self._reference, self._rtol, None)
            call = functools.partial(self._call, check, task)
            outcome = call()
            is_rounded = outcome.error is None and outcome.value.may_be_rounding
            if is_rounded and self._no_neighbours is None:
                # Without neighbours, nothing that is rounded may differ.
                self._find_neighbours()
                outcome = call()
            if outcome.error is not None:
                self._refute(finalist, failure_text(outcome.error), call)
            elif outcome.value.may_be_rounding and self._no_neighbours:
                finalist.unchecked = self._no_neighbours
            else:
                finalist.unchecked = ""
                if not math.isfinite(finalist.recorded_sec):  # a draft; the call takes longer
                    finalist.recorded_sec = outcome.elapsed_sec
                if outcome.value.problem is not None:
                    why = f"wrong result: {outcome.value.problem}"
                    self._refute(finalist, why, call)

    def _refute(self, finalist: Finalist, why: str, call: Callable[..., Outcome]) -> None:
        """Disqualify a finalist, whose call has failed, for good.

        Raises MachineError if its device may have failed instead.
        """
        unchecked, finalist.unchecked = finalist.unchecked, why  # it cannot win in any case
        if isinstance(self._pool, LeasingPool):
            failed_on = self._pool.address
            self._check_device(self._pool)
            if self._pool.address != failed_on:  # others have got that one, or it is gone
                self._repeat_failure(self._pool, failed_on, call)
        finalist.disqualified, finalist.unchecked = why, unchecked

    def _check_device(self, pool: LeasingPool) -> None:
        """Raise MachineError unless the present device repeats what the untuned function gave."""
        task = (self._untuned, self.options.seed, self._reference, self._rtol, None)
        if _has_failed(self._call(check, task, self.options.reference_timeout_sec)):
            address = pool.address
            pool.pass_over()
            raise MachineError(f"{address} does not repeat the results of the untuned function")

    def _repeat_failure(
        self, pool: LeasingPool, failed_on: str, call: Callable[..., Outcome]
    ) -> None:
        """Raise MachineError unless what failed elsewhere fails on the present device, too."""
        sound = pool.address
        pool.moves = False  # a kernel that ends its server has failed on it
        try:
            outcome = call(n_tries=1)
        finally:
            pool.moves = True
        if not _has_failed(outcome) or pool.address != sound:
            raise MachineError(f"a kernel that failed on {failed_on} did not fail on {sound}")

    def _find_neighbours(self) -> None:
        """Run the untuned module on neighbours of the values, or note why that failed."""
        task = (self._untuned, self.options.seed, self._reference, self._rtol)
        # As many runs; half of the time is for the other finalists.
        most_sec = 2 * N_PERTURBED_PAIRS * self.options.reference_timeout_sec
        timeout_sec = min(most_sec, self.left_sec() / 2)
        error = self._call(run_neighbours, task, timeout_sec).error
        self._no_neighbours = ""
        if error is not None:
            self._no_neighbours = f"what it rounds could not be compared: {summary_line(error)}"

    def with_equal_results(self, winner: Entry, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that compute exactly what a winner does, which may fail itself."""
        path, seed = f"{self._reference}-variant", self.options.seed
        if not entries:
            return []
        call = functools.partial(self._call, run_reference, (winner.timed, seed, path))
        error = call().error
        if error is not None:
            if not isinstance(error, WorkerTaskError):  # that of a reference without numbers
                self._refute(winner.finalist, failure_text(error), call)
            return []

        def is_equal(entry: Entry) -> bool:
            outcome = self._call(check, (entry.timed, seed, path, 0.0, 0.0))
            return outcome.error is None and outcome.value.problem is None

        return [entry for entry in entries if is_equal(entry)]

    def timer(self, entries: Sequence[Entry]) -> Callable[[int], float]:
        """Return a function that times an entry, by its index; a failure disqualifies it."""

        def measure(index: int) -> float:
            task = (entries[index].timed, self.options.seed, self.options.repeat_ms)
            call = functools.partial(self._call, time_once, task)
            outcome = call()
            if outcome.error is not None:
                self._refute(entries[index].finalist, failure_text(outcome.error), call)
                return math.nan
            return float(outcome.value)

        return measure

    def _build_plain(self, entries: Sequence[Entry]) -> None:
        """Build the kernels to check where they differ from those to time."""
        jobs: list[tuple[Entry, IRModule]] = []
        for entry in entries:
            if not entry.is_fit:
                continue
            try:
                plain = with_plain_weights(entry.mod)
            except Exception as error:
                entry.finalist.disqualified = f"{SCHEDULE_FAILED}{error}"
                continue
            if plain is entry.mod:
                entry.plain = entry.timed
            else:
                jobs.append((entry, plain))
        built = self._kernels([mod for _, mod in jobs])
        for (entry, _), (kernel, problem) in zip(jobs, built, strict=True):
            entry.plain = kernel
            if problem:
                entry.finalist.unchecked = f"{BUILD_FAILED}{problem}"

    def _kernels(self, mods: list[IRModule]) -> list[tuple[Kernel | None, str]]:
        """Return the kernel of each module, or why it could not be built."""
        self.left_sec()
        results = self._builder.build([BuilderInput(mod, self._target) for mod in mods])
        paths = [each.artifact_path for each in results]
        self._artifacts += [str(path) for path in paths if path is not None]
        if any(is_out_of_time(result.error_msg) for result in results):
            raise OutOfTimeError(OUT_OF_TIME)
        lacking = [r.error_msg for r in results if is_machine_failure(r.error_msg)]
        if lacking and len(lacking) == len(results):  # nothing is known of any of them
            raise MachineError(str(lacking[0]).removeprefix(MACHINE_FAILURE))
        # "llvm" and "c" are ways to compile, not devices.
        device_type = "cpu" if "cpu" in self._target.keys else str(self._target.kind.name)
        kernels: list[tuple[Kernel | None, str]] = []
        for mod, result in zip(mods, results, strict=True):
            if result.artifact_path is None:
                kernels.append((None, str(result.error_msg)))
                continue
            path = str(result.artifact_path)
            kernels.append((Kernel(path, device_type, buffers_of(mod), weights_of(mod)), ""))
        return kernels

    def _call(
        self,
        function: Callable[..., Any],
        task: tuple[Any, ...],
        timeout_sec: float | None = None,
        *,
        n_tries: int = _TRIES,
    ) -> Outcome:
        """Call a function in the worker."""
        deadline_sec = self._call_sec if timeout_sec is None else timeout_sec
        for attempt in range(n_tries):
            if attempt:
                time.sleep(min(_RETRY_PAUSE_SEC, self.left_sec()))
            limit_sec = min(deadline_sec, self.left_sec())
            (outcome,) = self._pool.map(function, [task], limit_sec)
            if not isinstance(outcome.error, self._not_of_kernels):
                break
        if isinstance(outcome.error, WorkerTimeoutError) and limit_sec < deadline_sec:
            raise OutOfTimeError(OUT_OF_TIME)
        if isinstance(outcome.error, NoDeviceError | MachineError):
            raise outcome.error
        return outcome


def _has_failed(outcome: Outcome) -> bool:
    """Say whether a call ended with an error, or a check with a problem."""
    is_wrong = isinstance(outcome.value, KernelCheck) and outcome.value.problem is not None
    return outcome.error is not None or is_wrong


def failure_text(error: WorkerError) -> str:
    """Return the reason to disqualify a kernel that ended its worker."""
    kind = "hang" if isinstance(error, WorkerTimeoutError) else "crash"
    return f"{kind}: {summary_line(error)}"
