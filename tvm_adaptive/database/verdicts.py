"""Verdicts of play-offs on candidates: which are proven, which are disqualified.

The fastest of many short timings is partly luck, and may compute a wrong result. The
play-off at the end of a run checks both; its verdicts are kept in record stores for later
runs and in a file of the run itself.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tvm_adaptive.database.records import (
    Identity,
    StoredTask,
    StoredTrial,
    row_of,
    trial_of_row,
)
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.values.trace_json import choices_of, without_flags

logger = logging.getLogger(__name__)

# Rows read per wanted candidate: every run measures again what earlier ones found. Where that
# is one candidate all the time, more are read.
_ROWS_PER_TRIAL = 4
_MOST_ROWS = 256

VERDICT_FILE = "verdicts.jsonl"
_FORMAT_VERSION = 1
# Behind the name of a run that decided twice: of each decision the first sound row has won.
SECOND_DECISION = ".2"
# Fields of a trial that the file keeps: all but its features and environment.
_KEPT = ("record", "seconds", "error", "failure", "unix_sec", "run")


def trusted(store: RecordStore, task: StoredTask, n: int) -> list[StoredTrial]:
    """Return the candidates of a task to try first, each once and none disqualified.

    Play-off winners, then losers, alternate with the fastest candidates that were in no
    play-off, as long as these have faster records than the first winner. Then come the other
    recorded candidates. Candidates from other environments come last, but the last place is
    always theirs: their times do not compare, so that one may be the best.
    """
    finals = store.finals(task)
    verdicts = _verdicts(finals)
    winners = _proven(verdicts)
    order = winners
    if winners:
        # Whatever else those runs found has lost against their finalists.
        runs = {each.run.removesuffix(SECOND_DECISION) for each in finals}
        found = _unchecked(store, task, n, verdicts, without=runs)
        # A recorded time is too good rather than too bad: a slower one is slower.
        faster = [each for each in found if _sec(each) < _sec(winners[0])]
        pairs = itertools.zip_longest(winners, faster)
        order = [each for pair in pairs for each in pair if each is not None]
    order = order[:n]
    taken = {candidate_key(each) for each in order} | set(verdicts)
    if len(order) < n:
        order += _unchecked(store, task, n - len(order), taken)
    taken |= {candidate_key(each) for each in order}
    n_elsewhere = max(n - len(order), n > 1)
    there = _proven(_verdicts(store.finals(task, elsewhere=True)))
    hints = _unchecked(store, task, n_elsewhere, taken, first=there, elsewhere=True)
    return order[: n - len(hints)] + hints


def proven(finals: Iterable[StoredTrial]) -> StoredTrial | None:
    """Return the fastest winner of a task's play-offs, None without one."""
    return next(iter(_proven(_verdicts(finals))), None)


def sound(finals: Iterable[StoredTrial], trials: Iterable[StoredTrial]) -> list[StoredTrial]:
    """Return trials without disqualified candidates."""
    wrong = disqualified(finals)
    if not wrong:  # nearly always: spares parsing all records
        return list(trials)
    return [trial for trial in trials if candidate_key(trial) not in wrong]


def without_lucky(
    finals: Iterable[StoredTrial], trials: Iterable[StoredTrial]
) -> list[StoredTrial]:
    """Return trials without unchecked ones that are recorded as faster than a proven one.

    A compiler that takes the fastest of them then takes a checked one. Of a candidate that was
    checked, another program, such as one that prefetches, was not.
    """
    finals = list(finals)
    winner = proven(finals)
    if winner is None:
        return list(trials)
    known, least_sec = _checked_programs(finals), mean_sec(winner)
    return [each for each in trials if mean_sec(each) >= least_sec or program_key(each) in known]


def mean_sec(trial: StoredTrial) -> float:
    """Return the mean of a record's times, by which MetaSchedule sorts; infinite for a failure."""
    if trial.seconds is None:
        return math.inf
    try:
        return statistics.fmean(json.loads(trial.record)[1])
    except (TypeError, ValueError, IndexError, OverflowError):  # anybody may write to a store
        return trial.seconds


def decided_with(finals: Iterable[StoredTrial], winner: StoredTrial | None) -> frozenset[str]:
    """Return a winner, and the sound candidates of all decisions that it has won."""
    if winner is None:
        return frozenset()
    finals, key = list(finals), candidate_key(winner)
    chosen: dict[str, str] = {}  # by each decision
    for each in finals:
        if each.seconds is not None:
            chosen.setdefault(each.run, candidate_key(each))
    latest = _verdicts(finals)
    found = {candidate_key(each) for each in finals if chosen.get(each.run) == key}
    return frozenset(each for each in found if latest[each].trial.seconds is not None)


def _checked_programs(finals: Sequence[StoredTrial]) -> frozenset[str]:
    """Return the programs that their candidates' latest play-off found sound."""
    runs = {key: each.trial.run for key, each in _verdicts(finals).items() if each.trial.seconds}
    return frozenset(
        program_key(each)
        for each in finals
        if each.seconds is not None and runs.get(candidate_key(each)) == each.run
    )


def disqualified(finals: Iterable[StoredTrial]) -> frozenset[str]:
    """Return the candidates whose latest play-off disqualified them."""
    return frozenset(key for key, each in _verdicts(finals).items() if each.trial.seconds is None)


def ever_disqualified(finals: Iterable[StoredTrial]) -> frozenset[str]:
    """Return the candidates that any play-off disqualified."""
    return frozenset(candidate_key(each) for each in finals if each.failure)


def standing_winner(finals: Sequence[StoredTrial]) -> StoredTrial | None:
    """Return the winner of the last play-off, without those that the run ever disqualified."""
    lost = ever_disqualified(finals)
    winners: dict[str, StoredTrial] = {}
    for each in finals:
        if each.seconds is not None and candidate_key(each) not in lost:
            winners.setdefault(each.run, each)
    return next(reversed(winners.values()), None)


