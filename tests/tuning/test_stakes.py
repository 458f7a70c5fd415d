"""What a play-off is worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.tuning.stakes import (
    SELECTION_BIAS,
    VISIBLE_SHARE,
    Plateau,
    Stake,
    plausible_gain,
    worth_playing,
)

SECS = st.floats(1e-6, 1.0)
# Products of numbers that are barely above zero are no longer in proportion.
IMPORTANCES = st.just(0.0) | st.floats(1e-12, 1.0)
STAKES = st.lists(st.builds(Stake, IMPORTANCES, st.floats(0.0, 0.05)), max_size=30)


@pytest.mark.parametrize(
    ("secs", "gain"),
    [
        ((), 0.0),
        ((1.0,), 0.0),
        ((1.0, math.inf), 0.0),
        ((1.0, 1.0), 0.05),
        ((0.95, 1.0), 0.0125),  # half the bias is left: a quarter of the gain
        ((0.9, 1.0), 0.0),
        ((0.5, 1.0), 0.0),
    ],
)
def test_only_a_close_second_makes_a_gain_plausible(secs: tuple[float, ...], gain: float) -> None:
    assert plausible_gain(secs) == pytest.approx(gain)


@given(SECS, SECS, SECS, st.floats(1e-3, 1e3))
def test_a_gain_depends_on_the_ratio_alone(
    first: float, second: float, third: float, unit: float
) -> None:
    secs = sorted([first, second, third])
    gain = plausible_gain(secs)
    assert 0.0 <= gain <= SELECTION_BIAS / 2.0 + 1e-12
    assert plausible_gain([unit * each for each in secs]) == pytest.approx(gain, abs=1e-9)
    assert plausible_gain([secs[0], secs[2]]) <= gain + 1e-12  # a worse rival


def play(stakes: list[Stake], searched_sec: float = 30.0, **changes: float) -> dict[int, float]:
    known = {"playoff_sec": 1.7, "allowance_sec": 1e9, **changes}
    return worth_playing(stakes, searched_sec=searched_sec, **known)


def test_a_second_is_worth_what_a_search_brings_in_it() -> None:
    # Half a network that may gain 5 %: 2.5 % of it. A search of 30 s brings 0.5 % a second.
    stakes = [Stake(1e-3), Stake(2e-3, 0.05), Stake(1e-3, 0.01)]
    assert play(stakes) == {1: pytest.approx(5.0)}
    # In a longer search a second brings less, so that more play-offs are worth it.
    assert play(stakes, 300.0) == {1: pytest.approx(50.0)}


def test_small_savings_that_are_visible_together_are_worth_it() -> None:
    stakes = [Stake(1e-3, 0.018)] * 20
    found = play(stakes, 3600.0)
    # What is left cannot be seen: 0.5 % of the network is five tasks' part.
    assert list(found) == list(range(15))


def test_play_offs_end_with_their_allowance() -> None:
    stakes = [Stake(1e-3, 0.05)] * 4
    assert len(play(stakes, 600.0, allowance_sec=4.0)) == 2
    assert play(stakes, 600.0, allowance_sec=0.0) == {}
    assert play(stakes, 600.0, allowance_sec=-5.0) == {}


@pytest.mark.parametrize("stakes", [[], [Stake(0.0)], [Stake(0.0, 0.05)] * 3, [Stake(1e-3)] * 3])
def test_nothing_is_played_for_nothing(stakes: list[Stake]) -> None:
    assert play(stakes, 1e6) == {}


@given(STAKES, st.floats(0.0, 1e4), st.floats(0.1, 1e3))
def test_what_is_not_played_costs_more_than_it_saves_or_is_invisible(
    stakes: list[Stake], searched_sec: float, unit: float
) -> None:
    played = play(stakes, searched_sec)
    assert all(most_sec >= 1.7 for most_sec in played.values())
    network_sec = sum(each.importance_sec for each in stakes)
    left = [each for i, each in enumerate(stakes) if i not in played]
    most = max((each.importance_sec * each.gain for each in left), default=0.0)
    is_invisible = (
        sum(each.importance_sec * each.gain for each in left) <= VISIBLE_SHARE * network_sec + 1e-12
    )
    assert is_invisible or most * searched_sec / 0.15 <= 1.7 * network_sec * (1 + 1e-9)
    # In another unit of time for the network, the same ones.
    scaled = [Stake(unit * each.importance_sec, each.gain) for each in stakes]
    assert play(scaled, searched_sec).keys() == played.keys()


def first_plateau(latencies: list[float], n_tasks: int = 1) -> int | None:
    """Return the round after which a search of one round a second is on a plateau."""
    plateau = Plateau()
    for number, network_sec in enumerate(latencies, start=1):
        plateau.add(float(number), network_sec)
        if plateau.is_reached(n_tasks):
            return number
    return None


def test_a_search_that_saves_nothing_is_on_a_plateau_when_its_seconds_have_doubled() -> None:
    climb = [1.0 / number for number in range(1, 21)]
    assert first_plateau([*climb, *[climb[-1]] * 40]) == 41
    # The same search with an infinite sum until each task has a result.
    assert first_plateau([*[math.inf] * 19, *[climb[-1]] * 40]) == 41


@given(st.integers(1, 5))
def test_a_plateau_lasts_some_rounds_of_each_task(n_tasks: int) -> None:
    # The round at half of the seconds counts to the second half.
    assert first_plateau([1.0] * 100, n_tasks) == 16 * n_tasks - 2


def test_a_visible_saving_goes_on() -> None:
    """Each doubling saves three percent, as long as it lasts."""
    climb = [number**-0.044 for number in range(1, 400)]
    assert first_plateau(climb) is None
    slow = [number**-0.005 for number in range(1, 400)]
    assert first_plateau(slow) == 14


def test_without_a_result_of_each_task_there_is_no_plateau() -> None:
    assert first_plateau([math.inf] * 50) is None
