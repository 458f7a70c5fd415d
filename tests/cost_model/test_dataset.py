import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.cost_model.dataset import Dataset, largest_share
from tvm_adaptive.cost_model.targets import TARGETS, ratio_of, target_of

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
    X, y, _ = dataset.training_set("log")
    np.testing.assert_allclose(y, [0, -math.log(2), 0, -math.log(4)])
    assert X.shape == (4, 4)
    _, ratio, _ = dataset.training_set("throughput")
    np.testing.assert_allclose(ratio, [1, 0.5, 1, 0.25])


def test_a_new_best_moves_the_targets_of_its_task_only():
    dataset = filled(a=[2.0], b=[2.0])
    dataset.add("a", rows(1), np.array([1.0]))
    _, y, _ = dataset.training_set("log")
    np.testing.assert_allclose(y, [-math.log(2), 0, 0])
    assert dataset.best_sec("a") == 1.0
    assert dataset.best_secs() == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf])
def test_what_is_no_time_is_a_failure(bad):
    dataset = filled(a=[1.0, bad, 2.0])
    assert (len(dataset), dataset.n_failures) == (3, 1)
    X, y, _ = dataset.training_set("log")
    np.testing.assert_allclose(y, [0, -math.log(2)])
    np.testing.assert_array_equal(X, rows(3)[[0, 2]])
    _, ratio, _ = dataset.training_set("throughput")
    np.testing.assert_allclose(ratio, [1, 0, 0.5])
    np.testing.assert_array_equal(dataset.validity_set()[1], [1, 0, 1])


@pytest.mark.parametrize("target", ["log", "throughput"])
def test_a_task_that_only_failed_teaches_nothing_about_speed(target):
    dataset = filled(a=[math.nan, math.nan])
    X, y, _ = dataset.training_set(target)
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
        _, y, _ = filled(a=seconds).training_set(target)
        _, scaled, _ = filled(a=[unit * sec for sec in seconds]).training_set(target)
        np.testing.assert_allclose(y, scaled, rtol=1e-9, atol=1e-12)


@given(seconds=seconds_lists)
def test_the_best_is_at_the_top(seconds):
    _, y, _ = filled(a=seconds).training_set("log")
    assert y.max() == 0
    assert np.argmax(y) == np.argmin(seconds)


@pytest.mark.parametrize("target", TARGETS)
def test_errors_fit_the_training_set(target):
    dataset = filled(b=[1.0, math.nan, 3.0], c=[math.nan])
    seconds = np.array([2.0, math.nan, 8.0, 4.0])
    dataset.add("a", rows(4), seconds, np.array([0.0, 0.5, 0.3, math.nan]))
    _, y, errors = dataset.training_set(target)
    assert errors.shape == y.shape
    if target == "throughput":  # AdaTune's forest takes all times alike
        assert not errors.any()
        return
    # The sample of 8 s, a quarter as fast as the best, whose time may be off by 30 %.
    assert (errors > 0).sum() == 1
    step = 1e-6
    slower = target_of(np.array(0.25 * (1 - 0.3 * step)), target)
    expected = (target_of(np.array(0.25), target) - slower) / step
    assert errors.max() == pytest.approx(expected, rel=1e-4)
    assert y[errors.argmax()] == pytest.approx(target_of(np.array(0.25), target))
    _, _, drifting = dataset.training_set("log", drift=0.4)
    assert drifting.max() == pytest.approx(0.5)
    assert drifting.min() == pytest.approx(0.4)


