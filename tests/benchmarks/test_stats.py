from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stats import (
    Curve,
    Interval,
    Paired,
    exactly,
    first_within,
    geometric_mean,
    geometric_mean_interval,
    make_curve,
    median_curve,
    median_interval,
    paired,
    spread,
    spread_of_samples,
)

positive = st.floats(0.01, 1e4)


def curve(*points: tuple[float, float | None], end: float = 0.0) -> Curve:
    times, values = [time for time, _ in points], [value for _, value in points]
    return make_curve(times, values, [16 * (n + 1) for n in range(len(points))], end)


@given(st.lists(st.one_of(st.none(), positive), max_size=20))
def test_best_so_far_never_rises(values: list[float | None]) -> None:
    made = make_curve(list(range(len(values))), values, list(range(len(values))), 0.0)
    assert all(b <= a for a, b in zip(made.best_ms, made.best_ms[1:], strict=False))
    known = [value for value in values if value is not None]
    assert made.final_ms == (min(known) if known else math.inf)


def test_a_curve_holds_until_its_next_step() -> None:
    made = curve((10, None), (20, 4.0), (30, 5.0), (40, 1.0), end=50)
    assert [made.at(time) for time in (5, 19.9, 20, 39, 40, 99)] == [math.inf, math.inf, 4, 4, 1, 1]
    assert [made.at_trial(n) for n in (31, 32, 64)] == [math.inf, 4, 1]
    assert [made.trials_at(time) for time in (9, 10, 35)] == [0, 16, 48]
    assert (made.final_ms, made.end_sec) == (1, 50)


def test_the_end_is_never_before_the_last_result() -> None:
    assert curve((10, 1.0), end=5).end_sec == 10


def test_a_quality_is_reached_by_the_first_that_was_timed_within_it() -> None:
    steps = [(10.0, 1.5), (20.0, 1.02), (30.0, 0.9)]
    assert first_within(steps, 40.0, 0.03) == exactly(20.0)
    assert first_within(steps[:1], 40.0, 0.03) == Interval(40.0, math.inf)


def test_a_lucky_minimum_is_not_when_a_quality_was_reached() -> None:
    # Recorded as the best at 10 s, which it is not; what came later is.
    assert first_within([(10.0, 1.6), (50.0, 1.0)], 60.0, 0.03) == exactly(50.0)


def test_what_was_not_timed_anew_leaves_bounds() -> None:
    assert first_within([(10.0, None), (20.0, 1.0)], 30.0, 0.03) == Interval(10.0, 20.0)
    assert first_within([(10.0, 1.5), (20.0, None)], 30.0, 0.03) == Interval(20.0, math.inf)
    assert first_within([], 30.0, 0.03) == Interval(30.0, math.inf)


@given(st.lists(st.tuples(positive, st.booleans()), min_size=1, max_size=10))
def test_bounds_hold_whatever_was_not_timed(drawn: list[tuple[float, bool]]) -> None:
    steps = [(float(n), ratio / 100.0) for n, (ratio, _) in enumerate(drawn)]
    truth = first_within(steps, 99.0, 0.03)
    partly = [
        (at, ratio if known else None) for (at, ratio), (_, known) in zip(steps, drawn, strict=True)
    ]
    found = first_within(partly, 99.0, 0.03)
    assert found.low <= truth.low
    assert found.high >= truth.high


def test_never_is_a_bound_of_the_ratio_whoever_it_was() -> None:
    never = Interval(50.0, math.inf)
    assert exactly(100.0).over(exactly(10.0)) == exactly(10.0)
    assert exactly(100.0).over(never) == Interval(0.0, 2.0)
    assert never.over(exactly(10.0)) == Interval(5.0, math.inf)
    assert never.over(never) == Interval(0.0, math.inf)


def test_a_median_is_known_where_never_is_not_in_its_middle() -> None:
    never = Interval(0.0, 2.0)
    assert median_interval([never, exactly(3.0), exactly(5.0)]) == exactly(3.0)
    assert median_interval([never, never, exactly(5.0)]) == Interval(0.0, 2.0)
    assert median_interval([exactly(8.0), never]) == Interval(0.0, pytest.approx(4.0))


def test_the_middle_of_two_ratios_is_their_geometric_mean() -> None:
    assert median_interval([exactly(1.0), exactly(25.0)]) == exactly(5.0)
    assert median_interval([exactly(x) for x in (0.1, 2.0, 8.0, 99.0)]).low == pytest.approx(4.0)
    assert median_interval([exactly(3.0), exactly(3.0)]) == exactly(3.0)
    never_timed = Interval(4.0, math.inf)
    assert median_interval([exactly(1.0), never_timed]) == Interval(2.0, math.inf)


def test_a_mean_over_workloads_with_a_bound_is_a_bound() -> None:
    assert geometric_mean_interval([exactly(2.0), exactly(8.0)]).low == pytest.approx(4.0)
    with_never = geometric_mean_interval([Interval(0.0, 2.0), exactly(8.0)])
    assert (with_never.low, with_never.high) == (0.0, pytest.approx(4.0))
    assert geometric_mean_interval([Interval(2.0, math.inf), exactly(8.0)]).high == math.inf


def test_ratios_within_rounds_are_blind_to_what_a_round_does_to_both() -> None:
    drift = {number: 1.0 + number for number in range(21)}
    slower = {number: 1.25 * ms for number, ms in drift.items()}
    assert paired(slower, drift) == Paired(1.25, 1.25, 1.25, 21)
    # Rounds that only one of them has are left out.
    assert paired({0: 2.0, 1: 9.0}, {0: 1.0, 7: 1.0}) == Paired(2.0, 2.0, 2.0, 1)
    assert paired({}, drift) is None


def test_the_interval_of_a_median_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    n_held = 0
    for _ in range(400):
        found = paired(
            dict(enumerate(np.exp(rng.normal(0.0, 0.1, 21)))), dict.fromkeys(range(21), 1.0)
        )
        assert found is not None
        n_held += found.low <= 1.0 <= found.high
    assert 0.94 <= n_held / 400 <= 0.995


def test_a_range_holds_seeds_and_their_intervals() -> None:
    found = spread([exactly(1.0), exactly(3.0), Interval(0.0, 2.0)], [Interval(0.9, 4.0)])
    assert found is not None
    assert (found.low, found.high) == (0.0, 4.0)
    assert (found.n, found.n_bounds, found.n_never) == (3, 1, 1)
    assert spread([]) is None


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([]))


def test_the_median_curve_is_infinite_while_half_have_nothing() -> None:
    curves = [curve((10, 4.0)), curve((20, 2.0)), curve((30, 3.0))]
    assert median_curve(curves, [5, 15, 20, 30]) == [math.inf, math.inf, 4.0, 3.0]


def test_the_spread_of_samples() -> None:
    steady = spread_of_samples([2.0] * 10)
    assert steady == {"median": 2.0, "spread": 0.0, "cv": 0.0, "drift": 0.0}
    assert spread_of_samples([1.0] * 10 + [2.0] * 10)["drift"] == pytest.approx(1.0)
