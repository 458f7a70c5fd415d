import dataclasses
import threading

import numpy as np
import pytest

from tvm_adaptive.runner.stopping import RULES, make_rule
from tvm_adaptive.testing.conformance import check_stopping_rule
from tvm_adaptive.values.trial import StopDecision


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("limits", [{}, {"min_batches": 2, "max_batches": 2}])
def test_the_packages_own_rules_conform(name, limits):
    report = check_stopping_rule(lambda: make_rule(name, **limits))
    rule = make_rule(name, **limits)
    assert rule.min_batches <= report.median_batches <= rule.max_batches
    assert report.is_unit_free


def test_more_precision_takes_more_batches():
    few, many = (
        check_stopping_rule(lambda width=width: make_rule("precision", relative_half_width=width))
        for width in (0.2, 0.02)
    )
    assert few.median_batches < many.median_batches


@dataclasses.dataclass
class Spread:
    """Stops once the micro-batches differ by less than 10 %."""

    min_batches: object = 3
    max_batches: object = 10
    runs_per_batch: object = None

    def decide(self, batch_means_sec):
        n = len(batch_means_sec)
        close = batch_means_sec.std() < 0.1 * batch_means_sec.mean()
        stop = n >= self.max_batches or (n >= self.min_batches and bool(close))
        return StopDecision(stop, "close" if close else "far")


class InSeconds(Spread):
    """Ends after a tenth of a second: a rule in seconds, which is none of our business."""

    def decide(self, batch_means_sec):
        if len(batch_means_sec) >= self.min_batches and batch_means_sec.sum() > 0.1:
            return StopDecision(True, "out-of-time")
        return super().decide(batch_means_sec)


def test_whether_the_unit_matters_is_a_report_and_no_rule():
    assert check_stopping_rule(Spread).is_unit_free
    assert not check_stopping_rule(InSeconds).is_unit_free


class Locked(Spread):
    """Has what cannot be sent."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Lossy(Spread):
    """Loses an option on the way."""

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__(max_batches=self.max_batches - 1)


class Indifferent(Spread):
    """Forgets on the way that it is strict."""

    strict = True

    def __reduce__(self):
        return _lenient, ()

    def decide(self, batch_means_sec):
        decision = super().decide(batch_means_sec)
        return decision if self.strict else dataclasses.replace(decision, reason="lenient")


def _lenient():
    rule = Indifferent()
    rule.strict = False
    return rule


class Hasty(Spread):
    """Stops at once."""

    def decide(self, batch_means_sec):
        return StopDecision(True, "hasty")


class Endless(Spread):
    """Does not look at its maximum."""

    def decide(self, batch_means_sec):
        return StopDecision(False, "more")


class Bare(Spread):
    """Gives no reason."""

    def decide(self, batch_means_sec):
        return super().decide(batch_means_sec).stop


class Undecided(Spread):
    """Stops with what is no truth value."""

    def decide(self, batch_means_sec):
        return StopDecision(None, "perhaps")


class Numbered(Spread):
    """Has numbers as reasons."""

    def decide(self, batch_means_sec):
        return StopDecision(super().decide(batch_means_sec).stop, 7)


class Vandal(Spread):
    """Sorts the times in place."""

    def decide(self, batch_means_sec):
        batch_means_sec.sort()
        return super().decide(batch_means_sec)


class Moody(Spread):
    """Counts how often it was asked."""

    n_asked = 0

    def decide(self, batch_means_sec):
        self.n_asked += 1
        decision = super().decide(batch_means_sec)
        return dataclasses.replace(decision, reason="even" if self.n_asked % 2 else "odd")


class Dividing(Spread):
    """Cannot stand equal times."""

    def decide(self, batch_means_sec):
        if len(batch_means_sec) > 1:
            _ = 1.0 / float(np.ptp(batch_means_sec))
        return super().decide(batch_means_sec)


@dataclasses.dataclass
class Odd(Spread):
    """Fails where a runner asks that counts each micro-batch, but not at powers of two."""

    runs_per_batch: int | None = 10

    def decide(self, batch_means_sec):
        if len(batch_means_sec) == 7:
            raise KeyError(7)
        return super().decide(batch_means_sec)


class Attributeless:
    """Has a method only."""

    def decide(self, batch_means_sec):
        return StopDecision(True, "x")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Locked, "pickling the rule raised TypeError"),
        (Lossy, r"is \(3, 10, None\), but \(3, 9, None\) in a pickled copy"),
        (Indifferent, "led to .*reason='close'.*, but in a pickled copy to .*reason='lenient'"),
        (Attributeless, "reading min_batches, max_batches and runs_per_batch raised Attrib"),
        (lambda: Spread(min_batches=0), "min_batches must be an integer of at least 1 but is 0"),
        (lambda: Spread(max_batches=9.0), "max_batches must be an integer .* but is 9.0"),
        (lambda: Spread(max_batches=2), "max_batches must be at least min_batches, 3, but is 2"),
        (lambda: Spread(runs_per_batch=True), "runs_per_batch must be None or .* but is True"),
        (Hasty, "min_batches is 3, but the rule stopped after 1 "),
        (Endless, r"max_batches is 10, but the rule went on after 10 \('more'\)"),
        (Bare, "expected a StopDecision but got False"),
        (Undecided, "must be a bool but is None"),
        (Numbered, "must be a str but is 7"),
        (Vandal, r"decide\(\) wrote to the times"),
        (Moody, "led to .*reason='even'.*, but asked again to .*reason='odd'"),
        (Odd, r"decide\(\) of 7 micro-batches .* raised KeyError"),
        (Dividing, r"decide\(\) of 2 micro-batches \(1e-09, 1e-09 s\) raised ZeroDivisionError"),
    ],
)
def test_what_does_not_conform_is_named(make, match):
    with pytest.raises(AssertionError, match=match):
        check_stopping_rule(make)
