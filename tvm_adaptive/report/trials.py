"""Trials one by one: what the events of a round, of timings and of their results say together."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Any

from tvm_adaptive.report.decisions import Decisions, decisions_of

Event = dict[str, Any]

# A timing belongs to a result of the same time, which the journal does not round: batches of
# several lanes may be timed in turns, so that their order does not tell.
_DIGITS = 9
# Sources of candidates, in the order in which a batch has them.
RECALLED, SEED, ANALYTICAL, PREFETCHING = "recalled", "seed", "analytical", "prefetching"
MODEL, RANDOM = "model", "random"
SOURCES = (RECALLED, SEED, ANALYTICAL, PREFETCHING, MODEL, RANDOM)
# The reason of a trial whose time a play-off, or the check within the network, has refuted.
DISQUALIFIED = "disqualified"


@dataclasses.dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial."""

    task: str
    form: str  # empty for a task without forms, and for the direct form
    source: str  # of SOURCES; empty where the journal does not tell
    ms: float  # NaN for a failure, and where a play-off has refuted it
    error: float  # standard error of the mean over the mean; NaN if unknown
    reason: str  # why its timing ended, or DISQUALIFIED; empty if unknown
    seconds: float  # of the timing; NaN if unknown
    improves: bool  # faster than every earlier trial of its task, the first one included
    decisions: Decisions | None = None


class TrialJoiner:
    """Joins events of a journal to trials."""

    def __init__(self) -> None:
        self._rounds: dict[str, deque[Event]] = defaultdict(deque)
        self._timings: dict[str, Event] = {}
        self._best_ms: dict[str, float] = {}

    def begin_attempt(self) -> None:
        """Forget what a killed attempt proposed and timed, whose results never came."""
        self._rounds.clear()
        self._timings.clear()

    def forget(self, tasks: Collection[str]) -> None:
        """Forget the fastest trials of tasks."""
        for task in tasks:
            self._best_ms.pop(task, None)

    def add_round(self, event: Event) -> None:
        """Keep a round until its results come."""
        self._rounds[str(event.get("task"))].append(event)

    def add_timing(self, event: Event) -> None:
        """Keep a candidate's timing until the results of its batch come."""
        if event.get("mean_sec"):
            self._timings[_time_key(1e3 * float(event["mean_sec"]))] = event

    def add_duet(self, event: Event) -> None:
        """Find timings by their corrected times from now on, which are those of results."""
        found = [self._timings.pop(_time_key(1e3 * raw), {}) for raw in event["raw_sec"]]
        corrected = zip(event["corrected_sec"], event["relative_errors"], strict=True)
        for timing, (sec, error) in zip(found, corrected, strict=True):
            self._timings[_time_key(1e3 * sec)] = {**timing, "stderr_sec": error * sec}

    def add_measured(self, event: Event, form: str) -> list[TrialRow]:
        """Return the trials of a batch of results."""
        task = str(event["task"])
        latencies_ms = [math.nan if ms is None else float(ms) for ms in event["latencies_ms"]]
        rounds = self._rounds[task]
        round_ = rounds.popleft() if rounds else {}
        sources = _sources(round_, len(latencies_ms))
        decisions = decisions_of(round_, len(latencies_ms))
        rows = []
        for ms, source, decided in zip(latencies_ms, sources, decisions, strict=True):
            timing = self._timings.pop(_time_key(ms), {})
            error = 1e3 * float(timing.get("stderr_sec") or math.nan) / ms
            seconds = float(timing.get("elapsed_sec") or math.nan)
            reason = str(timing.get("reason") or "")
            improves = ms < self._best_ms.get(task, math.inf)
            if improves:
                self._best_ms[task] = ms
            rows.append(TrialRow(task, form, source, ms, error, reason, seconds, improves, decided))
        return rows

    def disqualify(
        self, trials: Sequence[TrialRow], task: str, lost_ms: Sequence[float]
    ) -> list[TrialRow]:
        """Return all trials without these times of a task: times alone tell its trials apart."""
        rows, best_ms = list(trials), math.inf
        for place, trial in enumerate(trials):
            if trial.task != task:
                continue
            if any(math.isclose(trial.ms, lost) for lost in lost_ms):
                rows[place] = dataclasses.replace(
                    trial, ms=math.nan, error=math.nan, reason=DISQUALIFIED, improves=False
                )
                continue
            improves = trial.ms < best_ms
            if improves:
                best_ms = trial.ms
            if improves != trial.improves:
                rows[place] = dataclasses.replace(trial, improves=improves)
        self._best_ms[task] = best_ms
        return rows


def _time_key(ms: float) -> str:
    return f"{ms:.{_DIGITS}g}"


def _sources(event: Event, n_results: int) -> list[str]:
    """Return the source of each candidate; empty where candidates are missing in the results."""
    names = ("seeded", "analytical", "prefetching", "random")
    n_seeded, n_analytical, n_prefetching, n_random = (
        int(event.get(f"n_{name}") or 0) for name in names
    )
    n_model = n_results - n_seeded - n_analytical - n_prefetching - n_random
    if event.get("n_candidates") != n_results or n_model < 0:
        return [""] * n_results
    first = RECALLED if event.get("reason") == RECALLED else SEED
    counts = (n_seeded, n_analytical, n_prefetching, n_model, n_random)
    sources = (first, ANALYTICAL, PREFETCHING, MODEL, RANDOM)
    return [source for source, n in zip(sources, counts, strict=True) for _ in range(n)]


@dataclasses.dataclass(frozen=True)
class SourceShare:
    """What the candidates of one source brought."""

    source: str
    n_trials: int
    n_errors: int
    n_improvements: int  # trials faster than all before, the task's first not counted
    n_firsts: int  # tasks of which its candidate was the first success
    n_winners: int  # tasks of which its candidate is the fastest


def fastest_trials(trials: Sequence[TrialRow]) -> dict[str, TrialRow]:
    """Return the fastest trial of each task that had a success."""
    return {trial.task: trial for trial in trials if trial.improves}


def source_shares(trials: Sequence[TrialRow]) -> list[SourceShare]:
    """Return what each source brought, for those that had a trial."""
    firsts: dict[str, TrialRow] = {}
    for trial in trials:
        if trial.improves:
            firsts.setdefault(trial.task, trial)
    winners = fastest_trials(trials)
    shares = []
    for source in SOURCES:
        own = [trial for trial in trials if trial.source == source]
        if own:
            n_firsts = sum(trial.source == source for trial in firsts.values())
            shares.append(
                SourceShare(
                    source,
                    n_trials=len(own),
                    n_errors=sum(math.isnan(trial.ms) for trial in own),
                    n_improvements=sum(trial.improves for trial in own) - n_firsts,
                    n_firsts=n_firsts,
                    n_winners=sum(trial.source == source for trial in winners.values()),
                )
            )
    return shares
