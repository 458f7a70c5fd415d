"""The arms and decisions of a task scheduler.

The terms are the bandit's: a task is an *arm*, a share of tuning time given to it a *slot*.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tvm_adaptive.values import roofline
from tvm_adaptive.values.forms import NO_FORM, FormKey
from tvm_adaptive.values.trial import N_VERIFIED, FloatArray


@dataclasses.dataclass(frozen=True)
class PriorTrials:
    """The trials that earlier runs made for a task."""

    # milliseconds of one run, one per trial in the order measured, of all runs; ``nan`` for a
    # failure. Empty where this run does not start with the best of them
    latencies_ms: Sequence[float] = ()
    is_proven: bool = False  # a play-off has proven a candidate, which this run can fall back on


@dataclasses.dataclass(frozen=True)
class Arm:
    """A task's history so far.

    Attributes
    ----------
    name : str
    weight : float
        How often the task occurs in the network; 0 for one that the network does not use.
    flop : float
        Floating-point operations of one run; at least 1, which is what a task that
        only moves data has.
    latencies_ms : ndarray of shape (n,), milliseconds of one run, lower is better
        One per trial in the order measured; ``nan`` for a trial that failed.
    n_slots : int
        Slots played, those of the warm-up included.
    spent_sec : float
        Wall-clock seconds of these slots: search, builds, measuring and training.
    finished : bool
        Whether no further slot is possible: nothing new to try, trials used up, or
        given up; or none now, see ``is_under_way``.
    prior : PriorTrials
    key : FormKey
        The part of the network, and the form in which the task computes it.
    n_bytes : float
        Of the arguments: what one run reads and writes at least; 0 if not known.
    is_under_way : bool
        Whether a batch is measured or searched at present, so that the arm cannot be chosen.
        Its slot counts already, its trials do not yet.
    """

    name: str
    weight: float
    flop: float
    latencies_ms: FloatArray
    n_slots: int
    spent_sec: float
    finished: bool = False
    prior: PriorTrials = PriorTrials()
    key: FormKey = NO_FORM
    n_bytes: float = 0.0
    is_under_way: bool = False

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
    def share_ms(self) -> float:
        """Milliseconds of an inference; ``inf`` before the first success."""
        return math.inf if math.isinf(self.best_ms) else self.weight * self.best_ms

    @property
    def work(self) -> float:
        """Operations of an inference, its bytes counted as such: a guess of what it takes."""
        return self.weight * roofline.work(self.flop, self.n_bytes)

    @property
    def sec_per_trial(self) -> float:
        """Mean seconds of slot that a trial cost; ``nan`` before the first."""
        return self.spent_sec / self.n_trials if self.n_trials else math.nan

    def throughput_history(self) -> FloatArray:
        """Return the best throughput after each trial, of earlier runs and then of this one.

        In multiples of the incumbent's, which must exist; of shape (m + n,), 0 before the
        first success. A machine is not equally fast every day: earlier trials are scaled so
        that their best agrees with this run's first successes, which measure it again.
        """
        own = self.best_ms / best_so_far(self.latencies_ms)
        earlier = best_so_far(np.asarray(self.prior.latencies_ms, dtype=np.float64))
        if not len(earlier) or math.isinf(earlier[-1]):
            return own
        successes = self.latencies_ms[np.isfinite(self.latencies_ms)]
        again_ms = float(successes[:N_VERIFIED].min())
        earlier = self.best_ms / again_ms * (earlier[-1] / earlier)  # whose last is exactly 1
        history: FloatArray = np.maximum.accumulate(np.concatenate([earlier, own]))
        return history


@dataclasses.dataclass(frozen=True)
class Decision:
    """Which arm gets the next slot, and why.

    Attributes
    ----------
    arm : int or None
        Index of the arm; None to end the run, as no arm is worth another slot.
    reason : str
        One word for the journal: ``"warm-up"``, ``"index"``, ``"explore"``,
        ``"starved"``, ``"nothing-left"``, ...; never empty.
    n_trials : int or None
        Trials that the slot should have; None for a full batch of the search.
    scores : ndarray of shape (k,) or None
        One per arm, higher is better; ``nan`` for an arm that was not a choice. None
        where nothing was compared.
    unit : str
        Of the scores, e.g. ``"ms/s"``; empty without one.
    retired : tuple of int
        Arms that get no further slot: they are finished at the next decision.
    until_success : bool
        Whether the slot may end sooner, with its first batch that has a success: enough
        for a warm-up, and to verify the best of earlier runs.
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

    A user's policy needs this method alone. It may keep state between calls, but must
    not assume that the arm it chose got as many trials as it asked for.
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


def best_so_far(latencies_ms: FloatArray) -> FloatArray:
    """Return the lowest of each trial's latency and those before; ``inf`` before a success."""
    filled = np.where(np.isfinite(latencies_ms), latencies_ms, np.inf)
    best: FloatArray = np.minimum.accumulate(filled)
    return best
