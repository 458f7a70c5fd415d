import logging
from unittest.mock import Mock

import numpy as np
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload
from tvm_ffi import structural_hash

from tests.journals import MemoryJournal
from tvm_adaptive import AdaptiveSearch, RFEICostModel
from tvm_adaptive._tvm import PyCostModel, derived_object
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.errors import MACHINE_FAILURE, InvalidOptionError
from tvm_adaptive.search_strategy import evolution_proposer
from tvm_adaptive.search_strategy.knobs import Point
from tvm_adaptive.search_strategy.schedules import knobs_of
from tvm_adaptive.search_strategy.strategy import MAX_EMPTY_ROUNDS
from tvm_adaptive.values.trial_log import TrialLog

SMALL = {"population_size": 48, "genetic_num_iters": 1, "init_min_unmeasured": 8}


@derived_object
class ConstantModel(PyCostModel):
    """A stock-like model without variance that scores all alike."""

    def load(self, path):
        pass

    def save(self, path):
        pass

    def update(self, context, candidates, results):
        pass

    def predict(self, context, candidates):
        return np.ones(len(candidates))


def keys(batch):
    return [structural_hash(candidate.sch.mod) for candidate in batch]


@pytest.mark.parametrize("epsilon", [0.0, 0.25, 0.3, 1.0])
def test_a_fixed_epsilon_gives_exactly_its_share(make_task, epsilon):
    journal = MemoryJournal()
    task = make_task(AdaptiveSearch(**SMALL, epsilon=epsilon, journal=journal), ConstantModel())
    for _ in range(2):
        assert len(task.round()) == 16
    for event in journal.of("round"):
        assert event["n_random"] == int(epsilon * 16 + 0.5)
        assert (event["epsilon"], event["reason"]) == (epsilon, "fixed")


def test_the_journal_has_the_decisions_of_each_candidate(make_task):
    journal = MemoryJournal()
    strategy = AdaptiveSearch(**SMALL, proposer="surrogate", journal=journal)
    batch = make_task(strategy, RFEICostModel()).round()
    (event,) = journal.of("round")
    for candidate, (_, parts) in zip(batch, event["decisions"], strict=True):
        # The postprocessors' own follow.
        assert parts == tuple(knobs_of(candidate.sch)[: len(parts)])
    evolution = MemoryJournal()
    strategy = AdaptiveSearch(**SMALL, proposer="evolution", journal=evolution)
    make_task(strategy, RFEICostModel()).round()
    assert evolution.of("round")[0]["decisions"] is None


@pytest.mark.parametrize(
    ("limit", "n_given", "evolves"), [(1, 1, False), (8, 8, False), (9, 9, True), (99, 16, True)]
)
def test_a_limit_holds_for_the_next_batch_only(make_task, limit, n_given, evolves):
    journal = MemoryJournal()
    strategy = AdaptiveSearch(**SMALL, epsilon=0.25, journal=journal)
    task = make_task(strategy, ConstantModel())
    task.round()
    strategy.limit_next_batch(limit)
    assert len(task.round()) == n_given
    assert len(task.round()) == 16
    strategy.limit_next_batch(limit)
    strategy.limit_next_batch(None)
    assert len(task.round()) == 16
    small = journal.of("round")[1]
    assert small["n_random"] == int(n_given / 4 + 0.5)
    assert small["is_evolved"] is evolves


@pytest.mark.parametrize("limit", [1, 4])
def test_after_the_first_trials_the_posterior_decides_in_small_batches_too(make_task, limit):
    journal = MemoryJournal()
    strategy = AdaptiveSearch(**SMALL, journal=journal)
    task = make_task(strategy, RFEICostModel(n_trees=20, seed=1, n_jobs=1))
    for _ in range(2):
        task.round()
    strategy.limit_next_batch(limit)
    assert len(task.round()) == limit
    small = journal.of("round")[-1]
    assert (small["reason"], small["is_evolved"]) == ("posterior", False)
    assert small["n_random"] == int(small["epsilon"] * limit + 0.5)


