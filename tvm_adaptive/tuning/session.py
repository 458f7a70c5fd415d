"""One run: its options, its services, and what its stages share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from tvm_adaptive._tvm import RPCConfig, Target, is_gpu
from tvm_adaptive.database.store import RecordStore, open_store, redacted_name
from tvm_adaptive.errors import (
    InvalidOptionError,
    OtherMachineError,
    check_at_least,
    check_choices,
    check_positive,
)
from tvm_adaptive.measure_callback.history import History, differences, read_history
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, Journal, follow
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.models.content import MODEL_ASSUMED, ModelSource, check_same_model
from tvm_adaptive.models.frontend import Sample, peer_names, write_sample
from tvm_adaptive.models.frontend.shapes import check_shapes
from tvm_adaptive.models.prepare import LAYOUTS
from tvm_adaptive.tuning import registry
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig
from tvm_adaptive.tuning.foreign_files import refuse_foreign
from tvm_adaptive.tuning.interrupts import interruptible
from tvm_adaptive.tuning.observer import GuardedObserver, Observer
from tvm_adaptive.tuning.option_types import value_of
from tvm_adaptive.tuning.other_machine import has_records, set_aside
from tvm_adaptive.tuning.run_lock import Ownership, owned
from tvm_adaptive.tuning.stakes import VISIBLE_SHARE
from tvm_adaptive.tuning.target import (
    TargetLike,
    check_runs_here,
    environment_of,
    farm_of,
    n_threads_of,
    resolve_target,
    target_differences,
    target_fields,
)
from tvm_adaptive.values.run_folder import FINAL_DIR, FRESH_DIR
from tvm_adaptive.workers.cores import usable_physical_cores
from tvm_adaptive.workers.early_start import RUN_MODULES, early_server
from tvm_adaptive.workers.environment import Environment, compiler_problem, gpu_name
from tvm_adaptive.workers.file_system import forbids_programs
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.scratch import remove_left_behind

# A batch's libraries are some megabytes, its records some kilobytes; other programs write, too.
LEAST_FREE_BYTES = 32 << 20
# In the run's directory: arrays that it was given in memory.
INPUTS_FILE = "inputs.npz"
# In the run's directory: candidates while they are compiled and measured.
ARTIFACTS_FOLDER = "artifacts"
_SCHEDULER_REASONS = {
    "nothing-left": "no task promises a gain",
    "all-finished": "no task is left to try",
    "plateau": "many slots in a row saved too little",
}


# What bounds a run, and its seed.
_BOUNDS = {
    "budget_sec": float | None,
    "trials": int | None,
    "until_ms": float | None,
    "seed": int | None,
}


class CommonOptions(TypedDict, total=False):
    """The optional keywords that ``tune``, ``tune_relax`` and ``tune_tir`` share."""

    target: TargetLike
    budget_sec: float | None
    trials: int | None
    until_ms: float | None
    seed: int | None
    config: TuneConfig
    observer: Observer | None
    resume: bool
    allow_other_machine: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run as they were given, checked; see :func:`~tvm_adaptive.tune`."""

    what: str  # the model's name in the journal
    work_dir: str | Path
    input_shapes: Mapping[str, Sequence[int]] | None = None
    inputs: Sample | None = None
    target: TargetLike = None
    budget_sec: float | None = None
    trials: int | None = None
    until_ms: float | None = None
    seed: int | None = None
    config: TuneConfig = DEFAULT
    observer: Observer | None = None
    resume: bool = False
    allow_other_machine: bool = False
    spent_sec: float = 0.0

    def __post_init__(self) -> None:
        for name, hint in _BOUNDS.items():
            object.__setattr__(self, name, value_of(getattr(self, name), hint, name))
        if self.budget_sec is None and self.trials is None:
            raise InvalidOptionError("Give a budget in seconds, a number of trials, or both.")
        if self.budget_sec is not None and not 0 < self.budget_sec < math.inf:
            raise InvalidOptionError(
                f"The budget must be above 0 s and finite but got {self.budget_sec:g}; leave it "
                "out for none."
            )
        check_at_least("trials", self.trials, 1)
        check_at_least("seed", self.seed, 0)
        check_positive("until_ms", self.until_ms)
        registry.check_names(self.config)
        check_choices("layout", self.config.layout, LAYOUTS)
        peer_names(self.config.peers)
        if self.input_shapes is not None:
            check_shapes(self.input_shapes)

    @property
    def inputs_file(self) -> str | None:
        """The file of the inputs; relative to the directory if the run keeps it there."""
        if self.inputs is None:
            return None
        kept = Path(self.work_dir, INPUTS_FILE).resolve()
        if isinstance(self.inputs, Mapping) or Path(self.inputs).resolve() == kept:
            return INPUTS_FILE
        return str(Path(self.inputs).resolve())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """What compiling, checking and timing a model needs, in a run and in ``apply``."""

    journal: Journal
    observer: GuardedObserver
    server: ForkServer | None = None  # None for one of each part's own
    config: TuneConfig
    target: Target
    work_dir: Path
    seed: int
    budget: Budget
    farm: RPCConfig | None = None  # the devices that libraries run on; None for this machine
    # The farm's devices that were suspended or rested when the search ended.
    suspended: set[str] = dataclasses.field(default_factory=set)
    # Seconds that each stage took, in their order, in all attempts on this machine.
    stage_secs: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def n_host_cores(self) -> int:
        """Cores of this machine that search and compile; a farm's target has others."""
        return n_threads_of(self.target) if self.farm is None else usable_physical_cores()

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

    def write_end(self) -> None:
        """Write the last event to the journal."""
        self.journal.write(
            "end",
            interrupted=self.budget.interrupted,
            seconds=self.budget.elapsed_sec,
            stages=self.stage_secs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session(RunContext):
    """What all stages of a run share."""

    options: RunOptions
    run_id: str = ""  # different for every attempt
    # The records of earlier runs; this run's trials are added to it.
    store: RecordStore | None = None
    # What earlier attempts did; empty for a run that is not resumed.
    history: History = dataclasses.field(default_factory=History)
    # Tasks of which an earlier run has proven a record.
    proven: set[str] = dataclasses.field(default_factory=set)
    # Tasks that get no more trials: their search has ended, or the task scheduler has given up.
    ended: set[str] = dataclasses.field(default_factory=set)

    def round_done(self, progress: RunProgress) -> None:
        """Pass a round's result to the observer, update the reserve, see if it is enough."""
        self.observer.round(progress, self.budget)
        self.update_reserve(progress)
        self.check_goal(progress)
        self._check_plateau(progress)

    def update_reserve(self, progress: RunProgress) -> None:
        """Reserve what the end of the run needs."""
        for task in progress.tasks:
            task.is_ended = task.name in self.ended
        self.budget.update_reserve(progress, self.proven, self.config.search.n_trials_per_round)

    def check_goal(self, progress: RunProgress) -> None:
        """End the search if the sum of the tasks is as fast as the user wants."""
        until_ms = self.options.until_ms
        if until_ms is not None and progress.weighted_sec * 1e3 <= until_ms:
            self._stop(f"{progress.weighted_sec * 1e3:.3f} ms: the goal is reached")

    def _check_plateau(self, progress: RunProgress) -> None:
        """End the search if it saves nothing visible any more, unless all seconds are wanted."""
        budget = self.budget
        if budget.seconds is None or self.config.use_all:
            return
        budget.plateau.add(budget.searched_sec, progress.promising_sec)
        if budget.plateau.is_reached(len(progress.used_tasks)):
            self._stop(
                "the second half of the search saved less than "
                f"{VISIBLE_SHARE * 100:g} % (--use-all searches on)"
            )

    def scheduler_ended(self, reason: str) -> None:
        """Note why the task scheduler ended the search, unless the budget ended it."""
        if reason and not self.budget.should_stop():
            self._stop(_SCHEDULER_REASONS.get(reason, reason))

    def _stop(self, reason: str) -> None:
        """End the search for a reason, once; the rest of the run follows."""
        if not self.budget.stop_reason:
            self.observer.note(reason)
            self.budget.stop_reason = reason

    def machine_failed(self, reason: str) -> None:
        """End the run like an interrupt: what the machine cannot do now, it may do later."""
        self.journal.write("error", where="machine", message=reason)
        self._end_early(reason, "Fix that")

    def should_stop(self) -> bool:
        """Return True to end the search; MetaSchedule asks before each round."""
        # Before candidates fail for lack of disk space.
        failure = self.journal.failure
        if problem := _disk_space_problem(self.work_dir) if failure is None else str(failure):
            self._end_early(problem, "Make room")
        return self.budget.should_stop()

    def _end_early(self, problem: str, fix: str) -> None:
        if not self.budget.interrupted:
            self.observer.note(
                f"{problem}; the run ends here. {fix}, then continue with --resume {self.work_dir}"
            )
            self.budget.stop_reason = problem
            self.budget.interrupt(problem)


def _check_devices(config: TuneConfig, target: Target) -> None:
    """Raise InvalidOptionError for devices that are missing, or whose times cannot be compared."""
    indices = config.measure.device_indices
    if not is_gpu(target):
        if len(indices) == 1:
            return
        raise InvalidOptionError(
            f"devices {config.measure.devices!r}: a CPU is one device, whose cores two kernels "
            "would share while they are timed. Leave devices out."
        )
    kind = str(target.kind.name)
    names = {index: gpu_name(kind, index) for index in indices}
    missing = [f"{kind}:{index}" for index, name in names.items() if name is None]
    if missing:
        raise InvalidOptionError(
            f"devices {config.measure.devices!r}: this machine has no {', '.join(missing)}. They "
            "are counted from 0, among those that CUDA_VISIBLE_DEVICES leaves. A GPU elsewhere is "
            "measured behind a tracker (--tracker)."
        )
    if len(set(names.values())) > 1:
        found = ", ".join(f"{kind}:{index} is {name}" for index, name in names.items())
        raise InvalidOptionError(
            f"devices {config.measure.devices!r}: their times cannot be compared ({found}). Name "
            "devices of one kind."
        )


def check_compiler(farm: RPCConfig | None) -> None:
    """Raise InvalidOptionError if nothing here links libraries; a farm's devices do it there."""
    if farm is None and (problem := compiler_problem()):
        raise InvalidOptionError(
            f"There is {problem}, to link what TVM compiles. Install one: apt install gcc; CXX may "
            "name another. Then tvm-adaptive doctor checks the rest."
        )


def checked_target(options: RunOptions) -> tuple[Target, RPCConfig | None]:
    """Return target and farm; raise InvalidOptionError if this machine cannot tune for them."""
    config, work_dir = options.config, Path(options.work_dir)
    farm = farm_of(config)
    target = resolve_target(
        options.target, is_here=farm is None, device_index=config.measure.device_indices[0]
    )
    if farm is None:
        check_runs_here(target)
        _check_devices(config, target)
    check_compiler(farm)
    check_disk_space(work_dir, runs_here=farm is None)
    return target, farm


@contextlib.contextmanager
def open_session(
    options: RunOptions,
    *,
    budget: Budget | None = None,  # counts from the start of the call
    model: ModelSource | None = None,
    owner: Ownership | None = None,  # has the directory already
    server: ForkServer | None = None,  # runs already
    history: History | None = None,  # what the directory's journal says, if that was read
    libraries: Iterable[str] = (),  # names of the files that the run will make for its model
) -> Iterator[Session]:
    """Own the directory, open store and journal, catch interrupts while inside."""
    config, work_dir = options.config, Path(options.work_dir)
    target, farm = checked_target(options)
    with contextlib.ExitStack() as stack:
        owner = owner or stack.enter_context(owned(work_dir))
        _refuse_others(options, libraries)
        environment = environment_of(target, config)
        if history is None:
            history = read_history(work_dir / JOURNAL_FILE)
        history, notes, whose = _earlier_attempts(options, history, environment, target, model)
        config = config_after(history, config)
        budget = budget or Budget(options.budget_sec, spent_sec=options.spent_sec)
        budget.spent_sec += history.spent_sec
        store = stack.enter_context(open_store(config.store, environment))
        path = work_dir / JOURNAL_FILE
        # Last of all: what is refused has changed nothing.
        if whose and (folder := set_aside(work_dir)) is not None:
            notes.append(f"{whose} are in {folder}")
            # The file of the store that was named may have been among those that were moved.
            store = stack.enter_context(open_store(config.store, environment))
        remove_left_behind(work_dir)  # of attempts that were killed
        services = stack.enter_context(
            open_services(path, options.observer, server, tells_past=options.resume)
        )
        session = Session(
            **services,
            store=store,
            config=config,
            target=target,
            seed=time.time_ns() % 2**31 if options.seed is None else options.seed,
            budget=budget,
            farm=farm,
            options=options,
            run_id=f"{time.time_ns():x}-{os.getpid()}",
            history=history,
            stage_secs=dict(history.stage_secs),
        )
        session.journal.write("run", **_run_fields(session), **environment.as_fields())
        if isinstance(options.inputs, Mapping) and model is not None and model.inputs:
            write_sample(options.inputs, work_dir / INPUTS_FILE)
        if model is not None:
            session.journal.write("model", **model.as_fields())
        for note in notes:
            session.observer.note(note)
        with interrupts_of(session, owner):
            yield session
        session.write_end()


def _refuse_others(options: RunOptions, libraries: Iterable[str]) -> None:
    """Raise InvalidOptionError where a first run would replace files of other programs."""
    work_dir = Path(options.work_dir)
    if (work_dir / JOURNAL_FILE).is_file():  # they are an earlier run's
        return
    names = [FINAL_DIR, FRESH_DIR, ARTIFACTS_FOLDER, *libraries]
    if isinstance(options.inputs, Mapping):
        names.append(INPUTS_FILE)
    refuse_foreign(work_dir, names, "--work-dir")


@contextlib.contextmanager
def worker_server() -> Iterator[ForkServer]:
    """Start what forks workers, unless the command has; it imports their modules meanwhile."""
    with contextlib.closing(early_server() or ForkServer(RUN_MODULES)) as server:
        with contextlib.suppress(OSError):  # it is tried again when a worker is needed
            server.start()
        yield server


@contextlib.contextmanager
def open_services(
    path: Path,
    observer: Observer | None,
    server: ForkServer | None = None,
    *,
    tells_past: bool = False,  # the observer gets the events that are there
) -> Iterator[dict[str, Any]]:
    """Open a journal, and start the fork server unless it is given; yield a context's fields."""
    guarded = GuardedObserver(observer)
    if tells_past and observer is not None and path.is_file():
        follow(path, guarded.event)
    try:
        journal = Journal(path.parent.resolve() / path.name, guarded.event)
    except OSError as error:
        raise InvalidOptionError(
            f"The journal in {path.parent} cannot be written ({error.strerror}); choose another "
            "directory."
        ) from error
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(journal))
        server = server or stack.enter_context(worker_server())
        folder = journal.path.parent
        yield {"journal": journal, "observer": guarded, "server": server, "work_dir": folder}


