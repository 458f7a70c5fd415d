import logging
import math

import numpy as np
import pytest

from tests.journals import MemoryJournal
from tvm_adaptive import _tvm
from tvm_adaptive.cost_model import RFEICostModel
from tvm_adaptive.cost_model.dataset import Dataset
from tvm_adaptive.cost_model.storage import write_dataset
from tvm_adaptive.cost_model.surrogate import rank_correlation
from tvm_adaptive.errors import MACHINE_FAILURE, InvalidOptionError, ModelFileError
from tvm_adaptive.measure_callback.journal import Journal, read_journal
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.values.trial_log import TrialLog

N = 32


class BrokenJournal:
    def write(self, event, **fields):
        raise OSError("no space left")


def gmm_task(size):
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import MemoryDatabase
    from tvm.s_tir.meta_schedule.testing import te_workload
    from tvm.te import create_prim_func

    function = create_prim_func(te_workload.batch_matmul_nkkm(1, size, size, size))
    strategy = _tvm.EvolutionarySearch(population_size=16)
    context = _tvm.TuneContext(
        _tvm.IRModule({"main": function}),
        target=_tvm.Target({"kind": "llvm", "num-cores": 2}),
        space_generator="post-order-apply",
        search_strategy=strategy,
        task_name=f"gmm{size}",
        rand_state=1,
        num_threads=1,
    )
    model = _tvm.CostModel.create("random")
    strategy.pre_tuning(N, N, context.generate_design_space(), MemoryDatabase(), model)
    schedules = _tvm.sample_population(strategy, N)
    arguments = ArgInfo.from_entry_func(context.mod)
    return context, [_tvm.MeasureCandidate(schedule, arguments) for schedule in schedules]


@pytest.fixture(scope="module")
def task():
    return gmm_task(64)


@pytest.fixture(scope="module")
def other_task():
    return gmm_task(32)


def result(*run_secs):
    return _tvm.RunnerResult(list(run_secs), None)


def failure():
    return _tvm.RunnerResult(None, "it crashed")


def results_for(model, context, candidates):
    """Times that two features decide, so that there is something to learn."""
    rows = model.describe(context, candidates).astype(float)
    widest = np.argsort(-rows.std(axis=0), kind="stable")[:2]
    speed = (rows[:, widest] - rows[:, widest].mean(axis=0)).sum(axis=1)
    return [result(1e-3 * math.exp(-value)) for value in speed / speed.std()]


def trained(task, **options):
    context, candidates = task
    model = RFEICostModel(n_trees=20, seed=0, **options)
    model.update(context, candidates, results_for(model, context, candidates))
    return model


def test_before_any_data_scores_are_random_and_positive(task):
    context, candidates = task
    one, other = (RFEICostModel(seed=3).predict(context, candidates) for _ in range(2))
    assert one.shape == (len(candidates),)
    assert one.dtype == np.float64
    assert (one > 0).all()
    np.testing.assert_array_equal(one, other)
    assert RFEICostModel().posterior(context, candidates) is None


def test_it_ranks_what_it_has_learned(task):
    context, candidates = task
    model = trained(task, acquisition="mean")
    truth = [-float(entry.run_secs[0]) for entry in results_for(model, context, candidates)]
    assert rank_correlation(model.predict(context, candidates), np.array(truth)) > 0.8
    posterior = model.posterior(context, candidates)
    assert len(posterior) == len(candidates)
    assert 0.2 < posterior.mean.max() <= 1.0


def test_through_the_interfaces_of_tvm(task):
    context, candidates = task
    model = RFEICostModel(n_trees=20, seed=0)
    stock_view = _tvm.CostModel
    stock_view.update(model, context, candidates, results_for(model, context, candidates))
    scores = stock_view.predict(model, context, candidates)
    np.testing.assert_array_equal(scores, trained(task).predict(context, candidates))
    assert _tvm.python_side(model).posterior(context, candidates) is not None


def test_native_evolution_accepts_its_scores(task):
    from tvm.s_tir.meta_schedule.database import MemoryDatabase

    context, _ = task
    strategy = _tvm.EvolutionarySearch(population_size=16, genetic_num_iters=1)
    clone = _tvm.TuneContext(
        context.mod,
        target=context.target,
        space_generator="post-order-apply",
        search_strategy=strategy,
        rand_state=2,
        num_threads=1,
    )
    spaces = clone.generate_design_space()
    strategy.pre_tuning(8, 8, spaces, MemoryDatabase(), trained(task))
    assert 0 < len(_tvm.evolve(strategy, _tvm.sample_population(strategy, 16), 8)) <= 8


