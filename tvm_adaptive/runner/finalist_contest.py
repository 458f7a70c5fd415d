"""Hold one task's play-off: build the finalists, check them, time them side by side."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    Builder,
    BuilderInput,
    IRModule,
    Target,
    TuningRecord,
    args_info_of,
)
from tvm_adaptive.errors import NoDeviceError, WorkerError, WorkerTimeoutError
from tvm_adaptive.runner.agreement import tolerance
from tvm_adaptive.runner.finalist_modules import (
    mean_sec,
    module_key,
    reduction_length,
    runnable,
    scheduled,
    with_plain_weights,
)
from tvm_adaptive.runner.finalist_worker import Kernel, check, run_reference, time_once
from tvm_adaptive.runner.playoff import play_rounds
from tvm_adaptive.workers import Outcome, WorkerPool

# If all finalists are disqualified the next best get their turn, so often: of thousands of
# trials, one in a hundred wrong is dozens, and the fastest of all. A task with so many more
# is better left untuned.
MAX_HEATS = 10


@dataclasses.dataclass
class Finalist:
    """A record in the play-off and what became of it.

    Attributes
    ----------
    record : TuningRecord
        As it was recorded while tuning.
    recorded_sec : float
        Its mean time then, seconds, lower is better.
    playoff_sec : float
        Its time in the play-off, seconds; ``nan`` if it was not timed.
    stderr_sec : float
        Standard error of ``playoff_sec``.
    disqualified : str
        Why it can't win; empty if it can.
    unchecked : str
        Why its results were not compared with the untuned module's; empty if they were.
    """

    record: TuningRecord
    recorded_sec: float
    playoff_sec: float = math.nan
    stderr_sec: float = math.nan
    disqualified: str = ""
    unchecked: str = ""

    def final_sec(self) -> float:
        """Return the play-off's time, or the recorded one if there was no play-off."""
        return self.recorded_sec if math.isnan(self.playoff_sec) else self.playoff_sec


@dataclasses.dataclass(frozen=True)
class ContestOptions:
    """How to check and to time; see :func:`~tvm_adaptive.runner.finalists.play_off`."""

    timeout_sec: float
    rtol: float | None
    atol: float | None
    max_sec: float
    repeat_ms: float
    seed: int
    device_index: int
    scratch_dir: str | None


@dataclasses.dataclass
class _Entry:
    """A finalist with its kernels: one to time, one to check."""

    finalist: Finalist
    timed: Kernel | None = None
    plain: Kernel | None = None


