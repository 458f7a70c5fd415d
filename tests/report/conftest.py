from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_adaptive.measure_callback.journal import Journal

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;"


def tell(journal: Any, task: str, start: int, rng: np.random.Generator) -> None:
    """Write what one slot leaves in a journal."""
    latencies = np.round(5.0 / (1 + 0.1 * start) * rng.uniform(1, 2, 16), 4)
    journal.write("slot", task=task, reason="index" if start else "warm-up", gain=0.1, unit="ms/s")
    journal.write(
        "round",
        task=task,
        epsilon=0.5,
        mean_std=0.2 if start else None,
        reason="posterior",
        sample_sec=0.1,
        posterior_sec=0.05,
        evolve_sec=0.2,
    )
    journal.write("build", n=16, n_errors=1, seconds=0.7)
    for ms in latencies:
        journal.write(
            "timing",
            error=None,
            mean_sec=ms / 1e3,
            elapsed_sec=0.02,
            reason="precise",
        )
    journal.write("forecast", task=task, n=16, spearman=0.4, z_rms=1.1 if start else None)
    journal.write(
        "measured",
        task=task,
        weight=2.0,
        flop=1e8,
        best_ms=float(latencies.min()),
        latencies_ms=[None, *latencies[1:].tolist()],
        errors={f"crash {HOSTILE}": 1},
        weighted_ms=4.0 / (1 + start) if start else None,
    )
    journal.write("slot-end", task=task, seconds=0.5, n_trials=16, best_ms=float(latencies.min()))


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run's journal: so many slots, and its end if it has one."""

    def write(name: str = "run", n_slots: int = 8, *, ended: bool = True) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        journal = Journal(folder / "journal.jsonl")
        rng = np.random.default_rng(0)
        journal.write("run", what=f"net {HOSTILE}", target={"kind": "llvm"}, seed=1)
        for number in range(n_slots):
            tell(journal, f"task {HOSTILE} {number % 3}", number, rng)
        if ended:
            journal.write("stage", stage="search", seconds=20.0)
            journal.write("stage", stage="compile", seconds=2.0)
            journal.write(
                "comparison", before_sec=0.5, after_sec=0.004, max_abs=0.0, max_rel=0.0, agree=True
            )
            journal.write("report", what="net", target="llvm, 2 cores", interrupted=False)
        journal.close()
        return folder

    return write
