"""One run: where it writes, what it may spend, who watches, and how it is interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tvm_adaptive._tvm import RPCConfig, Target
from tvm_adaptive.database.location import open_store, redacted_name
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import InvalidOptionError, OtherMachineError
from tvm_adaptive.measure_callback.history import History, read_history
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, Journal
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.models.content import ModelSource, check_same_model
from tvm_adaptive.models.prepare import check_layout
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import TuneConfig
from tvm_adaptive.tuning.interrupts import interruptible
from tvm_adaptive.tuning.observer import GuardedObserver, Observer
from tvm_adaptive.tuning.other_machine import check_environment, set_aside
from tvm_adaptive.tuning.parts import check_names, farm_of
from tvm_adaptive.tuning.reserve import Reserve, has_gaps, tuned_share
from tvm_adaptive.tuning.run_lock import Ownership, owned
from tvm_adaptive.tuning.target import TargetLike, resolve_target
from tvm_adaptive.workers.environment import Environment
from tvm_adaptive.workers.fork_server import ForkServer, new_fork_server

logger = logging.getLogger(__name__)

# A batch's libraries are some megabytes, its records some kilobytes; other programs write, too.
LEAST_FREE_BYTES = 32 << 20
# Where the functions are that workers are given, by stage: untuned, search, play-off, compare.
_WORKER_MODULES = (
    "tvm_adaptive.models",
    "tvm_adaptive.builder.compile",
    "tvm_adaptive.runner.rpc.lease",
    "tvm_adaptive.runner.playoff.worker",
)


@dataclasses.dataclass
class Session:
    """What all stages of a run share."""

    config: TuneConfig
    target: Target
    # exists; everything that the run writes lies in it, but for what the store keeps
    work_dir: Path
    run_id: str  # different for every run
    seed: int
    trials: int | None  # trials at the most, None for no limit
    # the search ends when the sum of the tasks is as fast; None for no such goal
    until_ms: float | None
    budget: Budget
    journal: Journal
    observer: GuardedObserver
    server: ForkServer | None  # forks the run's workers; None where there is no such thing
    store: RecordStore | None  # what earlier runs measured, and where this one's trials are kept
    # where the devices are that everything runs on; None for this machine
    farm: RPCConfig | None = None
    # what earlier sittings of the run did; empty for a run that is not resumed
    history: History = dataclasses.field(default_factory=History)
    # what the search keeps back of the budget
    reserve: Reserve = dataclasses.field(default_factory=Reserve)
    # names of the tasks of which an earlier run has proven a record
    proven: frozenset[str] = frozenset()
    # seconds that each stage took, in their order
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
        self.update_reserve(progress)
        self.check_goal(progress)

    def update_reserve(self, progress: RunProgress) -> None:
        """Keep back what the end of the run needs."""
        n_tries = self.config.search.n_trials_per_round
        is_incomplete = has_gaps(progress, self.proven, n_tries)
        self.budget.reserve_sec = self.reserve.kept_sec(
            has_gaps=is_incomplete, share=tuned_share(progress)
        )

    def check_goal(self, progress: RunProgress) -> None:
        """See whether what the user wanted is reached."""
        if self.until_ms is not None and progress.weighted_sec * 1e3 <= self.until_ms:
            if not self.budget.reached:
                self.observer.note(f"{progress.weighted_sec * 1e3:.3f} ms: the goal is reached")
            self.budget.reach()

    def machine_failed(self, reason: str) -> None:
        """End the run like an interrupt: what the machine cannot do now, it may do later."""
        self.journal.write("error", where="machine", message=reason)
        if not self.budget.interrupted:
            self.observer.note(
                f"{reason}; the run ends here. Mend that, then go on with --resume {self.work_dir}"
            )
            self.budget.interrupt()

    def should_stop(self) -> bool:
        """Say whether to end the search; asked before each round."""
        self.budget.round_started()
        self._check_disk()
        return self.budget.should_stop()

    def _check_disk(self) -> None:
        """End the run like an interrupt before candidates fail for want of room."""
        failure = self.journal.failure
        problem = _disk_space_problem(self.work_dir) if failure is None else str(failure)
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
    allow_other_machine: bool = False,
    model: ModelSource | None = None,
    owner: Ownership | None = None,
    journal_file: str = JOURNAL_FILE,
) -> Iterator[Session]:
    """Check the options, own directory and journal, catch interrupts while inside."""
    check_bounds(budget.seconds, trials, until_ms)
    check_names(config)
    check_layout(config.layout)
    resolved = resolve_target(target)
    farm = farm_of(config)
    _check_disk_space(Path(work_dir))
    guarded = GuardedObserver(observer)
    with contextlib.ExitStack() as stack:
        owner = owner or stack.enter_context(owned(Path(work_dir)))
        environment = Environment.current(resolved, farm)
        history, notes = _begun(owner.work_dir, environment, allow_other_machine)
        if resume:
            notes += _resumed(history, environment, model, owner.work_dir)
        else:
            history = History()
        budget.spent_sec += history.spent_sec
        store = stack.enter_context(open_store(config.store, environment))
        path = owner.work_dir / journal_file
        journal = stack.enter_context(contextlib.closing(_open_journal(path, guarded)))
        server = new_fork_server(_WORKER_MODULES)
        stack.enter_context(_started(server))
        session = Session(
            config=config,
            target=resolved,
            work_dir=journal.path.parent,
            run_id=f"{time.time_ns():x}-{os.getpid()}",
            seed=time.time_ns() % 2**31 if seed is None else seed,
            trials=trials,
            until_ms=until_ms,
            budget=budget,
            journal=journal,
            observer=guarded,
            server=server,
            store=store,
            farm=farm,
            history=history,
        )
        _tell_begin(session, what, environment, model)
        for note in notes:
            guarded.note(note)
        with interruptible(budget.interrupt, last_words=guarded.close, release=owner.release):
            yield session
        _tell_end(session)


def _check_disk_space(work_dir: Path) -> None:
    place = next(each for each in (work_dir, *work_dir.absolute().parents) if each.exists())
    if problem := _disk_space_problem(place):
        raise InvalidOptionError(f"There is no room for a run: {problem}. Choose another place.")


def _begun(
    work_dir: Path, environment: Environment, allow_other_machine: bool
) -> tuple[History, list[str]]:
    """Return what was begun in a directory, and what a user should know of it."""
    history = read_history(work_dir / JOURNAL_FILE)
    try:
        check_environment(history.environment, environment, work_dir)
    except OtherMachineError:
        if not allow_other_machine:
            raise
        folder = set_aside(work_dir)
        history.forget_times()
        if folder is not None:
            return history, [f"another machine's records are in {folder}; the best begin anew"]
    return history, []


def _resumed(
    history: History, environment: Environment, model: ModelSource | None, work_dir: Path
) -> list[str]:
    """Check that a run is what it was; say what its journal does not tell."""
    notes = []
    if history.run and environment.is_known and not history.environment.is_known:
        notes.append(
            "the journal does not say on which machine: its times are taken for this one's"
        )
    if model is not None and history.run:
        before = history.model or {}
        if not check_same_model(before, model, work_dir) and model.content:
            notes.append("the journal does not say which model it was: it is taken for the same")
    return notes


def _disk_space_problem(folder: Path) -> str:
    """Say how little room a folder has left; nothing if there is enough."""
    free = shutil.disk_usage(folder).free
    if free >= LEAST_FREE_BYTES:
        return ""
    return f"only {free / 2**20:.0f} MiB are left on the disk of {folder}"


def _tell_begin(
    session: Session, what: str, environment: Environment, model: ModelSource | None
) -> None:
    config = dataclasses.asdict(session.config)
    # Not as it was given: a URL may hold a password.
    config["store"] = redacted_name(session.config.store, session.store)
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
        **environment.as_fields(),
    )
    if model is not None:
        session.journal.write("model", **model.as_fields())


def _tell_end(session: Session) -> None:
    session.journal.write(
        "end",
        interrupted=session.budget.interrupted,
        seconds=session.budget.elapsed_sec,
        stages=session.stage_secs,
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


def journal_of(work_dir: Path) -> Path:
    """Return where a run's journal is."""
    path = work_dir / JOURNAL_FILE
    if not path.is_file():
        raise InvalidOptionError(f"{work_dir} is no run's directory: it holds no {JOURNAL_FILE}.")
    return path


def _open_journal(path: Path, observer: GuardedObserver) -> Journal:
    """Open a run's journal."""
    work_dir = path.parent
    try:
        return Journal(work_dir.resolve() / path.name, observer.event)
    except OSError as error:
        raise InvalidOptionError(
            f"The journal in {work_dir} cannot be written ({error.strerror}); choose another "
            "directory."
        ) from error
