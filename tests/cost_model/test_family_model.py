from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.cost_model.test_model import gmm_task, result
from tvm_adaptive import _tvm
from tvm_adaptive.cost_model.family_model import (
    FAMILY_KINDS,
    RFEIFamilyCostModel,
    family_operator,
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


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_sizes_of_one_operator_are_a_family(tasks, kind):
    model = make(family=kind)
    learn(model, tasks, n=4)
    assert len(set(families_of(model).values())) == 1
    assert len(families_of(model)) == 3


def test_operators_are_distinguished(tasks):
    context, _ = tasks[0]
    other = SimpleNamespace(
        mod=_tvm.normalize_mod(_tvm.te_workload("C1D")),
        space_generator=context.space_generator,
        task_name="fused_conv1d_add",
    )
    for kind in FAMILY_KINDS:
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


def test_a_file_gives_the_families_back(tasks, tmp_path):
    model = make(min_samples=32)
    learn(model, tasks)
    model.save(str(tmp_path / "model"))
    again = make(min_samples=32)
    again.load(str(tmp_path / "model"))
    assert families_of(again) == families_of(model)
    (part,) = again._inst._surrogate.parts.values()
    assert len(part.dataset) == 48
    np.testing.assert_array_equal(again.predict(*tasks[0]), model.predict(*tasks[0]))


def test_what_is_measured_after_a_file_is_learned_at_once(tasks, tmp_path):
    model = make(min_samples=32)
    learn(model, tasks, n=32)
    model.save(str(tmp_path / "model"))
    model.load(str(tmp_path / "model"))
    surrogate = model._inst._surrogate
    serving = surrogate.serving(model._inst._key(tasks[0][0]))
    assert serving is not surrogate
    assert serving.refit_if_due() is not None
    learn(model, tasks[:1], n=2)
    assert serving.refit_if_due() is not None


def test_a_file_that_cannot_be_read_leaves_the_model_as_it_is(tasks, tmp_path):
    model = make()
    learn(model, tasks)
    with pytest.raises(ModelFileError, match="no such cost model file"):
        model.load(str(tmp_path / "model"))
    (tmp_path / "model").write_bytes(b"nonsense")
    with pytest.raises(ModelFileError, match="not a whole file"):
        model.load(str(tmp_path / "model"))
    assert len(model._inst._surrogate.dataset) == 48


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
    assert family_operator(name) == operator


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
