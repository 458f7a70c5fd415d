"""Rules for every stopping rule of a runner."""

from __future__ import annotations

import dataclasses
import numbers
import pickle
from collections.abc import Callable

import cloudpickle
import numpy as np

from tvm_adaptive.runner.stopping import StoppingRule, looks
from tvm_adaptive.testing.conformance.raising import must_not_raise
from tvm_adaptive.values.trial import FloatArray, StopDecision

MakeRule = Callable[[], StoppingRule]  # a fresh one each time

# Of micro-batches, relative: an idle machine's, a shared one's, and one that is useless.
_NOISES = (0.01, 0.05, 0.5)
# A shared machine's, for the report.
_REPORTED_NOISE = 0.05
# Of an empty kernel, a small one, and one of which a run takes longer than most budgets.
_MEANS_SEC = (1e-9, 1e-4, 1e3)
# An interrupt that stops a micro-batch for this many times its duration.
_OUTLIER = 100.0
# Powers of two: products with them are exact, so that rounding cannot change a decision.
_UNITS = (2.0**-10, 2.0**10)
# The median of so many is good to a few percent.
_N_REPORTED = 51


@dataclasses.dataclass(frozen=True)
class StoppingReport:
    """What a rule that passed all checks does where both is right."""

    # Whether decisions are the same in any unit of time. A rule that ends at a precision in
    # seconds, such as the clock's resolution, or at a sum of seconds, rightly depends on it.
    is_unit_free: bool
    median_batches: float  # of candidates whose micro-batches differ by 5 %


def check_stopping_rule(make_rule: MakeRule, *, seed: int = 0) -> StoppingReport:
    """Run all checks of a stopping rule, on made-up times.

    Parameters
    ----------
    make_rule : callable
        Returns a fresh rule each time.
    seed : int, default 0
        Of the noise of the times.

    Raises
    ------
    AssertionError
        With the rule that is broken, and what the stopping rule did.
    """
    rule = make_rule()
    check_counts(rule)
    rng = np.random.default_rng(seed)
    prefixes = [each[:n] for each in _sequences(rule, rng) for n in _lengths(rule)]
    decisions = [decide(rule, each) for each in prefixes]
    for batches, decision in zip(prefixes, decisions, strict=True):
        check_limits(rule, len(batches), decision)
    check_deterministic(rule, prefixes, decisions)
    check_travels(rule, prefixes, decisions)
    unit_free = all(
        decide(rule, unit * each).stop == decision.stop
        for each, decision in zip(prefixes, decisions, strict=True)
        for unit in _UNITS
    )
    return StoppingReport(unit_free, _median_batches(rule, rng))


def check_counts(rule: StoppingRule) -> None:
    """Require numbers of micro-batches and runs that a runner can count with."""
    with must_not_raise("reading min_batches, max_batches and runs_per_batch"):
        low, high, runs = _counts_of(rule)
    assert _is_count(low), f"min_batches must be an integer of at least 1 but is {low!r}"
    assert _is_count(high), f"max_batches must be an integer of at least 1 but is {high!r}"
    assert high >= low, f"max_batches must be at least min_batches, {low}, but is {high}"
    assert runs is None or _is_count(runs), (
        f"runs_per_batch must be None or an integer of at least 1 but is {runs!r}"
    )


def decide(rule: StoppingRule, batch_means_sec: FloatArray) -> StopDecision:
    """Ask a rule, and require a decision and an argument that is as it was."""
    given = batch_means_sec.copy()
    with must_not_raise(f"decide() of {_shown(batch_means_sec)}"):
        decision = rule.decide(given)
    assert isinstance(decision, StopDecision), f"expected a StopDecision but got {decision!r}"
    assert isinstance(decision.stop, bool | np.bool_), (
        f"the stop of a StopDecision must be a bool but is {decision.stop!r}"
    )
    assert isinstance(decision.reason, str), (
        f"the reason of a StopDecision must be a str but is {decision.reason!r}"
    )
    assert np.array_equal(given, batch_means_sec), "decide() wrote to the times that it was given"
    return decision


def check_limits(rule: StoppingRule, n: int, decision: StopDecision) -> None:
    """Require that a rule stops neither before its minimum nor after its maximum."""
    if n < rule.min_batches:
        assert not decision.stop, (
            f"min_batches is {rule.min_batches}, but the rule stopped after {n} "
            f"({decision.reason!r})"
        )
    if n >= rule.max_batches:
        assert decision.stop, (
            f"max_batches is {rule.max_batches}, but the rule went on after {n} "
            f"({decision.reason!r})"
        )


def check_deterministic(
    rule: StoppingRule, prefixes: list[FloatArray], decisions: list[StopDecision]
) -> None:
    """Require the same decisions in another order: one rule serves all candidates."""
    again = [decide(rule, each) for each in reversed(prefixes)][::-1]
    _check_same(prefixes, decisions, again, "asked again")


def check_travels(
    rule: StoppingRule, prefixes: list[FloatArray], decisions: list[StopDecision]
) -> None:
    """Require that a rule decides the same in the measuring process, which gets a pickle."""
    with must_not_raise("pickling the rule"):
        copied: StoppingRule = pickle.loads(cloudpickle.dumps(rule))
        ours, theirs = _counts_of(rule), _counts_of(copied)
    assert ours == theirs, (
        f"(min_batches, max_batches, runs_per_batch) is {ours}, but {theirs} in a pickled copy"
    )
    there = [decide(copied, each) for each in prefixes]
    _check_same(prefixes, decisions, there, "in a pickled copy")


def _check_same(
    prefixes: list[FloatArray], first: list[StopDecision], second: list[StopDecision], when: str
) -> None:
    for batches, one, other in zip(prefixes, first, second, strict=True):
        assert one == other, f"{_shown(batches)} led to {one}, but {when} to {other}"


def _sequences(rule: StoppingRule, rng: np.random.Generator) -> list[FloatArray]:
    """Return series of times: as noisy as machines are, without any noise, with one outlier."""
    n = rule.max_batches
    found = [mean * rng.lognormal(0.0, noise, n) for mean in _MEANS_SEC for noise in _NOISES]
    found += [np.full(n, mean) for mean in _MEANS_SEC]
    for place in {0, n // 2, n - 1}:
        disturbed = np.full(n, _MEANS_SEC[1])
        disturbed[place] *= _OUTLIER
        found.append(disturbed)
    return found


def _lengths(rule: StoppingRule) -> list[int]:
    """Return numbers of micro-batches to ask after: a runner's, and those beside the limits."""
    low, high = rule.min_batches, rule.max_batches
    return sorted({n for n in (1, low - 1, *looks(rule), high - 1, high) if 0 < n <= high})


def _median_batches(rule: StoppingRule, rng: np.random.Generator) -> float:
    used = []
    for _ in range(_N_REPORTED):
        batches = _MEANS_SEC[1] * rng.lognormal(0.0, _REPORTED_NOISE, rule.max_batches)
        used.append(next(n for n in looks(rule) if rule.decide(batches[:n]).stop))
    return float(np.median(used))


def _counts_of(rule: StoppingRule) -> tuple[int, int, int | None]:
    return rule.min_batches, rule.max_batches, rule.runs_per_batch


def _is_count(value: object) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= 1  # type: ignore[call-overload]


def _shown(batch_means_sec: FloatArray) -> str:
    """Return times as a message shows them: the first few."""
    first = ", ".join(f"{sec:.3g}" for sec in batch_means_sec[:3])
    return f"{len(batch_means_sec)} micro-batches ({first}{', ...' * (len(batch_means_sec) > 3)} s)"
