"""The end-to-end check: compare the tuned model with the untuned one, in latency and outputs.

Both run in worker processes, so that a crash or a hang of either does not end the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm import (
    Database,
    ExtractedTask,
    args_info_of,
    functions_as_tasks,
    save_json,
)
from tvm_adaptive.errors import (
    OUT_OF_TIME,
    ImportMismatchError,
    OutOfTimeError,
    WorkerTimeoutError,
    summary_line,
)
from tvm_adaptive.models import (
    Coverage,
    Network,
    Prepared,
    TIRWorkload,
    compile_network,
    export,
    extract,
    largest_difference,
    prepare,
    try_exported,
)
from tvm_adaptive.models.compile import (
    device_kind,
    export_function,
    export_module,
    schedule_network,
    schedule_tir,
)
from tvm_adaptive.models.network import Original, main_of
from tvm_adaptive.models.run import try_function
from tvm_adaptive.models.value_ranges import output_scales
from tvm_adaptive.models.weights import save_module
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.tuning.source_of_difference import source_of_difference
from tvm_adaptive.tuning.target import n_cores_of
from tvm_adaptive.values.agreement import outputs_problem
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.device_session import save_linked
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.scratch import ScratchFolder

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Self

# Untuned networks are slow: a few inferences of ten seconds each have to fit.
_RUN_TIMEOUT_SEC = 120.0
# For the tuned network; the untuned one only puts it in proportion.
_TIMING_SEC = 2.0
# Compiling tuned functions takes longer than untuned ones: they are unrolled.
_COMPILE_MARGIN = 2.5
# Compiling untuned functions again takes the same time, plus what else the machine does,
# plus the way to another process.
_UNTUNED_MARGIN = 1.3
# The share of the remaining budget that may go into timing untuned code: the rest is for
# the search and for what follows it.
_UNTUNED_SHARE = 0.2
# With less, starting a worker and loading a library would be cut short as often as not.
_LEAST_RUN_SEC = 1.0
# The share of the remaining budget that timing tuned code may take; outputs come first.
_TIMING_SHARE = 0.25
# Shorter timings are useless.
_LEAST_TIMING_SEC = 0.1
# Of the scale of an output: ONNX Runtime's sigmoid, whose scale is 1, is wrong by some 1e-7
# where its result is next to zero.
_ORIGINAL_ERROR = 1e-6


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The outputs and the latency of a library."""

    outputs: list[Any]
    latency_sec: float


