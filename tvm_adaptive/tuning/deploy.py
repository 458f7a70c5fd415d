"""From records to something that runs elsewhere: a library, and how to load it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm_adaptive._tvm import FFI_VERSION, TVM_VERSION, ExtractedTask
from tvm_adaptive._tvm.runtime_files import python_functions, runtime_libraries
from tvm_adaptive.database.store import open_store
from tvm_adaptive.errors import InvalidOptionError, WorkerError, check_choices
from tvm_adaptive.measure_callback.history import History, differences
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.models import BUILTIN, Network, TIRWorkload
from tvm_adaptive.models.compile import device_kind
from tvm_adaptive.models.content import MODEL_ASSUMED, check_same_model, named_source
from tvm_adaptive.models.frontend import FORMATS, ModelReader, Sample, load
from tvm_adaptive.models.frontend.factory import is_factory
from tvm_adaptive.models.prepare import LAYOUTS
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks.model import Check, tasks_and_check
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig, replaced
from tvm_adaptive.tuning.finals.decision import checked_database
from tvm_adaptive.tuning.finals.finalists import Finalists, finalists_of_store, finalists_to_apply
from tvm_adaptive.tuning.finals.form_choice import FormChoice, as_decided
from tvm_adaptive.tuning.foreign_files import library_names, refuse_foreign
from tvm_adaptive.tuning.manifest import (
    MANIFEST_FILE,
    Interface,
    features_of,
    interface_of,
    write_manifest,
)
from tvm_adaptive.tuning.native import PLAIN_NAMES, filled, is_supported, write_programs
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.option_types import spelled
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.resume import read_settings
from tvm_adaptive.tuning.run_lock import owned
from tvm_adaptive.tuning.session import (
    RunContext,
    RunOptions,
    check_compiler,
    check_disk_space,
    config_after,
    interrupts_of,
    open_services,
    worker_server,
)
from tvm_adaptive.tuning.target import (
    FARM_RUNNERS,
    TargetLike,
    check_architecture,
    describe_target,
    environment_of,
    farm_of,
    n_cores_of,
    resolve_target,
)
from tvm_adaptive.tuning.turns import time_thread_counts
from tvm_adaptive.values.forms import FormKey
from tvm_adaptive.workers.environment import Environment
from tvm_adaptive.workers.fork_server import ForkServer
from tvm_adaptive.workers.scratch import remove_left_behind

# Returns the finalists of some tasks.
_Records = Callable[[Sequence[ExtractedTask]], list[Finalists]]

# The events of compiling and checking. Not a run's journal: nothing was tuned here.
APPLY_FILE = "apply.jsonl"
PYTHON_EXAMPLE = "example.py"
# Options of a configuration that a run has settled.
_OF_A_RUN = ("layout", "prepack", "vector_math", "forms")


@dataclasses.dataclass(frozen=True)
class Applied:
    """A compiled model."""

    what: str
    target: str
    out_dir: Path  # holds everything below
    library: Path
    manifest: Path  # what the library takes, returns and needs, and how it was checked
    examples: tuple[Path, ...]  # programs that load the library and run it once
    coverage: str  # which functions run with a tuned schedule, in words
    comparison: Comparison | None  # with the model's framework, or the untuned model
    shortfall: str = ""  # why there is no comparison; also empty if a library could not be run
    # Seconds of an inference by number of threads; empty if fewer were not tried.
    thread_secs: Mapping[int, float] = dataclasses.field(default_factory=dict)


def apply(
    what: str,
    *,
    out_dir: str | Path,
    target: TargetLike = None,
    config: TuneConfig = DEFAULT,
    observer: Observer | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: Sample | None = None,
) -> Applied:
    """Compile a model with its best records; check and time it.

    Only what was checked, in a play-off or within the network, is compiled. For tasks of
    which nothing was, as of a run that was interrupted, the best few records are checked
    first, which takes seconds for each; a task of which none passes stays untuned.

    Parameters
    ----------
    what : str
        A run's work directory, also of a run in progress or one that was killed: everything
        else is taken from its journal, and nothing in it is changed. Or a model, as for
        :func:`~tvm_adaptive.tune`, with the records of ``config.store``.
    out_dir : str or Path
        Created if it does not exist; no run's directory.
    target, config, observer, input_shapes, inputs
        As in :func:`~tvm_adaptive.tune`; ``config`` supplies what concerns the model, the
        store and the farm of a foreign target. A run has its own, except for another farm.

    Returns
    -------
    Applied

    Raises
    ------
    InvalidOptionError
        When an option cannot be used, or no record of the model and target can be deployed.
    ImportMismatchError
        When an imported network computes something else in TVM than in its framework.
    StoreError
        When the store cannot be read.
    JournalError
        When the run's journal is damaged.
    OtherModelError
        When the model is not the one that the run began with.
    WorkDirInUseError
        When another run uses ``out_dir``.
    WorkerError
        When no library could be compiled.
    """
    out_dir = Path(out_dir)
    if (out_dir / JOURNAL_FILE).is_file():
        raise InvalidOptionError(
            f"{out_dir} is a run's directory, but the compiled model needs one of its own; name "
            "another with --out."
        )
    _refuse_others(out_dir, (MANIFEST_FILE, PYTHON_EXAMPLE, *PLAIN_NAMES))
    run = Path(what) if (Path(what) / JOURNAL_FILE).is_file() else None
    if run is None:
        _refuse_path(what)
    history = History()
    if run is not None:
        options, history = read_settings(run)
        given = {"target": target, "input_shapes": input_shapes, "inputs": inputs}
        _refuse_settled(what, given, config, options.config)
        what, target = options.what, options.target
        input_shapes, inputs = options.input_shapes, options.inputs
        config = _with_other_farm(config_after(history, options.config), config)
    with ExitStack() as stack:
        server = stack.enter_context(worker_server())
        reader = ModelReader(server)
        stack.callback(reader.close)
        model = load(what, input_shapes or {}, inputs=inputs, reader=reader)
        notes = [] if run is None else _notes_on_model(options, history, model)
        _refuse_others(out_dir, library_names(model, farm_of(config)))
        context = stack.enter_context(_opened(out_dir, config, target, observer, server))
        fields = {"what": what, "run": None if run is None else str(run)}
        environment = environment_of(context.target, context.config)
        context.journal.write(
            "apply", **fields, target=json.loads(str(context.target)), **environment.as_fields()
        )
        if context.farm is None and (found := differences(history.environment, environment)):
            notes.append(
                f"{run} was measured elsewhere ({'; '.join(found)}): what this machine cannot run "
                "is not checked here; apply it on that machine"
            )
        for note in notes:
            context.observer.note(note)
        with _records(run, context, environment) as records:
            compiled = _compiled(context, model, records, chosen_forms=_chosen_forms(history))
        assert compiled is not None
        return _written(context, model, *compiled)


def _refuse_path(what: str) -> None:
    """Raise InvalidOptionError for a path that is neither a run's nor a model's."""
    is_path = Path(what).is_dir() or ("/" in what and Path(what).suffix not in FORMATS)
    if is_path and not (what in BUILTIN or is_factory(what)):
        raise InvalidOptionError(
            f"There is no run in {what}: it has no {JOURNAL_FILE}. Name a run's directory, or a "
            "model."
        )


def _refuse_others(out_dir: Path, names: Iterable[str], option: str = "--out") -> None:
    """Raise InvalidOptionError where files of other programs would be replaced."""
    if not (out_dir / APPLY_FILE).is_file():  # else an earlier call has made the directory
        refuse_foreign(out_dir, names, option)


def _notes_on_model(
    options: RunOptions, history: History, model: Network | TIRWorkload
) -> list[str]:
    """Return what is not known of a run's model; raise OtherModelError if it is another one."""
    source = named_source(options.what, model, options.input_shapes, options.inputs_file)
    fix = "Apply the model itself instead of the run: the store has the records."
    is_known = check_same_model(history.model or {}, source, Path(options.work_dir), fix)
    return [] if is_known or not source.content else [MODEL_ASSUMED]


