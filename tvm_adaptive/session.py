"""One run: where it writes, what it may spend, who watches, and how it is interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from tvm_adaptive._tvm import FFI_VERSION, TVM_VERSION, RPCConfig, Target
from tvm_adaptive._versions import installed_version
from tvm_adaptive.budget import Budget
from tvm_adaptive.config import TuneConfig
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.fork_server import ForkServer, new_fork_server
from tvm_adaptive.history import History, read_history
from tvm_adaptive.measure_callback.journal import Journal
from tvm_adaptive.measure_callback.recorder import RunProgress
from tvm_adaptive.memory import open_store, told_name
from tvm_adaptive.models.prepare import check_layout
from tvm_adaptive.parts import check_names, farm_of
from tvm_adaptive.reserve import Reserve, has_gaps
from tvm_adaptive.target import TargetLike, resolve_target

logger = logging.getLogger(__name__)

JOURNAL_FILE = "journal.jsonl"
# A batch's libraries are some megabytes, its records some kilobytes; other programs write, too.
LEAST_FREE_BYTES = 32 << 20
# Where the functions are that workers are given, by stage: untuned, search, play-off, compare.
_WORKER_MODULES = (
    "tvm_adaptive.models",
    "tvm_adaptive.builder.compile",
    "tvm_adaptive.runner.lease",
    "tvm_adaptive.runner.finalist_worker",
)


class Observer(Protocol):
    """Who watches a run: the command line's display, or nobody."""

    def stage(self, name: str) -> None:
        """Learn that a stage begins (``"prepare"``, ``"search"``, ...)."""

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Learn what a round brought."""

    def note(self, text: str) -> None:
        """Learn something worth a line."""

    def event(self, event: dict[str, Any]) -> None:
        """Learn an event of the journal, as it was written; may be missing."""


class NoObserver:
    """Nobody watches."""

    def stage(self, name: str) -> None:
        """Do nothing."""

    def round(self, progress: RunProgress, budget: Budget) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """Do nothing."""


@dataclasses.dataclass
class Session:
    """What all stages of a run share.

    Attributes
    ----------
    config : TuneConfig
    target : Target
    work_dir : Path
        Exists; everything that the run writes lies in it, but for what the store keeps.
    run_id : str
        Different for every run.
    seed : int
    trials : int or None
        Trials at the most, None for no limit.
    until_ms : float or None
        The search ends when the sum of the tasks is as fast; None for no such goal.
    budget : Budget
    journal : Journal
    observer : Observer
    server : ForkServer or None
        Forks the run's workers; None where there is no such thing.
    store : RecordStore or None
        What earlier runs measured, and where this one's trials are kept.
    farm : RPCConfig or None
        Where the devices are that everything runs on; None for this machine.
    history : History
        What earlier sittings of the run did; empty for a run that is not resumed.
    reserve : Reserve
        What the search keeps back of the budget.
    proven : frozenset of str
        Names of the tasks of which an earlier run has proven a record.
    stage_secs : dict of str to float
        Seconds that each stage took, in their order.
    """

    config: TuneConfig
    target: Target
    work_dir: Path
    run_id: str
    seed: int
    trials: int | None
    until_ms: float | None
    budget: Budget
    journal: Journal
    observer: Observer
    server: ForkServer | None
    store: RecordStore | None
    farm: RPCConfig | None = None
    history: History = dataclasses.field(default_factory=History)
    reserve: Reserve = dataclasses.field(default_factory=Reserve)
    proven: frozenset[str] = frozenset()
    stage_secs: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and write it to the journal when it ends."""
        self.observer.stage(name)
        start_sec = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start_sec
            self.stage_secs[name] = self.stage_secs.get(name, 0.0) + seconds
            self.journal.write("stage", stage=name, seconds=seconds)

    def round_done(self, progress: RunProgress) -> None:
        """Pass a round's result on to the observer, and see whether the goal is reached."""
        self.observer.round(progress, self.budget)
        self.keep_back(progress)
        self.see_goal(progress)

    def keep_back(self, progress: RunProgress) -> None:
        """Keep back what the end of the run needs."""
        n_tries = self.config.search.n_trials_per_round
        is_incomplete = has_gaps(progress, self.proven, n_tries)
        self.budget.reserve_sec = self.reserve.kept_sec(has_gaps=is_incomplete)

    def see_goal(self, progress: RunProgress) -> None:
        """See whether what the user wanted is reached."""
        if self.until_ms is not None and progress.weighted_sec * 1e3 <= self.until_ms:
            if not self.budget.reached:
                self.observer.note(f"{progress.weighted_sec * 1e3:.3f} ms: the goal is reached")
            self.budget.reach()

    def should_stop(self) -> bool:
        """Say whether to end the search; asked before each round."""
        self.budget.round_started()
        self._see_disk()
        return self.budget.should_stop()

    def _see_disk(self) -> None:
        """End the run like an interrupt before candidates fail for want of room."""
        failure = self.journal.failure
        problem = _want_of_room(self.work_dir) if failure is None else str(failure)
        if problem and not self.budget.interrupted:
            self.observer.note(
                f"{problem}; the run ends here. Make room, then go on with --resume {self.work_dir}"
            )
            self.budget.interrupt()


