"""Go on with a run from its directory alone: its journal knows what it was told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tvm_adaptive.config import TuneConfig
from tvm_adaptive.config_file import config_of_fields
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.history import History, read_history
from tvm_adaptive.memory import NO_STORE
from tvm_adaptive.outcome import TuneReport
from tvm_adaptive.session import JOURNAL_FILE, Observer
from tvm_adaptive.tune import tune

# What a run's first event has to say, and as what.
_TOLD: dict[str, tuple[type, ...]] = {
    "target": (dict, str),
    "config": (dict,),
    "seed": (int,),
    "budget_sec": (float, int, type(None)),
    "trials": (int, type(None)),
    "until_ms": (float, int, type(None)),
}
# What SQLAlchemy writes instead of a password.
_HIDDEN = ":***@"


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """How much a run may spend, all sittings together."""

    budget_sec: float | None
    trials: int | None
    until_ms: float | None


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
    path = Path(work_dir) / JOURNAL_FILE
    history = read_history(path)
    if not history.run:
        raise InvalidOptionError(f"There is no run to resume in {work_dir}.")
    if history.model is None:
        raise InvalidOptionError(
            f"The run in {work_dir} was given its model in Python; resume it there, with "
            "resume=True."
        )
    told = history.run
    odd = [name for name, kinds in _TOLD.items() if not isinstance(told.get(name, ...), kinds)]
    if odd or not isinstance(history.model.get("what"), str):
        raise InvalidOptionError(
            f"The journal in {work_dir} does not say what the run was told, or not as this "
            f"version does ({', '.join(odd) or 'what'}); begin anew in another directory, the "
            "store knows its records."
        )
    before = _Bounds(told["budget_sec"], told["trials"], told["until_ms"])
    bounds = _Bounds(
        budget_sec or before.budget_sec, trials or before.trials, until_ms or before.until_ms
    )
    if history.report is not None and bounds == before:
        if observer is not None:
            observer.note("the run has come to its end; give it more --budget or --trials")
        return _report_of(history, work_dir)
    return tune(
        history.model["what"],
        work_dir=work_dir,
        target=told["target"],
        budget_sec=bounds.budget_sec,
        trials=bounds.trials,
        until_ms=bounds.until_ms,
        # The same would draw the candidates again that are measured already.
        seed=told["seed"] + history.n_sittings,
        config=_config_of(told["config"], store, str(path)),
        observer=observer,
        input_shapes=history.model.get("input_shapes"),
        resume=True,
    )


def _config_of(fields: dict[str, Any], store: str | None, name: str) -> TuneConfig:
    known = str(store or fields.get("store") or NO_STORE)
    if _HIDDEN in known:
        raise InvalidOptionError(
            f"The run kept its records in {known}; give --store with the password again, or none."
        )
    return config_of_fields({**fields, "store": known}, name)


def _report_of(history: History, work_dir: str | Path) -> TuneReport:
    try:
        return TuneReport.from_fields(history.report or {})
    except (KeyError, TypeError) as error:
        raise InvalidOptionError(
            f"The report of the run in {work_dir} is another version's; give it more --budget "
            "or --trials to go on."
        ) from error