def _with_other_farm(config: TuneConfig, given: TuneConfig) -> TuneConfig:
    """Return a run's configuration with the farm that a caller names."""
    if given.runner not in FARM_RUNNERS:
        return config
    farm = given.measure
    measure = replaced(config.measure, tracker=farm.tracker, tracker_key=farm.tracker_key)
    return config.replace(runner=given.runner, measure=measure)


def _refuse_settled(
    run: str, given: Mapping[str, Any], config: TuneConfig, settled: TuneConfig
) -> None:
    """Raise if a caller gives what a run has settled otherwise."""
    found = {name: value for name, value in given.items() if value is not None and value != {}}
    for name in _OF_A_RUN:
        value = getattr(config, name)
        if value not in (getattr(DEFAULT, name), getattr(settled, name)):
            found[name] = value
    if found:
        names = ", ".join(f"{name} ({spelled(name, value)})" for name, value in found.items())
        raise InvalidOptionError(
            f"Target, shapes, inputs and preparation are those of the run {run}; omit {names}."
        )


def apply_network(
    network: Network,
    *,
    out_dir: str | Path,
    config: TuneConfig,
    observer: Observer | None = None,
    least_proven_share: float,
    server: ForkServer,
    keeps_journal: bool = True,
) -> tuple[Path, Comparison | None, str] | None:
    """Compile a network for this machine as :func:`apply` does, with the store's records.

    Returns its library, the comparison and why there is none. None if an earlier run has proven
    records of less than a share of its calls, or there is no store; no play-off is held. With a
    share of 0, all records count, as for :func:`apply`. Errors do not refer to a journal that the
    caller removes (``keeps_journal``).
    """
    names = (MANIFEST_FILE, *library_names(network, farm_of(config)))
    _refuse_others(Path(out_dir), names, "work_dir")
    with _opened(Path(out_dir), config, None, observer, server) as context:
        environment = environment_of(context.target, context.config)
        context.journal.write("apply", what=network.name, run=None, **environment.as_fields())
        with _records(None, context, environment) as records:
            compiled = _compiled(
                context, network, records, least_proven_share, keeps_journal=keeps_journal
            )
        if compiled is None:
            return None
        check, library, comparison = compiled
        return library, comparison, check.shortfall


