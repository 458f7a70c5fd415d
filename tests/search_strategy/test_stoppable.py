import pytest
from tvm.s_tir import meta_schedule as ms

from tests.journals import MemoryJournal
from tvm_adaptive import AdaptiveSearch
from tvm_adaptive._tvm import (
    PySearchStrategy,
    contexts_of,
    derived_object,
    functions_as_tasks,
    python_side,
    te_workload,
)
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.search_strategy.stoppable import StoppableSearch
from tvm_adaptive.tuning.target import resolve_target

SMALL = {"population_size": 48, "genetic_num_iters": 1, "init_min_unmeasured": 8}


@derived_object
class FailingSearch(PySearchStrategy):
    """Random candidates; raises at the stage that it is given."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.inner = ms.search_strategy.ReplayTrace()

    def _initialize_with_tune_context(self, context):
        self.inner._initialize_with_tune_context(context)

    def pre_tuning(self, *args):
        if self.stage == "start":
            raise ValueError("made to fail")
        self.inner.pre_tuning(*args)

    def post_tuning(self):
        self.inner.post_tuning()

    def generate_measure_candidates(self):
        if self.stage == "generate":
            raise ValueError("made to fail")
        return self.inner.generate_measure_candidates()

    def notify_runner_results(self, candidates, results):
        if self.stage == "notify":
            raise ValueError("made to fail")
        self.inner.notify_runner_results(candidates, results)

    def clone(self):
        return FailingSearch(self.stage)


def test_what_holds_for_all_tasks_ends_the_run(make_task):
    strategy = StoppableSearch(AdaptiveSearch(**SMALL), lambda: False)
    task = make_task(strategy, ms.cost_model.RandomModel())
    spaces = task.context.generate_design_space()
    with pytest.raises(InvalidOptionError, match="needs a tune context, a database"):
        task.strategy.pre_tuning(4, 4, spaces, None, task.cost_model)


def test_it_stops_when_asked_to(make_task):
    requests = []
    task = make_task(
        StoppableSearch(ms.search_strategy.ReplayTrace(), lambda: bool(requests)),
        ms.cost_model.RandomModel(),
    )
    assert len(task.round()) == 16
    requests.append("stop")
    assert task.round() is None


def test_it_tells_of_a_task_that_ends_before_it_is_asked_to_stop(make_task):
    requests, ended = [], []

    def search(inner):
        pattern = StoppableSearch(inner, lambda: bool(requests), on_end=ended.append)
        return make_task(pattern.clone(), ms.cost_model.RandomModel(), max_trials=16)

    task = search(ms.search_strategy.ReplayTrace())
    assert len(task.round()) == 16
    assert ended == []
    assert task.round() is None
    assert ended == ["gmm"]
    assert search(FailingSearch("generate")).round() is None
    assert ended == ["gmm"] * 2
    requests.append("stop")
    assert task.round() is None
    assert len(ended) == 2


@pytest.mark.parametrize("n_given", [4, 16])
def test_a_limit_goes_through_to_a_search_that_can_follow_it(make_task, n_given):
    strategy = StoppableSearch(AdaptiveSearch(**SMALL, n_initial=0), lambda: False)
    task = make_task(strategy, ms.cost_model.RandomModel())
    python_side(task.context.search_strategy).limit_next_batch(n_given)
    assert len(task.round()) == n_given
    assert len(task.round()) == 16


@pytest.mark.parametrize("inner", [AdaptiveSearch, ms.search_strategy.ReplayTrace])
def test_only_the_clones_of_a_strategy_keep_tasks(tmp_path, inner):
    """A cycle through C++ would keep what ``should_stop`` belongs to for ever."""
    donor = StoppableSearch(inner(), lambda: False)
    tasks = functions_as_tasks(te_workload("GMM"), resolve_target("cpu"))
    (context,) = contexts_of(tasks, str(tmp_path), donor, 0)
    clone = python_side(context.search_strategy)
    if inner is AdaptiveSearch:
        assert donor.inner.context is None
        assert python_side(clone.inner).context.same_as(context)
    clone.pre_tuning(
        4,
        4,
        context.generate_design_space(),
        ms.database.MemoryDatabase(),
        ms.cost_model.RandomModel(),
    )
    assert len(clone.generate_measure_candidates()) == 4
    clone.post_tuning()
    clone.forget_task()


def test_a_search_that_cannot_follow_a_limit_is_left_alone(make_task):
    task = make_task(
        StoppableSearch(ms.search_strategy.ReplayTrace(), lambda: False),
        ms.cost_model.RandomModel(),
    )
    python_side(task.strategy).limit_next_batch(4)
    assert len(task.round()) == 16


@pytest.mark.parametrize(
    ("stage", "consequence"),
    [
        ("start", "this task is not searched"),
        ("generate", "this task ends"),
        ("notify", "it learns nothing from this round"),
    ],
)
def test_what_the_search_raises_is_reported_and_goes_no_further(
    make_task, caplog, stage, consequence
):
    journal = MemoryJournal()
    pattern = StoppableSearch(FailingSearch(stage), lambda: False, journal)
    task = make_task(pattern.clone(), ms.cost_model.RandomModel())
    batch = task.round()
    assert (batch is None) == (stage in ("start", "generate"))
    task.strategy.post_tuning()
    assert f"gmm: the search failed; {consequence}" in caplog.text
    assert journal.events == [
        {
            "event": "error",
            "task": "gmm",
            "where": "search",
            "message": "ValueError('made to fail')",
        }
    ]