def interrupts_of(context: RunContext, owner: Ownership) -> contextlib.AbstractContextManager[None]:
    """Let signals interrupt a context's budget while inside."""
    return interruptible(
        context.budget.interrupt, restore_screen=context.observer.close, release=owner.release
    )


def check_disk_space(work_dir: Path, *, runs_here: bool = True) -> None:
    """Raise InvalidOptionError if a disk has no room for a run, or lets no library run."""
    folder = next(each for each in (work_dir, *work_dir.absolute().parents) if each.exists())
    if runs_here and forbids_programs(folder):
        raise InvalidOptionError(
            f"Libraries in {folder} cannot be run, as its disk is mounted noexec. Choose another "
            "place."
        )
    if problem := _disk_space_problem(folder):
        raise InvalidOptionError(f"There is no room for a run: {problem}. Choose another place.")


def _disk_space_problem(folder: Path) -> str:
    """Return how little room a folder has left; "" if there is enough."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:  # such as a folder on a server that is gone
        return f"the disk of {folder} does not answer ({error.strerror})"
    if free >= LEAST_FREE_BYTES:
        return ""
    return f"only {free / 2**20:.0f} MiB are left on the disk of {folder}"


def _earlier_attempts(
    options: RunOptions,
    history: History,
    environment: Environment,
    target: Target,
    model: ModelSource | None,
) -> tuple[History, list[str], str]:
    """Return what a resumed run continues, notes, and whose records are set aside, if any."""
    work_dir, notes, whose = Path(options.work_dir), list[str](), ""
    found = differences(history.environment, environment)
    found += target_differences(history.run.get("target"), target)
    if found:
        if not options.allow_other_machine:
            raise OtherMachineError(
                f"The times in {work_dir} were taken elsewhere or for another target "
                f"({'; '.join(found)}); choose another --work-dir, or measure its best records "
                "anew with --allow-other-machine."
            )
        history.forget_times()
        whose = "another machine's records"
    elif not history.run and has_records(work_dir):  # such as stock MetaSchedule's, or an export
        whose = "records of an unknown machine"
    if not options.resume:
        return History(), notes, whose
    if history.run and environment.is_known and not history.environment.is_known:
        notes.append("the journal does not say on which machine: this one is assumed")
    if model is not None and history.run:
        before = history.model or {}
        if not check_same_model(before, model, work_dir) and model.content:
            notes.append(MODEL_ASSUMED)
    return history, notes, whose


def config_after(history: History, config: TuneConfig) -> TuneConfig:
    """Return a run's configuration without what an earlier attempt has given up."""
    return config.replace(forms=False) if history.gave_up_forms else config


def _run_fields(session: Session) -> dict[str, Any]:
    options = session.options
    config = dataclasses.asdict(session.config)
    # Not as it was given: a URL may hold a password.
    config["store"] = redacted_name(session.config.store, session.store)
    return {
        "what": options.what,
        "resumed": options.resume,
        "run_id": session.run_id,
        "elapsed_sec": session.budget.elapsed_sec,
        "target": target_fields(session.target),
        "seed": session.seed,
        "budget_sec": session.budget.seconds,
        "trials": options.trials,
        "until_ms": options.until_ms,
        "config": config,
    }


def journal_of(work_dir: Path) -> Path:
    """Return the path of a run's journal."""
    path = work_dir / JOURNAL_FILE
    if not path.is_file():
        raise InvalidOptionError(f"{work_dir} is no run's directory: it holds no {JOURNAL_FILE}.")
    return path
