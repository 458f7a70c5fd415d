"""Noise of this page's machines, from the rounds of published neutral measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.journals import Rounds, neutral_rounds

Array = npt.NDArray[np.float64]

RESULTS_FOLDER = Path(__file__).parent.parent / "results"
# Fewer rounds have no median to differ from.
_MIN_ROUNDS = 10


@dataclasses.dataclass(frozen=True)
class Recording:
    """Recorded noise of libraries that were timed in the same rounds.

    Attributes
    ----------
    name : str
        The workload's folder below the results.
    factors : ndarray
        Of shape (rounds, libraries): the time of each over its median of all rounds.
    """

    name: str
    factors: Array

    @property
    def noise(self) -> float:
        """Standard deviation of the ratio of two libraries in a round, by its middle 68 %."""
        logs = np.log(self.factors)
        left, right = np.triu_indices(logs.shape[1], 1)
        low, high = np.quantile(logs[:, left] - logs[:, right], [0.16, 0.84])
        return float(high - low) / 2.0


def factors_of(timed: Mapping[str, Rounds]) -> list[Array]:
    """Return the times of libraries over their medians, by the rounds that they share.

    Seeds that were measured on different days share none.
    """
    groups: dict[tuple[int, ...], list[list[float]]] = {}
    for each in timed.values():
        groups.setdefault(tuple(each), []).append(list(each.values()))
    return [
        np.asarray(np.array(times).T / np.median(times, axis=1))
        for rounds, times in groups.items()
        if len(rounds) >= _MIN_ROUNDS and len(times) > 1
    ]


def read_recordings(folder: Path) -> list[Recording]:
    """Read all neutral measurements below a folder."""
    return [
        Recording(str(there.relative_to(folder)), factors)
        for there in sorted({path.parent for path in folder.rglob("neutral.json*")})
        for factors in factors_of(neutral_rounds(there)[0])
    ]
