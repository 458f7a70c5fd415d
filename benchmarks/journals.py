"""From the folder of a benchmark to values: runs, their curves, and what was timed anew.

A folder as the runs left it and a packed one (``benchmarks/pack.py``) read alike.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan import OUTCOME_FILE, RunSpec, runs_folder
from benchmarks.stats import Curve, make_curve
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, read_journal
from tvm_adaptive.runner.playoff.finalist import refuted_ms

# Rounds of the neutral measurement, as they were made; earlier ones are in one JSON file.
NEUTRAL_JOURNAL = "neutral.jsonl"
# Of each method's runs.
REGRET_JOURNALS = "regret-*.jsonl"
NEUTRAL_FILE = "neutral.json"
BENCH_JOURNAL = "bench.jsonl"
PACKED = ".xz"
FINAL = "final"
# Stage of stock's runs that go on after the search.
POST_OPTIMIZATION = "post-optimization"
# From the start of a run's process to that of its journal: Python, TVM, and other imports.
START_UP = "start-up"

Event = dict[str, Any]
# Milliseconds by rounds: what shares a round was timed within a few seconds.
Rounds = dict[int, float]


@dataclasses.dataclass(frozen=True)
class Incumbent:
    """A record that was a run's best at some second.

    Attributes
    ----------
    n_trials : int
        Trials up to and with its own; of several tasks, up to its batch.
    time_sec : float
        When its batch's results were known.
    recorded_ms : float
    """

    n_trials: int
    time_sec: float
    recorded_ms: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes
    ----------
    spec : RunSpec
    curve : Curve
        As the run itself recorded it.
    incumbents : tuple of Incumbent
        In order, each faster than the one before as recorded.
    finish_sec : float
        When the run had its winner, everything included. As all its seconds, from the start of
        its process on, if the benchmark's journal says when that was.
    has_playoff : bool
        Whether the run itself chose its winner by a play-off.
    ends_with_record : bool
        Whether its winner is its last incumbent.
    stages : dict of str to float
        Seconds, see :func:`stage_seconds`.
    n_trials, n_errors : int
    peak_mb : float
        Of the tuner's own process.
    failure : str
        Why it failed, or empty.
    refuted_ms : tuple of float
        Recorded times of candidates that the run's play-offs refuted.
    """

    spec: RunSpec
    curve: Curve
    incumbents: tuple[Incumbent, ...]
    finish_sec: float
    has_playoff: bool
    ends_with_record: bool
    stages: dict[str, float]
    n_trials: int
    n_errors: int
    peak_mb: float
    failure: str = ""
    refuted_ms: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """The run within its workload."""
        return f"{self.spec.method}/{self.spec.seed}"


@dataclasses.dataclass(frozen=True)
class Bench:
    """Everything of one benchmark.

    Attributes
    ----------
    machines : tuple of dict
        See ``machine.describe_machine``; with the size of the benchmark and the ``seeds``
        that ran there. Invocations that differ in processor or commit are kept apart.
    noise : dict of str to dict
        ``"before"`` and ``"after"``.
    runs : tuple of Run
    neutral : dict of str to dict of str to dict of int to float
        Per workload and entry (see :class:`benchmarks.entries.Entry`), milliseconds by
        rounds.
    errors : dict of str to dict of str to str
        The same of entries that could not be built or timed: why.
    """

    machines: tuple[dict[str, Any], ...]
    noise: dict[str, dict[str, Any]]
    runs: tuple[Run, ...]
    neutral: dict[str, dict[str, Rounds]]
    errors: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def workloads(self) -> list[str]:
        """Names in the order of the runs."""
        return list(dict.fromkeys(run.spec.workload for run in self.runs))

    @property
    def methods(self) -> list[str]:
        """Names in the order of the runs."""
        return list(dict.fromkeys(run.spec.method for run in self.runs))

    def of(self, workload: str, method: str) -> list[Run]:
        """Return the runs that did not fail, by seed."""
        found = [
            run
            for run in self.runs
            if (run.spec.workload, run.spec.method) == (workload, method) and not run.failure
        ]
        return sorted(found, key=lambda run: run.spec.seed)

    def rounds_of(self, run: Run, cut: str = FINAL) -> Rounds:
        """Return how long a run's entry took when timed anew; empty if it was not."""
        return self.neutral.get(run.spec.workload, {}).get(f"{run.key}/{cut}", {})

    def neutral_ms(self, run: Run, cut: str = FINAL) -> float:
        """Return a winner's latency as timed anew, the median of rounds; nan if it was not."""
        return median_of(self.rounds_of(run, cut).values())

    def error_of(self, run: Run) -> str:
        """Return why a run's winner could not be built or timed anew, or nothing."""
        return self.errors.get(run.spec.workload, {}).get(f"{run.key}/{FINAL}", "")


