"""From records to something that runs elsewhere: a library, and how to load it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    FFI_VERSION,
    TVM_VERSION,
    Database,
    ExtractedTask,
    args_info_of,
    functions_as_tasks,
)
from tvm_adaptive.database.location import NO_STORE, open_store
from tvm_adaptive.errors import InvalidOptionError, WorkerError
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.models import Network, TIRWorkload, extract, prepare
from tvm_adaptive.models.compile import device_kind
from tvm_adaptive.models.frontend import load
from tvm_adaptive.tuning.budget import Budget
from tvm_adaptive.tuning.config import DEFAULT, TuneConfig
from tvm_adaptive.tuning.end_to_end import NetworkCheck, OperatorCheck
from tvm_adaptive.tuning.finalists import Finalists, finalists_of_run, finalists_of_store
from tvm_adaptive.tuning.finals import checked_database
from tvm_adaptive.tuning.loader_examples import (
    Argument,
    cpp_example,
    function_example,
    network_example,
)
from tvm_adaptive.tuning.observer import Observer
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.run_settings import read_settings
from tvm_adaptive.tuning.session import Session, open_session
from tvm_adaptive.tuning.target import TargetLike, describe_target
from tvm_adaptive.workers.environment import Environment

SUMMARY_FILE = "summary.json"
# What happened while it was compiled and checked.
APPLY_FILE = "apply.jsonl"
# A library runs with the version that made it.
_PINS = f"apache-tvm=={TVM_VERSION} apache-tvm-ffi=={FFI_VERSION}"
# From tasks to what is recorded of each.
_Records = Callable[[Sequence[ExtractedTask]], list[Finalists]]


@dataclasses.dataclass(frozen=True)
class Applied:
    """A compiled model."""

    what: str
    target: str
    out_dir: Path  # holds everything below, and a summary as JSON
    library: Path
    examples: tuple[Path, ...]  # programs that load the library and run it once
    coverage: str  # which functions run with a tuned schedule, in words
    # against the untuned model; None when one of the two could not be run
    comparison: Comparison | None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to compile, how, and with which records."""

    what: str
    target: TargetLike
    input_shapes: Mapping[str, Sequence[int]]
    config: TuneConfig
    run: Path | None


