"""Go on with a run from its directory alone: its journal knows what it was told."""

from __future__ import annotations

from pathlib import Path

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.history import History
from tvm_adaptive.outcome import TuneReport
from tvm_adaptive.session import Observer
from tvm_adaptive.told import Bounds, read_told
from tvm_adaptive.tune import tune


def resume(
    work_dir: str | Path,
    *,
    budget_sec: float | None = None,
    trials: int | None = None,
    until_ms: float | None = None,
    store: str | None = None,
    observer: Observer | None = None,
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
    JournalError
        When its journal is damaged.
    """
    told = read_told(Path(work_dir))
    before = told.bounds
    bounds = Bounds(
        budget_sec or before.budget_sec, trials or before.trials, until_ms or before.until_ms
    )
    if told.history.report is not None and bounds == before:
        if observer is not None:
            observer.note("the run has come to its end; give it more --budget or --trials")
        return _report_of(told.history, work_dir)
    if store is None and told.hides_password:
        raise InvalidOptionError(
            f"The run kept its records in {told.config.store}; give --store with the password "
            "again, or none."
        )
    return tune(
        told.what,
        work_dir=work_dir,
        target=told.target,
        budget_sec=bounds.budget_sec,
        trials=bounds.trials,
        until_ms=bounds.until_ms,
        # The same would draw the candidates again that are measured already.
        seed=told.seed + told.history.n_sittings,
        config=told.config.replace(store=store),
        observer=observer,
        input_shapes=told.input_shapes,
        resume=True,
    )


def _report_of(history: History, work_dir: str | Path) -> TuneReport:
    try:
        return TuneReport.from_fields(history.report or {})
    except (KeyError, TypeError) as error:
        raise InvalidOptionError(
            f"The report of the run in {work_dir} is another version's; give it more --budget "
            "or --trials to go on."
        ) from error