def test_the_first_trials_are_screened_and_not_evolved(make_task):
    journal = MemoryJournal()
    model = RFEICostModel(n_trees=20, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(**SMALL, n_initial=40, journal=journal), model)
    # The third round brings what is missing of the first 40.
    assert [len(task.round()) for _ in range(4)] == [16, 16, 8, 16]
    rounds = journal.of("round")
    assert [event["reason"] for event in rounds] == ["untrained", "initial", "initial", "posterior"]
    assert [event["n_random"] for event in rounds[:3]] == [8, 8, 4]
    assert [event["n_analytical"] for event in rounds] == [8, 0, 0, 0]
    assert [event["is_evolved"] for event in rounds] == [False, False, False, True]


def test_screening_takes_what_the_model_prefers(make_task):
    class Preference(ConstantModel._cls):
        """Scores by position: the last is the best."""

        def predict(self, context, candidates):
            self.asked = list(candidates)
            return np.arange(1.0, len(candidates) + 1)

    preference = derived_object(Preference)()
    task = make_task(AdaptiveSearch(**SMALL, epsilon=0.0, diversity="none"), preference)
    batch = task.round()
    best = keys(preference._inst.asked)[-len(batch) :]
    assert sorted(keys(batch)) == sorted(best)


def test_a_limit_does_not_reach_beyond_the_trials_left(make_task):
    strategy = AdaptiveSearch(**SMALL)
    task = make_task(strategy, ConstantModel(), max_trials=6)
    for limit, n_given in ((4, 4), (4, 2)):
        strategy.limit_next_batch(limit)
        assert len(task.round()) == n_given
    assert task.round() is None


def test_epsilon_comes_from_the_posterior_once_there_is_one(make_task):
    journal = MemoryJournal()
    model = RFEICostModel(n_trees=20, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(**SMALL, journal=journal), model)
    for _ in range(3):
        task.round()
    first, *later = journal.of("round")
    assert first["reason"] == "untrained"
    for event in later:
        assert event["reason"] == "posterior"
        assert event["epsilon"] == pytest.approx(min(1.0, event["mean_std"]))
        assert event["n_plans"] == 20
        assert event["n_random"] == int(event["epsilon"] * 16 + 0.5)


def test_nothing_is_measured_twice_also_after_a_restart(make_task):
    database = ms.database.MemoryDatabase()
    first = make_task(AdaptiveSearch(**SMALL), ConstantModel(), database=database)
    seen = [key for _ in range(3) for key in keys(first.round(fail=lambda n: n % 3 == 0))]
    first.strategy.post_tuning()
    second = make_task(AdaptiveSearch(**SMALL), ConstantModel(), database=database)
    for _ in range(3):
        seen += keys(second.round())
    assert len(seen) == len(set(seen)) == 6 * 16


@pytest.mark.parametrize("proposer", ["surrogate", "evolution"])
def test_a_disqualified_candidate_is_no_incumbent_after_a_restart(make_task, tmp_path, proposer):
    def search():
        strategy = AdaptiveSearch(**SMALL, proposer=proposer)
        model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
        return make_task(strategy, model, database=RunDatabase(tmp_path))

    first = search()
    first.round()
    liar, *others = first.database.get_top_k(first.database.commit_workload(first.mod), 16)
    first.database.commit_tuning_record(
        ms.database.TuningRecord(liar.trace, liar.workload, [1e-9], liar.target, liar.args_info)
    )
    finals = [trial_of(liar, failure="wrong result")]
    VerdictFile(tmp_path, "0.1").add(task_of(first.mod, first.context.target, "gmm"), finals)
    again = search().proposer
    assert again.best_sec == float(others[0].run_secs[0])
    assert len(again.excluded) == 16, "it is not proposed again"


