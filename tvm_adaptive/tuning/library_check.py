"""What the checks of networks and of single functions share, and the check of single functions.

Both compile and run in worker processes, so that a crash or a hang does not end the run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm import (
    TVM_VERSION,
    Database,
    ExtractedTask,
    IRModule,
    TuningRecord,
    args_info_of,
    record_as_json,
    save_json,
    workload_key,
)
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.errors import OUT_OF_TIME, OutOfTimeError, WorkerTimeoutError, summary_line
from tvm_adaptive.models import largest_difference
from tvm_adaptive.models.compare_calls import call_problem
from tvm_adaptive.models.compile import Coverage, device_kind, export_function, schedule_tir
from tvm_adaptive.models.run import try_function
from tvm_adaptive.runner.playoff.playoff import finalist_pool
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.budget import EndCosts
from tvm_adaptive.tuning.build_check import tolerances
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.tuning.target import n_cores_of
from tvm_adaptive.values.forms import FormKey
from tvm_adaptive.values.trace_json import without_flags
from tvm_adaptive.workers.device_session import save_linked
from tvm_adaptive.workers.pool import WorkerPool

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Self

# Untuned networks are slow: a few inferences of ten seconds each have to fit.
RUN_TIMEOUT_SEC = 120.0
# With less, starting a worker and loading a library would be cut short as often as not.
LEAST_RUN_SEC = 1.0
# Compiling tuned functions takes longer than untuned ones: they are unrolled.
_COMPILE_MARGIN = 2.5
# Compiling untuned functions again takes the same time, plus what else the machine does,
# plus the way to another process.
_UNTUNED_MARGIN = 1.3
# In the names of libraries that are only compared with.
_UNTUNED = ".untuned"
# The share of the remaining budget that may go into timing untuned code: the rest is for
# the search and for what follows it.
UNTUNED_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The outputs and the latency of a library."""

    outputs: list[Any]
    latency_sec: float
    device: str = ""  # of a farm


@dataclasses.dataclass(frozen=True)
class FunctionCheck:
    """What a check within the network has found of a task's functions."""

    # "" if they compute the same as untuned, else why not; None if that is not known.
    problem: str | None = None
    seconds: float = math.inf  # of one call, roughly


def kernel_worker(context: RunContext, time_left: Callable[[], float] | None) -> WorkerPool:
    """Return the worker that runs kernels and libraries, on this machine or a farm's device."""
    return finalist_pool(
        *(n_cores_of(context.target), context.server, context.farm),
        time_left=time_left,
        device_index=context.config.measure.device_indices[0],
        suspended=context.suspended,
    )


