"""What play-offs said of a store's trials: which are proven, and which are found out.

The fastest of many short timings is a lucky one, and it may compute something else. The
play-off at the end of a run knows better; a later run shall not have to learn it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Container, Iterable

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.traces import choices_of

# Rows looked at for each that is wanted: every run measures again what earlier ones found.
_ROWS_PER_TRIAL = 4


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What the latest play-off of a candidate said."""

    trial: StoredTrial
    is_winner: bool

    @property
    def is_sound(self) -> bool:
        return self.trial.seconds is not None


def trusted(store: RecordStore, task: StoredTask, n: int) -> list[StoredTrial]:
    """Return the candidates of a task to try first, each once.

    The play-offs' winners, then those who lost there, take turns with the fastest that none
    has judged, as long as these were recorded as faster than the very first. Those that a
    play-off found out are left out.

    Parameters
    ----------
    store : RecordStore
    task : StoredTask
    n : int
        At the most.

    Returns
    -------
    list of StoredTrial
        Proven ones with the seconds of their play-off.

    Raises
    ------
    StoreError
        When the store cannot be read.
    """
    verdicts = _verdicts(store.finals(task))
    proven = [each.trial for each in sorted(verdicts.values(), key=_rank) if each.is_sound]
    rows = store.best(task, _ROWS_PER_TRIAL * n + len(verdicts))
    unjudged = list(itertools.islice(_different(rows, verdicts), n))
    if not proven:
        return unjudged
    bar_sec = proven[0].seconds or 0.0
    # A recorded time flatters: who does not even seem faster is not.
    hopeful = [each for each in unjudged if (each.seconds or 0.0) < bar_sec]
    in_turns = [
        each for pair in itertools.zip_longest(proven, hopeful) for each in pair if each is not None
    ]
    return (in_turns + unjudged[len(hopeful) :])[:n]


def sound(store: RecordStore, task: StoredTask, trials: Iterable[StoredTrial]) -> list[StoredTrial]:
    """Return trials without the candidates that a play-off found out.

    Parameters
    ----------
    store : RecordStore
    task : StoredTask
    trials : iterable of StoredTrial
        Of that task.

    Raises
    ------
    StoreError
        When the store cannot be read.
    """
    verdicts = _verdicts(store.finals(task))
    wrong = {key for key, each in verdicts.items() if not each.is_sound}
    if not wrong:  # nearly always: spare the reading of all records
        return list(trials)
    return [trial for trial in trials if candidate_of(trial) not in wrong]


def candidate_of(trial: StoredTrial) -> str:
    """Return what tells a task's candidates apart: what is done, and with which decisions.

    The texts of two records of one candidate may differ. One that cannot be read is told
    by its text.
    """
    try:
        return json.dumps(choices_of(json.loads(trial.record)[0]))
    except (TypeError, ValueError, IndexError, KeyError):
        return trial.record


def _verdicts(finals: Iterable[StoredTrial]) -> dict[str, _Verdict]:
    """Return by candidates what their latest play-off said; the winner is its first."""
    verdicts: dict[str, _Verdict] = {}
    runs: set[str] = set()
    for each in finals:
        is_winner = each.run not in runs and each.seconds is not None
        verdicts[candidate_of(each)] = _Verdict(each, is_winner)
        runs.add(each.run)
    return verdicts


def _rank(verdict: _Verdict) -> tuple[bool, float]:
    # A winner was timed anew after it was chosen; losers' times may be lucky ones.
    return not verdict.is_winner, verdict.trial.seconds or 0.0


def _different(trials: Iterable[StoredTrial], known: Container[str]) -> Iterable[StoredTrial]:
    """Yield the first of each candidate that is not known."""
    seen: set[str] = set()
    for trial in trials:
        key = candidate_of(trial)
        if key not in known and key not in seen:
            seen.add(key)
            yield trial