def test_a_model_without_variance_fixes_epsilon_and_says_so_once(make_task, caplog):
    journal = MemoryJournal()
    with caplog.at_level(logging.WARNING, logger="tvm_adaptive"):
        task = make_task(AdaptiveSearch(**SMALL, journal=journal), ConstantModel())
        task.round()
        task.round()
    assert [event["reason"] for event in journal.of("round")] == ["no-variance"] * 2
    assert sum("states no variance" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("proposer", "diversity"),
    [
        ("surrogate", "medoids"),
        ("evolution", "knobs"),
        pytest.param("surrogate", "none", marks=pytest.mark.slow),
        pytest.param("surrogate", "knobs", marks=pytest.mark.slow),
        pytest.param("evolution", "none", marks=pytest.mark.slow),
        pytest.param("evolution", "medoids", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_used_competes_again(make_task, proposer, diversity):
    journal = MemoryJournal()
    options = {**SMALL, "n_samples": 24, "proposer": proposer, "diversity": diversity}
    task = make_task(
        AdaptiveSearch(**options, epsilon=0.0, n_initial=0, journal=journal),
        RFEICostModel(n_trees=10, seed=1, n_jobs=1),
        batch=6,
    )
    seen = [key for _ in range(4) for key in keys(task.round())]
    assert len(seen) == len(set(seen)) == 24
    # Evolution without diversity is asked for no more than a batch.
    spares = [event["n_spares"] > 0 for event in journal.of("round")]
    assert any(spares) is not ((proposer, diversity) == ("evolution", "none"))


def test_same_seed_same_candidates(make_task):
    batches = [
        keys(make_task(AdaptiveSearch(**SMALL), ConstantModel(), seed=11).round()) for _ in range(2)
    ]
    other = keys(make_task(AdaptiveSearch(**SMALL), ConstantModel(), seed=12).round())
    assert batches[0] == batches[1] != other


@pytest.mark.slow
def test_a_search_on_knobs_repeats_for_the_same_seed(make_task):
    def batches(seed):
        model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
        task = make_task(AdaptiveSearch(n_samples=16, n_initial=0), model, seed=seed)
        return [keys(task.round()) for _ in range(3)]

    assert batches(11) == batches(11) != batches(12)


@pytest.mark.slow
def test_a_search_on_knobs_never_measures_twice_also_after_a_restart(make_task):
    database = ms.database.MemoryDatabase()
    seen = []
    for seed in (1, 2):
        model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
        strategy = AdaptiveSearch(n_samples=16, n_initial=0)
        task = make_task(strategy, model, database=database, seed=seed)
        for _ in range(3):
            seen += keys(task.round(fail=lambda n: n % 3 == 0))
        task.strategy.post_tuning()
    assert len(seen) == len(set(seen)) == 6 * 16


@pytest.mark.slow
def test_half_of_a_searched_batch_is_near_the_best(make_task):
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(n_samples=24, n_initial=0, epsilon=0.0), model)
    for _ in range(3):
        task.round()
    centres = [point for _, point in task.proposer._elites[:4]]
    batch = task.strategy.generate_measure_candidates()
    space = task.proposer.candidates.space
    points = [task.proposer.candidates.sent[key] for key in keys(batch)]
    near = [min(space.distance(point, centre) for centre in centres) <= 2 for point in points]
    assert len(near) == 16
    assert sum(near) >= 8


@pytest.mark.slow
def test_builds_that_cost_much_are_avoided(make_task):
    """Where one decision makes builds ten times as dear and changes nothing else."""

    def share_of_dear(trial_log):
        model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
        strategy = AdaptiveSearch(n_samples=24, n_initial=0, trial_log=trial_log)
        task = make_task(strategy, model)
        unrolls = []
        for _ in range(5):
            batch = task.strategy.generate_measure_candidates()
            dear = [knobs_of(candidate.sch)[-1] == (3,) for candidate in batch]
            unrolls += dear
            if trial_log is not None:
                for key, is_dear in zip(keys(batch), dear, strict=True):
                    trial_log.note(int(key), build_sec=5.0 if is_dear else 0.1)
            results = [ms.runner.RunnerResult([1e-3 * (1 + n % 5)], None) for n in range(16)]
            task.strategy.notify_runner_results(batch, results)
            task.cost_model.update(task.context, batch, results)
        return np.mean(unrolls[32:])

    assert share_of_dear(TrialLog()) < 0.5 * share_of_dear(None)


@pytest.mark.parametrize("proposer", ["surrogate", "evolution"])
def test_a_runner_learns_the_incumbent_and_the_weights(make_task, proposer, monkeypatch):
    monkeypatch.setattr("tvm_adaptive.search_strategy.strategy.weights_of", lambda _mod: (1,))
    trial_log = TrialLog()
    facts = trial_log.batch_facts
    facts.incumbent_sec = 1e-9  # of the task before
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(**SMALL, proposer=proposer, trial_log=trial_log), model)
    task.strategy.generate_measure_candidates()
    assert (facts.incumbent_sec, facts.weights) == (None, (1,))
    task.round()
    recorded = [float(each.run_secs[0]) for each in task.database.get_all_tuning_records()]
    task.strategy.generate_measure_candidates()
    assert facts.incumbent_sec == min(recorded)


@pytest.mark.parametrize("proposer", ["surrogate", "evolution"])
def test_what_the_machine_failed_at_competes_again(make_task, proposer):
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(**SMALL, proposer=proposer, epsilon=0.0), model)
    batch = task.strategy.generate_measure_candidates()
    n_before = len(task.proposer.excluded)
    results = [ms.runner.RunnerResult(None, f"{MACHINE_FAILURE}no device") for _ in batch]
    task.strategy.notify_runner_results(batch, results)
    assert (n_before, len(task.proposer.excluded)) == (len(batch), 0)
    if proposer == "surrogate":
        assert set(map(int, keys(batch))) <= set(task.proposer.candidates.pool.keys)
    else:
        assert task.proposer._n_spares == len(batch)
    # Once: what takes more memory than there is would do so again.
    task.strategy.notify_runner_results(batch, results)
    again = task.proposer.take_back([candidate.sch for candidate in batch])
    assert again == []