class _EndToEndCheck:
    """What both checks share: workers to run and compile in, and their findings."""

    preparation = ""  # how the model was prepared, to be added to a note

    def __init__(self, context: RunContext) -> None:
        self._context = context
        # Runs libraries, on this machine or on the farm.
        self._pool = (
            WorkerPool(1, env=thread_env(n_cores_of(context.target)), server=context.server)
            if context.farm is None
            else LeasingPool(context.farm, server=context.server)
        )
        # Compiles tuned code: TVM's passes cannot be interrupted in this process.
        self._compiler = WorkerPool(1, server=context.server)
        # This machine links for itself only.
        self._suffix = ".so" if context.farm is None else ".tar"
        self._build_sec = 0.0
        self._run_sec = 0.0
        self.shortfall = ""
        self.failure = ""
        self.library: Path | None = None  # of a network
        self.libraries: dict[str, Path] = {}  # of functions
        self.coverage = ""
        self.n_tuned = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.close()
        self._compiler.close()

    @property
    def _later_run_sec(self) -> float:
        """Seconds that running the tuned code takes."""
        return self._run_sec

    @property
    def reserve_sec(self) -> float:
        """Seconds to reserve for ``measure_tuned`` if everything is tuned."""
        return _COMPILE_MARGIN * self._build_sec + self._later_run_sec

    @property
    def least_reserve_sec(self) -> float:
        """Seconds to reserve if nothing is tuned: the untuned code is compiled once more."""
        return _UNTUNED_MARGIN * self._build_sec + self._later_run_sec

    def _run(
        self,
        function: Callable[..., Any],
        task: tuple[Any, ...],
        path: Path,
        most_sec: float = math.inf,
    ) -> Any:
        """Run a library in the worker; None after an error, which is reported."""
        limit_sec = min(_RUN_TIMEOUT_SEC, most_sec, self._context.budget.left_sec)
        if limit_sec < min(_LEAST_RUN_SEC, _RUN_TIMEOUT_SEC):
            self._report_shortfall(f"no time was left to run {path.name}")
            return None
        (outcome,) = self._pool.map(function, [task], limit_sec)
        self._run_sec += outcome.elapsed_sec
        if outcome.error is None:
            return outcome.value
        if isinstance(outcome.error, WorkerTimeoutError) and limit_sec < _RUN_TIMEOUT_SEC:
            self._report_shortfall(f"{path.name} was stopped after the {limit_sec:.0f} s left")
        else:
            self._report_failure(path, outcome.error)
        return None

    def _compile_tuned(self, export: Callable[..., None], task: tuple[Any, ...]) -> None:
        """Compile in a worker, as long as the budget lasts."""
        self._check_time()
        limit_sec = self._context.budget.left_sec
        (outcome,) = self._compiler.map(export, [task], limit_sec)
        self._build_sec += outcome.elapsed_sec
        if isinstance(outcome.error, WorkerTimeoutError):
            raise OutOfTimeError(OUT_OF_TIME) from outcome.error
        if outcome.error is not None:
            raise outcome.error

    def _check_time(self) -> None:
        if self._context.budget.left_sec <= 0:
            raise OutOfTimeError(OUT_OF_TIME)

    def _report_uncompiled(self, path: Path, error: Exception, consequence: str) -> None:
        """Report why there is no library: TVM's passes, the linker, the disk, or no time."""
        if isinstance(error, OutOfTimeError):
            self._report_shortfall(f"no time was left to compile {path.name}{consequence}")
        else:
            self.failure = summary_line(error)
            self._report_failure(path, error)

    def _report_shortfall(self, text: str) -> None:
        """Report once what the budget was too short for: the first one is the cause."""
        if not self.shortfall:
            self.shortfall = text
            self._context.observer.note(f"the budget is short: {text}")
            self._context.journal.write("short", what=text)

    def _report_failure(self, path: Path, error: Exception) -> None:
        self._context.observer.note(f"{path.name} could not be made and run: {summary_line(error)}")
        self._context.journal.write("error", where=path.name, message=str(error))

    def _linked(self, path: Path) -> Path:
        """Return a library that was run in the form to keep; a farm's device links it."""
        library = path.with_suffix(".so")
        if library != path:
            library.unlink(missing_ok=True)
            self._run(save_linked, (str(path), str(library)), path)
            if not library.is_file():
                return path
            path.unlink()
        return library

    def _compare(
        self, before: Sequence[Measurement | None], after: Sequence[Measurement | None]
    ) -> Comparison | None:
        """Compare what was measured; None if a measurement is missing."""
        pairs = [
            (old, new)
            for old, new in zip(before, after, strict=True)
            if old is not None and new is not None
        ]
        if len(pairs) < len(before):
            return None
        differences = [largest_difference(new.outputs, old.outputs) for old, new in pairs]
        problems = [
            self._problem(i, new.outputs, old.outputs) for i, (old, new) in enumerate(pairs)
        ]
        problem = next(filter(None, problems), "")
        comparison = Comparison(
            before_sec=sum(old.latency_sec for old, _ in pairs),
            after_sec=sum(new.latency_sec for _, new in pairs),
            max_abs=max(difference.max_abs for difference in differences),
            max_rel=max(difference.max_rel for difference in differences),
            agree=not problem,
            problem=problem,
        )
        self._context.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison

    def _problem(self, place: int, outputs: Sequence[Any], reference: Sequence[Any]) -> str:
        """Say where the outputs of a library disagree with those of the untuned one."""
        raise NotImplementedError


