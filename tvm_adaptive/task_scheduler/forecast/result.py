"""A forecast of a task's throughput, and the history that it is made from."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.values.trial import FloatArray


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Posterior of a task's best throughput at the end of the next slot."""

    # in the unit of the history, higher is better. Exact where the method allows: it may
    # differ from that of ``samples`` by their Monte-Carlo error
    mean: float
    samples: FloatArray  # never below the incumbent; in no particular order
    incumbent: float = 0.0  # best throughput so far; 0 before the first success
    # ``expected_drop`` where the method has a more exact value than its samples
    exact_drop: float | None = None

    @property
    def expected_drop(self) -> float:
        """Share of its latency that the task is expected to lose in the slot, in [0, 1)."""
        if self.exact_drop is not None:
            return self.exact_drop
        # Draw by draw: latency is convex in the throughput, whose mean overstates the drop.
        return float(1.0 - (self.incumbent / self.samples).mean()) if self.incumbent > 0 else 0.0

    def quantile(self, p: npt.ArrayLike) -> FloatArray:
        """Return quantiles of the samples."""
        probabilities = np.asarray(p, dtype=np.float64)
        return np.asarray(np.quantile(self.samples, probabilities), dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class ThroughputHistory:
    """Best throughput after each trial, checked."""

    best: FloatArray  # any unit, higher is better, not decreasing; zeros until the first success
    # what the task is expected to reach at most, same unit. A guess: no curve has a higher limit,
    # but draws may exceed it, and it is ignored once it was reached
    expected_peak: float | None = None

    def __post_init__(self) -> None:
        if self.best.ndim != 1:
            raise ValueError(f"A history has shape (n,), but this one has {self.best.shape}.")
        if not np.isfinite(self.best).all() or (self.best < 0).any():
            raise ValueError("A throughput is finite and not negative; give failed trials as 0.")
        if (np.diff(self.best) < 0).any():
            raise ValueError("The best so far never falls; accumulate the maximum first.")
        peak = self.expected_peak
        if peak is not None and not 0 < peak < np.inf:
            raise InvalidOptionError(f"expected_peak must be positive and finite but got {peak}.")

    def __len__(self) -> int:
        return len(self.best)

    @property
    def incumbent(self) -> float:
        """The best so far; 0 before the first success."""
        return float(self.best[-1]) if len(self.best) else 0.0

    @property
    def first_success(self) -> int:
        """Number of the first trial with a throughput, from 1; 0 if there is none."""
        return int(np.argmax(self.best > 0)) + 1 if self.incumbent > 0 else 0

    @property
    def records(self) -> FloatArray:
        """The throughputs that were ever the best, shape (r,), increasing."""
        return np.unique(self.best[self.best > 0])

    @property
    def expected_gain(self) -> float:
        """The expected peak in multiples of the incumbent; infinite if it was reached."""
        if self.expected_peak is None or self.expected_peak <= self.incumbent:
            return math.inf
        return self.expected_peak / self.incumbent


class NoFitError(RuntimeError):
    """No curve of the family fits the data; the message says why."""


def unchanged(history: ThroughputHistory) -> Forecast:
    """Return the forecast that nothing changes, all samples at the incumbent."""
    best = history.incumbent
    return Forecast(best, np.full(1, best), best)
