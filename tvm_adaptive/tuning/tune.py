"""The whole job on one page: from a name or a module to a tuned, checked, timed result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    ExtractedTask,
    IRModule,
    RemoveBuildArtifact,
    TuneContext,
    anchor_of,
    contexts_of,
    functions_as_tasks,
    ms,
    scheduler_hooks,
    workload_key,
)
from tvm_adaptive.database.repair import repair_database
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.measure_callback.commit import CommitRound
from tvm_adaptive.measure_callback.progress import RunProgress
from tvm_adaptive.measure_callback.recorder import Recorder
from tvm_adaptive.models import Network, TIRWorkload, extract, prepare
from tvm_adaptive.models.content import named_source, python_source
from tvm_adaptive.models.frontend import load, network_of_imported
from tvm_adaptive.runner.rpc.leased_worker import check_farm
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig
from tvm_adaptive.tuning.end_to_end import NetworkCheck, OperatorCheck
from tvm_adaptive.tuning.finals import decide, report_of
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.outcome import TuneReport
from tvm_adaptive.tuning.parts import Parts, make_parts
from tvm_adaptive.tuning.reserve import reserve_of, tuned_share
from tvm_adaptive.tuning.run_lock import Ownership
from tvm_adaptive.tuning.session import Session, open_session
from tvm_adaptive.tuning.target import TargetLike, describe_target, n_cores_of
from tvm_adaptive.tuning.warm_start import remembering
from tvm_adaptive.workers.cores import limits_note, usable_physical_cores

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
        Everything that is written lies in it. A database in it is continued; what was
        measured for it is not measured again.
    target : Target, str, mapping or None, default None
        ``"cpu"`` or None is this machine's CPU, ``"cuda"`` its first GPU.
    budget_sec : float or None, default None
        Wall-clock seconds for the whole call. What takes long is bounded by what is left of
        them: a check that has no time is not made, and what nobody has checked is not used.
    trials : int or None, default None
        Trials at the most. One of the two bounds must be given.
    until_ms : float or None, default None
        The search ends sooner when the sum of the tasks, weighted by their calls, takes as
        few milliseconds; the whole network takes somewhat more.
    seed : int or None, default None
        Of search, forest and scheduler; None draws one. Measured times, and so the
        course of a run, still differ from run to run.
    config : TuneConfig, default DEFAULT
    observer : Observer or None, default None
    input_shapes : mapping of str to sequence of int, or None, default None
        Extents by the names of inputs, for those whose shapes are dynamic; ``""`` names
        the only one.
    resume : bool, default False
        Go on where the run in ``work_dir`` ended, was interrupted or crashed: its seconds
        and trials count towards ``budget_sec`` and ``trials``, and cost model and task
        scheduler know what they knew. Where there is none, this is its beginning.
    allow_other_machine : bool, default False
        Use a ``work_dir`` whose times another machine or version of TVM has taken: they are
        set aside in a folder there and count for nothing, seconds and trials neither; the
        fastest records are measured again.
    spent_sec : float, default 0.0
        Seconds of ``budget_sec`` that were spent before the call, such as a program's start.

    Returns
    -------
    TuneReport

    Raises
    ------
    InvalidOptionError
        For a name, file, target or option that cannot be used; nothing is written then.
    WorkDirInUseError
        When another run uses ``work_dir``.
    OtherMachineError
        When times in ``work_dir`` were taken elsewhere, unless that is allowed.
    OtherModelError
        When the model is not the one that the resumed run was begun with.
    ImportMismatchError
        When an imported network computes something else than in its own framework.
    """
    return tune_named(
        what,
        work_dir=work_dir,
        target=target,
        budget_sec=budget_sec,
        trials=trials,
        until_ms=until_ms,
        seed=seed,
        config=config,
        observer=observer,
        input_shapes=input_shapes,
        resume=resume,
        allow_other_machine=allow_other_machine,
        spent_sec=spent_sec,
    )


