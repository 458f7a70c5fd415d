from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.cost_model.test_model import gmm_task, result
from tvm_adaptive import _tvm
from tvm_adaptive.cost_model.family_model import (
    FAMILY_KINDS,
    RFEIFamilyCostModel,
    operator_of,
)
from tvm_adaptive.errors import InvalidOptionError, ModelFileError


@pytest.fixture(scope="module")
def tasks():
    """Three sizes of one product."""
    return [gmm_task(size) for size in (64, 32, 16)]


def learn(model, tasks, n=16):
    for number, (context, candidates) in enumerate(tasks):
        seconds = np.random.default_rng(number).uniform(1e-3, 2e-3, size=n)
        model.update(context, candidates[:n], [result(sec) for sec in seconds])


def make(**options):
    return RFEIFamilyCostModel(n_trees=8, seed=1, n_jobs=1, **options)


def families_of(model):
    return model._inst._surrogate.families


def test_it_is_known_by_name():
    model = _tvm.CostModel.create("rfei-family", num_tuning_cores=1, family="op")
    assert isinstance(_tvm.python_side(model), RFEIFamilyCostModel._cls)


@pytest.mark.parametrize(
    ("kind", "n_families"), [("anchor", 1), ("op", 1), ("hash", 1), ("task", 3)]
)
def test_sizes_of_one_operator_are_a_family_unless_each_task_is_one(tasks, kind, n_families):
    model = make(family=kind)
    learn(model, tasks, n=4)
    assert len(set(families_of(model).values())) == n_families
    assert len(families_of(model)) == 3


def test_operators_are_distinguished(tasks):
    context, _ = tasks[0]
    other = SimpleNamespace(
        mod=_tvm.normalize_mod(_tvm.te_workload("C1D")),
        space_generator=context.space_generator,
        task_name="fused_conv1d_add",
    )
    for kind in ("op", "hash", "task"):
        model = make(family=kind)
        learn(model, tasks[:1], n=4)
        model._inst._key(other)
        assert len(set(families_of(model).values())) == 2


def test_a_family_answers_once_it_knows_enough(tasks):
    model = make(min_samples=48)
    learn(model, tasks[:2])
    surrogate = model._inst._surrogate
    key = model._inst._key(tasks[0][0])
    assert surrogate.serving(key) is surrogate
    learn(model, tasks[2:])
    assert surrogate.serving(key) is not surrogate
    scores = model.predict(*tasks[0])
    assert np.isfinite(np.asarray(scores)).all()
    assert np.ptp(np.asarray(scores)) > 0


def test_each_family_has_a_file_of_its_own_and_gets_it_back(tasks, tmp_path):
    model = make(family="task", min_samples=16)
    learn(model, tasks)
    model.save(str(tmp_path / "model"))
    files = sorted((tmp_path / "model").iterdir())
    assert len(files) == 3
    again = make(family="task", min_samples=16)
    again.load(str(tmp_path / "model"))
    assert families_of(again) == families_of(model)
    sizes = {name: len(part.dataset) for name, part in again._inst._surrogate.parts.items()}
    assert set(sizes.values()) == {16}
    np.testing.assert_array_equal(again.predict(*tasks[0]), model.predict(*tasks[0]))


def test_files_of_families_that_are_no_more_go(tasks, tmp_path):
    folder = tmp_path / "model"
    first = make(family="task")
    learn(first, tasks)
    first.save(str(folder))
    second = make()
    learn(second, tasks)
    second.save(str(folder))
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_read_leaves_the_model_as_it_is(tasks, tmp_path):
    model = make()
    learn(model, tasks)
    with pytest.raises(ModelFileError, match="holds no families"):
        model.load(str(tmp_path))
    (tmp_path / "x.family.npz").write_bytes(b"nonsense")
    with pytest.raises(ModelFileError, match="not a whole file"):
        model.load(str(tmp_path))
    assert len(model._inst._surrogate.dataset) == 48


def test_families_are_learned_when_there_is_enough_to_learn_from(tasks, monkeypatch):
    from tvm_adaptive.cost_model import family_model

    monkeypatch.setattr(family_model, "_FIRST_LEARN", 90)
    model = make(family="learned")
    learn(model, tasks, n=32)
    assert families_of(model) == {}
    model.predict(*tasks[0])
    assert len(families_of(model)) == 3


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("fused_conv2d3_add_relu", "conv2d"),
        ("fused_conv2d_add1", "conv2d"),
        ("conv2d", "conv2d"),
        ("conv2d10", "conv2d"),
        ("matmul12", "matmul"),
        ("fused_softmax", "softmax"),
        ("main", "main"),
        ("123", "123"),
    ],
)
def test_operators_by_their_tasks_names(name, operator):
    assert operator_of(name) == operator


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"family": "sister"}, f"family must be one of {', '.join(FAMILY_KINDS)}"),
        ({"min_samples": 0}, "min_samples must be at least 1"),
        ({"min_tasks": 0}, "min_tasks must be at least 1"),
        ({"n_trees": 1}, "n_trees"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(InvalidOptionError, match=text):
        RFEIFamilyCostModel(**options)
