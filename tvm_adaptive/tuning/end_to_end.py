"""Compare the tuned whole with the untuned one: latency, and what it computes.

Both are run in worker processes, so that a crash or a hang of either costs an answer,
not the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm import Database, ExtractedTask, args_info_of, save_json
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
    compile_network,
    export,
    largest_difference,
    outputs_agree,
    try_exported,
)
from tvm_adaptive.models.compile import (
    device_kind,
    export_function,
    export_module,
    save_module,
    schedule_network,
    schedule_tir,
)
from tvm_adaptive.models.network import Original
from tvm_adaptive.models.run import try_function
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import Session
from tvm_adaptive.tuning.target import n_cores_of
from tvm_adaptive.workers.cores import thread_env
from tvm_adaptive.workers.device_session import save_linked
from tvm_adaptive.workers.pool import WorkerPool

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Self

# Untuned networks are slow: a few inferences of ten seconds each have to fit.
_RUN_TIMEOUT_SEC = 120.0
# Of the tuned network, measured at the end; the untuned one is only put in proportion.
_TIMING_SEC = 2.0
# Compiling tuned functions takes longer than untuned ones: they are unrolled.
_COMPILE_MARGIN = 2.5
# The same takes as long once more, but for what else the machine does, and for the way to
# another process.
_UNTUNED_MARGIN = 1.3
# Of what is left of a budget, what may go into timing what is not tuned yet: the rest is for
# the search, and for what has to come after it.
_UNTUNED_SHARE = 0.2
# With less, starting a worker and loading a library would be cut short as often as not.
_LEAST_RUN_SEC = 1.0
# Of what is left for a comparison, timing may take as much; outputs come first.
_TIMING_SHARE = 0.25
# A time of less is no time.
_LEAST_TIMING_SEC = 0.1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A network as it was measured."""

    outputs: list[Any]
    latency_sec: float


class _EndToEndCheck:
    """What both judges have: a worker to run things in, and what they found."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pool = worker_of(session)
        # Compiles what is tuned: TVM's passes cannot be interrupted in this process.
        self._compiler = WorkerPool(1, server=session.server)
        self._build_sec = 0.0
        self._run_sec = 0.0
        self.shortfall = ""
        self.failure = ""
        self.library: Path | None = None
        self.coverage = ""
        self.n_tuned = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.close()
        self._compiler.close()

    def _run(
        self,
        function: Callable[..., Any],
        task: tuple[Any, ...],
        path: Path,
        most_sec: float = math.inf,
    ) -> Any:
        """Run a library in the worker; an error is told to those who watch, and None."""
        limit_sec = min(_RUN_TIMEOUT_SEC, most_sec, self._session.budget.left_sec)
        if limit_sec < min(_LEAST_RUN_SEC, _RUN_TIMEOUT_SEC):
            self._tell_short(f"no time was left to run {path.name}")
            return None
        (outcome,) = self._pool.map(function, [task], limit_sec)
        self._run_sec += outcome.elapsed_sec
        if outcome.error is None:
            return outcome.value
        if isinstance(outcome.error, WorkerTimeoutError) and limit_sec < _RUN_TIMEOUT_SEC:
            self._tell_short(f"{path.name} was run for the {limit_sec:.0f} s that there were")
        else:
            self._tell_failure(path, outcome.error)
        return None

    def _compile_tuned(self, export: Callable[..., None], task: tuple[Any, ...]) -> None:
        """Compile in a worker, as long as the budget lasts."""
        self._check_time()
        limit_sec = self._session.budget.left_sec
        (outcome,) = self._compiler.map(export, [task], limit_sec)
        self._build_sec += outcome.elapsed_sec
        if isinstance(outcome.error, WorkerTimeoutError):
            raise OutOfTimeError(OUT_OF_TIME) from outcome.error
        if outcome.error is not None:
            raise outcome.error

    def _tell_uncompiled(self, path: Path, error: Exception, consequence: str) -> None:
        """Tell why there is no library: of TVM's passes, the linker or the disk, or for time."""
        if isinstance(error, OutOfTimeError):
            self._tell_short(f"no time was left to compile {path.name}{consequence}")
        else:
            self.failure = summary_line(error)
            self._tell_failure(path, error)

    def _check_time(self) -> None:
        """Raise OutOfTimeError if the budget is spent."""
        if self._session.budget.left_sec <= 0:
            raise OutOfTimeError(OUT_OF_TIME)

    def _tell_short(self, text: str) -> None:
        """Tell once what the budget was too short for: the first of it is the cause."""
        if not self.shortfall:
            self.shortfall = text
            self._session.observer.note(f"the budget is short: {text}")
            self._session.journal.write("short", what=text)

    def _tell_failure(self, path: Path, error: Exception) -> None:
        self._session.observer.note(f"{path.name} could not be made and run: {summary_line(error)}")
        self._session.journal.write("error", where=path.name, message=str(error))

    @property
    def _suffix(self) -> str:
        """What a library is called that is to be run: this machine links for itself only."""
        return ".so" if self._session.farm is None else ".tar"

    def _linked(self, path: Path) -> Path:
        """Return a library that was run as one to keep; on a farm, a device links it."""
        library = path.with_suffix(".so")
        if library != path:
            library.unlink(missing_ok=True)
            self._run(save_linked, (str(path), str(library)), path)
            if not library.is_file():
                return path
            path.unlink()
        return library