def test_a_pool_that_is_too_small_to_learn_from_is_searched_without_a_model(make_task, monkeypatch):
    module = "tvm_adaptive.search_strategy.surrogate_proposer"
    task = make_task(AdaptiveSearch(**SMALL), RFEICostModel(n_trees=8, seed=1, n_jobs=1))
    monkeypatch.setattr(f"{module}.MIN_TO_LEARN", 1 + len(task.proposer.candidates.pool))
    monkeypatch.setattr(f"{module}.descendants", Mock(side_effect=AssertionError))
    assert task.proposer._searched(2) == []


def test_a_space_that_no_point_of_satisfies_ends_after_a_few_draws(make_task, monkeypatch):
    task = make_task(AdaptiveSearch(**SMALL), RFEICostModel(n_trees=8, seed=1, n_jobs=1))
    space, draws = task.proposer.candidates.space, []
    draw = space.draw
    monkeypatch.setattr(space, "draw", lambda rng: draws.append(draw(rng)) or draws[-1])
    monkeypatch.setattr(space, "allows", lambda _point: False)
    monkeypatch.setattr(space, "all_points", lambda _most: [])
    monkeypatch.setattr(
        task.proposer.candidates.sketches, "replay", lambda points, _: [None] * len(points)
    )
    assert task.proposer._sample(None) is None
    assert 0 < len(draws) <= task.proposer.options.max_fail_count


