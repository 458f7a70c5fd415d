"""Hold one task's play-off: build the finalists, check them, time them side by side."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from tvm_adaptive._tvm import (
    Builder,
    BuilderInput,
    IRModule,
    Target,
    TuningRecord,
)
from tvm_adaptive.errors import (
    OUT_OF_TIME,
    MachineError,
    NoDeviceError,
    OutOfTimeError,
    WorkerError,
    WorkerTimeoutError,
    is_out_of_time,
)
from tvm_adaptive.models.prefetch import hinted
from tvm_adaptive.runner.playoff.finalist import BUILD_FAILED, SAME, Finalist, as_recorded
from tvm_adaptive.runner.playoff.modules import (
    buffers_of,
    mean_sec,
    module_key,
    reduction_length,
    runnable,
    scheduled,
    weights_of,
    with_plain_weights,
)
from tvm_adaptive.runner.playoff.rounds import play_rounds
from tvm_adaptive.runner.playoff.worker import (
    Kernel,
    check,
    run_neighbours,
    run_reference,
    time_once,
)
from tvm_adaptive.values.agreement import tolerance
from tvm_adaptive.workers.pool import Outcome, WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# If all finalists are disqualified the next best get their turn, so often: of thousands of
# trials, one in a hundred wrong is dozens, and the fastest of all. A task with so many more
# is better left untuned.
MAX_PLAYOFF_BATCHES = 10
# Enough to tell who is clearly slower; the final times the others anew.
QUALIFYING_ROUNDS = 5
# Nobody is so unlucky: recorded as twice as slow as the best, a record need not be tried again.
_QUALIFY_FACTOR = 2.0
# Built at once while qualifying, between two looks at the clock.
_BUILD_BATCH = 8
# With less for a play-off, there is no time to tell forms apart that differ by a tenth.
_LEAST_FORMS_SEC = 1.0
# All arguments of all qualifiers stay loaded in one process.
_QUALIFIERS_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class ContestOptions:
    """How to check and to time; see :func:`~tvm_adaptive.runner.playoff.playoff.play_off`."""

    timeout_sec: float
    reference_timeout_sec: float
    rtol: float | None
    atol: float | None
    max_sec: float
    repeat_ms: float
    seed: int
    device_index: int
    scratch_dir: str | None
    n_qualifiers: int
    qualifying_sec: float
    prefetch: bool
    # Monotonic; what a play-off has found by then is what it found.
    end_sec: float = math.inf


@dataclasses.dataclass
class _Entry:
    """A finalist with its kernels: one to time, one to check."""

    finalist: Finalist
    timed: Kernel | None = None
    plain: Kernel | None = None

    @property
    def is_fit(self) -> bool:
        return self.timed is not None and not self.finalist.disqualified

    @property
    def is_checked(self) -> bool:
        return self.is_fit and self.finalist.is_sound


class Contest:
    """One task's play-off."""

    def __init__(
        self, target: Target, builder: Builder, pool: WorkerPool, options: ContestOptions
    ) -> None:
        self._target = target
        self._builder = builder
        self._options = options
        self._folder = ScratchFolder("playoff", options.scratch_dir)
        self._artifacts: list[str] = []
        self._seen: set[int] = set()  # modules
        self._reference = str(self._folder.path / "reference")
        self._rtol = 0.0
        self._untuned: Kernel | None = None
        self.pool = pool
        self.winner: Finalist | None = None

    def hold(self, records: Sequence[TuningRecord], top_k: int) -> tuple[list[Finalist], str]:
        """Play, ``top_k`` records at a time, until somebody wins.

        With qualifiers, those come first that were fastest when qualifying.
        """
        if not records:
            return [], "no-record"
        entries = [_Entry(Finalist(record, mean_sec(record))) for record in records]
        try:
            if problem := self._prepare_reference(records[0].workload.mod):
                return [as_recorded(records[0], f"no reference: {problem}")], "no-reference"
            return self._hold(entries, top_k)
        except OutOfTimeError:
            return self._found_so_far(entries)

    def _hold(self, entries: list[_Entry], top_k: int) -> tuple[list[Finalist], str]:
        """Play with a reference."""
        finalists: list[Finalist] = []
        if self._options.n_qualifiers > top_k and len(entries) > top_k:
            entries, unfit = self._qualify(entries)
            finalists += [entry.finalist for entry in unfit]
        reason = "failed"
        for playoff_batch in range(min(MAX_PLAYOFF_BATCHES, math.ceil(len(entries) / top_k))):
            batch = entries[playoff_batch * top_k : (playoff_batch + 1) * top_k]
            self._build_timed(batch)
            self._build_plain(batch)
            self._check(batch)
            checked = [entry for entry in batch if entry.is_checked]
            self.winner, reason = self._time(checked, self._options.max_sec)
            finalists += [entry.finalist for entry in batch]
            if self.winner is not None and self._options.prefetch:
                self._ask_ahead(next(each for each in batch if each.finalist is self.winner))
            if self.winner is not None:
                return finalists, reason
        return finalists, reason

    def _found_so_far(self, entries: Sequence[_Entry]) -> tuple[list[Finalist], str]:
        """Return who was checked when the time was over; the fastest of them wins."""
        known = [entry.finalist for entry in entries if entry.is_checked]
        out = [each.finalist for each in entries if each.finalist.disqualified]
        if self.winner is None and known:
            self.winner = min(known, key=Finalist.final_sec)
        return [*known, *out], "no-time"

    def close(self) -> None:
        """Remove the artifacts."""
        self._folder.remove()
        for path in self._artifacts:
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)

    def _prepare_reference(self, mod: IRModule) -> str:
        """Run the untuned module; say why that was not possible, nothing if it was."""
        try:
            (kernel,), (error,) = self._kernels([runnable(mod, self._target)])
            if kernel is None:
                return str(error)
            self._untuned = kernel
            self._rtol = tolerance([dtype for dtype, _ in kernel.buffers], reduction_length(mod))
            task = (kernel, self._options.seed, self._reference)
            outcome = self._call(run_reference, task, self._options.reference_timeout_sec)
        except (NoDeviceError, OutOfTimeError):
            raise
        except Exception as error:  # e.g. a type that numpy does not know
            return repr(error)
        return "" if outcome.error is None else _last_line(outcome.error)

    def _call(
        self,
        function: Callable[..., Any],
        task: tuple[Any, ...],
        timeout_sec: float | None = None,
    ) -> Outcome:
        """Let the worker do something."""
        deadline_sec = self._options.timeout_sec if timeout_sec is None else timeout_sec
        limit_sec = min(deadline_sec, self._left_sec())
        (outcome,) = self.pool.map(function, [task], limit_sec)
        if isinstance(outcome.error, MachineError):  # what it lacked may be there again
            (outcome,) = self.pool.map(function, [task], min(deadline_sec, self._left_sec()))
        is_late = isinstance(outcome.error, WorkerTimeoutError)
        if is_late and limit_sec < deadline_sec:
            raise OutOfTimeError(OUT_OF_TIME)
        if isinstance(outcome.error, NoDeviceError | MachineError):
            raise outcome.error
        return outcome

    def _left_sec(self) -> float:
        """Return the seconds that are left."""
        left_sec = self._options.end_sec - time.monotonic()
        if left_sec <= 0:
            raise OutOfTimeError(OUT_OF_TIME)
        return left_sec

    def _qualify(self, entries: list[_Entry]) -> tuple[list[_Entry], list[_Entry]]:
        """Time the first entries for a few short rounds, side by side.

        The fastest of thousands of short timings are the lucky ones: what decides who is
        in the final should be newer, and fairer, than that.
        """
        options = self._options
        # Who is fast is of no use as long as nobody is checked: that takes the other half.
        qualifying_sec = min(options.qualifying_sec, self._left_sec() / 2)
        deadline_sec = time.monotonic() + qualifying_sec
        n_wanted = sum(
            entry.finalist.recorded_sec <= _QUALIFY_FACTOR * entries[0].finalist.recorded_sec
            for entry in entries[: options.n_qualifiers]
        )
        tried: list[_Entry] = []
        # Building takes at most half of the time: who is built shall be timed as well.
        while len(tried) < n_wanted and _left(deadline_sec) > qualifying_sec / 2:
            batch = entries[len(tried) : min(n_wanted, len(tried) + _BUILD_BATCH)]
            self._build_timed(batch)
            tried += batch
            if sum(each.timed.n_bytes for each in tried if each.timed) > _QUALIFIERS_BYTES:
                break
        ranking: tuple[int, ...] = ()
        if fit := [entry for entry in tried if entry.is_fit]:
            ranking = play_rounds(
                self._timer(fit),
                len(fit),
                max_rounds=QUALIFYING_ROUNDS,
                confirm_rounds=0,
                max_sec=_left(deadline_sec),
            ).ranking
        unfit = [
            entry for entry in tried if not entry.is_fit and entry.finalist.disqualified != SAME
        ]
        return [fit[i] for i in ranking] + entries[len(tried) :], unfit

    def _build_timed(self, batch: Sequence[_Entry]) -> None:
        """Build what is timed, of those that have not been built."""
        jobs: list[tuple[_Entry, IRModule]] = []
        for entry in batch:
            if entry.timed is not None or entry.finalist.disqualified:
                continue
            try:
                mod = scheduled(entry.finalist.record)
            except Exception as error:
                entry.finalist.disqualified = f"schedule: {error}"
                continue
            if module_key(mod) in self._seen:
                entry.finalist.disqualified = SAME
                continue
            self._seen.add(module_key(mod))
            jobs.append((entry, mod))
        kernels, errors = self._kernels([mod for _, mod in jobs])
        for (entry, _), kernel, problem in zip(jobs, kernels, errors, strict=True):
            entry.timed = kernel
            entry.finalist.disqualified = f"{BUILD_FAILED}{problem}" if problem else ""

    def _build_plain(self, batch: Sequence[_Entry]) -> None:
        """Build what is checked, where that is not what is timed."""
        jobs: list[tuple[_Entry, IRModule]] = []
        for entry in batch:
            if not entry.is_fit:
                continue
            try:
                mod = scheduled(entry.finalist.record)
                plain = with_plain_weights(mod)
            except Exception as error:
                entry.finalist.disqualified = f"schedule: {error}"
                continue
            if plain is mod:
                entry.plain = entry.timed
            else:
                jobs.append((entry, plain))
        kernels, errors = self._kernels([mod for _, mod in jobs])
        for (entry, _), kernel, problem in zip(jobs, kernels, errors, strict=True):
            entry.plain = kernel
            if problem:
                entry.finalist.unchecked = f"{BUILD_FAILED}{problem}"

    def _kernels(self, mods: list[IRModule]) -> tuple[list[Kernel | None], list[str | None]]:
        self._left_sec()
        results = self._builder.build([BuilderInput(mod, self._target) for mod in mods])
        if any(is_out_of_time(result.error_msg) for result in results):
            raise OutOfTimeError(OUT_OF_TIME)
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
                    buffers_of(mod),
                    self._options.device_index,
                    weights_of(mod),
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
            if finalist.disqualified or entry.plain is None:
                continue
            task = (entry.plain, options.seed, self._reference, rtol, atol)
            outcome = self._call(check, task)
            if outcome.error is None and outcome.value.may_be_rounding and self._untuned:
                self._find_neighbours(self._untuned, rtol)
                outcome = self._call(check, task)
            if outcome.error is not None:
                finalist.disqualified = _failure(outcome.error)
                continue
            finalist.unchecked = ""
            if outcome.value.problem is not None:
                finalist.disqualified = f"wrong result: {outcome.value.problem}"

    def _find_neighbours(self, untuned: Kernel, rtol: float) -> None:
        """Let the reference say which integers rounding decides; without it, none."""
        task = (untuned, self._options.seed, self._reference, rtol)
        self._call(run_neighbours, task, self._options.reference_timeout_sec)
        self._untuned = None  # once is enough

    def _ask_ahead(self, winner: _Entry) -> None:
        """Give the winner the form that asks for its weights ahead, if that is faster."""
        finalist = winner.finalist
        if winner.timed is None or winner.timed.device_type != "cpu":
            return
        if self._options.max_sec < _LEAST_FORMS_SEC:
            return
        try:
            records = hinted(finalist.record, winner.timed.weights)
        except Exception:  # worth a tenth at best, and never the play-off
            logger.warning("No form asks for weights ahead", exc_info=True)
            return
        forms = [_Entry(Finalist(record, finalist.recorded_sec)) for record in records]
        self._build_timed(forms)
        fit = self._equal_ones(winner.timed, [form for form in forms if form.is_fit])
        if not fit:
            return
        best, _ = self._time([winner, *fit], self._options.max_sec / 2)
        if finalist.disqualified:  # it ran so far, and a form of it is not to be trusted more
            self.winner = None
        elif best is not None and best is not finalist:
            finalist.record, finalist.prefetches = best.record, True
            finalist.playoff_sec, finalist.stderr_sec = best.playoff_sec, best.stderr_sec

    def _equal_ones(self, timed: Kernel, forms: list[_Entry]) -> list[_Entry]:
        """Return the forms that give the very numbers that the kernel gives."""
        path, seed = f"{self._reference}-form", self._options.seed
        if not forms or self._call(run_reference, (timed, seed, path)).error is not None:
            return []
        outcomes = [self._call(check, (form.timed, seed, path, 0.0, 0.0)) for form in forms]
        return [
            form
            for form, outcome in zip(forms, outcomes, strict=True)
            if outcome.error is None and outcome.value.problem is None
        ]

    def _time(self, entries: Sequence[_Entry], max_sec: float) -> tuple[Finalist | None, str]:
        """Return who is the fastest, and why the rounds ended."""
        if not entries:
            return None, "failed"
        # At least one round is played, with what it takes to start each kernel.
        max_sec = min(max_sec, self._left_sec() / 2)
        result = play_rounds(self._timer(entries), len(entries), max_sec=max_sec)
        for index, entry in enumerate(entries):
            entry.finalist.playoff_sec = float(result.location_sec[index])
            entry.finalist.stderr_sec = float(result.stderr_sec[index])
        first = entries[result.ranking[0]].finalist if result.ranking else None
        return first, result.reason

    def _timer(self, entries: Sequence[_Entry]) -> Callable[[int], float]:
        """Return what times an entry once, by its index; a failure disqualifies it."""

        def measure(index: int) -> float:
            task = (entries[index].timed, self._options.seed, self._options.repeat_ms)
            outcome = self._call(time_once, task)
            if outcome.error is not None:
                entries[index].finalist.disqualified = _failure(outcome.error)
                return math.nan
            return float(outcome.value)

        return measure


def _left(deadline_sec: float) -> float:
    return max(0.0, deadline_sec - time.monotonic())


def _device_type(target: Target) -> str:
    # "llvm" and "c" are ways to compile, not devices.
    return "cpu" if "cpu" in target.keys else str(target.kind.name)


def _failure(error: WorkerError) -> str:
    kind = "hang" if isinstance(error, WorkerTimeoutError) else "crash"
    return f"{kind}: {_last_line(error)}"


def _last_line(error: WorkerError) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
