from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.family import FamilySurrogate
from tvm_adaptive.cost_model.surrogate import SurrogateOptions
from tvm_adaptive.cost_model.targets import TargetKind

OPTIONS = SurrogateOptions(n_trees=8, n_jobs=1)
D = 6


def samples(n: int, seed: int, column: int = 0, sign: float = 1.0) -> tuple:
    """Return rows, and seconds that grow with one column."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(size=(n, D)).astype(np.float32)
    return rows, np.exp(sign * 3.0 * rows[:, column].astype(np.float64))


def surrogate(**options: int) -> FamilySurrogate:
    return FamilySurrogate(OPTIONS, 0, **{"min_samples": 40, "min_tasks": 2, **options})


def fill(model: FamilySurrogate, tasks: dict[str, tuple[str, int, int, float]]) -> None:
    """Add tasks: name -> (family, samples, column, sign)."""
    for seed, (key, (family, n, column, sign)) in enumerate(tasks.items()):
        if family:
            model.assign({key: family})
        model.add(key, *samples(n, seed, column, sign))


def test_a_small_family_is_served_by_the_model_of_all() -> None:
    model = surrogate()
    fill(model, {"a": ("conv", 19, 0, 1.0), "b": ("conv", 20, 0, 1.0)})
    assert model.serving("a") is model
    model.add("b", *samples(1, 9))
    assert model.serving("a") is model.serving("b") is model.parts["conv"]


@pytest.mark.parametrize(("target", "n_learned"), [("root", 2), ("log", 2), ("throughput", 62)])
def test_failures_make_no_family_large_enough_unless_they_are_learned(
    target: TargetKind, n_learned: int
) -> None:
    options = dataclasses.replace(OPTIONS, target=target)
    model = FamilySurrogate(options, 0, min_samples=40, min_tasks=2)
    fill(model, {"a": ("conv", 2, 0, 1.0), "c": ("dense", 60, 0, 1.0)})
    model.assign({"b": "conv"})
    for seed, key in enumerate(("a", "b"), 7):
        model.add(key, samples(60, seed)[0], np.full(60, np.nan))
    dataset = model.parts["conv"].dataset
    assert dataset.n_learned(target) == len(dataset.training_set(target)[1]) == n_learned
    assert (model.serving("a") is model) == (n_learned < 40)
    # Either one has an answer, also for a task without a result.
    model.serving("b").refit_if_due()
    assert model.serving("b").scores("b", samples(5, 2)[0]) is not None


def test_a_family_of_too_few_tasks_is_served_by_the_model_of_all() -> None:
    model = surrogate(min_tasks=3)
    fill(model, {"a": ("conv", 50, 0, 1.0), "b": ("conv", 50, 0, 1.0)})
    assert model.serving("a") is model
    fill(model, {"c": ("conv", 5, 0, 1.0)})
    assert model.serving("a") is model.parts["conv"]


def test_a_task_without_a_family_is_served_by_the_model_of_all() -> None:
    model = surrogate()
    fill(model, {"a": ("", 90, 0, 1.0)})
    assert model.serving("a") is model.serving("unknown") is model
    assert len(model.dataset) == 90


def test_families_that_contradict_one_another_do_not_spoil_each_other() -> None:
    """What is fast in one family is slow in the other; their features say nothing of it."""
    model = surrogate()
    fill(
        model,
        {
            "a": ("conv", 60, 0, 1.0),
            "b": ("conv", 60, 0, 1.0),
            "c": ("dense", 60, 0, -1.0),
            "d": ("dense", 60, 0, -1.0),
        },
    )
    rows, seconds = samples(100, 77)
    quality = {}
    for key, sign in (("a", 1.0), ("c", -1.0)):
        model.serving(key).refit_if_due()
        judged = model.serving(key).check(key, rows, seconds**sign)
        assert judged is not None
        quality[key] = judged.spearman
    assert min(quality.values()) > 0.8
    model.refit_if_due()
    spoiled = model.check("a", rows, seconds)
    assert spoiled is not None
    assert spoiled.spearman < min(quality.values()) - 0.2


def test_scores_and_beliefs_are_the_familys() -> None:
    model = surrogate()
    fill(model, {"a": ("conv", 40, 0, 1.0), "b": ("conv", 40, 0, 1.0)})
    rows, _ = samples(10, 5)
    assert model.serving("a").scores("a", rows) is None
    assert model.serving("a").refit_if_due() is not None
    assert model.serving("b").refit_if_due() is None
    assert model.serving("b").scores("a", rows) is not None
    belief = model.parts["conv"].posterior("a", rows)
    assert belief is not None
    assert len(belief) == 10


def test_a_task_that_changes_its_family_takes_its_samples_along() -> None:
    model = surrogate()
    fill(model, {"a": ("x", 30, 0, 1.0), "b": ("x", 30, 0, 1.0), "c": ("y", 30, 0, 1.0)})
    model.assign({"b": "y"})
    sizes = {name: part.dataset.n_tasks for name, part in model.parts.items()}
    assert sizes == {"x": 1, "y": 2}
    assert model.serving("a") is model
    assert model.serving("b") is model.parts["y"]


def test_a_dataset_is_divided_into_its_families() -> None:
    model = surrogate()
    fill(model, {"a": ("x", 30, 0, 1.0), "b": ("", 20, 0, 1.0), "c": ("y", 10, 0, 1.0)})
    again = surrogate()
    again.replace(model.dataset, model.families)
    assert again.families == {"a": "x", "c": "y"}
    assert {name: len(part.dataset) for name, part in again.parts.items()} == {"x": 30, "y": 10}
    assert len(again.dataset) == 60


def test_samples_of_earlier_runs_serve_all() -> None:
    model = surrogate()
    earlier = Dataset()
    earlier.add("old", *samples(50, 1))
    model.preload(earlier)
    fill(model, {"a": ("x", 3, 0, 1.0)})
    assert model.serving("a").refit_if_due() is not None
    assert model.serving("a").scores("a", samples(5, 2)[0]) is not None