def test_sampling_never_doubles_without_end(make_task, monkeypatch):
    strategy = AdaptiveSearch(**SMALL, max_fail_count=12)
    task = make_task(strategy, RFEICostModel(n_trees=8, seed=1, n_jobs=1))
    candidates, sizes = task.proposer.candidates, []
    monkeypatch.setattr(candidates.space, "draw", lambda _rng: None)
    monkeypatch.setattr(candidates.space, "allows", lambda _point: True)
    monkeypatch.setattr(candidates.space, "all_points", lambda _most: [])
    monkeypatch.setattr(
        candidates, "add", lambda points: sizes.append(len(points)) or [None] * len(points)
    )
    assert task.proposer._sample(None) is None
    assert len([each for each in sizes if each]) == 12
    assert max(sizes) == sizes[4] == 16 * sizes[0]


@pytest.mark.parametrize("one_in", [100, 200])
def test_where_few_draws_are_valid_a_task_goes_on(make_task, monkeypatch, one_in):
    """As of convolutions on GPUs, whose first rounds are cheap."""
    draw, rng = evolution_proposer.sample_population, np.random.default_rng(3)

    def native(inner, n):
        found, n_fruitless = 0, 0
        while found < SMALL["init_min_unmeasured"] and n_fruitless < 5:
            valid = int(rng.binomial(n, 1 / one_in))
            found, n_fruitless = found + valid, n_fruitless + (not valid)
        return draw(inner, found)[:found] if found else []

    monkeypatch.setattr(evolution_proposer, "sample_population", native)
    strategy = AdaptiveSearch(**{**SMALL, "population_size": 256}, proposer="evolution")
    task = make_task(strategy, ConstantModel())
    for _ in range(4):
        assert task.round()


@pytest.mark.slow
def test_random_candidates_are_the_rarer_the_dearer_their_build(make_task):
    """The same, where all candidates are random: none is out of the question."""
    strategy = AdaptiveSearch(n_samples=48, n_initial=0, epsilon=1.0, trial_log=TrialLog())
    task = make_task(strategy, RFEICostModel(n_trees=8, seed=1, n_jobs=1))
    shares = []
    for _ in range(10):
        batch = task.strategy.generate_measure_candidates()
        dear = [knobs_of(candidate.sch)[-1] == (3,) for candidate in batch]
        shares.append(np.mean(dear))
        for key, is_dear in zip(keys(batch), dear, strict=True):
            strategy.trial_log.note(int(key), build_sec=3.0 if is_dear else 0.1)
        results = [ms.runner.RunnerResult([1e-3], None) for _ in batch]
        task.strategy.notify_runner_results(batch, results)
        task.cost_model.update(task.context, batch, results)
    # One of four is dear before that is known.
    assert 0.0 < np.mean(shares[2:]) < 0.15


def test_a_model_of_stock_is_served_by_evolution(make_task):
    task = make_task(AdaptiveSearch(**SMALL, proposer="surrogate"), ConstantModel())
    assert type(task.proposer).__name__ == "EvolutionProposer"
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(**SMALL, proposer="evolution"), model)
    assert type(task.proposer).__name__ == "EvolutionProposer"
    task = make_task(AdaptiveSearch(**SMALL), model)
    assert type(task.proposer).__name__ == "SurrogateProposer"


def test_without_valid_random_points_the_pool_is_used(make_task, monkeypatch):
    strategy = AdaptiveSearch(**SMALL, n_initial=0, max_fail_count=1)
    task = make_task(strategy, RFEICostModel(n_trees=8, seed=1, n_jobs=1), batch=4)
    seen = {key for _ in range(2) for key in keys(task.round())}
    space = task.proposer.candidates.space
    assert len(task.proposer.candidates.pool)
    point = space.draw(np.random.default_rng(0))
    impossible = Point(point.sketch, (*point.vector[:-1], 99))
    monkeypatch.setattr(space, "draw", lambda _: impossible)
    batch = task.round()
    assert batch
    assert not seen & set(keys(batch))


