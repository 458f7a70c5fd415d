"""What is timed anew: winners, and what was best when another run was done. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.journals import FINAL, Run

BASELINE = "stock"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Something to time.

    Attributes
    ----------
    name : str
        ``"method/seed/final"``, ``"method/seed/96"``, ``"untuned"`` or ``"pytorch"``.
    method : str or None
    folder : str or None
        Of the run; None for an untuned one.
    n_trials : int or None
        The run's best after so many trials; None for its winner.
    """

    name: str
    method: str | None = None
    folder: str | None = None
    n_trials: int | None = None


def entries_of(out: Path, runs: Sequence[Run]) -> list[Entry]:
    """Return what to time of one workload's runs.

    Of each run its winner; of each run that is compared with the baseline of the same
    seed, also what the one that took longer had found when the other was done, and what
    the run had found with the baseline's number of trials if it went on after them.
    """
    entries: dict[str, Entry] = {}

    def add(run: Run, n_trials: int | None) -> None:
        name = f"{run.key}/{FINAL if n_trials is None else n_trials}"
        folder = str(out / run.spec.folder)
        entries[name] = Entry(name, run.spec.method, folder, n_trials)

    good = [run for run in runs if not run.failure]
    for run in good:
        add(run, None)
    bases = {run.spec.seed: run for run in good if run.spec.method == BASELINE}
    for run in good:
        base = bases.get(run.spec.seed)
        if base is not None and run is not base:
            longer, n_trials = equal_time_cut(base, run)
            if n_trials:
                add(longer, n_trials)
            if n_trials := equal_trials_cut(base, run):
                add(run, n_trials)
    return list(entries.values())


def equal_trials_cut(base: Run, run: Run) -> int | None:
    """Return the baseline's number of trials if a run went on after them, else None."""
    return base.n_trials if 0 < base.n_trials < run.n_trials else None


def equal_time_cut(one: Run, other: Run) -> tuple[Run, int]:
    """Return the run that took longer, and its trials known when the shorter was done."""
    longer, shorter = (one, other) if one.finish_sec >= other.finish_sec else (other, one)
    return longer, longer.curve.trials_at(shorter.finish_sec)
