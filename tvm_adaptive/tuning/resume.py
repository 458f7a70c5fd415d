"""Go on with a run from its directory alone: its journal knows what it was told."""

from __future__ import annotations

from pathlib import Path

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.measure_callback.history import History, differences
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE
from tvm_adaptive.tuning.observer import GuardedObserver, Observer
from tvm_adaptive.tuning.outcome import TuneReport
from tvm_adaptive.tuning.parts import farm_of
from tvm_adaptive.tuning.run_lock import owned
from tvm_adaptive.tuning.run_settings import Bounds, RunSettings, read_settings
from tvm_adaptive.tuning.target import resolve_target
from tvm_adaptive.tuning.tune import tune_named
from tvm_adaptive.workers.environment import Environment


def resume(
    work_dir: str | Path,
    *,
    budget_sec: float | None = None,
    trials: int | None = None,
    until_ms: float | None = None,
    store: str | None = None,
    observer: Observer | None = None,
    allow_other_machine: bool = False,
    spent_sec: float = 0.0,
) -> TuneReport:
    """Continue a run that was interrupted, killed, or shall go on for longer.

    Model, target and configuration are those it was begun with.

    Parameters
    ----------
    work_dir : str or Path
        Of the run.
    budget_sec, trials, until_ms
        Other bounds than the run had, counted from its beginning: of a run that spent 200
        of 600 s, 400 are left. None leaves one as it was.
    store : str or None, default None
        The record store; needed again where its URL holds a password, which no journal
        keeps.
    observer : Observer or None, default None
    allow_other_machine : bool, default False
        Go on also where another machine, or another version of TVM, took the run's times:
        they are set aside in a folder of ``work_dir`` and count for nothing, seconds and
        trials neither; the fastest records are measured again.
    spent_sec : float, default 0.0
        Seconds of the budget that were spent before the call, such as a program's start.

    Returns
    -------
    TuneReport
        Of all sittings; of a run that has come to its end, and whose bounds are as they
        were, the report it ended with: nothing is measured then.

    Raises
    ------
    InvalidOptionError
        When there is no run in ``work_dir``, or it was given its model in Python: resume
        that with ``tune_relax(..., resume=True)``.
    WorkDirInUseError
        When the run goes on in another process.
    OtherMachineError
        When its times were taken elsewhere, unless that is allowed.
    OtherModelError
        When the model has changed since.
    JournalError
        When its journal is damaged.
    """
    folder = Path(work_dir)
    if not (folder / JOURNAL_FILE).is_file():
        raise InvalidOptionError(f"There is no run in {work_dir}.")
    with owned(folder) as owner:
        told = read_settings(folder)
        before = told.bounds
        bounds = Bounds(
            budget_sec or before.budget_sec, trials or before.trials, until_ms or before.until_ms
        )
        if told.history.report is not None and bounds == before and _is_from_here(told):
            GuardedObserver(observer).note(
                "the run has come to its end; give it more --budget or --trials"
            )
            return _report_of(told.history, work_dir)
        if store is None and told.hides_password:
            raise InvalidOptionError(
                f"The run kept its records in {told.config.store}; give --store with the "
                "password again, or none."
            )
        return tune_named(
            told.what,
            work_dir=folder,
            target=told.target,
            budget_sec=bounds.budget_sec,
            trials=bounds.trials,
            until_ms=bounds.until_ms,
            # The same would draw the candidates again that are measured already.
            seed=told.seed + told.history.n_attempts,
            config=told.config.replace(store=store),
            observer=observer,
            input_shapes=told.input_shapes,
            resume=True,
            allow_other_machine=allow_other_machine,
            spent_sec=spent_sec,
            owner=owner,
        )


def _is_from_here(told: RunSettings) -> bool:
    """Say whether what a run ended with was timed on this machine, for all that is known."""
    here = Environment.current(resolve_target(told.target), farm_of(told.config))
    return not differences(told.history.environment, here)


def _report_of(history: History, work_dir: str | Path) -> TuneReport:
    try:
        return TuneReport.from_fields(history.report or {})
    except (KeyError, TypeError) as error:
        raise InvalidOptionError(
            f"The report of the run in {work_dir} is another version's; give it more --budget "
            "or --trials to go on."
        ) from error
