"""What the checks of networks and of single functions share: workers, time, and findings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm import Database, IRModule
from tvm_adaptive.errors import OUT_OF_TIME, OutOfTimeError, WorkerTimeoutError, summary_line
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.session import RunContext
from tvm_adaptive.tuning.target import n_cores_of
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.device_session import save_linked
from tvm_adaptive.workers.pool import WorkerPool

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Self

# Untuned networks are slow: a few inferences of ten seconds each have to fit.
_RUN_TIMEOUT_SEC = 120.0
# With less, starting a worker and loading a library would be cut short as often as not.
LEAST_RUN_SEC = 1.0
# Compiling tuned functions takes longer than untuned ones: they are unrolled.
_COMPILE_MARGIN = 2.5
# Compiling untuned functions again takes the same time, plus what else the machine does,
# plus the way to another process.
_UNTUNED_MARGIN = 1.3
# The share of compiling an untuned network that goes into its functions; the rest are passes,
# weights and the linker. Of a network with 75 functions it is 15 of 17 s.
_FUNCTIONS_SHARE = 0.85
# The share of the remaining budget that may go into timing untuned code: the rest is for
# the search and for what follows it.
UNTUNED_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The outputs and the latency of a library."""

    outputs: list[Any]
    latency_sec: float


class LibraryCheck:
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

    @property
    def untuned_functions_sec(self) -> float:
        """Of ``least_reserve_sec``, what the functions take that could be tuned."""
        return _FUNCTIONS_SHARE * _UNTUNED_MARGIN * self._build_sec

    @property
    def network_check_sec(self) -> float | None:
        """Seconds of a check of all functions within the network; None if it is impossible."""
        return None

    def check_functions(self, _database: Database, mods: Sequence[IRModule]) -> list[str | None]:
        """Compile with a database, and check functions within the network.

        Returns
        -------
        list of str or None
            Of each of ``mods``, which are not tuned: "" if its functions compute the same with
            the database as without it, else why not; None if that could not be found out.
        """
        return [None] * len(mods)

    def _run(
        self,
        function: Callable[..., Any],
        task: tuple[Any, ...],
        path: Path,
        most_sec: float = math.inf,
        late: Callable[[float], None] | None = None,
    ) -> Any:
        """Run a library in the worker; None after an error, which is reported.

        ``late`` reports that ``most_sec`` have passed; without it the budget was too short.
        """
        limit_sec = min(_RUN_TIMEOUT_SEC, most_sec, self._context.budget.left_sec)
        if limit_sec < min(LEAST_RUN_SEC, _RUN_TIMEOUT_SEC):
            self._report_shortfall(f"no time was left to run {path.name}")
            return None
        (outcome,) = self._pool.map(function, [task], limit_sec)
        self._run_sec += outcome.elapsed_sec
        if outcome.error is None:
            return outcome.value
        if isinstance(outcome.error, WorkerTimeoutError) and late is not None:
            late(limit_sec)
        elif isinstance(outcome.error, WorkerTimeoutError) and limit_sec < _RUN_TIMEOUT_SEC:
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
        if library != path:
            library.unlink(missing_ok=True)
            self._run(save_linked, (str(path), str(library)), path)
            if not library.is_file():
                return path
            path.unlink()
        return library