def worker_of(session: Session) -> WorkerPool:
    """Return a worker that runs libraries: on this machine, or on the session's farm."""
    if session.farm is not None:
        return LeasingPool(session.farm, server=session.server)
    return WorkerPool(1, env=thread_env(n_cores_of(session.target)), server=session.server)


class NetworkCheck(_EndToEndCheck):
    """Compile, run and time a network before and after its search."""

    def __init__(self, session: Session, network: Network, prepared: Prepared) -> None:
        super().__init__(session)
        self._prepared = prepared
        self._inputs = network.random_inputs(session.seed)
        self._original = network.original
        self._before: Measurement | None = None
        # Kept until there is a tuned one: a run always ends with a library.
        self._untuned = session.work_dir / f"untuned{self._suffix}"

    @property
    def reserve_sec(self) -> float:
        """Seconds to keep back for :meth:`measure_tuned`, where all is tuned."""
        return _COMPILE_MARGIN * self._build_sec + 2 * _TIMING_SEC

    @property
    def least_reserve_sec(self) -> float:
        """The same, where hardly anything is: it is compiled once more."""
        return _UNTUNED_MARGIN * self._build_sec + 2 * _TIMING_SEC

    def measure_untuned(self) -> None:
        """Run the network without tuning: the reference for speed and outputs."""
        with self._session.stage("untuned"):
            start_sec = time.perf_counter()
            compiled = compile_network(self._prepared, None, self._session.target)
            export(compiled, self._untuned)
            self._build_sec = time.perf_counter() - start_sec
            self._device_kind = compiled.device_kind
            self._set_coverage(compiled.coverage)
            most_sec = _UNTUNED_SHARE * self._session.budget.left_sec
            self._before = self._measure(self._untuned, min_seconds=0.5, most_sec=most_sec)
        if self._before is not None:
            self._session.journal.write("untuned", seconds=self._before.latency_sec)
            self._session.observer.note(f"untuned: {self._before.latency_sec * 1e3:.2f} ms")
            if self._original is not None and self._session.budget.left_sec > 0:
                self._check_import(self._original, self._before.outputs)

    def _check_import(self, original: Original, outputs: Sequence[Any]) -> None:
        """Compare with the framework that the network comes from."""
        try:
            with contextlib.closing(original):
                expected = original.run(self._inputs)
        except Exception as error:  # the framework's own errors, of any kind
            message = f"{original.framework} could not run it: {summary_line(error)}"
            self._session.observer.note(f"outputs are not checked: {message}")
            self._session.journal.write("error", where="original", message=message)
            return
        difference = largest_difference(outputs, expected)
        agree = outputs_agree(outputs, expected, self._session.config.finish.rtol)
        self._session.journal.write(
            "original", framework=original.framework, agree=agree, **difference._asdict()
        )
        apart = f"{difference.max_abs:.2g} absolute, {difference.max_rel:.2g} relative"
        if not agree:
            raise ImportMismatchError(
                f"Imported and untuned, {self._prepared.name} computes something else than "
                f"{original.framework} (largest difference {apart}), so that tuning it would "
                "be in vain. If that is rounding, allow more of it: finish.rtol in a --config "
                "file."
            )
        self._session.observer.note(
            f"outputs agree with {original.framework}; largest difference {apart}"
        )

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database, compare with the untuned network."""
        if self._session.budget.interrupted:
            self._untuned.unlink(missing_ok=True)
            return None
        path = self._session.work_dir / f"{self._prepared.name}{self._suffix}"
        with self._session.stage("compile"):
            is_compiled = self._is_compiled(database, path)
        with self._session.stage("compare"):
            if not is_compiled:
                os.replace(self._untuned, path)
                self.library = self._linked(path)
                return None
            min_seconds = min(_TIMING_SEC, _TIMING_SHARE * self._session.budget.left_sec)
            after = self._measure(path, min_seconds=max(min_seconds, _LEAST_TIMING_SEC))
            self.library = self._linked(path)
        self._untuned.unlink(missing_ok=True)
        if after is None or self._before is None:
            return None
        difference = largest_difference(after.outputs, self._before.outputs)
        comparison = Comparison(
            before_sec=self._before.latency_sec,
            after_sec=after.latency_sec,
            max_abs=difference.max_abs,
            max_rel=difference.max_rel,
            agree=outputs_agree(
                after.outputs, self._before.outputs, self._session.config.finish.rtol
            ),
        )
        self._session.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison

    def _is_compiled(self, database: Database, path: Path) -> bool:
        """Compile what is tuned; say whether that was done, and tell why not."""
        target = self._session.target
        try:
            self._check_time()
            mod, coverage = schedule_network(
                self._prepared, database, target, check=self._check_time
            )
            if not coverage.tuned and self._session.budget.seconds is not None:
                self._tell_short("nothing is tuned; the library is the untuned one")
                return False
            with tempfile.TemporaryDirectory(dir=self._session.work_dir) as folder:
                save_module(mod, Path(folder))
                self._compile_tuned(export_module, (folder, save_json(target), str(path)))
        except Exception as error:
            self._tell_uncompiled(path, error, "; the library is the untuned one")
            return False
        self._set_coverage(coverage)
        self._session.journal.write("coverage", **dataclasses.asdict(coverage))
        return True

    def _set_coverage(self, coverage: Coverage) -> None:
        self.coverage = coverage.summary()
        self.n_tuned = len(coverage.tuned)

    def _measure(
        self, path: Path, *, min_seconds: float, most_sec: float = math.inf
    ) -> Measurement | None:
        run = functools.partial(try_exported, min_seconds=min_seconds)
        task = (str(path), self._inputs, self._device_kind)
        found = self._run(run, task, path, most_sec)
        if found is None:
            return None
        outputs, latency_sec = found
        return Measurement(outputs, latency_sec if latency_sec > 0 else math.nan)


class OperatorCheck(_EndToEndCheck):
    """Compile, run and time single functions before and after their search."""

    def __init__(self, session: Session, tasks: Sequence[ExtractedTask]) -> None:
        super().__init__(session)
        self._tasks = tasks
        self._before: list[Measurement | None] = []
        self.libraries: dict[str, Path] = {}

    @property
    def reserve_sec(self) -> float:
        """Seconds to keep back for :meth:`measure_tuned`, where all is tuned."""
        return _COMPILE_MARGIN * self._build_sec + self._run_sec

    @property
    def least_reserve_sec(self) -> float:
        """The same, where hardly anything is: it is compiled once more."""
        return _UNTUNED_MARGIN * self._build_sec + self._run_sec

    def measure_untuned(self) -> None:
        """Run every function without tuning: the reference for speed and outputs."""
        with self._session.stage("untuned"):
            least_left_sec = (1.0 - _UNTUNED_SHARE) * self._session.budget.left_sec
            self._before = []
            for task in self._tasks:
                if self._session.budget.left_sec <= least_left_sec < math.inf:
                    self._tell_short(f"no time was left to time {task.task_name} untuned")
                    self._before.append(None)
                    continue
                path = self._compiled(task, None)
                # A function's first run is worth a little more than its share.
                most_sec = max(self._session.budget.left_sec - least_left_sec, _LEAST_RUN_SEC)
                self._before.append(None if path is None else self._measure(task, path, most_sec))
        if all(whole is not None for whole in self._before):
            total_sec = sum(whole.latency_sec for whole in self._before if whole is not None)
            self._session.journal.write("untuned", seconds=total_sec)
            self._session.observer.note(f"untuned: {total_sec * 1e3:.3f} ms")

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database, compare with the untuned functions."""
        if self._session.budget.interrupted:
            return None
        # All libraries before any comparison: they are what is wanted.
        with self._session.stage("compile"):
            paths = [self._compiled(task, database) for task in self._tasks]
        with self._session.stage("compare"):
            after = [
                None if path is None else self._measure(task, path)
                for task, path in zip(self._tasks, paths, strict=True)
            ]
            for task, path in zip(self._tasks, paths, strict=True):
                if path is not None:
                    self.libraries[str(task.task_name)] = self._linked(path)
        self.n_tuned = sum(
            str(task.task_name) in self.libraries and database.has_workload(task.dispatched[0])
            for task in self._tasks
        )
        self.coverage = f"{self.n_tuned} of {len(self._tasks)} functions tuned"
        pairs = list(zip(self._before, after, strict=True))
        known = [(old, new) for old, new in pairs if old is not None and new is not None]
        if len(known) < len(pairs):
            return None
        differences = [largest_difference(new.outputs, old.outputs) for old, new in known]
        rtol = self._session.config.finish.rtol
        comparison = Comparison(
            before_sec=sum(old.latency_sec for old, _ in known),
            after_sec=sum(new.latency_sec for _, new in known),
            max_abs=max(difference.max_abs for difference in differences),
            max_rel=max(difference.max_rel for difference in differences),
            agree=all(outputs_agree(new.outputs, old.outputs, rtol) for old, new in known),
        )
        self._session.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison

    def _compiled(self, task: ExtractedTask, database: Database | None) -> Path | None:
        """Return a function's library; None, with a word on why, if there is none."""
        target = self._session.target
        # Not the same name twice: a worker that has loaded a library would find the old
        # one under it.
        state = ".untuned" if database is None else ""
        path = self._session.work_dir / f"{task.task_name}{state}{self._suffix}"
        try:
            mod = schedule_tir(task.dispatched[0], target, database)
            self._compile_tuned(export_function, (save_json(mod), save_json(target), str(path)))
        except Exception as error:
            self._tell_uncompiled(path, error, "")
            return None
        return path

    def _measure(
        self, task: ExtractedTask, path: Path, most_sec: float = math.inf
    ) -> Measurement | None:
        mod = task.dispatched[0]
        args = [(tuple(int(n) for n in arg.shape), str(arg.dtype)) for arg in args_info_of(mod)]
        job = (str(path), args, device_kind(self._session.target), self._session.seed)
        found = self._run(try_function, job, path, most_sec)
        return None if found is None else Measurement(*found)