@contextmanager
def _opened(
    out_dir: Path,
    config: TuneConfig,
    target: TargetLike,
    observer: Observer | None,
    server: ForkServer,
) -> Iterator[RunContext]:
    """Own the directory, open the journal, catch interrupts while inside."""
    check_choices("layout", config.layout, LAYOUTS)
    farm = farm_of(config)
    device_index = config.measure.device_indices[0]
    resolved = resolve_target(target, is_here=farm is None, device_index=device_index)
    if farm is None:
        check_architecture(resolved)
    check_compiler(farm)
    check_disk_space(out_dir, runs_here=farm is None)
    with (
        owned(out_dir) as owner,
        open_services(out_dir / APPLY_FILE, observer, server) as services,
    ):
        remove_left_behind(out_dir)  # of calls that were killed
        context = RunContext(
            **services, config=config, target=resolved, seed=0, budget=Budget(), farm=farm
        )
        with interrupts_of(context, owner):
            try:
                yield context
            except InvalidOptionError:
                if not context.budget.interrupted:
                    raise
            if context.budget.interrupted:
                raise KeyboardInterrupt
        context.write_end()


@contextmanager
def _records(
    run: Path | None, context: RunContext, environment: Environment
) -> Iterator[_Records | None]:
    """Open a run's records, or the store's; yield what returns those of some tasks, if any."""
    if run is not None:
        finish = context.config.finish
        yield functools.partial(finalists_to_apply, run, context.target, finish=finish)
        return
    with open_store(context.config.store, environment) as store:
        yield (
            None if store is None else functools.partial(finalists_of_store, store, context.target)
        )


def _compiled(
    context: RunContext,
    model: Network | TIRWorkload,
    records: _Records | None,
    least_proven_share: float = 0.0,
    *,
    chosen_forms: Mapping[str, str] = MappingProxyType({}),
    keeps_journal: bool = True,
) -> tuple[Check, Path, Comparison | None] | None:
    """Compile a model with its records, checked; None if less than a share is proven."""
    if records is None:
        if least_proven_share > 0:
            return None
        raise InvalidOptionError("Say where the records are: a run's directory, or a store.")
    kept = context.work_dir / APPLY_FILE
    journal = str(kept) if keeps_journal else "the journal that work_dir= keeps"
    tasks, check = tasks_and_check(context, model)
    with check:
        finalists = records(tasks)
        if least_proven_share > 0:
            finalists = [_proven_only(each) for each in finalists]

        def is_proven() -> bool:
            if least_proven_share <= 0:
                return True
            share = _proven_share(tasks, finalists, check.forms, is_direct=check.is_direct)
            return share >= least_proven_share

        if not is_proven():
            return None
        if tasks and not any(each.records for each in finalists):
            raise InvalidOptionError(
                f"Nothing was recorded for {model.name} on {describe_target(context.target)}; tune "
                "it first, with the same layout and target."
            )
        check.measure_untuned()
        check.release_device()
        decided = as_decided(finalists, check.forms, chosen_forms)
        database = checked_database(context, decided, check)
        if tasks and not database.get_all_tuning_records():
            raise _nothing_passed(model, journal)  # and the library of an earlier call stays
        comparison = check.measure_tuned(database)
        if check.gives_up_forms(comparison):
            if not is_proven():  # what takes the place of the forms
                return None
            comparison = check.measure_tuned(checked_database(context, finalists, check))
    return check, _library_of(model, check, journal, is_tunable=bool(tasks)), comparison