def disqualified_in(*folders: Path) -> dict[str, set[str]]:
    """Return the candidates that any play-off of runs disqualified, by their workloads' keys.

    Those of another version of TVM are among them.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for _, (workload_key, _), finals in VerdictFile(folder, "").lines():
            if lost := ever_disqualified(finals):
                found[workload_key] |= lost
    return dict(found)


def trace_key(trace: Any) -> str:
    """Return the key of a candidate by its trace in JSON: its instructions and decisions."""
    return json.dumps(choices_of(trace))


def candidate_key(trial: StoredTrial) -> str:
    """Return a candidate's key, or an unreadable text itself."""
    try:
        return trace_key(json.loads(trial.record)[0])
    except (TypeError, ValueError, IndexError, KeyError, RecursionError):
        return trial.record


def program_key(trial: StoredTrial) -> str:
    """Return a key that only records of the same program share, or an unreadable text itself."""
    try:
        return json.dumps(without_flags(json.loads(trial.record)[0]))
    except (TypeError, ValueError, IndexError, KeyError, RecursionError):
        return trial.record


class _Verdict(NamedTuple):
    """The latest play-off's verdict on a candidate."""

    is_winner: bool
    trial: StoredTrial


def _verdicts(finals: Iterable[StoredTrial]) -> dict[str, _Verdict]:
    """Return the latest verdict on each candidate; a play-off's winner is its first."""
    verdicts: dict[str, _Verdict] = {}
    runs: set[str] = set()
    for each in finals:
        key = candidate_key(each)
        known = verdicts.get(key)
        if each.seconds is not None and known and known.is_winner and known.trial.run == each.run:
            continue  # the same without prefetching, which has lost
        is_winner = each.run not in runs and each.seconds is not None
        verdicts[key] = _Verdict(is_winner, each)
        if each.seconds is not None:  # a run may disqualify before its play-off
            runs.add(each.run)
    return verdicts


def _proven(verdicts: dict[str, _Verdict]) -> list[StoredTrial]:
    """Return the sound candidates, fastest winners first."""
    # A winner was timed again after it was chosen; a loser's time may be luck.
    order = sorted(verdicts.values(), key=lambda each: (not each.is_winner, _sec(each.trial)))
    return [each.trial for each in order if each.trial.seconds is not None]


def _unchecked(
    store: RecordStore,
    task: StoredTask,
    n: int,
    known: Collection[str],
    *,
    first: Iterable[StoredTrial] = (),
    **options: Any,
) -> list[StoredTrial]:
    """Return ``n`` candidates, each once, that are not known: first some, then the fastest."""
    first, n_rows = list(first), _ROWS_PER_TRIAL * n + len(known)
    while True:
        rows = store.best(task, n_rows, **options)
        different: dict[str, StoredTrial] = {}
        for row in itertools.chain(first, rows):
            if len(different) == n:
                break
            key = candidate_key(row)
            if key not in known:
                different.setdefault(key, row)
        if len(different) == n or len(rows) < n_rows or n_rows >= _MOST_ROWS:
            return list(different.values())
        n_rows = min(_MOST_ROWS, _ROWS_PER_TRIAL * n_rows)


def _sec(trial: StoredTrial) -> float:
    return math.inf if trial.seconds is None else trial.seconds


class VerdictFile:
    """The verdicts of one run in its own directory, one JSON line per play-off.

    Half a line of a killed process, and a line of another version of TVM, is left out when
    the file is read. Its candidates are then checked again: only sound ones are deployed.
    """

    def __init__(self, work_dir: Path, compiler: str) -> None:
        self.path = work_dir / VERDICT_FILE
        self._compiler = compiler

    def add(
        self, task: StoredTask, finals: Sequence[StoredTrial], *, is_loose: bool = False
    ) -> None:
        """Append a play-off's verdicts, its winner first; they are on disk on return.

        What passed a looser tolerance than others' is for this run alone.
        """
        rows = [row_of(each) for each in finals]
        line = {
            "version": _FORMAT_VERSION,
            "compiler": self._compiler,
            "task": task.name,
            "identity": list(task.identity),
            "is_loose": is_loose,
            "finals": [{name: row[name] for name in _KEPT} for row in rows],
        }
        # The first line break ends a torn line, if there is one.
        text = f"\n{json.dumps(line, allow_nan=False)}\n"
        with open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self, *, with_loose: bool = True) -> dict[Identity, list[StoredTrial]]:
        """Return the verdicts on each task's candidates, oldest first."""
        found: dict[Identity, list[StoredTrial]] = {}
        for event, identity, rows in self.lines():
            if event.get("compiler") == self._compiler:
                is_shared = with_loose or not event.get("is_loose")
                finals = found.setdefault(identity, [])
                finals += [each for each in rows if each.failure or is_shared]
        return found

    def lines(self) -> Iterator[tuple[dict[str, Any], Identity, list[StoredTrial]]]:
        """Yield each line that this version knows, its task and its verdicts; of any compiler."""
        for event in self._events():
            try:
                workload_key, target_key = map(str, event["identity"])
                rows = [trial_of_row(each) for each in event["finals"]]
            except (KeyError, TypeError, ValueError, AttributeError):
                logger.warning("%s: a line that this version does not know", self.path)
                continue
            identity = (workload_key, target_key)
            yield event, identity, [each for each in rows if each is not None]

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of this version of the format."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for line in lines:
            try:
                event = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                logger.warning("%s: a line that is no JSON is left out", self.path)
                continue
            if isinstance(event, dict) and event.get("version") == _FORMAT_VERSION:
                yield event
