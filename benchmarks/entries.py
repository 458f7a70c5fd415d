"""What is timed anew: every incumbent of every run, and who comes next. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.journals import FINAL, Run
from benchmarks.workloads import WORKLOADS

BASELINE = "stock"
# A run without play-offs of its own gets one of as many records, by the neutral measurement.
TOP = 3
# The same library once more: how different does one and the same kernel seem?
COPY = "copy"
# Compiling a network takes a minute: of its incumbents as many, evenly spread, and the bounds
# that follow from the others.
_OF_A_NETWORK = 6


@dataclasses.dataclass(frozen=True)
class Entry:
    """Something to time.

    Attributes
    ----------
    name : str
        ``"method/seed/final"``, ``"method/seed/96"`` for what was best after 96 trials, either
        with ``"-2"`` and ``"-3"`` for the next best or ``"-copy"``, ``"untuned"`` or
        ``"pytorch"``.
    method : str or None
    folder : str or None
        Of the run; None for an untuned one.
    n_trials : int or None
        The run's best after so many trials; None for its winner.
    rank : int
        Among the records, as recorded; 1 is the best, and the winner of a run's own play-off.
    refuted_ms : tuple of float
        Of records that are none, because they computed something else.
    """

    name: str
    method: str | None = None
    folder: str | None = None
    n_trials: int | None = None
    rank: int = 1
    refuted_ms: tuple[float, ...] = ()


def entries_of(out: Path, runs: Sequence[Run]) -> list[Entry]:
    """Return what to time of one workload's runs.

    Of each run its winner, twice, and its incumbents. Of a run without a play-off of its own
    also the next best, where it ended and where it is compared with another.
    """
    good = [run for run in runs if not run.failure and run.incumbents]
    baseline = baseline_of([run.spec.method for run in runs])
    entries: dict[str, Entry] = {}
    for run in good:
        is_network = WORKLOADS[run.spec.workload].is_network
        folder = str(out / run.spec.folder)

        def add(
            cut: str, n_trials: int | None, rank: int = 1, run: Run = run, folder: str = folder
        ) -> None:
            name = f"{run.key}/{cut}"
            entries[name] = Entry(name, run.spec.method, folder, n_trials, rank, run.refuted_ms)

        add(FINAL, None)
        last = run.incumbents[-1].n_trials if run.ends_with_record else None
        name = f"{run.key}/{FINAL}-{COPY}"
        entries[name] = Entry(name, run.spec.method, folder)
        counts = [each.n_trials for each in run.incumbents if each.n_trials != last]
        for n_trials in _thinned(counts, is_network):
            add(str(n_trials), n_trials)
        for n_trials in sorted(set(play_offs_of(run, good, baseline))):
            # At its end a run with a play-off has its choice; a cut at that trial is before it.
            is_end = n_trials == run.n_trials and not run.has_playoff
            cut = FINAL if is_end else str(n_trials)
            # Of networks incumbents stand in for the next best, which tasks have one by one.
            for rank in (1,) if is_network else range(2, TOP + 1):
                if ranked(cut, rank) != FINAL:
                    add(ranked(cut, rank), None if is_end else n_trials, rank)
    return list(entries.values())


def baseline_of(methods: Sequence[str]) -> str:
    """Return what others are compared with: stock, or the first where that is missing."""
    return BASELINE if BASELINE in methods or not methods else methods[0]


def play_offs_of(run: Run, runs: Sequence[Run], baseline: str) -> Iterator[int]:
    """Yield after how many trials a run's record is played off by the neutral measurement.

    Where it is cut short to be compared with the other of the same seed, one of which is the
    baseline; at its end if it has had no play-off.
    """
    if not run.has_playoff:
        yield run.n_trials
    for other in runs:
        is_compared = baseline in (run.spec.method, other.spec.method)
        if other is not run and other.spec.seed == run.spec.seed and is_compared:
            cut = cut_of(run, other.finish_sec)
            if cut not in (None, FINAL):
                yield int(str(cut))
            if other.n_trials < run.n_trials:
                yield other.n_trials


def cut_of(run: Run, time_sec: float) -> str | None:
    """Return the cut of what a run had at a second; None while it had nothing."""
    if time_sec >= run.finish_sec:
        return FINAL
    n_trials = run.curve.trials_at(time_sec)
    return str(n_trials) if any(each.n_trials <= n_trials for each in run.incumbents) else None


def ranked(cut: str, rank: int) -> str:
    """Return the name of the next best at a cut."""
    return cut if rank == 1 else f"{cut}-{rank}"


def _thinned(cuts: Sequence[int], is_network: bool) -> list[int]:
    if not is_network or len(cuts) <= _OF_A_NETWORK:
        return list(cuts)
    n_even = _OF_A_NETWORK - TOP + 1
    step = (len(cuts) - 1) / (n_even - 1)
    evenly = {cuts[round(number * step)] for number in range(n_even)}
    return sorted(evenly | set(cuts[-TOP:]))