def test_every_kind_of_result_is_digested(task):
    context, candidates = task
    journal = MemoryJournal()
    model = RFEICostModel(n_trees=5, seed=0, journal=journal)
    odd = [failure(), result(0.0), result(math.nan), result(math.inf), result(3e-3, 1e-3, 2e-3)]
    fine = [result(1e-3 + 1e-5 * i) for i in range(len(candidates) - len(odd))]
    model.update(context, candidates, odd + fine)
    assert np.isfinite(model.predict(context, candidates)).all()
    (fit,) = journal.of("fit")
    assert fit["task"] == "gmm64"
    assert fit["n_samples"] == len(fine) + 1
    assert fit["n_failures"] == 4
    assert fit["seconds"] > 0
    assert journal.of("error") == []
    seconds = dict(model._surrogate.dataset).popitem()[1].seconds
    assert seconds[4] == 2e-3  # the median of three


def test_only_failures(task):
    context, candidates = task
    model = RFEICostModel(n_trees=5, seed=0)
    model.update(context, candidates, [failure() for _ in candidates])
    scores = model.predict(context, candidates)
    assert (scores > 0).all()
    assert model.posterior(context, candidates) is None


def test_what_the_machine_has_failed_at_says_nothing_of_a_candidate(task):
    context, candidates = task
    model = RFEICostModel(n_trees=5, seed=0)
    untried = _tvm.RunnerResult(None, f"{MACHINE_FAILURE}no memory")
    model.update(context, candidates[:3], [untried, result(1e-3), failure()])
    dataset = model._inst._surrogate.dataset
    assert (len(dataset), dataset.n_failures) == (2, 1)
    model.update(context, candidates[:1], [untried])
    assert len(dataset) == 2


def test_empty_batches(task):
    context, _ = task
    for model in (RFEICostModel(seed=0), trained(task)):
        _tvm.CostModel.update(model, context, [], [])
        assert len(model._surrogate.dataset) in (0, len(task[1]))
        # TVM's wrapper of predict cannot be called without candidates; evolution never does.
        assert model._inst.predict(context, []).shape == (0,)
        assert model.posterior(context, []) is None


def test_candidates_without_stores(task):
    context, _ = task
    schedule = _tvm.Schedule(module_without_stores())
    candidate = _tvm.MeasureCandidate(schedule, [])
    model = RFEICostModel(n_trees=5, seed=0)
    assert not model.describe(context, [candidate] * 2).any()
    model.update(context, [candidate] * 2, [result(1e-3), result(2e-3)])
    assert np.isfinite(model.predict(context, [candidate] * 2)).all()
    assert model.posterior(context, [candidate]).mean.shape == (1,)


def module_without_stores():
    from tvm.script import tirx as T

    @T.prim_func
    def main() -> None:
        T.evaluate(0)

    return _tvm.IRModule({"main": main})


def test_a_task_never_seen_profits_from_the_others(task, other_task):
    context, candidates = other_task
    model = trained(task)
    scores = model.predict(context, candidates)
    assert np.ptp(scores) > 0
    assert model.posterior(context, candidates) is None
    model.update(context, candidates, results_for(model, context, candidates))
    assert model.posterior(context, candidates) is not None
    assert model._surrogate.dataset.n_tasks == 2


def test_the_forecast_of_a_batch_is_journalled(task):
    context, candidates = task
    journal = MemoryJournal()
    model = trained(task, journal=journal)
    model.predict(context, candidates)
    assert journal.of("forecast") == []
    model.update(context, candidates[:8], results_for(model, context, candidates)[:8])
    (forecast,) = journal.of("forecast")
    assert forecast["n"] == 8
    assert forecast["spearman"] > 0.5
    assert forecast["task"] == "gmm64"


def test_a_real_journal_takes_the_events(task, tmp_path):
    context, candidates = task
    model = trained(task, journal=Journal(tmp_path / "journal.jsonl"))
    model.predict(context, candidates)
    events = read_journal(tmp_path / "journal.jsonl")
    assert [entry["event"] for entry in events] == ["journal", "fit"]


