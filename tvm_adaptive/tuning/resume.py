"""Continue a run from its directory alone: its journal has its settings, and what it did."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tvm_adaptive._tvm import Target
from tvm_adaptive.database.location import HIDDEN, NO_STORE
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.history import History, differences, read_history
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.tuning.config_file import config_of_fields
from tvm_adaptive.tuning.observer import GuardedObserver, Observer
from tvm_adaptive.tuning.outcome import TuneReport
from tvm_adaptive.tuning.run_lock import owned
from tvm_adaptive.tuning.session import RunOptions
from tvm_adaptive.tuning.target import (
    FARM_RUNNERS,
    check_runs_here,
    environment_of,
    resolve_target,
)
from tvm_adaptive.tuning.tune import run_named

# The fields of a run's first events, and their types.
_RUN: dict[str, tuple[type, ...]] = {
    "target": (dict, str),
    "config": (dict,),
    "seed": (int,),
    "budget_sec": (float, int, type(None)),
    "trials": (int, type(None)),
    "until_ms": (float, int, type(None)),
}
_MODEL: dict[str, tuple[type, ...]] = {"what": (str,), "input_shapes": (dict,)}


def resume(
    work_dir: str | Path,
    *,
    budget_sec: float | None = None,
    trials: int | None = None,
    until_ms: float | None = None,
    use_all: bool | None = None,
    store: str | None = None,
    observer: Observer | None = None,
    allow_other_machine: bool = False,
    spent_sec: float = 0.0,
) -> TuneReport:
    """Continue a run that was interrupted or killed, or that gets larger bounds.

    Model, target and configuration are those of its first attempt.

    Parameters
    ----------
    work_dir : str or Path
        The run's directory.
    budget_sec, trials, until_ms
        Bounds that replace the run's, counted from its beginning: of a run that spent 200
        of 600 s, 400 are left. None keeps the run's own.
    use_all : bool or None, default None
        Whether a search that has ended before its budget goes on; see
        :class:`~tvm_adaptive.tuning.config.TuneConfig`. None keeps the run's own.
    store : str or None, default None
        The record store; needed again if its URL holds a password, which no journal keeps.
    observer, allow_other_machine, spent_sec
        As in :func:`~tvm_adaptive.tune`.

    Returns
    -------
    TuneReport
        Of all attempts. A finished run with unchanged bounds returns its former report and
        measures nothing.

    Raises
    ------
    InvalidOptionError
        When there is no run in ``work_dir``, or its model was given in Python: resume
        that with ``tune_relax(..., resume=True)``.
    WorkDirInUseError, OtherMachineError, OtherModelError, ImportMismatchError
        As :func:`~tvm_adaptive.tune`.
    JournalError
        When its journal is damaged.
    """
    folder = Path(work_dir)
    if not (folder / JOURNAL_FILE).is_file():
        raise InvalidOptionError(f"There is no run in {work_dir}.")
    with owned(folder) as owner:
        before, history = read_settings(folder)
        options = dataclasses.replace(
            before,
            budget_sec=before.budget_sec if budget_sec is None else budget_sec,
            trials=before.trials if trials is None else trials,
            until_ms=before.until_ms if until_ms is None else until_ms,
            config=before.config.replace(use_all=use_all),
        )
        if history.report is not None and options == before and _is_from_here(before, history):
            bounds = {"--budget": before.budget_sec, "--trials": before.trials}
            given = " and ".join(name for name, bound in bounds.items() if bound is not None)
            note = f"the run has come to its end; give it more {given}"
            if before.until_ms is not None:
                note += ", or, if it has reached its goal, a shorter --until-latency"
            GuardedObserver(observer).note(note)
            return _report_of(history, work_dir)
        if store is None and HIDDEN in before.config.store:
            raise InvalidOptionError(
                f"The run kept its records in {before.config.store}; give --store with the "
                "password again, or none."
            )
        _check_target(options)
        options = dataclasses.replace(
            options,
            # The same seed would draw the candidates again that are measured already.
            seed=(before.seed or 0) + history.n_attempts,
            config=options.config.replace(store=store),
            observer=observer,
            allow_other_machine=allow_other_machine,
            spent_sec=spent_sec,
        )
        return run_named(options, owner, history)


def read_settings(work_dir: Path) -> tuple[RunOptions, History]:
    """Return a run's last options, with the journal's name of the store, and what it did."""
    path = work_dir / JOURNAL_FILE
    history = read_history(path)
    if not history.run:
        raise InvalidOptionError(f"There is no run in {work_dir}.")
    if history.model is None or history.model.get("what") is None:
        raise InvalidOptionError(
            f"The run in {work_dir} was given its model in Python: resume it there with "
            f"resume=True. If it has come to its end, its tuned library is in {work_dir}. "
            "tvm_adaptive.compile makes a function of a network from the record store."
        )
    run, model = history.run, history.model
    odd = [
        name
        for event, kinds in ((run, _RUN), (model, _MODEL))
        for name, kind in kinds.items()
        if not isinstance(event.get(name, ...), kind)
    ]
    if odd:
        raise InvalidOptionError(
            f"The journal in {work_dir} lacks settings of the run, or has them in another form "
            f"than this version ({', '.join(odd)}); start again in another directory, the store "
            "knows its records."
        )
    fields = {**run["config"], "store": str(run["config"].get("store") or NO_STORE)}
    inputs = model.get("inputs")
    # As it was resolved then: a mapping without a processor would mean this machine's now.
    settings = {name: run[name] for name in _RUN if name != "config"}
    if isinstance(run["target"], dict):
        settings["target"] = Target(run["target"])
    options = RunOptions(
        what=model["what"],
        work_dir=work_dir,
        input_shapes=model["input_shapes"],
        inputs=str(Path(work_dir, inputs)) if isinstance(inputs, str) else None,
        config=config_of_fields(fields, str(path)),
        resume=True,
        **settings,
    )
    return options, history


def _check_target(options: RunOptions) -> None:
    """Raise InvalidOptionError if this machine cannot run what a run has measured here."""
    if options.config.runner in FARM_RUNNERS:
        return
    index = options.config.measure.device_indices[0]
    target = resolve_target(options.target, device_index=index)
    try:
        check_runs_here(target)
    except InvalidOptionError as error:
        reason = str(error).partition(":")[0]  # then follows what helps a new run
        raise InvalidOptionError(
            f"{reason}. The run in {options.work_dir} is continued on machines that run its code; "
            "here, begin a new one in another directory: the record store knows its records."
        ) from error


def _is_from_here(options: RunOptions, history: History) -> bool:
    """Return True unless the run's times are known to be another machine's."""
    index = options.config.measure.device_indices[0]
    target = resolve_target(options.target, device_index=index)
    here = environment_of(target, options.config)
    return not differences(history.environment, here)


def _report_of(history: History, work_dir: str | Path) -> TuneReport:
    try:
        report = TuneReport.from_fields(history.report or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidOptionError(
            f"The report of the run in {work_dir} is another version's; give it more --budget "
            "or --trials to continue."
        ) from error
    folder = Path(work_dir).resolve()  # it may have been moved since
    return dataclasses.replace(
        report,
        work_dir=folder,
        database_dir=folder / report.database_dir.name,
        library=report.library and folder / report.library.name,
    )
