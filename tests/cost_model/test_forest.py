import os
import subprocess
import sys

import numpy as np
import pytest

from tvm_adaptive.cost_model import forest as forests
from tvm_adaptive.cost_model.forest import STDS, Forest, distinct_columns, n_draws


def data(n=80, d=12, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)).astype(np.float32)
    X[:, 3] = 7.0  # constant
    return X, 2.0 * X[:, 0] + np.sin(X[:, 1]) + rng.normal(0, 0.1, n)


def oob_error(forest, predictions, y):
    """Mean squared error of each sample's forecast by the trees that had not seen it."""
    errors = [
        (predictions[i, forest._inbag[i] == 0].mean() - y[i]) ** 2
        for i in range(len(y))
        if (forest._inbag[i] == 0).any()
    ]
    return np.mean(errors)


def test_trees_are_those_of_the_naive_loop():
    X, y = data()
    forest = Forest(n_trees=20).fit(X, y, seed=1)
    naive = np.array(
        [[tree.predict(row[None, :])[0] for tree in forest._trees] for row in X[:, forest._columns]]
    )
    np.testing.assert_array_equal(forest.tree_predictions(X), naive)
    mean, std = forest.predict(X)
    np.testing.assert_allclose(mean, naive.mean(axis=1), rtol=1e-12)
    expected = (20 * naive.var(axis=1) + 2 * oob_error(forest, naive, y)) / 22
    np.testing.assert_allclose(std, np.sqrt(expected), rtol=1e-12)


def test_total_variance_is_the_naive_sum_over_leaves():
    X, y = data()
    forest = Forest(n_trees=15, std="total").fit(X, y, seed=1)
    view = X[:, forest._columns]
    within = np.zeros(len(X))
    for estimator in forest._trees:
        leaves = estimator.apply(view)
        within += [estimator.tree_.impurity[leaf] for leaf in leaves]
    between = forest.tree_predictions(X).var(axis=1)
    np.testing.assert_allclose(forest.predict(X)[1] ** 2, within / 15 + between, rtol=1e-9)
    assert within.max() > 0


def test_the_paper_takes_the_spread_of_the_trees_alone():
    X, y = data()
    y[0] = 100.0
    forest = Forest(n_trees=10, std="between-tree").fit(X, y, seed=1)
    std = forest.predict(X)[1]
    np.testing.assert_allclose(std, forest.tree_predictions(X).std(axis=1), rtol=1e-12)
    # Where all trees agree it is 0, however far the forest was off elsewhere.
    X, y = np.array([[0.0], [1.0]], dtype=np.float32).repeat(40, axis=0), np.repeat([1.0, 2.0], 40)
    shrunk, plain = (
        Forest(n_trees=10, std=std).fit(X, y + 0.1 * np.tile([0, 1], 40) * (y > 1), seed=1)
        for std in ("shrunk", "between-tree")
    )
    assert plain.predict(X[:1])[1] == [0.0]
    assert shrunk.predict(X[:1])[1] > 0.0


@pytest.mark.parametrize(("max_features", "n_tried"), [(3, 3), (10, 10), (99, 11), (1 / 3, 4)])
def test_features_tried_are_a_number_or_a_share(max_features, n_tried):
    X, y = data()  # 11 of 12 columns vary
    forest = Forest(n_trees=2, max_features=max_features).fit(X, y, seed=0)
    assert {tree.max_features_ for tree in forest._trees} == {n_tried}


