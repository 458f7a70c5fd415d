from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.runner.playoff.rounds import PlayoffResult, median_stderr, play_rounds

SEEDS = range(200)


def noisy(true_sec: list[float], noise: float, seed: int) -> Callable[[int], float]:
    rng = np.random.default_rng(seed)
    return lambda index: true_sec[index] * (1.0 + noise * rng.standard_normal())


def counted(measure: Callable[[int], float]) -> tuple[Counter[int], Callable[[int], float]]:
    """Also return how often each finalist is timed."""
    counts: Counter[int] = Counter()

    def timed(index: int) -> float:
        counts[index] += 1
        return measure(index)

    return counts, timed


def play(measure: Callable[[int], float], n: int, **options: Any) -> PlayoffResult:
    return play_rounds(measure, n, clock=lambda: 0.0, **options)


def test_finds_the_best_of_three_10_percent_apart_with_5_percent_noise() -> None:
    true_sec = [1.1e-3, 1e-3, 1.21e-3]
    right = [play(noisy(true_sec, 0.05, seed), 3).ranking[0] == 1 for seed in SEEDS]
    assert np.mean(right) >= 0.95


def test_the_winners_time_is_unbiased_although_it_was_chosen() -> None:
    # Three equal candidates: the best of their medians alone is too low.
    noise = 0.05
    results = [play(noisy([1e-3] * 3, noise, seed), 3) for seed in SEEDS]
    reported = np.array([result.location_sec[result.ranking[0]] for result in results])
    standard_error = noise * 1e-3 * math.sqrt(math.pi / 2 / 10 / len(results))
    assert abs(reported.mean() - 1e-3) < 3 * standard_error


def test_without_confirmation_the_winner_looks_too_good() -> None:
    results = [
        play(noisy([1e-3] * 3, 0.05, seed), 3, confirm_rounds=0, indifference=0.0) for seed in SEEDS
    ]
    reported = np.array([result.location_sec[result.ranking[0]] for result in results])
    assert reported.mean() < 0.995e-3


def test_the_stated_error_is_the_true_one() -> None:
    results = [play(noisy([1e-3], 0.05, seed), 1, confirm_rounds=30) for seed in SEEDS]
    locations = np.array([result.location_sec[0] for result in results])
    stated = np.array([result.stderr_sec[0] for result in results])
    assert np.mean(stated) == pytest.approx(np.std(locations), rel=0.25)


def test_a_hopeless_candidate_costs_three_timings() -> None:
    timed, measure = counted(noisy([1e-3, 1e-2, 1.0001e-3], 0.01, 0))
    result = play(measure, 3)
    assert timed[1] == 3
    assert result.ranking[-1] == 1


def test_equals_are_a_tie_long_before_the_last_round() -> None:
    timed, measure = counted(noisy([1e-3, 1e-3], 1e-4, 0))
    assert play(measure, 2).reason == "tied"
    assert min(timed.values()) < 20


def test_rounds_are_interleaved() -> None:
    order: list[int] = []

    def measure(index: int) -> float:
        order.append(index)
        return noisy([1e-3, 1e-3, 1e-3], 0.05, len(order))(index)

    play(measure, 3, min_rounds=3, max_rounds=3, confirm_rounds=0)
    assert [sorted(order[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert len({order[0], order[3], order[6]}) == 3


def test_drift_of_the_machine_does_not_decide() -> None:
    clock = iter(range(10**6))

    def measure(index: int) -> float:
        return [1.0e-3, 1.05e-3][index] * (1.0 + 0.01 * next(clock))

    assert play(measure, 2).ranking[0] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("fails_at", [1, 5, 100])
def test_a_failing_candidate_is_out_for_good(bad: float, fails_at: int) -> None:
    calls = [0, 0]
    good = noisy([1e-3, 0.2e-3], 0.3, 1)

    def measure(index: int) -> float:
        calls[index] += 1
        if index == 1 and calls[1] >= min(fails_at, 12):
            return bad
        return good(index)

    result = play(measure, 2)
    assert result.ranking == (0,)
    assert math.isnan(result.location_sec[1])


def test_nobody_left() -> None:
    result = play(lambda index: float("nan"), 2)
    assert (result.ranking, result.reason) == ((), "failed")


def test_time_is_kept_and_one_round_is_always_played() -> None:
    now = [0.0]

    def measure(index: int) -> float:
        now[0] += 1.0
        return 1e-3 * (1 + index * 0.001)

    options = {"indifference": 0.0, "significance": 1e-6}
    result = play_rounds(measure, 3, max_sec=0.5, clock=lambda: now[0], **options)
    assert (result.reason, now[0]) == ("time", 3.0)
    now[0] = 0.0
    play_rounds(noisy_clock(now), 3, max_sec=30.0, clock=lambda: now[0], **options)
    assert now[0] <= 30.0


def noisy_clock(now: list[float]) -> Callable[[int], float]:
    measure = noisy([1e-3] * 3, 0.05, 0)

    def timed(index: int) -> float:
        now[0] += 1.0
        return measure(index)

    return timed


@given(
    times=st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=5),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_ranking_does_not_depend_on_the_unit(times: list[float], scale: float) -> None:
    result = play(lambda index: times[index], len(times), significance=0.01)
    scaled = play(lambda index: times[index] * scale, len(times), significance=0.01)
    assert sorted(result.ranking) == list(range(len(times)))
    assert times[result.ranking[0]] == min(times)
    assert times[scaled.ranking[0]] == pytest.approx(min(times))


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=30))
def test_stderr_is_never_negative_and_scales(values: list[float]) -> None:
    array = np.array(values)
    assert median_stderr(array) >= 0.0
    assert median_stderr(array * 2.0) == pytest.approx(2.0 * median_stderr(array))


def test_stderr_of_one_value_is_unknown_and_an_outlier_hardly_counts() -> None:
    assert math.isnan(median_stderr(np.array([1.0])))
    clean = np.linspace(0.99, 1.01, 9)
    spiked = np.append(clean, 50.0)
    assert median_stderr(spiked) < 2.0 * median_stderr(clean)
