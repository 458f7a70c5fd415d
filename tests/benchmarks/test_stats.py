from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stats import (
    Curve,
    Reached,
    censored_median,
    geometric_mean,
    inverse,
    kaplan_meier,
    make_curve,
    median_curve,
    quality_of,
    spread,
    spread_of_samples,
    time_ratio,
    time_to,
)

positive = st.floats(0.01, 1e4)
observed = st.lists(st.builds(Reached, positive, st.booleans()), min_size=1, max_size=20)


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
    assert (made.first_ms, made.final_ms, made.end_sec) == (4, 1, 50)
    assert made.scaled(2).best_ms == (math.inf, 8, 8, 2)


def test_the_end_is_never_before_the_last_result() -> None:
    assert curve((10, 1.0), end=5).end_sec == 10


def test_time_to_a_quality_is_censored_where_it_is_not_reached() -> None:
    made = curve((10, 4.0), (20, 2.0), end=30)
    assert time_to(made, 2.0) == Reached(20)
    assert time_to(made, 1.9) == Reached(30, censored=True)


@pytest.mark.parametrize(("share", "quality"), [(0.0, 9.0), (0.5, 5.0), (1.0, 1.0)])
def test_quality_is_a_share_of_the_improvement(share: float, quality: float) -> None:
    assert quality_of(curve((1, None), (2, 9.0), (3, 1.0)), share) == quality


def test_the_ratio_of_times_is_to_the_same_quality() -> None:
    base = curve((10, 9.0), (20, 5.0), (40, 1.0))
    assert time_ratio(base, curve((5, 1.0)), 1.0) == Reached(0.125)
    assert time_ratio(base, curve((5, 1.0)), 0.5) == Reached(0.25)
    assert time_ratio(base, curve((5, 2.0), end=60), 1.0) == Reached(1.5, censored=True)
    assert time_ratio(curve((1, None)), base, 1.0) is None


@given(st.lists(positive, min_size=1, max_size=10), st.sampled_from([0.5, 0.9, 1.0]))
def test_a_run_is_as_fast_as_itself(values: list[float], share: float) -> None:
    made = curve(*((n + 1.0, value) for n, value in enumerate(values)))
    assert time_ratio(made, made, share) == Reached(1.0)


def test_kaplan_meier_by_hand() -> None:
    # At risk: 5 at 1, 3 at 3 (one censored at 2), 1 at 5.
    seen = [
        Reached(1),
        Reached(2, censored=True),
        Reached(3),
        Reached(4, censored=True),
        Reached(5),
    ]
    steps = kaplan_meier(seen)
    assert [value for value, _ in steps] == [1, 3, 5]
    np.testing.assert_allclose([share for _, share in steps], [0.8, 0.8 * 2 / 3, 0.0])


@given(observed)
def test_the_share_that_is_left_falls(seen: list[Reached]) -> None:
    shares = [share for _, share in kaplan_meier(seen)]
    assert all(0 <= b <= a <= 1 for a, b in zip([1.0, *shares], shares, strict=False))


@given(st.lists(positive, min_size=1, max_size=20))
def test_without_censoring_the_median_is_the_usual_one(values: list[float]) -> None:
    assert censored_median([Reached(value) for value in values]).value == float(np.median(values))


def test_a_median_that_was_not_reached_is_a_bound() -> None:
    seen = [Reached(1), Reached(7, censored=True), Reached(9, censored=True)]
    assert censored_median(seen) == Reached(9, censored=True)
    assert censored_median([Reached(1), Reached(2), Reached(9, censored=True)]) == Reached(2)
    with pytest.raises(ValueError, match="at least one observation"):
        censored_median([])


@given(observed)
def test_censoring_never_lowers_the_median(seen: list[Reached]) -> None:
    known = censored_median([Reached(each.value) for each in seen]).value
    assert censored_median(seen).value >= known * (1 - 1e-12) or len(seen) % 2 == 0


def test_few_seeds_have_a_range_many_an_interval() -> None:
    few = spread([Reached(float(n)) for n in (1, 2, 9)])
    assert few is not None
    assert (few.low, few.high, few.is_interval, few.n) == (1, 9, False, 3)
    many = spread([Reached(float(n)) for n in range(1, 31)])
    assert many is not None
    assert many.is_interval
    assert 1 < many.low < many.median.value < many.high < 30
    assert spread([]) is None


def test_a_time_ratio_turns_into_a_speed_up() -> None:
    found = spread([Reached(0.25), Reached(0.5), Reached(2.0, censored=True)])
    assert found is not None
    turned = inverse(found)
    assert (turned.median.value, turned.low, turned.high, turned.n_censored) == (2, 0.5, 4, 1)


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