class LibraryCheck:
    """What both checks share: workers to run and compile in, and their findings."""

    preparation = ""  # how the model was prepared, to be added to a note
    uses_forms = False  # whether the library computes something in another form
    is_direct = False  # whether it may not

    def __init__(self, context: RunContext) -> None:
        self._context = context
        # Runs libraries, on this machine or on the farm.
        self._pool = kernel_worker(context, lambda: context.budget.left_sec)
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
        self.covered = Coverage({}, {}, {})  # the same by the functions' names
        # The forms that functions belong to, by their names; see ``values.forms``.
        self.forms: Mapping[str, FormKey] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.close()
        self._compiler.close()

    @property
    def n_tuned(self) -> int:
        """How many functions of the library have a tuned schedule."""
        return len(self.covered.tuned)

    @property
    def _device(self) -> str:
        """The device of a farm that the last library ran on."""
        return self._pool.address if isinstance(self._pool, LeasingPool) else ""

    @property
    def _later_run_sec(self) -> float:
        """Seconds that running the tuned code takes."""
        return self._run_sec

    def end_costs(self) -> EndCosts:
        """Return the seconds that ``measure_tuned`` takes."""
        return EndCosts(
            later_sec=_COMPILE_MARGIN * self._build_sec + self._later_run_sec,
            least_later_sec=_UNTUNED_MARGIN * self._build_sec + self._later_run_sec,
            margin_sec=(_UNTUNED_MARGIN - 1.0) * self._build_sec,
        )

    def gives_up_forms(self, comparison: Comparison | None) -> bool:
        """Leave other forms out if the outputs disagree; return False if that changes nothing."""
        if comparison is None or comparison.agree or not self.uses_forms:
            return False
        self._context.observer.note(
            f"{comparison.problem}; convolutions are computed directly instead, which rounds less"
        )
        self._context.journal.write("error", where="forms", message=comparison.problem)
        self.without_forms()
        self.release_device()  # the play-offs that follow need it
        return True

    def without_forms(self) -> None:
        """Compute everything in its direct form from now on."""
        self.is_direct = True

    def release_device(self) -> None:
        """Give a farm's device back, which the search and play-offs need."""
        if isinstance(self._pool, LeasingPool):
            self._pool.release()

    def begin_untuned(self) -> None:
        """Start in a worker what ``measure_untuned`` waits for, where anything can be."""

    def check_functions(self, _database: Database, mods: Sequence[IRModule]) -> list[FunctionCheck]:
        """Compile with a database, and check the functions of ``mods``, which are not tuned."""
        return [FunctionCheck()] * len(mods)

    def _run(
        self,
        function: Callable[..., Any],
        task: tuple[Any, ...],
        path: Path,
        most_sec: float = math.inf,
        late: Callable[[float], None] | None = None,  # reports that ``most_sec`` have passed
    ) -> Any:
        """Run a library in the worker; None after an error, which is reported."""
        limit_sec = min(RUN_TIMEOUT_SEC, most_sec, self._context.budget.left_sec)
        if limit_sec < LEAST_RUN_SEC:
            self._report_shortfall(f"no time was left to run {path.name}")
            return None
        (outcome,) = self._pool.map(function, [task], limit_sec)
        self._run_sec += outcome.elapsed_sec
        if outcome.error is None:
            return outcome.value
        if isinstance(outcome.error, WorkerTimeoutError) and late is not None:
            late(limit_sec)
        elif isinstance(outcome.error, WorkerTimeoutError) and limit_sec < RUN_TIMEOUT_SEC:
            self._report_shortfall(f"{path.name} was stopped after the {limit_sec:.0f} s left")
        else:
            self._report_failure(path, outcome.error)
        return None

    def _comparable_sec(self, before: Measurement | None) -> float:
        """Return a latency; infinite if the last library ran on another device."""
        if before is None or before.device != self._device:
            return math.inf
        return before.latency_sec

    def _compile_tuned(self, export: Callable[..., Any], task: tuple[Any, ...]) -> None:
        """Compile in a worker, as long as budget and overtime last."""
        self._check_overtime()
        limit_sec = self._context.budget.overtime_left_sec
        (outcome,) = self._compiler.map(export, [task], limit_sec)
        self._build_sec += outcome.elapsed_sec
        if isinstance(outcome.error, WorkerTimeoutError):
            raise OutOfTimeError(OUT_OF_TIME) from outcome.error
        if outcome.error is not None:
            raise outcome.error

    def _check_time(self) -> None:
        if self._context.budget.left_sec <= 0:
            raise OutOfTimeError(OUT_OF_TIME)

    def _check_overtime(self) -> None:
        if self._context.budget.overtime_left_sec <= 0:
            raise OutOfTimeError(OUT_OF_TIME)

    def _report_uncompiled(self, path: Path, error: Exception, consequence: str) -> None:
        """Report why there is no library: TVM's passes, the linker, the disk, or no time."""
        if isinstance(error, OutOfTimeError):
            self._report_shortfall(f"no time was left to compile {path.name}{consequence}")
        else:
            self.failure = summary_line(error)
            self._report_failure(path, error)

    def _report_shortfall(self, text: str, cause: str = "the budget is short: ") -> None:
        """Report once what there is no comparison for: the first reason is the cause."""
        if not self.shortfall:
            self.shortfall = text
            self._context.observer.note(f"{cause}{text}")
            self._context.journal.write("short", what=text)

    def _report_failure(self, path: Path, error: Exception) -> None:
        self._context.observer.note(f"{path.name} could not be made and run: {summary_line(error)}")
        self._context.journal.write("error", where=path.name, message=str(error))

    def _linked(self, path: Path) -> Path:
        """Return a library that was run in the form to keep; a farm's device links it."""
        library = path.with_suffix(".so")
        if library == path or not path.is_file():  # an earlier attempt has linked it
            return library
        library.unlink(missing_ok=True)
        self._run(save_linked, (str(path), str(library)), path)
        if not library.is_file():
            return path
        path.unlink()
        return library


