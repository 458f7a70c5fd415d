"""Rules that decide when enough micro-batches of a candidate have been measured.

=======  ==================================================  ===========
symbol   meaning                                             unit
=======  ==================================================  ===========
t_j      mean time of one run in micro-batch j               seconds
i        micro-batches so far                                count
R_i      running throughput, i / (t_1 + ... + t_i)           1 / seconds
cv       population standard deviation over mean             none
=======  ==================================================  ===========

References
----------
Li, Zhang, Wang & Li (2020), "AdaTune: Adaptive Tensor Program Compilation Made
Efficient", NeurIPS, Algorithm 1. Chow & Robbins (1965), "On the asymptotic theory of
fixed-width sequential confidence intervals for the mean", Ann. Math. Statist. 36.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
from scipy.special import stdtrit

from tvm_adaptive.errors import (
    InvalidOptionError,
    check_at_least,
    check_positive,
    check_share,
)
from tvm_adaptive.runner.summary import summarize
from tvm_adaptive.values.trial import FloatArray, StopDecision

# With one value the deviation is zero: the paper's Algorithm 1 taken literally would
# always stop there.
MIN_BATCHES = 3
# With five or more values AdaTune's released code drops the smallest and the largest.
CV_TRIM_ABOVE = 4


class StoppingRule(Protocol):
    """When to stop measuring a candidate.

    Your own rule needs the method and the three attributes, must be picklable (it is sent
    to the measuring process), never stops before ``min_batches`` and always by
    ``max_batches``.
    """

    @property
    def min_batches(self) -> int:
        """Micro-batches before the first look; at least 1."""

    @property
    def max_batches(self) -> int:
        """Micro-batches after which measuring ends in any case."""

    @property
    def runs_per_batch(self) -> int | None:
        """Runs in a micro-batch; None to let their duration decide."""

    def decide(self, batch_means_sec: FloatArray) -> StopDecision:
        """Say whether to stop after the micro-batches so far, shape (i,), seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRule:
    """AdaTune's rule as published: running throughput varies by less than 10 %.

    Stops when the population cv of R_1 ... R_i is below ``max_cv``. The running means
    share their data, so their cv is about a third of the noise of a single micro-batch
    and does not shrink with more of them: the rule asks whether the noise is below 30 %,
    not whether the mean is known. :class:`PrecisionRule` asks that.

    Parameters
    ----------
    max_cv : float
        Coefficient of variation to stop below. Default 0.1.
    min_batches : int
        Default 3; the paper gives none.
    max_batches : int
        Default 10.
    runs_per_batch : int
        Default 50.
    """

    max_cv: float = 0.1
    min_batches: int = MIN_BATCHES
    # AdaTune, section 4.1: n = 500 runs in micro-batches of B = 50, so at most ten.
    max_batches: int = 10
    runs_per_batch: int = 50

    def __post_init__(self) -> None:
        check_at_least("min_batches", self.min_batches, 2)
        check_at_least("max_batches", self.max_batches, self.min_batches)
        check_at_least("runs_per_batch", self.runs_per_batch, 1)
        check_positive("max_cv", self.max_cv)

    def decide(self, batch_means_sec: FloatArray) -> StopDecision:
        """Stop when cv(R_1 ... R_i) < max_cv (Algorithm 1)."""
        i = np.arange(1, len(batch_means_sec) + 1)
        running = i / np.cumsum(batch_means_sec)
        return _decide(self, len(i), _cv(running) < self.max_cv, "steady")