@pytest.mark.parametrize("hook", ["update", "predict", "posterior"])
def test_a_hook_never_raises(task, caplog, monkeypatch, hook):
    context, candidates = task
    journal = MemoryJournal()
    model = trained(task, journal=journal)

    def broken(*_):
        raise RuntimeError("no features today")

    monkeypatch.setattr(model._inst, "describe", broken)
    with caplog.at_level(logging.ERROR):
        if hook == "update":
            _tvm.CostModel.update(model, context, candidates[:1], [failure()])
        elif hook == "predict":
            scores = _tvm.CostModel.predict(model, context, candidates)
            np.testing.assert_array_equal(scores, np.ones(len(candidates)))
        else:
            assert model.posterior(context, candidates) is None
    assert f"{hook} failed for task gmm64" in caplog.text
    (error,) = journal.of("error")
    assert (error["hook"], error["task"]) == (hook, "gmm64")
    assert "no features today" in error["message"]


def test_a_full_disk_does_not_end_the_run(task, caplog):
    context, candidates = task
    model = trained(task, journal=BrokenJournal())
    np.testing.assert_array_equal(model.predict(context, candidates), np.ones(len(candidates)))
    assert "could not be written to the journal" in caplog.text
    assert rank_correlation(model.predict(context, candidates), np.arange(len(candidates))) < 1


def test_lengths_that_do_not_fit_are_an_error_event(task):
    context, candidates = task
    journal = MemoryJournal()
    model = RFEICostModel(seed=0, journal=journal)
    model.update(context, candidates, [failure()])
    assert len(journal.of("error")) == 1
    assert len(model._surrogate.dataset) == 0


@pytest.mark.parametrize("target", ["log", "throughput"])
def test_saved_and_loaded_it_predicts_the_same(task, tmp_path, target):
    context, candidates = task
    model = trained(task, target=target)
    path = str(tmp_path / "model.bin")
    _tvm.CostModel.save(model, path)
    loaded = RFEICostModel(n_trees=20, seed=0, target=target)
    _tvm.CostModel.load(loaded, path)
    np.testing.assert_array_equal(
        loaded.predict(context, candidates), model.predict(context, candidates)
    )


@pytest.mark.parametrize("kind", ["missing", "torn", "width"])
def test_a_bad_file_leaves_the_model_as_it_was(task, tmp_path, kind):
    context, candidates = task
    path = tmp_path / "model.bin"
    if kind == "torn":
        path.write_bytes(b"PK")
    if kind == "width":
        dataset = Dataset()
        dataset.add("a", np.ones((1, 3), dtype=np.float32), np.ones(1))
        write_dataset(path, dataset, {})
    model = trained(task)
    before = model.predict(context, candidates)
    with pytest.raises(ModelFileError, match=r"model\.bin"):
        model.load(str(path))
    np.testing.assert_array_equal(model.predict(context, candidates), before)


@pytest.mark.parametrize(
    "options", [{"n_trees": 0}, {"std": "no"}, {"target": "no"}, {"acquisition": "no"}]
)
def test_bad_options(options):
    with pytest.raises(InvalidOptionError, match=next(iter(options))):
        RFEICostModel(**options)


def test_it_learns_how_far_off_times_may_be(task):
    context, candidates = task
    log = TrialLog()
    model = RFEICostModel(n_trees=5, seed=0, trial_log=log)
    results = results_for(model, context, candidates)
    log.note(key_of(candidates[1].sch), relative_error=0.2)
    model.update(context, candidates, results)
    ((_, samples),) = model._surrogate.dataset
    assert samples.errors[1] == pytest.approx(0.2)
    assert np.count_nonzero(samples.errors) == 1


def test_features_that_the_search_extracted_are_not_extracted_again(task, monkeypatch):
    context, candidates = task
    log = TrialLog()
    model = RFEICostModel(n_trees=5, seed=0, trial_log=log)
    results = results_for(model, context, candidates)
    rows = model.describe(context, candidates)
    for candidate, row in zip(candidates[1:], rows[1:], strict=True):
        log.note(key_of(candidate.sch), features=row)
    extracted = []
    describe = model._inst.describe

    def count(context, candidates):
        extracted.extend(candidates)
        return describe(context, candidates)

    monkeypatch.setattr(model._inst, "describe", count)
    model.update(context, candidates, results)
    ((_, samples),) = model._surrogate.dataset
    np.testing.assert_array_equal(samples.rows, rows)
    assert len(extracted) == 1
    np.testing.assert_array_equal(log.get(key_of(candidates[0].sch)).features, rows[0])
