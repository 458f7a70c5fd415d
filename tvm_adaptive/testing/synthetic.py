"""Synthetic recordings from known curves, for which the right order of arms is known."""

from __future__ import annotations

import dataclasses

import numpy as np

from tvm_adaptive.errors import InvalidOptionError, check_positive
from tvm_adaptive.testing.recording import Recording, TaskRecording
from tvm_adaptive.values.trial import FloatArray


@dataclasses.dataclass(frozen=True)
class SyntheticArm:
    """A task whose latency falls as ``floor + (start - floor) exp(-n / tau)``.

    Without noise the best latency is exactly this curve, whose gains diminish.
    """

    name: str
    start_ms: float  # milliseconds of the first trial, and of infinitely many
    floor_ms: float
    tau_trials: float  # trials after which 1/e of the gain is left
    weight: float = 1.0
    flop: float = 1e9
    sec_per_trial: float = 0.5
    overhead_sec: float = 0.0  # of each round
    # candidates are slower than the curve by an exponential with this mean, relative
    spread: float = 0.0
    failing: float = 0.0  # share of trials that fail

    def __post_init__(self) -> None:
        if not 0 < self.floor_ms <= self.start_ms:
            raise InvalidOptionError(
                "A synthetic arm needs 0 < floor_ms <= start_ms but got "
                f"{self.floor_ms} and {self.start_ms}."
            )
        check_positive("tau_trials", self.tau_trials)

    def curve_ms(self, n_trials: FloatArray) -> FloatArray:
        """Return the milliseconds of the curve after so many trials."""
        decay = np.exp(-np.asarray(n_trials, dtype=np.float64) / self.tau_trials)
        return np.asarray(self.floor_ms + (self.start_ms - self.floor_ms) * decay, dtype=np.float64)


def record_arms(
    arms: tuple[SyntheticArm, ...], *, n_trials: int = 256, batch: int = 16, seed: int = 0
) -> Recording:
    """Return a recording of synthetic arms."""
    rng = np.random.default_rng(seed)
    return Recording(
        network="synthetic",
        tasks=tuple(_record_arm(arm, n_trials, batch, rng) for arm in arms),
        batch=batch,
        machine="none",
        tvm="none",
        seed=seed,
    )


def _record_arm(
    arm: SyntheticArm, n_trials: int, batch: int, rng: np.random.Generator
) -> TaskRecording:
    latencies = arm.curve_ms(np.arange(n_trials, dtype=np.float64))
    latencies *= 1.0 + arm.spread * rng.exponential(size=n_trials)
    latencies[rng.random(n_trials) < arm.failing] = np.nan
    full, rest = divmod(n_trials, batch)
    sizes = np.array([batch] * full + [rest] * (rest > 0), dtype=np.int64)
    return TaskRecording(
        name=arm.name,
        weight=arm.weight,
        flop=arm.flop,
        latencies_ms=latencies,
        trial_sec=np.full(n_trials, arm.sec_per_trial),
        round_sizes=sizes,
        overhead_sec=np.full(len(sizes), arm.overhead_sec),
    )