def median_of(samples: Iterable[float] | None) -> float:
    """Return the median; nan of nothing."""
    known = list(samples or ())
    return statistics.median(known) if known else math.nan


def read_events(path: Path) -> list[Event]:
    """Return a journal's events, packed or not.

    Raises
    ------
    FileNotFoundError
        When there is neither.
    """
    packed = path.with_name(path.name + PACKED)
    if path.exists():
        return read_journal(path)
    with lzma.open(packed, "rt") as file:
        return [json.loads(line) for line in file if line.strip()]


def load_bench(folder: Path) -> Bench:
    """Read a benchmark's folder.

    Raises
    ------
    FileNotFoundError
        When it is none.
    """
    events = read_events(folder / BENCH_JOURNAL)
    # Of several invocations, the noisiest is reported.
    noises = sorted(
        (event for event in events if event["event"] == "noise"),
        key=lambda event: float(event.get("spread", math.inf)),
    )
    noise = {event["when"]: event for event in noises}
    outcomes = sorted(folder.glob(f"*/*/*/{OUTCOME_FILE}"))
    order = {
        _key_of(event): number for number, event in enumerate(events) if event["event"] == "run-end"
    }
    started = _started_unix_sec(events)
    runs = [load_run(path.parent, started) for path in outcomes]
    runs.sort(key=lambda run: order.get(_key_of(dataclasses.asdict(run.spec)), len(order)))
    workloads = dict.fromkeys(run.spec.workload for run in runs)
    neutral, errors = {}, {}
    for each in workloads:
        neutral[each], errors[each] = neutral_rounds(folder / runs_folder(each))
    return Bench(_machines_of(events), noise, tuple(runs), neutral, errors)


def neutral_rounds(folder: Path) -> tuple[dict[str, Rounds], dict[str, str]]:
    """Return the rounds of a workload's neutral measurement and its errors, by entries' names."""
    timed, errors = read_rounds(folder / NEUTRAL_JOURNAL)
    return {**_earlier_rounds(folder), **timed}, errors


def read_rounds(path: Path) -> tuple[dict[str, Rounds], dict[str, str]]:
    """Return what a journal of timings holds so far: rounds and errors by entries' names.

    Nothing of an entry that failed once is used. The journal may be missing or packed.
    """
    timed: dict[str, Rounds] = {}
    errors: dict[str, str] = {}
    if not path.exists() and not path.with_name(path.name + PACKED).exists():
        return timed, errors
    number = 0
    for event in read_events(path):
        if event["event"] == "round":
            for name, ms in event["ms"].items():
                timed.setdefault(name, {})[number] = float(ms)
            errors.update(event["errors"])
            # Rounds that several processes made are different rounds.
            number += 1
    return {name: each for name, each in timed.items() if name not in errors}, errors


def _earlier_rounds(folder: Path) -> dict[str, Rounds]:
    path = folder / NEUTRAL_FILE
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    # Below 0: no round of the journal's is one of them.
    return {
        name: {-1 - number: ms for number, ms in enumerate(entry["samples_ms"])}
        for name, entry in entries.items()
        if entry.get("samples_ms")  # not of one that failed
    }


def _machines_of(events: Iterable[Event]) -> tuple[dict[str, Any], ...]:
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    seeds: set[int] = set()
    for event in events:
        if event["event"] == "bench":
            key = event.get("cpu"), event.get("commit")
            seeds = found.setdefault(key, {**event, "seeds": set()})["seeds"]
        elif event["event"] == "run-end":
            seeds.add(event["seed"])
    return tuple(found.values())


def _started_unix_sec(events: Iterable[Event]) -> dict[tuple[Any, ...], float]:
    """Return when the processes of runs were started, by workload, method and seed."""
    found: dict[tuple[Any, ...], float] = {}
    opened_unix_sec = math.nan
    for event in events:
        if event["event"] == "journal":
            opened_unix_sec = float(event.get("started_unix_sec", math.nan))
        elif event["event"] == "run-start":
            found[_key_of(event)] = opened_unix_sec + float(event["time_sec"])
    return found


def load_run(folder: Path, started_unix_sec: Mapping[tuple[Any, ...], float]) -> Run:
    """Read a finished run's folder."""
    outcome = json.loads((folder / OUTCOME_FILE).read_text())
    spec = RunSpec(**outcome["spec"])
    if outcome["status"] != "done":
        empty = make_curve([], [], [], 0.0)
        finish_sec = float(outcome.get("seconds", math.nan))
        message = outcome["message"]
        return Run(spec, empty, (), finish_sec, False, False, {}, 0, 0, math.nan, message)
    events = read_events(folder / JOURNAL_FILE)
    # One journal per run: whatever continued it later is not part of it.
    later = [n for n, event in enumerate(events) if event["event"] == "journal"][1:]
    started = started_unix_sec.get(_key_of(outcome["spec"]), math.nan)
    start_up_sec = float(events[0].get("started_unix_sec", math.nan)) - started
    if not start_up_sec >= 0:  # not known, or the clock was set
        start_up_sec = 0.0
    return run_of(spec, events[: later[0]] if later else events, outcome, start_up_sec)


