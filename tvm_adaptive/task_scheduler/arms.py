"""What a task scheduler sees of its tasks, and what it decides.

The terms are the bandit's: a task is an *arm*, playing it for a while is a *slot*.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tvm_adaptive.records import FloatArray


@dataclasses.dataclass(frozen=True)
class Arm:
    """A task's history so far.

    Attributes
    ----------
    name : str
    weight : float
        How often the task occurs in the network.
    flop : float
        Floating-point operations of one run; at least 1, which is what a task that
        only moves data has.
    latencies_ms : ndarray of shape (n,), milliseconds of one run, lower is better
        One per trial in the order measured; ``nan`` for a trial that failed.
    n_slots : int
        Slots played, those of the warm-up included.
    spent_sec : float
        Wall-clock seconds of these slots: search, builds, measuring and learning.
    finished : bool
        Whether it cannot be played any more: nothing new to try, trials used up, or
        given up.
    is_proven : bool
        Whether an earlier run has proven a candidate of it, which is there to fall back on.
    """

    name: str
    weight: float
    flop: float
    latencies_ms: FloatArray
    n_slots: int
    spent_sec: float
    finished: bool = False
    is_proven: bool = False

    @property
    def n_trials(self) -> int:
        """Trials so far, failed ones included."""
        return len(self.latencies_ms)

    @functools.cached_property
    def best_ms(self) -> float:
        """Milliseconds of one run of the incumbent; ``inf`` before the first success."""
        valid = self.latencies_ms[np.isfinite(self.latencies_ms)]
        return float(valid.min()) if len(valid) else math.inf

    @property
    def sec_per_trial(self) -> float:
        """Mean seconds of slot that a trial cost; ``nan`` before the first."""
        return self.spent_sec / self.n_trials if self.n_trials else math.nan

    def best_history_ms(self) -> FloatArray:
        """Return the incumbent's milliseconds after each trial; ``inf`` before a success."""
        filled = np.where(np.isfinite(self.latencies_ms), self.latencies_ms, np.inf)
        best: FloatArray = np.minimum.accumulate(filled)
        return best


class Played(Protocol):
    """What is known of an arm from an earlier sitting of the run; see :class:`Arm`."""

    @property
    def latencies_ms(self) -> Sequence[float]:
        """Milliseconds, one per trial."""

    @property
    def n_slots(self) -> int:
        """Slots played."""

    @property
    def spent_sec(self) -> float:
        """Seconds of these slots."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """Which arm gets the next slot, and why.

    Attributes
    ----------
    arm : int or None
        Index of the arm; None to end the run, because nothing left is worth a slot.
    reason : str
        One word for the journal: ``"warm-up"``, ``"index"``, ``"explore"``,
        ``"starved"``, ``"nothing-left"``, ...; never empty.
    n_trials : int or None
        Trials that the slot should have; None for a full batch of the search.
    scores : ndarray of shape (k,) or None
        What was compared, one per arm, higher is better; ``nan`` for an arm that was
        not a choice. None where nothing was compared.
    unit : str
        Of the scores, e.g. ``"ms/s"``; empty without one.
    retired : tuple of int
        Arms that shall not be asked again.
    until_success : bool
        Whether the slot may end sooner, with its first batch that has a success: a warm-up
        wants no more, and what an earlier run knows of the task is verified in less.
    """

    arm: int | None
    reason: str
    n_trials: int | None = None
    scores: FloatArray | None = None
    unit: str = ""
    retired: tuple[int, ...] = ()
    until_success: bool = False

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("A Decision needs a reason; give one word for the journal.")


class Policy(Protocol):
    """Decides slot by slot. The same object serves hardware and replay.

    A policy of one's own needs this method alone. It may keep state between calls, but
    must not assume that the arm it chose got as many trials as it asked for.
    """

    def choose(self, arms: Sequence[Arm], rng: np.random.Generator) -> Decision:
        """Choose among the arms that are not finished.

        Parameters
        ----------
        arms : sequence of Arm
            Always all of them, in the same order.
        rng : numpy.random.Generator
            The only source of randomness; ties are broken with it.
        """
