import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.search_strategy.picking import pick_best, pick_diverse, pick_medoids

scores_lists = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(scores_lists, st.integers(0, 50))
def test_pick_best_takes_the_highest(scores, n):
    scores = np.asarray(scores)
    picked = pick_best(scores, n)
    assert len(picked) == min(n, len(scores))
    assert len(set(picked.tolist())) == len(picked)
    rest = np.delete(scores, picked)
    if len(picked) and len(rest):
        assert scores[picked].min() >= rest.max()


def test_ties_keep_their_order():
    assert pick_best(np.array([1.0, 2.0, 2.0, 1.0]), 3).tolist() == [1, 2, 0]


def test_diversity_prefers_unseen_knobs():
    scores = np.array([1.0, 0.99, 0.5])
    knobs = [[(1, 2), (3,)], [(1, 2), (3,)], [(2, 1), (4,)]]
    assert pick_diverse(scores, knobs, 2).tolist() == [0, 2]
    assert pick_diverse(scores, knobs, 2, weight=0.0).tolist() == [0, 1]


def test_diversity_works_when_all_scores_are_zero():
    picked = pick_diverse(np.zeros(3), [[1], [1], [2]], 3)
    assert sorted(picked.tolist()) == [0, 1, 2]
    assert picked.tolist()[:2] == [0, 2]


@given(scores_lists, st.integers(1, 10), st.integers(0, 2**31))
def test_diversity_returns_distinct_candidates(scores, n, seed):
    rng = np.random.default_rng(seed)
    knobs = [tuple(rng.integers(0, 3, size=4).tolist()) for _ in scores]
    picked = pick_diverse(np.asarray(scores), knobs, n).tolist()
    assert len(picked) == len(set(picked)) == min(n, len(scores))


def test_medoids_are_the_best_of_separate_clusters():
    vectors = np.array([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0], [9.1, 9.0]])
    scores = np.array([1.0, 0.9, 0.1, 0.2])
    picked = pick_medoids(scores, vectors, 2, np.random.default_rng(0))
    assert picked.tolist() == [0, 3]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_medoids_cope_with_identical_points(n):
    scores = np.arange(6.0)
    picked = pick_medoids(scores, np.ones((6, 3)), n, np.random.default_rng(1)).tolist()
    assert len(picked) == len(set(picked)) == min(n, 6)
    assert picked[0] == 5


def test_medoids_repeat_for_the_same_seed():
    rng = np.random.default_rng(3)
    vectors, scores = rng.normal(size=(60, 5)), rng.random(60)
    first = pick_medoids(scores, vectors, 8, np.random.default_rng(7))
    again = pick_medoids(scores, vectors, 8, np.random.default_rng(7))
    assert first.tolist() == again.tolist()
