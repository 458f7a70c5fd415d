"""The whole job on one page: from a name or a module to a tuned, checked, timed result."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_adaptive._tvm import (
    ExtractedTask,
    IRModule,
    TuneContext,
    anchor_of,
    argument_bytes,
    contexts_of,
    ms,
    runner_hooks,
    scheduler_hooks,
    tensor_functions_of,
    workload_key,
)
from tvm_adaptive._tvm.tensor_functions import has_fixed_arguments
from tvm_adaptive.database.repair import repair_database
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.commit import CommitRound, RemoveArtifacts
from tvm_adaptive.measure_callback.history import History
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.measure_callback.recorder import Recorder
from tvm_adaptive.models import Network, TIRWorkload
from tvm_adaptive.models.content import ModelSource, named_source, python_source
from tvm_adaptive.models.frontend import (
    ModelReader,
    Sample,
    check_installed,
    load,
    network_of_imported,
    peer_names,
    read_sample,
    shapes_of_sample,
    with_sample,
)
from tvm_adaptive.runner.rpc.leased_worker import check_farm
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.checks.model import Check, tasks_and_check
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig
from tvm_adaptive.tuning.earlier_kernels import with_earlier_kernels
from tvm_adaptive.tuning.finals.decision import decide
from tvm_adaptive.tuning.foreign_files import library_names
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.outcome import TuneReport
from tvm_adaptive.tuning.parts import Parts, build_sec_of, check_parts, forget_tasks, make_parts
from tvm_adaptive.tuning.run_lock import Ownership
from tvm_adaptive.tuning.session import (
    CommonOptions,
    RunOptions,
    Session,
    checked_target,
    open_session,
    worker_server,
)
from tvm_adaptive.tuning.target import TargetLike, describe_target
from tvm_adaptive.tuning.warm_start import report_waiting, warm_started
from tvm_adaptive.values.forms import DIRECT, NO_FORM, FormKey
from tvm_adaptive.values.run_folder import FINAL_DIR
from tvm_adaptive.workers.cores import limits_note, n_build_workers, usable_physical_cores
from tvm_adaptive.workers.fork_server import ForkServer

if TYPE_CHECKING:  # in typing from Python 3.11 on
    from typing_extensions import Unpack

# MetaSchedule counts trials in 32 bits; no run gets near this.
_UNLIMITED = 10**8


def tune(
    what: str,
    *,
    work_dir: str | Path,
    target: TargetLike = None,
    budget_sec: float | None = None,
    trials: int | None = None,
    until_ms: float | None = None,
    seed: int | None = None,
    config: TuneConfig = DEFAULT,
    observer: Observer | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: Sample | None = None,
    resume: bool = False,
    allow_other_machine: bool = False,
    spent_sec: float = 0.0,
) -> TuneReport:
    """Tune a network or an operator by its name, its file or its factory.

    Parameters
    ----------
    what : str
        A file (``"net.onnx"``, ``"net.pt2"``, a Relax module's ``"net.json"``), a factory
        (``"package.module:factory"``), a name in :data:`~tvm_adaptive.models.BUILTIN`,
        such as ``"resnet18"``, or ``"te:C2D"`` and its like.
    work_dir : str or Path
        The run writes there, to ``config.store`` and to the system's temporary directory. A run's
        database in it is continued: nothing is measured twice. Files of other programs stay.
    target : Target, str, mapping or None, default None
        ``"cpu"`` or None is this machine's CPU, ``"cuda"`` its first GPU, or the
        first that ``config.measure.devices`` names. Devices behind a tracker need one.
    budget_sec : float or None, default None
        Wall-clock seconds for the whole call. Preparing the model and compiling it untuned
        are not cut short. Every later step is bounded by what is left: a check without time
        is skipped, and what is not checked is not used.
    trials : int or None, default None
        Largest number of trials. One of the two bounds must be given.
    until_ms : float or None, default None
        The search also ends when the sum of the tasks, weighted by their calls, takes as
        few milliseconds; the whole network takes somewhat more.
    seed : int or None, default None
        Of search, forest and scheduler; None draws one. Measured times, and so the
        course of a run, still differ from run to run.
    config : TuneConfig, default DEFAULT
    observer : Observer or None, default None
    input_shapes : mapping of str to sequence of int, or None, default None
        Extents by the names of inputs, for those whose shapes are dynamic; ``""`` names
        the only one.
    inputs : mapping of str to ndarray, path of a file of numpy.savez, or None, default None
        Arrays by the names of the inputs. They fix the shapes, and every check and timing of
        the network uses them; None draws random ones. A run keeps arrays in its folder, and
        reads a file again when it is resumed.
    resume : bool, default False
        Continue the run in ``work_dir`` after its end, an interrupt or a crash: its seconds
        and trials count towards ``budget_sec`` and ``trials``, and cost model and task
        scheduler are restored. Without a run there, a new one begins.
    allow_other_machine : bool, default False
        Use a ``work_dir`` whose times are of another machine, version of TVM or target: they
        are moved to a folder there and do not count, nor do their seconds and trials; the
        fastest records are measured again. Records without a run's journal are always treated so.
    spent_sec : float, default 0.0
        Seconds of ``budget_sec`` that were spent before the call, such as a program's start.

    Returns
    -------
    TuneReport

    Raises
    ------
    InvalidOptionError
        For a name, file, target or option that cannot be used, in most cases before
        anything is written; or when TVM cannot compile the model.
    StoreError
        When a store other than the user's own cannot be opened.
    JournalError
        When the journal in ``work_dir`` is damaged.
    WorkDirInUseError
        When another run uses ``work_dir``.
    OtherMachineError
        When times in ``work_dir`` were taken elsewhere or for another target, unless that is
        allowed.
    OtherModelError
        When the resumed run began with another model.
    ImportMismatchError
        When an imported network computes something else in TVM than in its framework.
    """
    options = RunOptions(
        what=what,
        work_dir=work_dir,
        input_shapes=input_shapes,
        inputs=inputs,
        target=target,
        budget_sec=budget_sec,
        trials=trials,
        until_ms=until_ms,
        seed=seed,
        config=config,
        observer=observer,
        resume=resume,
        allow_other_machine=allow_other_machine,
        spent_sec=spent_sec,
    )
    return run_named(options)


def tune_relax(
    mod: IRModule,
    params: Mapping[str, Any] | None = None,
    *,
    work_dir: str | Path,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: Sample | None = None,
    name: str = "network",
    **options: Unpack[CommonOptions],
) -> TuneReport:
    """Tune a network given as a Relax module; returns what :func:`tune` does.

    Parameters
    ----------
    mod : IRModule
        Raw: with Relax operators, not yet lowered or fused. ``main`` takes the inputs
        first, then the parameters.
    params : mapping of str to Tensor, or None, default None
        Weights by the names of ``main``'s parameters; None when they are bound already.
    work_dir, input_shapes, inputs
        As in :func:`tune`.
    name : str, default "network"
        For the journal.
    **options
        ``target``, ``budget_sec``, ``trials``, ``until_ms``, ``seed``, ``config``,
        ``observer``, ``resume`` and ``allow_other_machine``, as in :func:`tune`.

    Raises
    ------
    InvalidOptionError
        As :func:`tune`; also for a module without ``main``, or whose shapes stay dynamic.
    """

    def load_network(_: ForkServer | None) -> tuple[Network, ModelSource]:
        shapes: Mapping[str, Sequence[int]] = dict(input_shapes or {})
        arrays = None if inputs is None else read_sample(inputs)
        if arrays is not None:
            shapes = shapes_of_sample(arrays, shapes, "inputs")
        network = network_of_imported(name, mod, shapes, params=dict(params or {}))
        if arrays is not None:
            network = with_sample(network, arrays, "inputs")
        return network, python_source(network, shapes)

    return run_loaded(RunOptions(what=name, work_dir=work_dir, **options), load_network)


def tune_tir(
    mod: IRModule,
    *,
    work_dir: str | Path,
    name: str = "functions",
    **options: Unpack[CommonOptions],
) -> TuneReport:
    """Tune every tensor function of a module; returns and raises what :func:`tune` does.

    Parameters
    ----------
    mod : IRModule or PrimFunc
    work_dir
        As in :func:`tune`.
    name : str, default "functions"
        For the journal.
    **options
        As in :func:`tune_relax`.

    Raises
    ------
    InvalidOptionError
        As :func:`tune`; also for a module without tensor functions, or with arguments that
        have no fixed sizes.
    """
    functions = tensor_functions_of(mod)
    if not functions:
        raise InvalidOptionError(
            "The module has no tensor function; tune_relax tunes a network of Relax operators."
        )
    if is_open := [str(v.name_hint) for v, each in functions if not has_fixed_arguments(each)]:
        raise InvalidOptionError(
            f"Arguments of {', '.join(is_open)} have no fixed sizes, which tuning needs; bind them "
            "first, as PrimFunc.specialize does."
        )
    run_options = RunOptions(what=name, work_dir=work_dir, **options)
    return run_loaded(run_options, lambda _: (TIRWorkload(name, mod), python_source(mod)))


def run_named(
    options: RunOptions, owner: Ownership | None = None, history: History | None = None
) -> TuneReport:
    """Tune what ``options.what`` names; one that owns the directory gives its lock and history."""

    def load_model(server: ForkServer | None) -> tuple[Network | TIRWorkload, ModelSource]:
        what, shapes, inputs = options.what, options.input_shapes, options.inputs
        with ExitStack() as stack:
            reader = ModelReader(server)
            stack.callback(reader.close)
            model = load(what, shapes, inputs=inputs, reader=reader)
            source = named_source(what, model, shapes, options.inputs_file)
            if isinstance(model, Network) and model.original is not None:
                stack.pop_all()  # the original closes it
            return model, source

    return run_loaded(options, load_model, owner=owner, history=history)


def run_loaded(
    options: RunOptions,
    load_model: Callable[[ForkServer | None], tuple[Network | TIRWorkload, ModelSource]],
    *,
    owner: Ownership | None = None,
    history: History | None = None,
    server: ForkServer | None = None,
) -> TuneReport:
    """Tune what a function loads, which gets the server that forks workers."""
    budget = Budget(options.budget_sec, spent_sec=options.spent_sec)
    check_parts(options.config)
    check_installed(peer_names(options.config.peers))
    # Before a model is read, which may take minutes.
    _, farm = checked_target(options)
    check_farm(farm)
    with ExitStack() as stack:
        server = server or stack.enter_context(worker_server())
        if options.config.cost_model.startswith("rfei"):
            # It takes a second, for which the search would wait; the reading of a file does, too.
            imports = threading.Thread(target=importlib.import_module, args=("sklearn.ensemble",))
            imports.start()
            stack.callback(imports.join)  # a program must not end within an import
        model, source = load_model(server)
        session = stack.enter_context(
            open_session(
                options,
                budget=budget,
                model=source,
                owner=owner,
                server=server,
                history=history,
                libraries=library_names(model, farm),
            )
        )
        tasks, check = tasks_and_check(session, model)
        what = model.name if isinstance(model, Network) else options.what
        session.observer.note(
            f"{what} on {describe_target(session.target)}: {len(tasks)} tasks{check.preparation}"
        )
        with check:
            return _tune_tasks(session, what, tasks, check)


def _tune_tasks(
    session: Session, what: str, tasks: Sequence[ExtractedTask], check: Check
) -> TuneReport:
    if note := limits_note(session.n_host_cores):
        session.observer.note(note)
    check.begin_untuned()
    repair_database(session.work_dir)
    with closing(make_parts(session)) as parts, ExitStack() as stack:
        with session.stage("prepare"):  # beside the compilation of the untuned network
            contexts = contexts_of(
                tasks,
                str(session.work_dir),
                parts.strategy,
                session.seed,
                reductions=session.config.search.reduction_sketches,
            )
        stack.callback(forget_tasks, contexts)
        check.measure_untuned()
        check.release_device()
        _plan_reserve(session, tasks, check)
        run_database = RunDatabase(session.work_dir)
        progress = _search(session, tasks, contexts, parts, check.forms, database=run_database)
        if (devices := runner_hooks(parts.runner)) is not None:
            session.suspended.update(devices.suspended)
    choose = functools.partial(decide, run_database=run_database, draft=parts.draft)
    for is_second in (False, True):
        database, outcomes = choose(session, tasks, contexts, progress, check, is_second=is_second)
        comparison = check.measure_tuned(database)
        if is_second or not check.gives_up_forms(comparison):
            break
        progress.forbid_forms()
    report = TuneReport(
        what=what,
        target=describe_target(session.target),
        work_dir=session.work_dir,
        database_dir=session.work_dir / FINAL_DIR,
        library=check.library,
        tasks=tuple(outcomes),
        comparison=comparison,
        coverage=check.coverage,
        weighted_sec=sum(task.weight * task.best_sec for task in outcomes if task.is_used),
        errors=dict(progress.errors),
        stage_secs=dict(session.stage_secs),
        elapsed_sec=session.budget.elapsed_sec,
        interrupted=session.budget.interrupted,
        machine_failure=session.budget.machine_failure,
        shortfall=check.shortfall,
        is_compiled=check.is_compiled,
        failure=check.failure,
        stopped=session.budget.stopped,
    )
    session.journal.write("report", **report.as_fields())
    return report


def _plan_reserve(session: Session, tasks: Sequence[ExtractedTask], check: Check) -> None:
    """Plan the end of the run, when the untuned code is known."""
    session.budget.plan_reserve(
        session.config.finish,
        sum(check.forms.get(str(each.task_name), NO_FORM).form == DIRECT for each in tasks),
        check.end_costs(),
        n_compilers=n_build_workers(usable_physical_cores()),
        drafts=session.config.search.n_analytical > 0,
    )


def _search(
    session: Session,
    tasks: Sequence[ExtractedTask],
    contexts: Sequence[TuneContext],
    parts: Parts,
    forms: Mapping[str, FormKey],
    *,
    database: RunDatabase,
) -> RunProgress:
    """Run MetaSchedule's loop with our parts until budget, trials or spaces are used up."""
    history = session.history
    history.keep_tasks({str(each.task_name): workload_key(each.mod) for each in contexts})
    if history.n_trials:
        history.disqualify(database.disqualified_secs)
    named = [(str(each.task_name), float(int(each.weight))) for each in tasks]
    progress = history.progress(named, forms)
    session.update_reserve(progress)
    if history.n_trials:
        session.observer.note(
            f"resumes after {history.n_trials} trials and {history.spent_sec:.0f} s"
        )
        session.check_goal(progress)
    report_waiting(session)
    if not tasks:
        session.observer.note("no search: no schedule can change a function of this network")
        return progress
    _write_tasks(session, tasks, contexts, forms)
    n_left = min(session.options.trials or _UNLIMITED, _UNLIMITED) - history.n_trials
    if n_left <= 0:
        session.observer.note(f"no search: all {session.options.trials} trials are done")
        return progress
    if not session.budget.can_search(len(tasks)):
        if not session.budget.interrupted and not session.budget.stop_reason:
            session.observer.note("no search: the budget does not reach beyond the first steps")
        return progress
    with session.stage("search"):
        scheduler = scheduler_hooks(parts.task_scheduler)
        if scheduler is not None:
            scheduler.restore(history.tasks)
            scheduler.set_forms(forms)
        _tune_contexts(session, contexts, progress, parts, n_left, database=database)
    if scheduler is not None:
        session.scheduler_ended(scheduler.stop_reason)
    budget = session.budget
    session.journal.write(
        "reserve",
        left_sec=None if budget.seconds is None else budget.left_sec,
        next_round_sec=budget.next_round_sec,
        parts=budget.reserve_parts,
    )
    return progress


def _write_tasks(
    session: Session,
    tasks: Sequence[ExtractedTask],
    contexts: Sequence[TuneContext],
    forms: Mapping[str, FormKey],
) -> None:
    described = [
        {
            "name": str(context.task_name),
            "weight": float(int(task.weight)),
            "workload_key": workload_key(context.mod),
            "family": anchor_of(context.mod),
            "bytes": argument_bytes(context.mod),
            **forms.get(str(context.task_name), NO_FORM)._asdict(),
        }
        for context, task in zip(contexts, tasks, strict=True)
    ]
    session.journal.write("tasks", tasks=described)


def _tune_contexts(
    session: Session,
    contexts: Sequence[TuneContext],
    progress: RunProgress,
    parts: Parts,
    n_trials: int,
    *,
    database: RunDatabase,
) -> None:
    with (
        warm_started(session, contexts, parts, database) as store_callbacks,
        with_earlier_kernels(parts.builder, parts.trial_log, contexts, database) as builder,
    ):
        ms.tune_tasks(
            tasks=contexts,
            task_weights=[task.weight for task in progress.tasks],
            work_dir=str(session.work_dir),
            max_trials_global=n_trials,
            num_trials_per_iter=session.config.search.n_trials_per_round,
            builder=builder,
            runner=parts.runner,
            database=database,
            cost_model=parts.cost_model,
            measure_callbacks=[
                CommitRound(
                    contexts,
                    database,
                    parts.cost_model,
                    session.machine_failed,
                    trial_log=parts.trial_log,
                ),
                RemoveArtifacts(),
                # Before the recorder: a resumed run's cost model knows what the journal counts.
                *store_callbacks,
                Recorder(
                    progress,
                    session.round_done,
                    session.journal,
                    build_sec_of=build_sec_of(session, parts),
                ),
            ],
            task_scheduler=parts.task_scheduler,
        )
