"""What play-offs said of a store's trials: which are proven, and which are found out.

The fastest of many short timings is a lucky one, and it may compute something else. The
play-off at the end of a run knows better; a later run shall not have to learn it again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.values.trace_json import choices_of

# Rows looked at for each that is wanted: every run measures again what earlier ones found.
_ROWS_PER_TRIAL = 4


def trusted(store: RecordStore, task: StoredTask, n: int) -> list[StoredTrial]:
    """Return the candidates of a task to try first, each once.

    The play-offs' winners, then those who lost there, take turns with the fastest that were
    in no play-off, as long as these were recorded as faster than the very first. Then come
    the others that were recorded. Those that a play-off found out are left out. What was
    measured elsewhere comes last, but has the last place of all: its times do not compare
    with these, so that it may be the best as well.
    """
    known = _Known(store, task)
    order = list(known.in_turns(n))[:n]
    taken = {candidate_of(each) for each in order} | set(known.verdicts)
    missing = n - len(order)
    order += known.unjudged(missing, taken) if missing else []
    taken |= {candidate_of(each) for each in order}
    hints = _hints(store, task, max(n - len(order), n > 1), taken)
    return order[: n - len(hints)] + hints


def _hints(
    store: RecordStore, task: StoredTask, n: int, taken: Collection[str]
) -> list[StoredTrial]:
    """Return what is the best elsewhere, winners of play-offs first, each once."""
    verdicts = _verdicts(store.finals(task, elsewhere=True))
    winners = sorted(verdicts.values(), key=_Verdict.rank)
    recorded = store.best(task, _ROWS_PER_TRIAL * n + len(taken), elsewhere=True)
    different: dict[str, StoredTrial] = {}
    for each in [*(verdict.trial for verdict in winners), *recorded]:
        key = candidate_of(each)
        if key not in taken:
            different.setdefault(key, each)
    return list(different.values())[:n]


def proven(store: RecordStore, task: StoredTask) -> StoredTrial | None:
    """Return the fastest winner of a task's play-offs, None without one."""
    return next(iter(_Known(store, task).proven), None)


def sound(store: RecordStore, task: StoredTask, trials: Iterable[StoredTrial]) -> list[StoredTrial]:
    """Return trials without the candidates that a play-off found out."""
    wrong = disqualified(store.finals(task))
    if not wrong:  # nearly always: spare the reading of all records
        return list(trials)
    return [trial for trial in trials if candidate_of(trial) not in wrong]


def checked(finals: Iterable[StoredTrial]) -> frozenset[str]:
    """Return the candidates that a play-off has checked and found sound."""
    return frozenset(key for key, each in _verdicts(finals).items() if each.is_sound)


def disqualified(finals: Iterable[StoredTrial]) -> frozenset[str]:
    """Return the candidates that a play-off found out, and that none has cleared since."""
    return frozenset(key for key, each in _verdicts(finals).items() if not each.is_sound)


def ever_disqualified(finals: Iterable[StoredTrial]) -> frozenset[str]:
    """Return the candidates that any play-off found out, whatever others said."""
    return frozenset(candidate_of(each) for each in finals if each.failure)


def standing_winner(finals: Sequence[StoredTrial]) -> StoredTrial | None:
    """Return the winner of a run's last play-off of a task that had one; None without one.

    Who was once found out in the run is none.
    """
    lost = ever_disqualified(finals)
    winners: dict[str, StoredTrial] = {}
    for each in finals:
        if each.seconds is not None and candidate_of(each) not in lost:
            winners.setdefault(each.run, each)
    return next(reversed(winners.values()), None)


def candidate_of(trial: StoredTrial) -> str:
    """Return what tells a task's candidates apart: what is done, and with which decisions.

    The texts of two records of one candidate may differ. One that cannot be read is told
    by its text.
    """
    try:
        return json.dumps(choices_of(json.loads(trial.record)[0]))
    except (TypeError, ValueError, IndexError, KeyError, RecursionError):
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