def tune_named(
    what: str,
    *,
    work_dir: str | Path,
    target: TargetLike,
    budget_sec: float | None,
    trials: int | None,
    until_ms: float | None,
    seed: int | None,
    config: TuneConfig,
    observer: Observer | None,
    input_shapes: Mapping[str, Sequence[int]] | None,
    resume: bool,
    allow_other_machine: bool,
    spent_sec: float = 0.0,
    owner: Ownership | None = None,
) -> TuneReport:
    """Do as :func:`tune`, also in a directory that the caller owns already."""
    budget = Budget(budget_sec, spent_sec=spent_sec)
    workload = load(what, input_shapes)
    with open_session(
        what,
        work_dir=work_dir,
        target=target,
        budget=budget,
        trials=trials,
        until_ms=until_ms,
        seed=seed,
        config=config,
        observer=observer,
        resume=resume,
        allow_other_machine=allow_other_machine,
        model=named_source(what, workload, input_shapes),
        owner=owner,
    ) as session:
        if isinstance(workload, TIRWorkload):
            return _tune_functions(session, what, workload.mod)
        return _tune_network(session, workload)


def tune_relax(
    mod: IRModule,
    params: Mapping[str, Any] | None = None,
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
    resume: bool = False,
    allow_other_machine: bool = False,
    name: str = "network",
) -> TuneReport:
    """Tune a network that is given as a Relax module.

    Parameters
    ----------
    mod : IRModule
        Raw: with Relax operators, not yet lowered or fused. ``main`` takes the inputs
        first, then the parameters.
    params : mapping of str to Tensor, or None, default None
        Weights by the names of ``main``'s parameters; None when they are bound already.
    work_dir, target, budget_sec, trials, until_ms, seed, config, observer
        As in :func:`tune`.
    input_shapes, resume, allow_other_machine
        As in :func:`tune`.
    name : str, default "network"
        For the journal.

    Returns
    -------
    TuneReport

    Raises
    ------
    InvalidOptionError
        As :func:`tune`; also for a module without ``main``, or whose shapes stay dynamic.
    """
    budget = Budget(budget_sec)
    network = network_of_imported(name, mod, input_shapes or {}, params=dict(params or {}))
    with open_session(
        name,
        work_dir=work_dir,
        target=target,
        budget=budget,
        trials=trials,
        until_ms=until_ms,
        seed=seed,
        config=config,
        observer=observer,
        resume=resume,
        allow_other_machine=allow_other_machine,
        model=python_source(network, input_shapes),
    ) as session:
        return _tune_network(session, network)


def tune_tir(
    mod: IRModule,
    *,
    work_dir: str | Path,
    target: TargetLike = None,
    budget_sec: float | None = None,
    trials: int | None = None,
    until_ms: float | None = None,
    seed: int | None = None,
    config: TuneConfig = DEFAULT,
    observer: Observer | None = None,
    resume: bool = False,
    allow_other_machine: bool = False,
    name: str = "functions",
) -> TuneReport:
    """Tune every tensor function of a module.

    Parameters
    ----------
    mod : IRModule or PrimFunc
    work_dir, target, budget_sec, trials, until_ms, seed, config, observer
        As in :func:`tune`.
    resume, allow_other_machine
        As in :func:`tune`.
    name : str, default "functions"
        For the journal.

    Returns
    -------
    TuneReport

    Raises
    ------
    InvalidOptionError
        As :func:`tune`.
    """
    budget = Budget(budget_sec)
    with open_session(
        name,
        work_dir=work_dir,
        target=target,
        budget=budget,
        trials=trials,
        until_ms=until_ms,
        seed=seed,
        config=config,
        observer=observer,
        resume=resume,
        allow_other_machine=allow_other_machine,
        model=python_source(mod),
    ) as session:
        return _tune_functions(session, name, mod)


def _tune_network(session: Session, network: Network) -> TuneReport:
    check_farm(session.farm, session.server)
    with session.stage("prepare"):
        prepared = prepare(network, session.target, **session.config.preparation)
        tasks = extract(prepared, session.target)
        session.observer.note(
            f"{network.name} on {describe_target(session.target)}: {len(tasks)} tasks, "
            f"layout {prepared.layout}{', weights packed' if prepared.prepack else ''}"
        )
    with NetworkCheck(session, network, prepared) as check:
        return _tune_tasks(session, network.name, tasks, check)