@contextlib.contextmanager
def open_session(
    what: str,
    *,
    work_dir: Path | str,
    target: TargetLike,
    budget: Budget,
    trials: int | None,
    until_ms: float | None,
    seed: int | None,
    config: TuneConfig,
    observer: Observer | None,
    resume: bool = False,
) -> Iterator[Session]:
    """Check the options, create directory and journal, catch interrupts while inside.

    Parameters
    ----------
    what : str
        What is tuned, for the journal.
    work_dir, target, budget, trials, until_ms, seed, config, observer
        See :class:`Session`; ``seed`` None draws one, which the journal tells.
    resume : bool, default False
        Whether to go on where the journal in ``work_dir``, if there is one, ends.

    Raises
    ------
    InvalidOptionError
        When an option cannot be used, before anything is written.
    StoreError
        When a record store that was named cannot be opened, before anything is written.
    """
    check_bounds(budget.seconds, trials, until_ms)
    check_names(config)
    check_layout(config.layout)
    resolved = resolve_target(target)
    farm = farm_of(config)
    history = read_history(Path(work_dir) / JOURNAL_FILE) if resume else History()
    budget.spent_sec = history.spent_sec
    server = new_fork_server(_WORKER_MODULES)
    if seed is None:
        seed = time.time_ns() % 2**31
    with (
        open_store(config.store) as store,
        contextlib.closing(_open_journal(Path(work_dir), observer)) as journal,
        _started(server),
    ):
        session = Session(
            config=config,
            target=resolved,
            work_dir=journal.path.parent,
            run_id=f"{time.time_ns():x}-{os.getpid()}",
            seed=seed,
            trials=trials,
            until_ms=until_ms,
            budget=budget,
            journal=journal,
            observer=observer or NoObserver(),
            server=server,
            store=store,
            farm=farm,
            history=history,
        )
        _tell_begin(session, what)
        with _flag_instead_of_interrupt(session):
            yield session
        journal.write(
            "end",
            interrupted=budget.interrupted,
            seconds=budget.elapsed_sec,
            stages=session.stage_secs,
        )


def _want_of_room(folder: Path) -> str:
    """Say how little room a folder has left; nothing if there is enough."""
    free = shutil.disk_usage(folder).free
    if free >= LEAST_FREE_BYTES:
        return ""
    return f"only {free / 2**20:.0f} MiB are left on the disk of {folder}"


def _tell_begin(session: Session, what: str) -> None:
    config = dataclasses.asdict(session.config)
    # Not as it was given: a URL may hold a password.
    config["store"] = told_name(session.config.store, session.store)
    session.journal.write(
        "run",
        what=what,
        run_id=session.run_id,
        target=json.loads(str(session.target)),
        seed=session.seed,
        budget_sec=session.budget.seconds,
        trials=session.trials,
        until_ms=session.until_ms,
        config=config,
        tvm=TVM_VERSION,
        tvm_ffi=FFI_VERSION,
        tvm_adaptive=installed_version("tvm-adaptive"),
    )


def check_bounds(
    budget_sec: float | None, trials: int | None, until_ms: float | None = None
) -> None:
    """Raise InvalidOptionError unless seconds or trials bound a run; a goal alone does not."""
    if budget_sec is None and trials is None:
        raise InvalidOptionError("Give a budget in seconds, a number of trials, or both.")
    if budget_sec is not None and not budget_sec > 0:
        raise InvalidOptionError(f"The budget must be above 0 s but got {budget_sec:g}.")
    if trials is not None and trials < 1:
        raise InvalidOptionError(f"trials must be at least 1 but got {trials}.")
    if until_ms is not None and not until_ms > 0:
        raise InvalidOptionError(f"until_ms must be above 0 but got {until_ms:g}.")


@contextlib.contextmanager
def _started(server: ForkServer | None) -> Iterator[None]:
    """Let a server import its modules while the run begins."""
    if server is None:
        yield
        return
    with contextlib.closing(server):
        with contextlib.suppress(OSError):  # it is tried again when a worker is needed
            server.start()
        yield


@contextlib.contextmanager
def _flag_instead_of_interrupt(session: Session) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a flag that is looked at between rounds.

    Python's own handler raises wherever the main thread happens to be, and inside TVM's
    native search that ends in a segmentation fault.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set handlers
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        session.budget.interrupt()
        logger.warning("%s: stopping after this round", signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def journal_of(work_dir: Path) -> Path:
    """Return where a run's journal is.

    Raises
    ------
    InvalidOptionError
        When there is none.
    """
    path = work_dir / JOURNAL_FILE
    if not path.is_file():
        raise InvalidOptionError(f"{work_dir} is no run's directory: it holds no {JOURNAL_FILE}.")
    return path


def _open_journal(work_dir: Path, observer: Observer | None) -> Journal:
    """Make a run's directory and open its journal."""
    place = next(each for each in (work_dir, *work_dir.absolute().parents) if each.exists())
    if problem := _want_of_room(place):
        raise InvalidOptionError(f"There is no room for a run: {problem}. Choose another place.")
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOptionError(
            f"The work directory {work_dir} cannot be made ({error.strerror}); choose another."
        ) from error
    try:
        return Journal(work_dir.resolve() / JOURNAL_FILE, getattr(observer, "event", None))
    except OSError as error:
        raise InvalidOptionError(
            f"The journal in {work_dir} cannot be written ({error.strerror}); choose another "
            "directory."
        ) from error
