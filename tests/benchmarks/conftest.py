from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journals import NEUTRAL_FILE
from benchmarks.plan import RunSpec, write_outcome

Point = tuple[float, float | None, int]


def write_journal(path: Path, events: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def spec() -> Callable[..., RunSpec]:
    def make(method: str = "stock", seed: int = 0, workload: str = "te:C2D") -> RunSpec:
        return RunSpec(workload, method, seed, 96, None, "cpu", 2)

    return make


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a finished run as its process leaves it: (seconds, best ms, trials) per round."""

    def write(spec: RunSpec, points: Sequence[Point], finish_sec: float) -> Path:
        folder = tmp_path / spec.folder
        rounds = [
            {
                "event": "measured",
                "time_sec": time_sec,
                "task": "main",
                "n_trials": n_trials,
                "n_errors": 1,
                "weighted_ms": best_ms,
            }
            for time_sec, best_ms, n_trials in points
        ]
        end_sec = (points[-1][0] if points else 0.0) + 1.0
        stages = {"search": end_sec - 1.0, "compare": 1.0}
        write_journal(
            folder / "journal.jsonl",
            [
                {"event": "journal", "time_sec": 0.0, "started_unix_sec": 1000.0},
                {"event": "run", "time_sec": 0.0, "what": spec.workload},
                *rounds,
                {"event": "stage", "time_sec": end_sec, "stage": "search", "seconds": end_sec},
                *([] if spec.method == "stock" else [{"event": "playoff", "time_sec": end_sec}]),
                {"event": "report", "time_sec": finish_sec},
                {"event": "end", "time_sec": finish_sec, "stages": stages},
            ],
        )
        scopes = {"SendToBuilder": 3.0, "SendToRunner": 2.0, "InitializeTask": 1.0}
        write_outcome(folder, spec, status="done", scopes=scopes, peak_mb=100.0)
        return folder

    return write


@pytest.fixture
def write_bench(tmp_path: Path) -> Callable[..., Path]:
    """Write what belongs to the whole benchmark; give it after the runs."""

    def write(
        neutral: dict[str, list[float]] | None = None,
        workload: str = "te:C2D",
        start_up_sec: dict[RunSpec, float] | None = None,
    ) -> Path:
        machine = {"cpu": "a processor", "n_processors": 2, "memory_gb": 8.0, "load_1min": 0.1}
        noise = {"spread": 0.02, "drift": 0.0, "noisy": False, "when": "before"}
        # Journals of runs begin at 1,000 s.
        starts = [
            {"event": "run-start", "time_sec": 100.0 - sec, **dataclasses.asdict(spec)}
            for spec, sec in (start_up_sec or {}).items()
        ]
        write_journal(
            tmp_path / "bench.jsonl",
            [
                {"event": "journal", "time_sec": 0.0, "started_unix_sec": 900.0},
                {"event": "bench", "time_sec": 0.0, "size": "smoke", **machine},
                {"event": "noise", "time_sec": 1.0, **noise},
                *starts,
            ],
        )
        if neutral is not None:
            entries = {name: {"samples_ms": samples} for name, samples in neutral.items()}
            path = tmp_path / workload.replace(":", "-") / NEUTRAL_FILE
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"workload": workload, "entries": entries}))
        return tmp_path

    return write
