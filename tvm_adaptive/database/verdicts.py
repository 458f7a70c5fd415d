"""What play-offs said of a store's trials: which are proven, and which are found out.

The fastest of many short timings is a lucky one, and it may compute something else. The
play-off at the end of a run knows better; a later run shall not have to learn it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterable, Iterator

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.traces import choices_of

# Rows looked at for each that is wanted: every run measures again what earlier ones found.
_ROWS_PER_TRIAL = 4
# The fastest of hundreds of timings flatters by some 2 to 7 %; only what seems to save more
# than a tenth goes before what was proven and checked.
FLATTERY = 0.9


def trusted(store: RecordStore, task: StoredTask, n: int) -> list[StoredTrial]:
    """Return the candidates of a task to try first, each once.

    The play-offs' winners, then those who lost there, take turns with the fastest that were
    in no play-off, as long as these were recorded as faster than the very first. Then come
    the others that were recorded. Those that a play-off found out are left out.

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
    known = _Known(store, task)
    order = list(known.in_turns(n))[:n]
    taken = {candidate_of(each) for each in order} | set(known.verdicts)
    missing = n - len(order)
    return order + (known.unjudged(missing, taken) if missing else [])


def proven(store: RecordStore, task: StoredTask) -> StoredTrial | None:
    """Return the fastest winner of a task's play-offs, None without one.

    Raises
    ------
    StoreError
        When the store cannot be read.
    """
    return next(iter(_Known(store, task).proven), None)


def chosen(store: RecordStore, task: StoredTask) -> StoredTrial | None:
    """Return the candidate of a task to deploy without another look, if one was proven.

    That is the fastest of the play-offs' winners, unless something that was in no play-off
    seems faster by more than luck.

    Parameters
    ----------
    store : RecordStore
    task : StoredTask

    Returns
    -------
    StoredTrial or None
        None where no play-off has proven any.

    Raises
    ------
    StoreError
        When the store cannot be read.
    """
    known = _Known(store, task)
    if not known.proven:
        return None
    winner = known.proven[0]
    hopeful = known.hopeful(1)
    return hopeful[0] if hopeful and _sec(hopeful[0]) < FLATTERY * _sec(winner) else winner


def checked(store: RecordStore, task: StoredTask) -> frozenset[str]:
    """Return the candidates of a task that a play-off has checked and found sound.

    Raises
    ------
    StoreError
        When the store cannot be read.
    """
    verdicts = _verdicts(store.finals(task))
    return frozenset(key for key, each in verdicts.items() if each.is_sound)


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


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What the latest play-off of a candidate said."""

    trial: StoredTrial
    is_winner: bool

    @property
    def is_sound(self) -> bool:
        return self.trial.seconds is not None

    def rank(self) -> tuple[bool, float]:
        # A winner was timed anew after it was chosen; losers' times may be lucky ones.
        return not self.is_winner, _sec(self.trial)


class _Known:
    """What a store knows of a task."""

    def __init__(self, store: RecordStore, task: StoredTask) -> None:
        self._store = store
        self._task = task
        finals = store.finals(task)
        self.verdicts = _verdicts(finals)
        fit = sorted((v for v in self.verdicts.values() if v.is_sound), key=_Verdict.rank)
        self.proven = [each.trial for each in fit]
        # Whatever else these runs had found lost against their finalists.
        self._judged_runs = {each.run for each in finals}

    def hopeful(self, n: int) -> list[StoredTrial]:
        """Return the fastest that were in no play-off and were recorded as faster."""
        found = self.unjudged(n, self.verdicts, without=self._judged_runs)
        # A recorded time flatters: who does not even seem faster is not.
        return [each for each in found if _sec(each) < _sec(self.proven[0])]

    def in_turns(self, n: int) -> Iterator[StoredTrial]:
        """Yield proven and hopeful ones."""
        hopeful = self.hopeful(n) if self.proven else []
        for pair in itertools.zip_longest(self.proven, hopeful):
            yield from (each for each in pair if each is not None)

    def unjudged(
        self, n: int, known: Collection[str], without: Collection[str] = ()
    ) -> list[StoredTrial]:
        """Return the ``n`` fastest candidates, each once, that are none of some."""
        rows = self._store.best(self._task, _ROWS_PER_TRIAL * n + len(known), without=without)
        different: dict[str, StoredTrial] = {}
        for row in rows:
            key = candidate_of(row)
            if key not in known:
                different.setdefault(key, row)
            if len(different) == n:
                break
        return list(different.values())


def _verdicts(finals: Iterable[StoredTrial]) -> dict[str, _Verdict]:
    """Return by candidates what their latest play-off said; the winner is its first."""
    verdicts: dict[str, _Verdict] = {}
    runs: set[str] = set()
    for each in finals:
        is_winner = each.run not in runs and each.seconds is not None
        verdicts[candidate_of(each)] = _Verdict(each, is_winner)
        runs.add(each.run)
    return verdicts


def _sec(trial: StoredTrial) -> float:
    return float("inf") if trial.seconds is None else trial.seconds