class NetworkCheck(_EndToEndCheck):
    """Compile, run and time a network before and after its search."""

    def __init__(self, context: RunContext, network: Network, prepared: Prepared) -> None:
        super().__init__(context)
        self._prepared = prepared
        packed = ", weights packed" if prepared.prepack else ""
        self.preparation = f", layout {prepared.layout}{packed}"
        self._network = network
        self._inputs = network.inputs(context.seed)
        self._tuned: set[str] = set()
        self._before: Measurement | None = None
        # Kept until there is a tuned one: a run always ends with a library.
        self._untuned = context.work_dir / f"untuned{self._suffix}"

    @property
    def _later_run_sec(self) -> float:
        return 2 * _TIMING_SEC

    def measure_untuned(self) -> None:
        """Run the network without tuning: the reference for speed and outputs."""
        context = self._context
        with context.stage("untuned"):
            start_sec = time.perf_counter()
            compiled = compile_network(self._prepared, None, context.target)
            export(compiled, self._untuned)
            self._build_sec = time.perf_counter() - start_sec
            self._device_kind = compiled.device_kind
            self._set_coverage(compiled.coverage)
            most_sec = _UNTUNED_SHARE * context.budget.left_sec
            self._before = self._measure(self._untuned, min_seconds=0.5, most_sec=most_sec)
        if self._before is not None:
            context.journal.write("untuned", seconds=self._before.latency_sec)
            context.observer.note(f"untuned: {self._before.latency_sec * 1e3:.2f} ms")
            if self._network.original is not None and context.budget.left_sec > 0:
                self._check_import(self._network.original, self._before.outputs)

    def _check_import(self, original: Original, outputs: Sequence[Any]) -> None:
        """Compare with the framework that the network comes from."""
        observer, journal = self._context.observer, self._context.journal
        try:
            with contextlib.closing(original):
                expected = original.run(self._inputs)
        except Exception as error:  # the framework's own errors, of any kind
            message = f"{original.framework} could not run it: {summary_line(error)}"
            observer.note(f"outputs are not checked: {message}")
            journal.write("error", where="original", message=message)
            return
        difference = largest_difference(outputs, expected)
        scales = output_scales(main_of(self._network.mod))
        problem = outputs_problem(
            outputs,
            expected,
            self._context.config.finish.rtol,
            floors=[_ORIGINAL_ERROR * scale for scale in scales],
            names=self._network.output_names,
        )
        known = {"framework": original.framework, "agree": problem is None, "problem": problem}
        journal.write("original", **known, **difference._asdict())
        apart = f"{difference.max_abs:.2g} absolute, {difference.max_rel:.2g} relative"
        if problem is not None:
            raise ImportMismatchError(
                f"Imported and untuned, {self._prepared.name} computes something else than "
                f"{original.framework} (largest difference {apart}): {problem}. That comes from no "
                "tuned function, so that tuning would be useless. If that is rounding, allow more "
                "of it: finish.rtol in a --config file."
            )
        observer.note(f"outputs agree with {original.framework}; largest difference {apart}")

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database, compare with the untuned network."""
        context = self._context
        if context.budget.interrupted:
            self._untuned.unlink(missing_ok=True)
            return None
        path = context.work_dir / f"{self._prepared.name}{self._suffix}"
        with context.stage("compile"):
            is_compiled = self._compile(database, path)
        with context.stage("compare"):
            if not is_compiled:
                os.replace(self._untuned, path)
                self.library = self._linked(path)
                return None
            min_seconds = min(_TIMING_SEC, _TIMING_SHARE * context.budget.left_sec)
            after = self._measure(path, min_seconds=max(min_seconds, _LEAST_TIMING_SEC))
            self.library = self._linked(path)
            comparison = self._compare([self._before], [after])
        self._untuned.unlink(missing_ok=True)
        return comparison

    def _problem(self, _place: int, outputs: Sequence[Any], reference: Sequence[Any]) -> str:
        rtol, names = self._context.config.finish.rtol, self._network.output_names
        problem = outputs_problem(outputs, reference, rtol, names=names)
        if problem is None:
            return ""
        paths = str(self._untuned), str(self.library)
        builds = (paths, self._inputs, self._device_kind)
        source = source_of_difference(
            self._context, self._pool, self._prepared, builds, self._tuned
        )
        return f"{problem}; {source}"

    def _compile(self, database: Database, path: Path) -> bool:
        """Compile the tuned network; return False, and report why, if there is no library."""
        context = self._context
        try:
            self._check_time()
            mod, coverage = schedule_network(
                self._prepared, database, context.target, check=self._check_time
            )
            if not coverage.tuned and context.budget.seconds is not None:
                self._report_shortfall("nothing is tuned; the library is the untuned one")
                return False
            with ScratchFolder("network", context.work_dir) as folder:
                save_module(mod, folder)
                task = (str(folder), save_json(context.target), str(path))
                self._compile_tuned(export_module, task)
        except Exception as error:
            self._report_uncompiled(path, error, "; the library is the untuned one")
            return False
        self._set_coverage(coverage)
        context.journal.write("coverage", **dataclasses.asdict(coverage))
        return True

    def _set_coverage(self, coverage: Coverage) -> None:
        self.coverage = coverage.summary()
        self._tuned = set(coverage.tuned)
        self.n_tuned = len(coverage.tuned)

    def _measure(
        self, path: Path, *, min_seconds: float, most_sec: float = math.inf
    ) -> Measurement | None:
        run = functools.partial(try_exported, min_seconds=min_seconds)
        found = self._run(run, (str(path), self._inputs, self._device_kind), path, most_sec)
        if found is None:
            return None
        outputs, latency_sec = found
        return Measurement(outputs, latency_sec if latency_sec > 0 else math.nan)


class OperatorCheck(_EndToEndCheck):
    """Compile, run and time single functions before and after their search."""

    def __init__(self, context: RunContext, tasks: Sequence[ExtractedTask]) -> None:
        super().__init__(context)
        self._tasks = tasks
        self._before: list[Measurement | None] = []

    def measure_untuned(self) -> None:
        """Run every function without tuning: the reference for speed and outputs."""
        budget = self._context.budget
        with self._context.stage("untuned"):
            least_left_sec = (1.0 - _UNTUNED_SHARE) * budget.left_sec
            for task in self._tasks:
                if budget.left_sec <= least_left_sec < math.inf:
                    self._report_shortfall(f"no time was left to time {task.task_name} untuned")
                    self._before.append(None)
                    continue
                path = self._compile(task, None)
                # A function's first run is worth a little more than its share.
                most_sec = max(budget.left_sec - least_left_sec, _LEAST_RUN_SEC)
                self._before.append(None if path is None else self._measure(task, path, most_sec))
        known = [each.latency_sec for each in self._before if each is not None]
        if len(known) == len(self._tasks):
            self._context.journal.write("untuned", seconds=sum(known))
            self._context.observer.note(f"untuned: {sum(known) * 1e3:.3f} ms")

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database, compare with the untuned functions."""
        if self._context.budget.interrupted:
            return None
        # All libraries before any comparison: they are what the user wants.
        with self._context.stage("compile"):
            paths = [self._compile(task, database) for task in self._tasks]
        compiled = list(zip(self._tasks, paths, strict=True))
        with self._context.stage("compare"):
            after = [None if path is None else self._measure(task, path) for task, path in compiled]
            for task, path in compiled:
                if path is not None:
                    self.libraries[str(task.task_name)] = self._linked(path)
        self.n_tuned = sum(
            path is not None and database.has_workload(task.dispatched[0])
            for task, path in compiled
        )
        self.coverage = f"{self.n_tuned} of {len(self._tasks)} functions tuned"
        return self._compare(self._before, after)

    def _problem(self, place: int, outputs: Sequence[Any], reference: Sequence[Any]) -> str:
        problem = outputs_problem(outputs, reference, self._context.config.finish.rtol)
        return f"{self._tasks[place].task_name}: {problem}" if problem else ""

    def _compile(self, task: ExtractedTask, database: Database | None) -> Path | None:
        """Compile a function; return None, and report why, if there is no library."""
        target = self._context.target
        # Two names: a worker that has loaded a library would find the old one under it.
        state = ".untuned" if database is None else ""
        path = self._context.work_dir / f"{task.task_name}{state}{self._suffix}"
        try:
            mod = schedule_tir(task.dispatched[0], target, database)
            self._compile_tuned(export_function, (save_json(mod), save_json(target), str(path)))
        except Exception as error:
            self._report_uncompiled(path, error, "")
            return None
        return path

    def _measure(
        self, task: ExtractedTask, path: Path, most_sec: float = math.inf
    ) -> Measurement | None:
        mod = task.dispatched[0]
        args = [(tuple(int(n) for n in arg.shape), str(arg.dtype)) for arg in args_info_of(mod)]
        job = (str(path), args, device_kind(self._context.target), self._context.seed)
        found = self._run(try_function, job, path, most_sec)
        return None if found is None else Measurement(*found)


def tasks_and_check(
    context: RunContext, model: Network | TIRWorkload
) -> tuple[Sequence[ExtractedTask], NetworkCheck | OperatorCheck]:
    """Return the tasks of a model and its check, which is to be closed."""
    if isinstance(model, Network):
        with context.stage("prepare"):
            prepared = prepare(model, context.target, **context.config.preparation)
            tasks = extract(prepared, context.target)
        return tasks, NetworkCheck(context, model, prepared)
    tasks = functions_as_tasks(model.mod, context.target)
    return tasks, OperatorCheck(context, tasks)
