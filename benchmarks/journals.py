"""From the folder of a benchmark to values: runs, their curves, and what was timed anew.

A folder as the runs left it and a packed one (``benchmarks/pack.py``) read alike.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plan import OUTCOME_FILE, RunSpec
from benchmarks.stats import Curve, make_curve
from tvm_adaptive.measure_callback.journal import read_journal

JOURNAL_FILE = "journal.jsonl"
NEUTRAL_FILE = "neutral.json"
BENCH_JOURNAL = "bench.jsonl"
PACKED = ".xz"
FINAL = "final"

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes
    ----------
    spec : RunSpec
    curve : Curve
        As the run itself recorded it.
    finish_sec : float
        When the run had its winner, everything included.
    stages : dict of str to float
        Seconds, see :func:`stage_seconds`.
    n_trials, n_errors : int
    peak_mb : float
        Of the tuner's own process.
    failure : str
        Why it failed, or empty.
    """

    spec: RunSpec
    curve: Curve
    finish_sec: float
    stages: dict[str, float]
    n_trials: int
    n_errors: int
    peak_mb: float
    failure: str = ""

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
        that ran there. Sittings that differ in processor or commit are kept apart.
    noise : dict of str to dict
        ``"before"`` and ``"after"``.
    runs : tuple of Run
    neutral : dict of str to dict of str to list of float
        Per workload and entry (``"method/seed/final"``, ``"method/seed/96"`` for what
        was best after 96 trials, ``"untuned"``, ``"pytorch"``): milliseconds per round.
    """

    machines: tuple[dict[str, Any], ...]
    noise: dict[str, dict[str, Any]]
    runs: tuple[Run, ...]
    neutral: dict[str, dict[str, list[float]]]

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

    def neutral_ms(self, run: Run, cut: str = FINAL) -> float:
        """Return a winner's latency as timed anew, the median of rounds; nan if it was not."""
        return median_of(self.neutral.get(run.spec.workload, {}).get(f"{run.key}/{cut}"))

    def curve(self, run: Run) -> Curve:
        """Return a run's curve, in the neutral measurement's unit where there is one.

        What a run recorded is a minimum over noisy timings by its own runner. All of it
        is multiplied by what its winner takes when timed anew, over what was recorded.
        """
        neutral_ms = self.neutral_ms(run)
        if math.isfinite(neutral_ms) and math.isfinite(run.curve.final_ms):
            return run.curve.scaled(neutral_ms / run.curve.final_ms)
        return run.curve


def median_of(samples: Iterable[float] | None) -> float:
    """Return the median; nan of nothing."""
    ordered = sorted(samples or ())
    if not ordered:
        return math.nan
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


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
    # Of several sittings, the noisiest is reported.
    sittings = sorted(
        (event for event in events if event["event"] == "noise"),
        key=lambda event: float(event.get("spread", math.inf)),
    )
    noise = {event["when"]: event for event in sittings}
    outcomes = sorted(folder.glob(f"*/*/*/{OUTCOME_FILE}"))
    order = {
        _key_of(event): number for number, event in enumerate(events) if event["event"] == "run-end"
    }
    runs = [load_run(path.parent) for path in outcomes]
    runs.sort(key=lambda run: order.get(_key_of(dataclasses.asdict(run.spec)), len(order)))
    neutral = {}
    for path in sorted(folder.glob(f"*/{NEUTRAL_FILE}")):
        found = json.loads(path.read_text())
        neutral[found["workload"]] = {
            name: entry["samples_ms"] for name, entry in found["entries"].items()
        }
    return Bench(_machines_of(events), noise, tuple(runs), neutral)


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


def load_run(folder: Path) -> Run:
    """Read a finished run's folder."""
    outcome = json.loads((folder / OUTCOME_FILE).read_text())
    spec = RunSpec(**outcome["spec"])
    if outcome["status"] != "done":
        empty = make_curve([], [], [], 0.0)
        return Run(spec, empty, math.nan, {}, 0, 0, math.nan, outcome["message"])
    events = read_events(folder / JOURNAL_FILE)
    # One journal per run: whatever continued it later is not part of it.
    later = [n for n, event in enumerate(events) if event["event"] == "journal"][1:]
    return run_of(spec, events[: later[0]] if later else events, outcome)


def run_of(spec: RunSpec, events: list[Event], outcome: Mapping[str, Any]) -> Run:
    """Make a run of its journal's events and its outcome."""
    measured = [event for event in events if event["event"] == "measured"]
    counts: dict[str, tuple[int, int]] = {}
    trials = []
    for event in measured:
        counts[event["task"]] = (int(event["n_trials"]), int(event["n_errors"]))
        trials.append(sum(n for n, _ in counts.values()))
    end = next((event for event in reversed(events) if event["event"] == "end"), {})
    report = next((event for event in events if event["event"] == "report"), end)
    stages = dict(end.get("stages", {}))
    searched = next(
        (e["time_sec"] for e in events if e["event"] == "stage" and e["stage"] == "search"), 0.0
    )
    curve = make_curve(
        [float(event["time_sec"]) for event in measured],
        [event["weighted_ms"] for event in measured],
        trials,
        searched,
    )
    return Run(
        spec,
        curve,
        float(report.get("time_sec", searched)),
        stage_seconds(stages, outcome.get("scopes", {})),
        trials[-1] if trials else 0,
        sum(n for _, n in counts.values()),
        float(outcome.get("peak_mb", math.nan)),
    )


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
        other stages.
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