def test_the_trial_limit_cuts_the_last_batch(make_task):
    task = make_task(AdaptiveSearch(**SMALL), ConstantModel(), batch=16, max_trials=20)
    assert [len(task.round()), len(task.round()), task.round()] == [16, 4, None]


def test_a_broken_round_costs_the_round_and_five_end_the_task(make_task):
    @derived_object
    class Broken(PyCostModel):
        def load(self, path):
            pass

        def save(self, path):
            pass

        def update(self, context, candidates, results):
            pass

        def predict(self, context, candidates):
            raise RuntimeError("no score today")

    journal = MemoryJournal()
    task = make_task(AdaptiveSearch(**SMALL, epsilon=0.5, journal=journal), Broken())
    batches = [task.strategy.generate_measure_candidates() for _ in range(MAX_EMPTY_ROUNDS)]
    assert [list(batch) for batch in batches[:-1]] == [[]] * (MAX_EMPTY_ROUNDS - 1)
    assert batches[-1] is None
    assert "no score today" in journal.of("error")[0]["message"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"population_size": 0}, "population_size must be at least 1 but got 0"),
        ({"init_measured_ratio": 2.0}, r"init_measured_ratio must be in \[0, 1\] but got 2.0"),
        ({"genetic_num_iters": -1}, "genetic_num_iters must be at least 0 but got -1"),
        ({"init_min_unmeasured": 0}, "init_min_unmeasured must be at least 1 but got 0"),
        ({"n_plans": 0}, "n_plans must be at least 1 but got 0"),
        ({"n_samples": 0}, "n_samples must be at least 1 but got 0"),
        ({"proposer": "oracle"}, "proposer must be one of surrogate, evolution but got 'oracle'"),
        ({"diversity": "much"}, "diversity must be one of none, knobs, medoids but got 'much'"),
        ({"epsilon": -1.0}, "epsilon must be in"),
        ({"genetic_mutate_prob": 1.5}, r"genetic_mutate_prob must be in \[0, 1\] but got 1.5"),
        ({"genetic_max_fail_count": -1}, "genetic_max_fail_count must be at least 0 but got -1"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(InvalidOptionError, match=text):
        AdaptiveSearch(**options)


def test_a_generation_of_measured_schedules_alone_ends_no_space(make_task):
    strategy = AdaptiveSearch(
        proposer="evolution",
        init_measured_ratio=1.0,
        population_size=16,
        init_min_unmeasured=4,
        genetic_num_iters=1,
    )
    task = make_task(strategy, ms.cost_model.RandomModel(), batch=8)
    assert all(task.round() for _ in range(4))


def test_it_needs_a_database():
    strategy = AdaptiveSearch()
    with pytest.raises(Exception, match="needs a tune context, a database and a cost model"):
        strategy.pre_tuning(10, 10, [], None, None)


def test_a_task_that_was_tuned_is_tuned_again_as_a_clone(make_task):
    task = make_task(AdaptiveSearch(**SMALL), ConstantModel())
    given = 16, 16, task.context.generate_design_space(), task.database, task.cost_model
    task.strategy.post_tuning()
    with pytest.raises(Exception, match=r"tuned to its end.*\[context\.clone\(\) for context in"):
        task.strategy.pre_tuning(*given)
    context = task.context.clone()
    context.search_strategy.pre_tuning(*given)
    assert len(context.search_strategy.generate_measure_candidates()) == 16


def test_a_small_space_is_tried_to_its_end(make_task):
    mod = tvm.IRModule({"main": create_te_workload("NRM", 2)})
    model = RFEICostModel(n_trees=8, seed=1, n_jobs=1)
    task = make_task(AdaptiveSearch(n_samples=24), model, batch=8, mod=mod)
    n_points = len(task.proposer.candidates.space.all_points(256))
    batches = iter(task.round, None)  # until several in a row bring nothing new
    assert sum(map(len, batches)) == n_points == 60