class CVRule(PaperRule):
    """The rule of AdaTune's released code: micro-batches differ by less than 10 %.

    Takes the cv of the throughputs 1 / t_j themselves; with five or more, without the
    smallest and the largest. That cv estimates the noise of a micro-batch, not the error
    of the mean, and falls abruptly at the fifth. Parameters are those of
    :class:`PaperRule`.
    """

    def decide(self, batch_means_sec: FloatArray) -> StopDecision:
        """Stop when the cv of the (trimmed) 1 / t_j is below max_cv."""
        throughputs = np.sort(1.0 / batch_means_sec)
        if len(throughputs) > CV_TRIM_ABOVE:
            throughputs = throughputs[1:-1]
        return _decide(self, len(batch_means_sec), _cv(throughputs) < self.max_cv, "steady")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionRule:
    """Stop when the mean time itself is known well enough.

    Stops when the confidence interval of the robust mean (see
    :func:`~tvm_adaptive.runner.summary.summarize`) has a half-width of at most
    ``relative_half_width`` of it: t * stderr <= relative_half_width * mean. An interval
    that is tested repeatedly until it is narrow covers less than it states, so the error
    probability is divided by the number of looks (Bonferroni).

    The interval assumes independent batches. It does not contain drifts slower than a
    measurement (clocks, temperature, other tenants): two candidates measured a minute
    apart can differ by more than their intervals.

    Parameters
    ----------
    relative_half_width : float
        In (0, 1). Default 0.03: on a virtual machine a kernel's time drifts by more
        between two measurements.
    confidence : float
        Over all looks together, in (0, 1). Default 0.9.
    min_batches : int
        At least 2. Default 3.
    max_batches : int
        Default 48.
    """

    relative_half_width: float = 0.03
    confidence: float = 0.9
    min_batches: int = MIN_BATCHES
    # Four doublings of three: at 2 ms each, what stock's 100 ms minimum would have spent.
    max_batches: int = 48
    runs_per_batch = None  # as many as fill the duration of a micro-batch

    def __post_init__(self) -> None:
        check_at_least("min_batches", self.min_batches, 2)
        check_at_least("max_batches", self.max_batches, self.min_batches)
        check_share("relative_half_width", self.relative_half_width, "(0, 1)")
        check_share("confidence", self.confidence, "(0, 1)")

    def decide(self, batch_means_sec: FloatArray) -> StopDecision:
        """Stop when the half-width is at most relative_half_width of the mean."""
        summary = summarize(batch_means_sec)
        error = (1.0 - self.confidence) / len(looks(self))
        t = float(stdtrit(summary.dof, 1.0 - error / 2.0))
        is_precise = t * summary.stderr_sec <= self.relative_half_width * summary.mean_sec
        return _decide(self, len(batch_means_sec), is_precise, "precise")


RULES: dict[str, type[PaperRule] | type[PrecisionRule]] = {
    "precision": PrecisionRule,
    "paper": PaperRule,
    "cv": CVRule,
}


def make_rule(name: str, **options: Any) -> StoppingRule:
    """Make a stopping rule from its name.

    Parameters
    ----------
    name : str
        ``"precision"``, ``"paper"`` or ``"cv"``.
    **options : Any
        Passed to the rule.

    Raises
    ------
    InvalidOptionError
        For a name or an option that does not exist, or a value out of range.
    """
    if name not in RULES:
        raise InvalidOptionError(
            f"Expected the name of a stopping rule, one of {', '.join(map(repr, RULES))}, "
            f"but got {name!r}. For a rule of your own pass the object instead of a name."
        )
    rule = RULES[name]
    try:
        return rule(**options)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(rule))
        raise InvalidOptionError(
            f"Expected options of the stopping rule {name!r} among {known}, "
            f"but got {', '.join(options)} ({error})."
        ) from error


def looks(rule: StoppingRule) -> list[int]:
    """Return the numbers of micro-batches after which a rule is asked, increasing.

    With a fixed number of runs per micro-batch: each number from ``min_batches`` to
    ``max_batches``, as published. Else the number doubles, as each call of the timer makes
    a warm-up run and each look costs confidence.
    """
    if rule.runs_per_batch is not None:
        return list(range(rule.min_batches, rule.max_batches + 1))
    counts = [rule.min_batches]
    while counts[-1] < rule.max_batches:
        counts.append(min(2 * counts[-1], rule.max_batches))
    return counts


def _decide(rule: StoppingRule, n: int, is_satisfied: bool, reason: str) -> StopDecision:
    if n < rule.min_batches:
        return StopDecision(False, "too-few")
    if is_satisfied:
        return StopDecision(True, reason)
    if n >= rule.max_batches:
        return StopDecision(True, "exhausted")
    return StopDecision(False, "noisy")


def _cv(values: FloatArray) -> float:
    return float(np.std(values) / np.mean(values))
