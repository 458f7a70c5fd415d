"""From records to something that runs elsewhere: a library, and how to load it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import (
    FFI_VERSION,
    TVM_VERSION,
    Database,
    Target,
    args_info_of,
    copy_record,
    functions_as_tasks,
    memory_database,
)
from tvm_adaptive.budget import Budget
from tvm_adaptive.config import DEFAULT, TuneConfig
from tvm_adaptive.database.metaschedule import StoreDatabase
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.examples import Argument, cpp_example, function_example, network_example
from tvm_adaptive.importers import load
from tvm_adaptive.judge import FunctionJudge, NetworkJudge
from tvm_adaptive.memory import NO_STORE, open_store
from tvm_adaptive.models import Network, TIRWorkload, prepare
from tvm_adaptive.models.compile import device_kind
from tvm_adaptive.outcome import Comparison
from tvm_adaptive.session import JOURNAL_FILE, Observer, Session, open_session
from tvm_adaptive.show import best_records
from tvm_adaptive.target import TargetLike, describe_target
from tvm_adaptive.told import read_told

SUMMARY_FILE = "summary.json"
# A library runs with the version that made it.
_PINS = f"apache-tvm=={TVM_VERSION} apache-tvm-ffi=={FFI_VERSION}"


@dataclasses.dataclass(frozen=True)
class Applied:
    """A compiled model.

    Attributes
    ----------
    what, target : str
    out_dir : Path
        Holds everything below, and a summary as JSON.
    library : Path
    examples : tuple of Path
        Programs that load the library and run it once.
    coverage : str
        Which functions run with a tuned schedule, in words.
    comparison : Comparison or None
        Against the untuned model; None when one of the two could not be run.
    """

    what: str
    target: str
    out_dir: Path
    library: Path
    examples: tuple[Path, ...]
    coverage: str
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

    Parameters
    ----------
    what : str
        A run's work directory, also of one that goes on or was killed: everything else is
        taken from its journal then. Or a model, as for :func:`~tvm_adaptive.tune`; then
        the records are those of ``config.store``.
    out_dir : str or Path
        Made if it is not there.
    target, config, observer, input_shapes
        As in :func:`~tvm_adaptive.tune`; of ``config`` what concerns the model, the store
        and the farm that a foreign target needs. A run has its own, but for another farm.

    Returns
    -------
    Applied

    Raises
    ------
    InvalidOptionError
        When an option cannot be used, or nothing was recorded for the model and target.
    ImportMismatchError
        When an imported network computes something else than in its own framework.
    StoreError
        When the store cannot be read.
    """
    run = Path(what)
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
    ) as session:
        with _records(plan, session.target) as database:
            applied = _compile(session, workload, database)
        _write_summary(applied)
        return applied


def _plan_of_run(run: Path) -> _Plan:
    """Return what a run tuned, from its journal."""
    told = read_told(run)
    return _Plan(told.what, told.target, told.input_shapes, told.config, run)


@contextmanager
def _records(plan: _Plan, target: Target) -> Iterator[Database]:
    """Open the records to compile with."""
    if plan.run is not None:
        found = memory_database()
        for _, record in best_records(plan.run).values():
            copy_record(record, found)
        yield found
        return
    with open_store(plan.config.store) as store:
        if store is None:
            raise InvalidOptionError("Say where the records are: a run's directory, or a store.")
        yield StoreDatabase(store, target)


def _compile(session: Session, workload: Network | TIRWorkload, database: Database) -> Applied:
    if isinstance(workload, TIRWorkload):
        return _compile_function(session, workload, database)
    return _compile_network(session, workload, database)


def _compile_network(session: Session, network: Network, database: Database) -> Applied:
    with session.stage("prepare"):
        prepared = prepare(network, session.target, **session.config.preparation)
    with NetworkJudge(session, network, prepared) as judge:
        judge.measure_untuned()
        comparison = judge.measure_tuned(database)
    library = judge.library or session.work_dir / f"{network.name}.so"
    kind = device_kind(session.target)
    arguments = [
        Argument(name, shape, network.input_dtypes[name])
        for name, shape in network.input_shapes.items()
    ]
    texts = {"example.py": network_example(library.name, arguments, kind, _PINS)}
    if kind == "cpu":
        texts["example.cc"] = cpp_example(library.name, arguments)
    return _applied(session, library, texts, judge, comparison, what=network.name)


def _compile_function(session: Session, workload: TIRWorkload, database: Database) -> Applied:
    tasks = functions_as_tasks(workload.mod, session.target)
    with FunctionJudge(session, tasks) as judge:
        judge.measure_untuned()
        comparison = judge.measure_tuned(database)
    (task,) = tasks  # what has a name has one function
    library = judge.libraries[str(task.task_name)]
    arguments = [
        Argument(f"buffer_{place}", tuple(int(extent) for extent in info.shape), str(info.dtype))
        for place, info in enumerate(args_info_of(workload.mod))
    ]
    kind = device_kind(session.target)
    texts = {"example.py": function_example(library.name, arguments, kind, _PINS)}
    return _applied(session, library, texts, judge, comparison, what=workload.name)


def _applied(
    session: Session,
    library: Path,
    texts: Mapping[str, str],
    judge: NetworkJudge | FunctionJudge,
    comparison: Comparison | None,
    *,
    what: str,
) -> Applied:
    if not judge.n_tuned:
        raise InvalidOptionError(
            f"Nothing was recorded for {what} on {describe_target(session.target)}; tune it "
            "first, with the same layout and target."
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
        coverage=judge.coverage,
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
