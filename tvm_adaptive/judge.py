"""Compare the tuned whole with the untuned one: latency, and what it computes.

Both are run in worker processes, so that a crash or a hang of either costs an answer,
not the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm import Database, ExtractedTask, args_info_of
from tvm_adaptive.cores import thread_env
from tvm_adaptive.errors import ImportMismatchError, essence
from tvm_adaptive.models import (
    Network,
    Prepared,
    compile_network,
    compile_tir,
    export,
    largest_difference,
    outputs_agree,
    try_exported,
)
from tvm_adaptive.models.compile import device_kind
from tvm_adaptive.models.network import Original
from tvm_adaptive.models.operator import try_function
from tvm_adaptive.outcome import Comparison
from tvm_adaptive.runner.leasing import LeasingPool
from tvm_adaptive.session import Session
from tvm_adaptive.station import save_linked
from tvm_adaptive.target import n_cores_of
from tvm_adaptive.workers import WorkerPool

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Self

# Untuned networks are slow: a few inferences of ten seconds each have to fit.
_RUN_TIMEOUT_SEC = 120.0
# Of the tuned network, measured at the end; the untuned one is only put in proportion.
_TIMING_SEC = 2.0
# Compiling tuned functions takes longer than untuned ones: they are unrolled.
_COMPILE_MARGIN = 2.5


@dataclasses.dataclass(frozen=True)
class Whole:
    """A network as it was measured.

    Attributes
    ----------
    outputs : list of ndarray
    latency_sec : float
    """

    outputs: list[Any]
    latency_sec: float


class _Judge:
    """What both judges have: a worker to run things in, and what they found.

    Parameters
    ----------
    session : Session

    Attributes
    ----------
    library : Path or None
        The tuned library, once there is one. For a device elsewhere that could not link it,
        its objects as an archive.
    coverage : str
        How much of what was compiled is tuned; empty until then.
    n_tuned : int
        Functions that are.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pool = worker_of(session)
        self._build_sec = 0.0
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

    def _run(self, function: Callable[..., Any], task: tuple[Any, ...], path: Path) -> Any:
        """Run a library in the worker; an error is told to those who watch, and None."""
        (outcome,) = self._pool.map(function, [task], _RUN_TIMEOUT_SEC)
        if outcome.error is None:
            return outcome.value
        self._tell_failure(path, outcome.error)
        return None

    def _tell_failure(self, path: Path, error: Exception) -> None:
        self._session.observer.note(f"{path.name} could not be made and run: {essence(error)}")
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


class NetworkJudge(_Judge):
    """Compile, run and time a network before and after its search.

    Parameters
    ----------
    session : Session
    network : Network
    prepared : Prepared
    """

    def __init__(self, session: Session, network: Network, prepared: Prepared) -> None:
        super().__init__(session)
        self._prepared = prepared
        self._inputs = network.random_inputs(session.seed)
        self._original = network.original
        self._before: Whole | None = None

    @property
    def reserve_sec(self) -> float:
        """Seconds to keep back for :meth:`measure_tuned`."""
        return _COMPILE_MARGIN * self._build_sec + 2 * _TIMING_SEC

    def measure_untuned(self) -> None:
        """Run the network without tuning: the reference for speed and outputs.

        Raises
        ------
        ImportMismatchError
            When it computes something else than what it was imported from.
        """
        with self._session.stage("untuned"):
            path = self._session.work_dir / f"untuned{self._suffix}"
            start_sec = time.perf_counter()
            self._compile(None, path)
            self._build_sec = time.perf_counter() - start_sec
            self._before = self._measure(path, min_seconds=0.5)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if self._before is not None:
            self._session.journal.write("untuned", seconds=self._before.latency_sec)
            self._session.observer.note(f"untuned: {self._before.latency_sec * 1e3:.2f} ms")
            if self._original is not None:
                self._check_import(self._original, self._before.outputs)

    def _check_import(self, original: Original, outputs: Sequence[Any]) -> None:
        """Compare with the framework that the network comes from."""
        try:
            expected = original.run(self._inputs)
        except Exception as error:  # the framework's own errors, of any kind
            message = f"{original.framework} could not run it: {essence(error)}"
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
        """Compile with a database, compare with the untuned network.

        Parameters
        ----------
        database : Database

        Returns
        -------
        Comparison or None
            None when the run was interrupted, or one of the two could not be run.
        """
        if self._session.budget.interrupted:
            return None
        with self._session.stage("compile"):
            path = self._session.work_dir / f"{self._prepared.name}{self._suffix}"
            try:
                self._compile(database, path)
            except Exception as error:  # of TVM's passes, the linker or the disk
                self._tell_failure(path, error)
                return None
        with self._session.stage("compare"):
            after = self._measure(path, min_seconds=_TIMING_SEC)
            self.library = self._linked(path)
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

    def _compile(self, database: Database | None, path: Path) -> None:
        compiled = compile_network(self._prepared, database, self._session.target)
        export(compiled, path)
        self._device_kind = compiled.device_kind
        if database is not None:
            self.coverage = compiled.coverage.summary()
            self.n_tuned = len(compiled.coverage.tuned)
            self._session.journal.write("coverage", **dataclasses.asdict(compiled.coverage))

    def _measure(self, path: Path, *, min_seconds: float) -> Whole | None:
        run = functools.partial(try_exported, min_seconds=min_seconds)
        task = (str(path), self._inputs, self._device_kind)
        found = self._run(run, task, path)
        if found is None:
            return None
        outputs, latency_sec = found
        return Whole(outputs, latency_sec if latency_sec > 0 else math.nan)