class Contest:
    """One task's play-off.

    Parameters
    ----------
    target : Target
    builder : Builder
    pool : WorkerPool
        Of one worker that is replaced after any error.
    options : ContestOptions

    Attributes
    ----------
    winner : Finalist or None
        Known after :meth:`hold`.
    """

    def __init__(
        self, target: Target, builder: Builder, pool: WorkerPool, options: ContestOptions
    ) -> None:
        self._target = target
        self._builder = builder
        self._options = options
        self._folder = tempfile.mkdtemp(prefix="tvm-adaptive-playoff-", dir=options.scratch_dir)
        self._artifacts: list[str] = []
        self._reference = os.path.join(self._folder, "reference")
        self._no_reference = ""
        self._rtol = 0.0
        self.pool = pool
        self.winner: Finalist | None = None

    def hold(self, records: Sequence[TuningRecord], top_k: int) -> tuple[list[Finalist], str]:
        """Play, ``top_k`` records at a time, until somebody wins.

        Parameters
        ----------
        records : sequence of TuningRecord
            Fastest first.
        top_k : int

        Returns
        -------
        (finalists, reason)
            In the order of ``records``; see ``FinalistReport`` for the reason.
        """
        if not records:
            return [], "no-record"
        self._prepare_reference(records[0].workload.mod)
        entries = [_Entry(Finalist(record, mean_sec(record))) for record in records]
        seen: set[int] = set()
        finalists: list[Finalist] = []
        reason = "failed"
        for heat in range(min(MAX_HEATS, math.ceil(len(entries) / top_k))):
            batch = entries[heat * top_k : (heat + 1) * top_k]
            self._build(batch, seen)
            self._check(batch)
            reason = self._time([entry for entry in batch if not entry.finalist.disqualified])
            finalists += [entry.finalist for entry in batch]
            if self.winner is not None:
                return finalists, reason
        if self._no_reference:
            # Not even the untuned module runs: the fault is not the records'.
            return [as_recorded(records[0], self._no_reference)], "error"
        return finalists, reason

    def close(self) -> None:
        """Remove the artifacts."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._artifacts:
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)

    def _prepare_reference(self, mod: IRModule) -> None:
        try:
            problem = self._run_reference(mod)
        except NoDeviceError:
            raise
        except Exception as error:  # e.g. a type that numpy does not know
            problem = repr(error)
        if problem:
            self._no_reference = f"no reference: {problem}"

    def _run_reference(self, mod: IRModule) -> str | None:
        (kernel,), (error,) = self._kernels([runnable(mod, self._target)])
        if kernel is None:
            return error
        self._rtol = tolerance([dtype for dtype, _ in kernel.buffers], reduction_length(mod))
        task = (kernel, self._options.seed, self._reference)
        outcome = self._call(run_reference, task)
        return None if outcome.error is None else _last_line(outcome.error)

    def _call(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Outcome:
        """Let the worker do something.

        Raises
        ------
        NoDeviceError
            When it cannot, which is no finalist's fault.
        """
        (outcome,) = self.pool.map(function, [task], self._options.timeout_sec)
        if isinstance(outcome.error, NoDeviceError):
            raise outcome.error
        return outcome

    def _build(self, batch: Sequence[_Entry], seen: set[int]) -> None:
        jobs: list[tuple[_Entry, bool, IRModule]] = []
        for entry in batch:
            try:
                mod = scheduled(entry.finalist.record)
                plain = with_plain_weights(mod)
            except Exception as error:
                entry.finalist.disqualified = f"schedule: {error}"
                continue
            if module_key(mod) in seen:
                entry.finalist.disqualified = "the same schedule as a better record"
                continue
            seen.add(module_key(mod))
            jobs.append((entry, True, mod))
            if plain is not mod:
                jobs.append((entry, False, plain))
        kernels, errors = self._kernels([mod for _, _, mod in jobs])
        for (entry, is_timed, _), kernel, problem in zip(jobs, kernels, errors, strict=True):
            if is_timed:
                entry.timed = entry.plain = kernel
                entry.finalist.disqualified = f"build: {problem}" if problem else ""
            else:
                entry.plain = kernel
                entry.finalist.unchecked = f"build: {problem}" if problem else ""

    def _kernels(self, mods: list[IRModule]) -> tuple[list[Kernel | None], list[str | None]]:
        results = self._builder.build([BuilderInput(mod, self._target) for mod in mods])
        kernels: list[Kernel | None] = []
        for mod, result in zip(mods, results, strict=True):
            if result.artifact_path is None:
                kernels.append(None)
                continue
            self._artifacts.append(str(result.artifact_path))
            kernels.append(
                Kernel(
                    str(result.artifact_path),
                    _device_type(self._target),
                    _buffers(mod),
                    self._options.device_index,
                )
            )
        messages = [result.error_msg for result in results]
        return kernels, [None if text is None else str(text) for text in messages]

    def _check(self, batch: Sequence[_Entry]) -> None:
        options = self._options
        rtol = self._rtol if options.rtol is None else options.rtol
        # A given rtol without atol means what numpy means by it.
        atol = 0.0 if options.rtol is not None and options.atol is None else options.atol
        for entry in batch:
            finalist = entry.finalist
            finalist.unchecked = finalist.unchecked or self._no_reference
            if finalist.disqualified or finalist.unchecked:
                continue
            task = (entry.plain, options.seed, self._reference, rtol, atol)
            outcome = self._call(check, task)
            if outcome.error is not None:
                finalist.disqualified = _failure(outcome.error)
            elif outcome.value is not None:
                finalist.disqualified = f"wrong result: {outcome.value}"

    def _time(self, entries: Sequence[_Entry]) -> str:
        if not entries:
            return "failed"
        options = self._options

        def measure(index: int) -> float:
            task = (entries[index].timed, options.seed, options.repeat_ms)
            outcome = self._call(time_once, task)
            if outcome.error is not None:
                entries[index].finalist.disqualified = _failure(outcome.error)
                return math.nan
            return float(outcome.value)

        result = play_rounds(measure, len(entries), max_sec=options.max_sec)
        for index, entry in enumerate(entries):
            entry.finalist.playoff_sec = float(result.location_sec[index])
            entry.finalist.stderr_sec = float(result.stderr_sec[index])
        if result.ranking:
            self.winner = entries[result.ranking[0]].finalist
        return result.reason


def _buffers(mod: IRModule) -> tuple[tuple[str, tuple[int, ...]], ...]:
    infos = [info.as_json() for info in args_info_of(mod)]
    return tuple((str(dtype), tuple(int(n) for n in shape)) for _, dtype, shape in infos)


def _device_type(target: Target) -> str:
    # "llvm" and "c" are ways to compile, not devices.
    return "cpu" if "cpu" in target.keys else str(target.kind.name)


def as_recorded(record: TuningRecord, why: str) -> Finalist:
    """Return a record as a finalist that was neither checked nor timed, and say why."""
    return Finalist(record, mean_sec(record), unchecked=why)


def _failure(error: WorkerError) -> str:
    kind = "hang" if isinstance(error, WorkerTimeoutError) else "crash"
    return f"{kind}: {_last_line(error)}"


def _last_line(error: WorkerError) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
