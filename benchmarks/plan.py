"""Which runs, in which order, and which of them are still to do."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods import Method
from benchmarks.workloads import Workload

OUTCOME_FILE = "outcome.json"


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run: all that its process needs to know.

    Attributes
    ----------
    workload, method : str
    seed : int
    trials : int or None
        At the most.
    budget_sec : float or None
        Wall-clock seconds.
    target : str
    n_threads : int or None
        Of every CPU kernel, whoever times it; None on a GPU.
    """

    workload: str
    method: str
    seed: int
    trials: int | None
    budget_sec: float | None
    target: str
    n_threads: int | None

    @property
    def folder(self) -> Path:
        """Where the run lies in a benchmark's folder."""
        return runs_folder(self.workload) / self.method / str(self.seed)


def runs_folder(workload: str) -> Path:
    """Return where all runs of a workload lie in a benchmark's folder."""
    return Path(workload.replace(":", "-"))


def interleaved(
    workloads: Sequence[Workload], methods: Sequence[Method], seeds: Iterable[int]
) -> Iterator[tuple[Workload, Method, int]]:
    """Yield all runs so that drift of the machine meets all methods alike.

    The methods of one workload and seed follow one another; which of them comes first
    goes round with the seed.
    """
    for seed in seeds:
        start = seed % max(1, len(methods))
        order = [*methods[start:], *methods[:start]]
        for workload in workloads:
            for method in order:
                yield workload, method, seed


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Return what a run ended with; None for one that never ran or was killed."""
    try:
        outcome = json.loads((folder / OUTCOME_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) and "spec" in outcome else None


def write_outcome(folder: Path, spec: RunSpec, **fields: Any) -> None:
    """Write what a run ended with, all of it or nothing."""
    temporary = folder / f"{OUTCOME_FILE}.tmp"
    temporary.write_text(json.dumps({"spec": dataclasses.asdict(spec), **fields}, indent=1))
    os.replace(temporary, folder / OUTCOME_FILE)


def is_finished(out: Path, spec: RunSpec) -> bool:
    """Say whether a run is finished, successfully or not.

    Raises
    ------
    ValueError
        When another run has finished in its place, with other settings.
    """
    outcome = read_outcome(out / spec.folder)
    if outcome is None:
        return False
    if outcome["spec"] != dataclasses.asdict(spec):
        raise ValueError(
            f"{out / spec.folder} holds a run with other settings: {outcome['spec']}, not "
            f"{dataclasses.asdict(spec)}. Give another --out."
        )
    return True