class FunctionJudge(_Judge):
    """Compile, run and time single functions before and after their search.

    Parameters
    ----------
    session : Session
    tasks : sequence of ExtractedTask

    Attributes
    ----------
    libraries : dict of str to Path
        Of the tuned functions, by the names of their tasks.
    """

    def __init__(self, session: Session, tasks: Sequence[ExtractedTask]) -> None:
        super().__init__(session)
        self._tasks = tasks
        self._before: list[Whole | None] = []
        self.libraries: dict[str, Path] = {}

    @property
    def reserve_sec(self) -> float:
        """Seconds to keep back for :meth:`measure_tuned`."""
        return _COMPILE_MARGIN * self._build_sec + 2.0 * len(self._tasks)

    def measure_untuned(self) -> None:
        """Run every function without tuning: the reference for speed and outputs."""
        with self._session.stage("untuned"):
            start_sec = time.perf_counter()
            self._before = [self._measure(task, None) for task in self._tasks]
            self._build_sec = time.perf_counter() - start_sec
        if all(whole is not None for whole in self._before):
            total_sec = sum(whole.latency_sec for whole in self._before if whole is not None)
            self._session.journal.write("untuned", seconds=total_sec)
            self._session.observer.note(f"untuned: {total_sec * 1e3:.3f} ms")

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database, compare with the untuned functions.

        Parameters
        ----------
        database : Database

        Returns
        -------
        Comparison or None
            Latencies are sums over the functions, differences the largest of all; None
            when the run was interrupted, or a function could not be run.
        """
        if self._session.budget.interrupted:
            return None
        with self._session.stage("compare"):
            after = [self._measure(task, database) for task in self._tasks]
        self.n_tuned = sum(database.has_workload(task.dispatched[0]) for task in self._tasks)
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

    def _measure(self, task: ExtractedTask, database: Database | None) -> Whole | None:
        mod = task.dispatched[0]
        # Not the same name twice: a worker that has loaded a library would find the old
        # one under it.
        state = ".untuned" if database is None else ""
        path = self._session.work_dir / f"{task.task_name}{state}{self._suffix}"
        compile_tir(mod, self._session.target, database).export_library(str(path))
        args = [(tuple(int(n) for n in arg.shape), str(arg.dtype)) for arg in args_info_of(mod)]
        job = (str(path), args, device_kind(self._session.target), self._session.seed)
        found = self._run(try_function, job, path)
        if database is not None:
            self.libraries[str(task.task_name)] = self._linked(path)
        return None if found is None else Whole(*found)