@pytest.mark.parametrize("target", TARGETS)
def test_targets_can_be_converted_back_and_change_alike_near_the_best(target):
    ratio = np.array([1e-3, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(ratio_of(target_of(ratio, target), target), ratio, rtol=1e-9)
    slope = np.diff(target_of(np.array([1.0, 1.0001]), target)) / 0.0001
    assert slope == pytest.approx(1.0, abs=1e-3)


def test_a_share_of_a_tasks_samples_has_its_best_and_grows_with_the_share():
    dataset = Dataset()
    dataset.add("here", *samples(50))
    dataset.add("there", *samples(200, seed=1))
    shares = [0.0, 0.1, 0.5, 1.0]
    parts = [kept(dataset.with_share(share, "there".__eq__)) for share in shares]
    assert all(part["here"] == list(range(50)) for part in parts)
    there = [set(part.get("there", ())) for part in parts]
    assert not there[0]
    assert there[3] == set(range(200))
    assert there[1] < there[2]
    assert int(np.argmin(samples(200, seed=1)[1])) in there[1]
    assert len(there[2]) == pytest.approx(100, abs=30)


def samples(n, seed=0, n_failures=0):
    """Rows that say which sample they are, and their seconds."""
    seconds = np.random.default_rng(seed).uniform(1e-3, 1e-2, n)
    seconds[:n_failures] = math.nan
    return np.arange(n, dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32), seconds


def kept(dataset):
    return {key: task.rows[:, 0].astype(int).tolist() for key, task in dataset}


def test_below_its_capacity_it_keeps_all():
    dataset = Dataset(capacity=80)
    X, seconds = samples(90)
    for start in range(0, 90, 10):
        dataset.add("a", X[start : start + 10], seconds[start : start + 10])
    assert kept(dataset) == {"a": list(range(90))}


def test_the_fastest_stay_and_some_of_the_others_from_the_whole_history():
    X, seconds = samples(2000, n_failures=200)
    dataset = Dataset(capacity=200)
    for start in range(0, 2000, 16):
        dataset.add("a", X[start : start + 16], seconds[start : start + 16])
        assert len(dataset) <= 225
        assert dataset.n_added == min(2000, start + 16)
    (stayed,) = kept(dataset).values()
    assert stayed == sorted(stayed)
    fastest = np.argsort(seconds)[:100]
    assert set(fastest) <= set(stayed)
    others = [number for number in stayed if number not in fastest]
    # A uniform sample of some 100 has a mean with a standard error of 58.
    assert abs(np.mean(others) - 1000) < 5 * 58
    assert 0 < dataset.n_failures < 40  # a tenth is expected of the others
    assert dataset.best_sec("a") == np.nanmin(seconds)


def test_the_same_samples_leave_the_same():
    X, seconds = samples(600)
    found = []
    for _ in range(2):
        dataset = Dataset(capacity=100)
        for start in range(0, 600, 16):
            dataset.add("a", X[start : start + 16], seconds[start : start + 16])
        found.append(kept(dataset))
    assert found[0] == found[1]


def test_tasks_with_few_samples_keep_them():
    dataset = Dataset(capacity=120)
    for key, n in (("few", 10), ("many", 400), ("some", 70)):
        dataset.add(key, *samples(n))
    assert {key: len(rows) for key, rows in kept(dataset).items()} == {
        "many": 55,
        "some": 55,
        "few": 10,
    }


def test_of_a_single_sample_it_is_the_fastest():
    dataset = Dataset(capacity=2)
    for key in ("a", "b"):
        dataset.add(key, *samples(50))
    best = int(np.argmin(samples(50)[1]))
    assert kept(dataset) == {"a": [best], "b": [best]}


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 300))
def test_the_largest_share_fills_the_capacity(sizes, capacity):
    share = largest_share(sizes, capacity)

    def total(most):
        return sum(min(size, most) for size in sizes)

    if sum(sizes) <= capacity:
        assert share == max(sizes, default=0)
    else:
        assert share == 1 or total(share) <= capacity
        assert total(share + 1) > capacity


def test_a_shared_task_is_no_copy():
    whole, part = Dataset(capacity=40), Dataset()
    whole.add("a", *samples(40))
    part.share(whole, "a", 40)
    assert next(iter(part))[1].rows is next(iter(whole))[1].rows
    whole.add("b", *samples(40))
    part.follow(whole)
    assert (len(part), part.n_added) == (20, 40)
