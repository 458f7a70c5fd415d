import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler import index


@pytest.mark.parametrize(
    ("mean", "incumbent", "weight", "gain_ms"),
    [(200.0, 100.0, 3.0, 15.0), (1.5, 1.0, 1.0, 10.0 / 3.0), (1.0, 2.0, 1.0, 0.0)],
)
def test_the_papers_gain_is_the_drop_at_the_mean_throughput(mean, incumbent, weight, gain_ms):
    assert index.published_gain_ms(mean, incumbent, 10.0, weight) == pytest.approx(gain_ms)


@pytest.mark.parametrize(
    ("c", "total", "played", "bonus"),
    [(2.0, 12, 1, 2.2293), (2.0, 35, 3, 1.5396), (2.0, 200, 10, 1.0294), (0.2, 12, 1, 0.7050)],
)
def test_the_papers_bonus(c, total, played, bonus):
    assert index.ucb([1.0], [played], total, c) == pytest.approx([1.0 + bonus], abs=1e-4)


def test_an_arm_never_played_comes_first_and_the_first_slot_has_no_logarithm_of_zero():
    assert index.ucb([5.0, 0.0], [3, 0], 3, 2.0)[1] == math.inf
    assert index.ucb([0.0], [0], 0, 2.0) == [math.inf]
    assert index.ucb([0.0], [1], 1, 2.0) == [0.0]


@pytest.mark.parametrize(("initial_ms", "c"), [(0.99, 0.2), (1.0, 2.0), (30.0, 2.0)])
def test_small_networks_explore_less(initial_ms, c):
    assert index.exploration_constant(initial_ms) == c


def test_epsilon_is_the_share_of_chance(rng):
    scores = np.array([0.0, 2.0, np.nan, 1.0])
    picks = [index.epsilon_greedy(scores, 0.3, rng) for _ in range(3000)]
    # Three standard deviations of a share of 0.3 among 3000.
    assert np.mean([by_chance for _, by_chance in picks]) == pytest.approx(0.3, abs=0.026)
    assert {arm for arm, by_chance in picks if not by_chance} == {1}
    assert {arm for arm, by_chance in picks if by_chance} == {0, 1, 3}


def test_softmax_at_the_mean_gain():
    chances = index.softmax_probabilities(np.array([3.0, np.nan, 1.0]))
    assert chances == pytest.approx([math.e / (math.e + 1), 0.0, 1 / (math.e + 1)])


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1e300, 1e300], [math.inf, math.inf]])
def test_softmax_of_equal_scores_is_even(scores):
    assert index.softmax_probabilities(np.array([*scores, np.nan])) == pytest.approx([0.5, 0.5, 0])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_softmax_sums_to_one(scores):
    chances = index.softmax_probabilities(np.array([*scores, np.nan]))
    assert chances.sum() == pytest.approx(1.0)
    assert (chances >= 0).all()


def test_ties_are_broken_evenly(rng):
    scores = np.array([1.0, 2.0, np.nan, 2.0])
    counts = np.bincount([index.argmax(scores, rng) for _ in range(1000)], minlength=4)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert counts[1] == pytest.approx(500, abs=50)


def test_infinite_scores_are_scores(rng):
    assert index.argmax(np.array([1.0, np.inf, np.nan]), rng) == 1


def test_without_a_choice_there_is_an_error(rng):
    nothing = np.array([np.nan, np.nan])
    with pytest.raises(InvalidOptionError, match="argmax needs at least one score"):
        index.argmax(nothing, rng)
    with pytest.raises(InvalidOptionError, match="softmax needs at least one score"):
        index.softmax_probabilities(nothing)
