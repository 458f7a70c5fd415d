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
    """Recorded noise of one workload.

    Attributes
    ----------
    name : str
        The folder below the results.
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


def factors_of(timed: Mapping[str, Rounds]) -> Array:
    """Return the times of libraries that were timed in all rounds over their medians."""
    n_rounds = max((len(each) for each in timed.values()), default=0)
    whole = [list(each.values()) for each in timed.values() if len(each) == n_rounds]
    if n_rounds < _MIN_ROUNDS or len(whole) < 2:
        return np.empty((0, 0))
    times = np.array(whole).T
    return np.asarray(times / np.median(times, axis=0))


def read_recordings(folder: Path) -> list[Recording]:
    """Read all neutral measurements below a folder."""
    found = []
    for there in sorted({path.parent for path in folder.rglob("neutral.json*")}):
        factors = factors_of(neutral_rounds(there))
        if factors.size:
            found.append(Recording(str(there.relative_to(folder)), factors))
    return found