def apply(
    what: str,
    *,
    out_dir: str | Path,
    target: TargetLike = None,
    config: TuneConfig = DEFAULT,
    observer: Observer | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Applied:
    """Compile a model with the best records there are; check and time it.

    Only what a play-off has checked is compiled. Of tasks that were in none, as of a run
    that was interrupted, the best few records are checked first: that takes seconds for
    each; a task of which none passes stays untuned.

    Parameters
    ----------
    what : str
        A run's work directory, also of one that goes on or was killed: everything else is
        taken from its journal then, and nothing in it is changed. Or a model, as for
        :func:`~tvm_adaptive.tune`; then the records are those of ``config.store``.
    out_dir : str or Path
        Made if it is not there; no run's directory.
    target, config, observer, input_shapes
        As in :func:`~tvm_adaptive.tune`; of ``config`` what concerns the model, the store
        and the farm that a foreign target needs. A run has its own, but for another farm.

    Returns
    -------
    Applied

    Raises
    ------
    InvalidOptionError
        When an option cannot be used, or nothing that was recorded for the model and target
        can be deployed.
    ImportMismatchError
        When an imported network computes something else than in its own framework.
    StoreError
        When the store cannot be read.
    """
    run = Path(what)
    if (Path(out_dir) / JOURNAL_FILE).is_file():
        raise InvalidOptionError(
            f"{out_dir} is a run's directory, and what is applied needs one of its own; name "
            "another with --out."
        )
    if (run / JOURNAL_FILE).is_file():
        if target is not None or input_shapes:
            raise InvalidOptionError(f"Target and shapes are those of the run {what}; leave them.")
        plan = _plan_of_run(run)
        if config.measure.tracker is not None:
            moved = plan.config.replace(runner=config.runner, measure=config.measure)
            plan = dataclasses.replace(plan, config=moved)
    else:
        plan = _Plan(what, target, dict(input_shapes or {}), config, None)
    workload = load(plan.what, plan.input_shapes)
    with _opened(plan, out_dir, observer) as session, _records(plan, session) as records:
        if isinstance(workload, TIRWorkload):
            applied = _compile_function(session, workload, records)
        else:
            applied = _compile_network(session, workload, records)
        _write_summary(applied)
        return applied


@contextmanager
def _opened(plan: _Plan, out_dir: str | Path, observer: Observer | None) -> Iterator[Session]:
    """Open a session whose directory does not look like a run's."""
    with open_session(
        plan.what,
        work_dir=out_dir,
        target=plan.target,
        budget=Budget(None),
        trials=1,
        until_ms=None,
        seed=0,
        config=plan.config.replace(store=NO_STORE),
        observer=observer,
        journal_file=APPLY_FILE,
    ) as session:
        try:
            yield session
        except InvalidOptionError:
            if not session.budget.interrupted:
                raise
        if session.budget.interrupted:
            raise KeyboardInterrupt


def _plan_of_run(run: Path) -> _Plan:
    """Return what a run tuned, from its journal."""
    told = read_settings(run)
    return _Plan(told.what, told.target, told.input_shapes, told.config, run)


@contextmanager
def _records(plan: _Plan, session: Session) -> Iterator[_Records]:
    """Open the records to compile with."""
    if plan.run is not None:
        yield functools.partial(finalists_of_run, plan.run, session.target)
        return
    with open_store(plan.config.store, Environment.current(session.target, session.farm)) as store:
        if store is None:
            raise InvalidOptionError("Say where the records are: a run's directory, or a store.")
        yield functools.partial(finalists_of_store, store, session.target)


def _deployable(session: Session, what: str, finalists: Sequence[Finalists]) -> Database:
    """Return a record for each task that has a sound one."""
    if not any(each.records for each in finalists):
        raise InvalidOptionError(
            f"Nothing was recorded for {what} on {describe_target(session.target)}; tune it "
            "first, with the same layout and target."
        )
    return checked_database(session, finalists)


def _compile_network(session: Session, network: Network, records: _Records) -> Applied:
    with session.stage("prepare"):
        prepared = prepare(network, session.target, **session.config.preparation)
    finalists = records(extract(prepared, session.target))
    with NetworkCheck(session, network, prepared) as check:
        check.measure_untuned()
        database = _deployable(session, network.name, finalists)
        comparison = check.measure_tuned(database)
    library = check.library or session.work_dir / f"{network.name}.so"
    kind = device_kind(session.target)
    arguments = [
        Argument(name, shape, network.input_dtypes[name])
        for name, shape in network.input_shapes.items()
    ]
    texts = {"example.py": network_example(library.name, arguments, kind, _PINS)}
    if kind == "cpu":
        texts["example.cc"] = cpp_example(library.name, arguments)
    return _applied(session, library, texts, check, comparison, what=network.name)


def _compile_function(session: Session, workload: TIRWorkload, records: _Records) -> Applied:
    tasks = functions_as_tasks(workload.mod, session.target)
    (task,) = tasks  # what has a name has one function
    finalists = records(tasks)
    with OperatorCheck(session, tasks) as check:
        check.measure_untuned()
        database = _deployable(session, workload.name, finalists)
        comparison = check.measure_tuned(database)
    library = check.libraries.get(str(task.task_name), session.work_dir)
    arguments = [
        Argument(f"buffer_{place}", tuple(int(extent) for extent in info.shape), str(info.dtype))
        for place, info in enumerate(args_info_of(workload.mod))
    ]
    kind = device_kind(session.target)
    texts = {"example.py": function_example(library.name, arguments, kind, _PINS)}
    return _applied(session, library, texts, check, comparison, what=workload.name)


def _applied(
    session: Session,
    library: Path,
    texts: Mapping[str, str],
    check: NetworkCheck | OperatorCheck,
    comparison: Comparison | None,
    *,
    what: str,
) -> Applied:
    if check.failure:
        raise WorkerError(
            f"What is tuned of {what} could not be compiled: {check.failure}. The journal in "
            f"{session.work_dir} has all of the message."
        )
    if not check.n_tuned:
        raise InvalidOptionError(
            f"Nothing that was recorded for {what} passed its check and could be compiled; "
            f"{session.journal.path} says why. Tune it for longer."
        )
    examples = []
    for name, text in texts.items():
        path = session.work_dir / name
        path.write_text(text, encoding="utf-8")
        examples.append(path)
    return Applied(
        what=what,
        target=describe_target(session.target),
        out_dir=session.work_dir,
        library=library,
        examples=tuple(examples),
        coverage=check.coverage,
        comparison=comparison,
    )


def _write_summary(applied: Applied) -> None:
    fields: dict[str, Any] = {
        "what": applied.what,
        "target": applied.target,
        "library": applied.library.name,
        "coverage": applied.coverage,
        "comparison": applied.comparison and dataclasses.asdict(applied.comparison),
        "tvm": TVM_VERSION,
        "tvm_ffi": FFI_VERSION,
    }
    path = applied.out_dir / SUMMARY_FILE
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