def _written(
    context: RunContext,
    model: Network | TIRWorkload,
    check: Check,
    library: Path,
    comparison: Comparison | None,
) -> Applied:
    """Write what loads a library and what is known of it."""
    thread_secs = {} if comparison is None else _thread_secs(context, model, library)
    n_threads = min(thread_secs, key=thread_secs.__getitem__, default=n_cores_of(context.target))
    interface, features = interface_of(model), features_of(context)
    runtime = runtime_libraries(library) if _runs_in_c(context, interface, library) else []
    examples = [_write_python_example(context, library)]
    if runtime:
        examples += write_programs(
            context, interface, library, features, runtime, n_threads=n_threads or 1
        )
    manifest = write_manifest(
        context.work_dir / MANIFEST_FILE,
        model.name,
        library.name,
        context.target,
        interface,
        cpu_features=features,
        runtime_libraries=[path.name for path in runtime],
        coverage=check.coverage,
        functions=check.covered,
        comparison=comparison,
        n_threads=n_threads,
        thread_secs=thread_secs,
    )
    return Applied(
        what=model.name,
        target=describe_target(context.target),
        out_dir=context.work_dir,
        library=library,
        manifest=manifest,
        examples=tuple(examples),
        coverage=check.coverage,
        comparison=comparison,
        shortfall=check.shortfall,
        thread_secs=thread_secs,
    )


def _library_of(
    model: Network | TIRWorkload, check: Check, journal: str, *, is_tunable: bool
) -> Path:
    """Return the library that a check has made, or raise why there is none to deploy."""
    if check.failure:
        raise WorkerError(
            f"The tuned {model.name} cannot be deployed: {check.failure}. The whole message is in "
            f"{journal}."
        )
    library = check.library or next(iter(check.libraries.values()), None)
    if library is None or (is_tunable and not check.n_tuned):
        raise _nothing_passed(model, journal)
    return library


def _chosen_forms(history: History) -> dict[str, str]:
    """Return the form that a run has chosen of each group at its end; {} if it has not ended."""
    tasks = (history.report or {}).get("tasks") or []
    used = [task for task in tasks if task.get("group") and task.get("is_used")]
    return {str(task["group"]): str(task["form"]) for task in used}


def _nothing_passed(model: Network | TIRWorkload, journal: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"No record of {model.name} passed its check and could be compiled; {journal} says why. "
        "Tune it for longer."
    )


def _thread_secs(
    context: RunContext, model: Network | TIRWorkload, library: Path
) -> dict[int, float]:
    """Return the seconds of an inference by number of threads; {} where none can be timed."""
    n_cores = n_cores_of(context.target)
    is_here = context.farm is None and device_kind(context.target) == "cpu"
    if not (isinstance(model, Network) and is_here and n_cores):
        return {}
    with context.stage("threads"):
        return time_thread_counts(context, library, model.inputs(context.seed), n_cores)


def _proven_only(finalists: Finalists) -> Finalists:
    """Return the finalists with what an earlier play-off has proven, which needs no other."""
    proven = finalists.proven
    records = () if proven is None else (proven.record,)
    is_proven = proven is not None
    return dataclasses.replace(finalists, records=records, is_proven=is_proven, read_all=None)


def _proven_share(
    tasks: Sequence[ExtractedTask],
    finalists: Sequence[Finalists],
    forms: Mapping[str, FormKey],
    *,
    is_direct: bool,
) -> float:
    """Return the share of calls whose task has a record that an earlier run has checked.

    An inference calls one form of each part: the one that these records choose.
    """
    used = FormChoice.of(finalists, forms, is_direct=is_direct).used
    calls = [int(task.weight) * is_used for task, is_used in zip(tasks, used, strict=True)]
    n_proven = sum(n for n, each in zip(calls, finalists, strict=True) if each.proven is not None)
    return n_proven / max(1, sum(calls))


def _runs_in_c(context: RunContext, interface: Interface, library: Path) -> bool:
    """Say whether C programs are written: for networks on CPUs, with TVM's files for Linux."""
    if interface.buffers or device_kind(context.target) != "cpu":
        return False
    reason = ""
    if not is_supported(interface):
        reason = (
            "the sizes of the outputs are not known before they are computed, or a type is "
            "unknown to NumPy"
        )
    elif in_python := python_functions(library):
        reason = f"the network calls functions that TVM has in Python only: {', '.join(in_python)}"
    if reason:
        context.observer.note(f"no C program is written: {reason}")
    return not reason


def _write_python_example(context: RunContext, library: Path) -> Path:
    values = {
        "library": library.name,
        "device": device_kind(context.target),
        # A library runs with the version that made it.
        "pins": f"apache-tvm=={TVM_VERSION} apache-tvm-ffi=={FFI_VERSION}",
    }
    path = context.work_dir / PYTHON_EXAMPLE
    path.write_text(filled(PYTHON_EXAMPLE, values), encoding="utf-8")
    return path