def test_the_jackknife_is_the_published_formula():
    X, y = data(n=30)
    forest = Forest(n_trees=400, std="jackknife").fit(X, y, seed=2)
    _, std = forest.predict(X[:5])
    trees, bags = forest.tree_predictions(X[:5]), forest._inbag
    for i in range(5):
        covariances = [
            np.mean((bags[j] - 1.0) * (trees[i] - trees[i].mean())) for j in range(len(X))
        ]
        # Wager, Hastie and Efron 2014: sum of squared covariances less n v / B^2.
        raw = np.sum(np.square(covariances))
        bias = len(X) * bags.var(axis=1).mean() * trees[i].var() / 400
        assert std[i] ** 2 == pytest.approx(max(0.0, raw - bias), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("std", STDS)
def test_spread_is_never_negative_and_learning_works(std):
    X, y = data(n=120)
    forest = Forest(n_trees=50, std=std).fit(X[:80], y[:80], seed=0)
    mean, spread = forest.predict(X[80:])
    assert (spread >= 0).all()
    assert np.isfinite(spread).all()
    assert np.corrcoef(mean, y[80:])[0, 1] > 0.8


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("n", [1, 2])
def test_tiny_data(std, n):
    X, y = data(n=n)
    mean, spread = Forest(n_trees=5, std=std).fit(X, y, seed=0).predict(X)
    assert mean.shape == spread.shape == (n,)
    assert np.isfinite(mean).all()
    assert np.isfinite(spread).all()


def test_rows_that_are_all_alike():
    X, y = np.ones((10, 4), dtype=np.float32), np.arange(10.0)
    mean, _ = Forest(n_trees=200).fit(X, y, seed=0).predict(X[:1])
    assert mean[0] == pytest.approx(y.mean(), abs=1.0)


def test_no_rows_to_predict():
    X, y = data()
    mean, std = Forest(n_trees=5).fit(X, y, seed=0).predict(X[:0])
    assert mean.shape == std.shape == (0,)


def test_the_seed_decides():
    X, y = data()
    first, again, other = (
        Forest(n_trees=10).fit(X, y, seed=seed).tree_predictions(X) for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_threads_change_nothing():
    X, y = data()
    one, two = (
        Forest(n_trees=10, n_jobs=n_jobs).fit(X, y, seed=3).tree_predictions(X) for n_jobs in (1, 2)
    )
    np.testing.assert_array_equal(one, two)


def test_the_global_random_state_is_left_alone():
    X, y = data()
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - it is the thing under test
    Forest(n_trees=5, std="jackknife").fit(X, y, seed=3).predict(X)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


SCRIPT = """
import numpy as np
from tvm_adaptive.cost_model.forest import Forest
rng = np.random.default_rng(0)
X = rng.normal(size=(50, 8)).astype(np.float32)
print(Forest(n_trees=10).fit(X, X[:, 0].astype(float), seed=4).predict(X)[1].tobytes().hex())
"""


@pytest.mark.slow
def test_another_process_gives_the_same_bits():
    answers = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(answers) == 1
    assert answers.pop().strip()


def test_columns_that_repeat_another_in_other_units_are_left_out():
    X, y = data(n=60)
    repeated = np.column_stack([X, 3 * X[:, 1], 2 - X[:, 5], np.ones(60)]).astype(np.float32)
    assert set(distinct_columns(repeated)) == set(range(12)) - {3}
    assert list(distinct_columns(np.ones((5, 4), dtype=np.float32))) == [0]
    alone, beside = (Forest(n_trees=8).fit(matrix, y, seed=0) for matrix in (X, repeated))
    np.testing.assert_array_equal(alone.predict(X)[0], beside.predict(repeated)[0])


def test_columns_that_differ_all_stay():
    for seed in range(5):
        X = np.random.default_rng(seed).normal(size=(64, 984)).astype(np.float32)
        assert len(distinct_columns(X)) == 984


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (320, 320), (512, 320), (4000, 2400)])
def test_bags_of_many_samples_are_smaller(n, expected):
    assert n_draws(n) == expected


def test_samples_that_count_less_decide_less():
    X = np.repeat(np.array([[0.0], [1.0]], dtype=np.float32), 40, axis=0)
    y = np.tile([0.0, 1.0], 40)  # two truths for every row
    weights = np.where(y == 1.0, 0.25, 1.0)
    plain, _ = Forest(n_trees=200).fit(X, y, seed=0).predict(X[:1])
    weighted, _ = Forest(n_trees=200).fit(X, y, seed=0, weights=weights).predict(X[:1])
    assert plain[0] == pytest.approx(0.5, abs=0.05)
    assert weighted[0] == pytest.approx(0.2, abs=0.05)


def test_equal_weights_change_nothing():
    X = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    forests = [Forest(n_trees=5).fit(X, X[:, 0] * 1.0, 1, w) for w in (None, np.ones(50))]
    np.testing.assert_array_equal(*(forest.tree_predictions(X) for forest in forests))


def test_columns_are_compared_a_few_at_a_time(monkeypatch):
    rng = np.random.default_rng(0)
    base = rng.random((50, 6)).astype(np.float32)
    X = np.hstack([base, 2 * base[:, ::-1], np.ones((50, 1))]).astype(np.float32)
    whole = distinct_columns(X)
    assert len(whole) == 6
    monkeypatch.setattr(forests, "_MAX_CENTERED", 200)
    np.testing.assert_array_equal(distinct_columns(X), whole)


def test_a_sample_that_counts_less_has_a_leaf_in_fewer_trees():
    X, y = data(n=60)
    y[7] = 50.0
    weights = np.where(np.arange(60) == 7, 0.02, 1.0)
    forecast, _ = Forest(n_trees=100).fit(X, y, 0, weights).predict(X[7:8])
    assert forecast[0] < 5.0  # of 50 without weights: 63 trees have a leaf for it