class OperatorCheck(LibraryCheck):
    """Compile, run and time single functions before and after their search."""

    def __init__(self, context: RunContext, tasks: Sequence[ExtractedTask]) -> None:
        super().__init__(context)
        self._tasks = tasks
        self._before: list[Measurement | None] = []
        self._tuned: set[str] = set()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for task in self._tasks:
            self._path(task, _UNTUNED).unlink(missing_ok=True)

    def measure_untuned(self) -> None:
        """Run every function without tuning: the reference for speed and outputs."""
        budget = self._context.budget
        with self._context.stage("untuned"):
            least_left_sec = (1.0 - UNTUNED_SHARE) * budget.left_sec
            for task in self._tasks:
                if budget.interrupted:
                    self._before.append(None)
                    continue
                if budget.left_sec <= least_left_sec < math.inf:
                    self._report_shortfall(f"no time was left to time {task.task_name} untuned")
                    self._before.append(None)
                    continue
                path = self._compile(task, None)
                # A function's first run is worth a little more than its share.
                most_sec = max(budget.left_sec - least_left_sec, LEAST_RUN_SEC)
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
        tuned: dict[str, int] = {}
        fallback: dict[str, int] = {}
        for task, path in compiled:
            name = str(task.task_name)
            is_tuned = path is not None and name in self._tuned
            (tuned if is_tuned else fallback)[name] = 1
        self.covered = Coverage(tuned, fallback, failed={})
        self.coverage = f"{self.n_tuned} of {len(self._tasks)} functions tuned"
        return self._compare(self._before, after)

    def _compile(self, task: ExtractedTask, database: Database | None) -> Path | None:
        """Compile a function; return None, and report why, if there is no library."""
        target = self._context.target
        # Two names: a worker that has loaded a library would find the old one under it.
        path = self._path(task, _UNTUNED if database is None else "")
        try:
            self._check_time()
            mod, is_tuned = schedule_tir(task.dispatched[0], target, database)
            self._compile_tuned(export_function, (save_json(mod), save_json(target), str(path)))
        except Exception as error:
            self._report_uncompiled(path, error, "")
            return None
        if is_tuned:
            self._tuned.add(str(task.task_name))
        return path

    def _path(self, task: ExtractedTask, state: str) -> Path:
        return self._context.work_dir / f"{task.task_name}{state}{self._suffix}"

    def _measure(
        self, task: ExtractedTask, path: Path, most_sec: float = math.inf
    ) -> Measurement | None:
        mod = task.dispatched[0]
        args = [(tuple(int(n) for n in arg.shape), str(arg.dtype)) for arg in args_info_of(mod)]
        job = (str(path), args, device_kind(self._context.target), self._context.seed)
        found = self._run(try_function, job, path, most_sec)
        if found is None:
            return None
        outputs, latency_sec = found
        return Measurement(outputs, latency_sec, self._device)

    def _compare(
        self, before: Sequence[Measurement | None], after: Sequence[Measurement | None]
    ) -> Comparison | None:
        """Compare what was measured; None if a measurement is missing and nothing is wrong."""
        pairs = {
            str(task.task_name): (old, new)
            for task, old, new in zip(self._tasks, before, after, strict=True)
            if old is not None and new is not None
        }
        mods = {str(task.task_name): task.dispatched[0] for task in self._tasks}
        functions = {name: mods[name]["main"] for name in pairs}
        rtols = tolerances(functions, self._context.config.finish.rtol)
        found = {
            name: call_problem(new.outputs, old.outputs, rtols[name])
            for name, (old, new) in pairs.items()
        }
        problem = next((f"{name}: {text}" for name, text in found.items() if text), "")
        is_whole = len(pairs) == len(before)
        if not is_whole and not problem:
            return None
        differences = [largest_difference(new.outputs, old.outputs) for old, new in pairs.values()]
        is_fair = is_whole and all(old.device == new.device for old, new in pairs.values())
        comparison = Comparison(
            before_sec=sum(old.latency_sec for old, _ in pairs.values()) if is_fair else math.inf,
            after_sec=sum(new.latency_sec for _, new in pairs.values()) if is_whole else math.inf,
            max_abs=max(difference.max_abs for difference in differences),
            max_rel=max(difference.max_rel for difference in differences),
            agree=not problem,
            problem=problem,
        )
        self._context.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison


def key_of_record(record: TuningRecord) -> str:
    """Return a text that only records with the same schedule of the same function share."""
    choices, _, *_ = record_as_json(record)
    return json.dumps([workload_key(record.workload.mod), without_flags(choices)])


def coverage_of_earlier(session: Session) -> str:
    """Return which functions are tuned in an earlier attempt's library; "" if it must go.

    It stays if its outputs agreed, and no kernel was refused since: it may be in it.
    """
    history = session.history
    report = history.library_report
    if report is None or not report["comparison"].get("agree"):
        return ""
    runs_since = (*history.runs_since, session.run_id)
    verdicts = VerdictFile(session.work_dir, str(TVM_VERSION)).read().values()
    new = [each for those in verdicts for each in those if each.run.startswith(runs_since)]
    return "" if any(each.failure for each in new) else str(report["coverage"])
