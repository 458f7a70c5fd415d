"""What the checks of networks and of single functions share.

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
    IRModule,
    TuningRecord,
    record_as_json,
    workload_key,
)
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.errors import (
    OUT_OF_TIME,
    MachineError,
    NoDeviceError,
    OutOfTimeError,
    WorkerTimeoutError,
    summary_line,
)
from tvm_adaptive.measure_callback.history import GAVE_UP_FORMS
from tvm_adaptive.models.compile import Coverage, device_kind
from tvm_adaptive.runner.playoff.playoff import finalist_pool
from tvm_adaptive.runner.rpc.leased_worker import LOST_DEVICE, LeasingPool
from tvm_adaptive.tuning.budget import EndCosts
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.tuning.target import n_cores_of, n_threads_of
from tvm_adaptive.values.forms import FormKey
from tvm_adaptive.values.trace_json import without_flags
from tvm_adaptive.workers.device_session import save_linked
from tvm_adaptive.workers.pool import WorkerPool
from tvm_adaptive.workers.roofline import measure_roofline

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Self

# Untuned networks are slow: a few inferences of ten seconds each have to fit.
RUN_TIMEOUT_SEC = 120.0
# With less, starting a worker and loading a library would be cut short as often as not.
LEAST_RUN_SEC = 1.0
# Two measurements, with importing what they need.
_ROOFLINE_SEC = 1.0
_ROOFLINE_TIMEOUT_SEC = 10.0
# Compiling tuned functions takes longer than untuned ones: they are unrolled.
_COMPILE_MARGIN = 2.5
# Compiling untuned functions again takes the same time, plus what else the machine does,
# plus the way to another process.
_UNTUNED_MARGIN = 1.3
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
        n_cores_of(context.target),
        context.server,
        context.farm,
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
        # Whether libraries run on this machine's CPU.
        self._is_here = context.farm is None and device_kind(context.target) == "cpu"
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
        self.run_failure = ""  # of the library that was run last
        self.is_compiled = False  # the result, with the records that it was to have
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

    @property
    def may_give_up_forms(self) -> bool:
        """Whether forms may be why outputs disagree."""
        return self.uses_forms

    def gives_up_forms(self, comparison: Comparison | None) -> bool:
        """Leave other forms out if the outputs disagree; return False if that changes nothing."""
        if comparison is None or comparison.agree or not self.may_give_up_forms:
            return False
        self._context.observer.note(
            f"{comparison.problem}; convolutions are computed directly instead, which rounds less"
        )
        self._context.journal.write("error", where=GAVE_UP_FORMS, message=comparison.problem)
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
        # A device that has lost its power looks like a library that hangs or crashes. Of one that
        # lacks disk space or memory, another one may have enough.
        n_tries = 2 if isinstance(self._pool, LeasingPool) else 1
        for _ in range(n_tries):
            limit_sec = min(RUN_TIMEOUT_SEC, most_sec / n_tries, self._context.budget.left_sec)
            if limit_sec < LEAST_RUN_SEC:
                self._report_shortfall(f"no time was left to run {path.name}")
                return None
            (outcome,) = self._pool.map(function, [task], limit_sec)
            self._run_sec += outcome.elapsed_sec
            if not isinstance(outcome.error, (*LOST_DEVICE, MachineError)):
                break
        if outcome.error is None:
            return outcome.value
        if isinstance(outcome.error, WorkerTimeoutError) and late is not None:
            late(limit_sec)
        elif isinstance(outcome.error, WorkerTimeoutError) and limit_sec < RUN_TIMEOUT_SEC:
            self._report_shortfall(f"{path.name} was stopped after the {limit_sec:.0f} s left")
        else:
            self._report_failure(path, outcome.error)
        return None

    def _write_roofline(self) -> None:
        """Measure for the journal what this processor reaches, if there is time."""
        if self._context.budget.left_sec < _ROOFLINE_SEC:
            return
        n_threads = n_threads_of(self._context.target)
        limit_sec = min(_ROOFLINE_TIMEOUT_SEC, self._context.budget.left_sec)
        (outcome,) = self._pool.map(measure_roofline, [(n_threads,)], limit_sec)
        if outcome.error is None:
            self._context.journal.write("roofline", **outcome.value._asdict())

    def _compile_tuned(self, export: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        """Compile in a worker, as long as budget and overtime last."""
        self._check_overtime()
        limit_sec = self._context.budget.overtime_left_sec
        (outcome,) = self._compiler.map(export, [task], limit_sec)
        self._build_sec += outcome.elapsed_sec
        if isinstance(outcome.error, WorkerTimeoutError):
            raise OutOfTimeError(OUT_OF_TIME) from outcome.error
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

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
        self.shortfall = ""  # an earlier lack of time is not why the result cannot be run
        if not isinstance(error, (NoDeviceError, MachineError)):  # these say nothing of it
            self.run_failure = summary_line(error)
        self._context.observer.note(f"{path.name} could not be made and run: {summary_line(error)}")
        self._context.journal.write("error", where=path.name, message=str(error))

    def _forget_description(self, *names: str) -> None:
        """Remove what describes the library before, for which programs would take this one."""
        if not isinstance(self._context, Session):  # a run has no such files
            for name in names:
                (self._context.work_dir / name).unlink(missing_ok=True)

    def _linked(self, path: Path) -> Path:
        """Return a library that was run in the form to keep; a farm's device links it."""
        library = path.with_suffix(".so")
        if library == path or not path.is_file():  # an earlier attempt has linked it
            return library
        library.unlink(missing_ok=True)
        if not self._run(save_linked, (str(path), str(library)), path):
            Path(f"{library}.new").unlink(missing_ok=True)  # of a worker that was killed
            return path
        path.unlink()
        return library


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