def run_of(
    spec: RunSpec, events: list[Event], outcome: Mapping[str, Any], start_up_sec: float
) -> Run:
    """Make a run of its journal's events and its outcome.

    Its process began so many seconds before its journal: a user waits for imports, too.
    """
    events = [{**event, "time_sec": event["time_sec"] + start_up_sec} for event in events]
    measured = [event for event in events if event["event"] == "measured"]
    counts: dict[str, tuple[int, int]] = {}
    trials = []
    for event in measured:
        counts[event["task"]] = (int(event["n_trials"]), int(event["n_errors"]))
        trials.append(sum(n for n, _ in counts.values()))
    end = next((event for event in reversed(events) if event["event"] == "end"), {})
    report = next((event for event in events if event["event"] == "report"), end)
    stages = {START_UP: start_up_sec, **end.get("stages", {})}
    searched = next(
        (e["time_sec"] for e in events if e["event"] == "stage" and e["stage"] == "search"), 0.0
    )
    curve = make_curve(
        [float(event["time_sec"]) for event in measured],
        [event["weighted_ms"] for event in measured],
        trials,
        searched,
    )
    # Ours chooses what it deploys, by play-offs or within the network; stock takes its record.
    playoffs = (event for event in events if event["event"] == "playoff")
    refuted = tuple(ms for event in playoffs for ms in refuted_ms(event))
    has_playoff = any(event["event"] in ("playoff", "network-check") for event in events)
    return Run(
        spec,
        curve,
        incumbents_of(measured, trials, refuted),
        float(report.get("time_sec", searched)),
        has_playoff,
        not has_playoff and POST_OPTIMIZATION not in stages,
        stage_seconds(stages, outcome.get("scopes", {})),
        trials[-1] if trials else 0,
        sum(n for _, n in counts.values()),
        float(outcome.get("peak_mb", math.nan)),
        refuted_ms=refuted,
    )


def incumbents_of(
    measured: Sequence[Event], trials: Sequence[int], refuted: Sequence[float] = ()
) -> tuple[Incumbent, ...]:
    """Return what was best at some second.

    Results are known by batches, of which only the best was ever a run's. The database holds
    trials in order, so that one task's incumbent has a trial of its own; a network's is what
    its tasks had after a batch.

    Parameters
    ----------
    measured : sequence of dict
        The journal's events, one per batch.
    trials : sequence of int
        Of the run, after each of them.
    refuted : sequence of float
        Milliseconds of one task's candidates that computed something else, which it never had.
    """
    is_one = len({event["task"] for event in measured}) == 1
    found: list[Incumbent] = []
    best_ms = math.inf
    for before, after, event in zip([0, *trials], trials, measured, strict=False):
        latencies = event.get("latencies_ms") if is_one else None
        known = [event["weighted_ms"]] if latencies is None else latencies
        known = [None if is_one and is_among(each, refuted) else each for each in known]
        ms = min((each for each in known if each is not None), default=math.inf)
        if ms < best_ms:
            best_ms = ms
            n_trials = after if latencies is None else before + known.index(ms) + 1
            found.append(Incumbent(n_trials, float(event["time_sec"]), ms))
    return tuple(found)


def is_among(ms: float | None, others: Sequence[float]) -> bool:
    """Say whether a recorded time is one of others, which went through a journal."""
    return ms is not None and any(math.isclose(ms, other, rel_tol=1e-6) for other in others)


def stage_seconds(stages: Mapping[str, float], scopes: Mapping[str, float]) -> dict[str, float]:
    """Return where a run's seconds went, without overlap.

    Parameters
    ----------
    stages : mapping
        Of the run's journal: ``"prepare"``, ``"search"``, ...
    scopes : mapping
        Of MetaSchedule's profiler, the same for stock and ours. All lie within the
        stage ``"search"``.

    Returns
    -------
    dict
        ``start`` (tasks are set up), ``build``, ``measure``, ``learn``, ``propose``
        (everything else of the search: candidates, decisions, files), then the run's
        other stages, ``start-up`` among them.
    """
    searching = float(stages.get("search", 0.0))
    parts = {
        "start": scopes.get("CreateContexts", 0.0) + scopes.get("InitializeTask", 0.0),
        "build": scopes.get("SendToBuilder", 0.0),
        "measure": scopes.get("SendToRunner", 0.0) + scopes.get("JoinRunnerFutures", 0.0),
        "learn": scopes.get("MeasureCallback/UpdateCostModel", 0.0),
    }
    parts["propose"] = max(0.0, searching - sum(parts.values()))
    parts.update({name: sec for name, sec in stages.items() if name != "search"})
    return parts


def _key_of(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    return (fields["workload"], fields["method"], fields["seed"])