def _tune_functions(session: Session, what: str, mod: IRModule) -> TuneReport:
    check_farm(session.farm, session.server)
    tasks = functions_as_tasks(mod, session.target)
    session.observer.note(f"{what} on {describe_target(session.target)}: {len(tasks)} tasks")
    with OperatorCheck(session, tasks) as check:
        return _tune_tasks(session, what, tasks, check)


def _tune_tasks(
    session: Session,
    what: str,
    tasks: Sequence[ExtractedTask],
    check: NetworkCheck | OperatorCheck,
) -> TuneReport:
    if note := limits_note(n_cores_of(session.target) or usable_physical_cores()):
        session.observer.note(note)
    check.measure_untuned()
    finish = session.config.finish
    session.reserve = reserve_of(
        session.budget,
        finish,
        len(tasks),
        later_sec=check.reserve_sec,
        least_later_sec=check.least_reserve_sec,
    )
    progress = _search(session, tasks)
    session.budget.reserve_sec = session.reserve.after_sec(tuned_share(progress))
    database, outcomes = decide(session, tasks, progress)
    comparison = check.measure_tuned(database)
    return report_of(
        session, what, check, outcomes=outcomes, progress=progress, comparison=comparison
    )


def _search(session: Session, tasks: Sequence[ExtractedTask]) -> RunProgress:
    """Run MetaSchedule's loop with our parts until budget, trials or spaces are spent."""
    repair_database(session.work_dir)
    history = session.history
    progress = history.progress([(str(each.task_name), float(int(each.weight))) for each in tasks])
    session.update_reserve(progress)
    if history.n_trials:
        session.observer.note(
            f"goes on after {history.n_trials} trials and {history.spent_sec:.0f} s"
        )
        session.check_goal(progress)
    n_left = (session.trials or _UNLIMITED) - history.n_trials
    if session.budget.should_stop() or n_left <= 0:
        session.observer.note("no search: the budget does not reach beyond the first steps")
        return progress
    with session.stage("search"), _parts(session) as parts:
        contexts = contexts_of(tasks, str(session.work_dir), parts.strategy, session.seed)
        described = [_described(*pair) for pair in zip(contexts, tasks, strict=True)]
        session.journal.write("tasks", tasks=described)
        scheduler = scheduler_hooks(parts.task_scheduler)
        if scheduler is not None:
            scheduler.restore(history.tasks)
        with remembering(session, contexts, parts) as keepers:
            database = RunDatabase(session.work_dir)
            ms.tune_tasks(
                tasks=contexts,
                task_weights=[task.weight for task in progress.tasks],
                work_dir=str(session.work_dir),
                max_trials_global=n_left,
                num_trials_per_iter=session.config.search.n_trials_per_round,
                builder=parts.builder,
                runner=parts.runner,
                database=database,
                cost_model=parts.cost_model,
                measure_callbacks=[
                    CommitRound(
                        *(contexts, database, parts.cost_model, session.machine_failed),
                        trial_log=parts.trial_log,
                    ),
                    RemoveBuildArtifact(),
                    # What the journal counts, a resumed run's cost model shall know.
                    *keepers,
                    Recorder(progress, session.round_done, session.journal),
                ],
                task_scheduler=parts.task_scheduler,
            )
    return progress


def _described(context: TuneContext, task: ExtractedTask) -> dict[str, Any]:
    return {
        "name": str(context.task_name),
        "weight": float(int(task.weight)),
        "workload_key": workload_key(context.mod),
        "family": anchor_of(context.mod),
    }


@contextmanager
def _parts(session: Session) -> Iterator[Parts]:
    parts = make_parts(
        session.config,
        target=session.target,
        work_dir=session.work_dir,
        seed=session.seed,
        journal=session.journal,
        should_stop=session.should_stop,
        server=session.server,
        time_left=lambda: session.budget.search_left_sec,
    )
    with closing(parts):
        yield parts
