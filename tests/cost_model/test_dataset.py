import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.cost_model.dataset import Dataset

seconds_lists = st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=10)


def rows(n, d=4):
    return np.arange(n * d, dtype=np.float32).reshape(n, d)


def filled(**tasks):
    dataset = Dataset()
    for key, seconds in tasks.items():
        dataset.add(key, rows(len(seconds)), np.array(seconds, dtype=float))
    return dataset


def test_each_task_is_normalised_by_its_own_best():
    dataset = filled(small=[1e-6, 2e-6], large=[1.0, 4.0])
    X, y = dataset.training_set("log")
    np.testing.assert_allclose(y, [0, -math.log(2), 0, -math.log(4)])
    assert X.shape == (4, 4)
    _, ratio = dataset.training_set("throughput")
    np.testing.assert_allclose(ratio, [1, 0.5, 1, 0.25])


def test_a_new_best_moves_the_targets_of_its_task_only():
    dataset = filled(a=[2.0], b=[2.0])
    dataset.add("a", rows(1), np.array([1.0]))
    _, y = dataset.training_set("log")
    np.testing.assert_allclose(y, [-math.log(2), 0, 0])
    assert dataset.best_sec("a") == 1.0
    assert dataset.best_secs() == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf])
def test_what_is_no_time_is_a_failure(bad):
    dataset = filled(a=[1.0, bad, 2.0])
    assert (len(dataset), dataset.n_failures) == (3, 1)
    X, y = dataset.training_set("log")
    np.testing.assert_allclose(y, [0, -math.log(2)])
    np.testing.assert_array_equal(X, rows(3)[[0, 2]])
    _, ratio = dataset.training_set("throughput")
    np.testing.assert_allclose(ratio, [1, 0, 0.5])
    np.testing.assert_array_equal(dataset.validity_set()[1], [1, 0, 1])


@pytest.mark.parametrize("target", ["log", "throughput"])
def test_a_task_that_only_failed_teaches_nothing_about_speed(target):
    dataset = filled(a=[math.nan, math.nan])
    X, y = dataset.training_set(target)
    assert X.shape == (0, 4)
    assert y.shape == (0,)
    assert math.isnan(dataset.best_sec("a"))
    assert dataset.best_secs() == {}
    assert math.isnan(dataset.best_sec("unknown"))


def test_empty():
    dataset = Dataset()
    dataset.add("a", rows(0), np.zeros(0))
    assert (len(dataset), dataset.n_tasks, dataset.width) == (0, 0, None)
    assert dataset.training_set()[1].shape == (0,)
    assert dataset.validity_set()[1].shape == (0,)


def test_wrong_shapes_are_refused():
    dataset = filled(a=[1.0])
    with pytest.raises(ValueError, match=r"rows of shape \(n, d\)"):
        dataset.add("a", rows(2), np.ones(3))
    with pytest.raises(ValueError, match="rows of 4 features as before, but got 5"):
        dataset.add("b", rows(2, 5), np.ones(2))
    assert len(dataset) == 1


@given(seconds=seconds_lists, unit=st.sampled_from([1e-9, 1e-3, 1e3]))
def test_targets_do_not_depend_on_the_unit_of_time(seconds, unit):
    for target in ("log", "throughput"):
        _, y = filled(a=seconds).training_set(target)
        _, scaled = filled(a=[unit * sec for sec in seconds]).training_set(target)
        np.testing.assert_allclose(y, scaled, rtol=1e-9, atol=1e-12)


@given(seconds=seconds_lists)
def test_the_best_is_at_the_top(seconds):
    _, y = filled(a=seconds).training_set("log")
    assert y.max() == 0
    assert np.argmax(y) == np.argmin(seconds)


@pytest.mark.parametrize("target", ["log", "throughput"])
def test_weights_fit_the_training_set(target):
    dataset = filled(b=[1.0, math.nan, 3.0], c=[math.nan])
    seconds = np.array([2.0, math.nan, 8.0, 4.0])
    dataset.add("a", rows(4), seconds, np.array([0.0, 0.5, 0.3, math.nan]))
    _, y = dataset.training_set(target)
    weights = dataset.training_weights(0.3, target)
    assert weights.shape == y.shape
    # The sample of 8 s, whose time may be off by 30 %, or by 0.3 * 2 / 8 as a throughput.
    error = {"log": 0.3, "throughput": 0.075}[target]
    assert (weights < 1).sum() == 1
    assert weights.min() == pytest.approx(0.09 / (0.09 + error**2))
    assert y[weights.argmin()] == pytest.approx({"log": -math.log(4), "throughput": 0.25}[target])


def test_no_samples_no_weights():
    assert Dataset().training_weights(0.3).shape == (0,)
