import math
import re

import numpy as np
import pytest
from tvm.s_tir import meta_schedule as ms

from tvm_adaptive import AdaptiveScheduler, AdaptiveSearch
from tvm_adaptive._tvm import PySearchStrategy, derived_object
from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.search_strategy.stoppable import DelegatingSearch, StoppableSearch
from tvm_adaptive.task_scheduler.arms import Decision, PriorTrials
from tvm_adaptive.task_scheduler.slot_queue import MAX_EMPTY_BATCHES
from tvm_adaptive.tuning import registry
from tvm_adaptive.values.trial import Promise

SMALL = {"population_size": 16, "genetic_num_iters": 1, "init_min_unmeasured": 4}


@derived_object
class OddSearch(PySearchStrategy):
    """Replays prepared candidates; counts how often it was asked."""

    def __init__(self, brings, promise=None):
        super().__init__()
        self.brings = brings
        self.promise = promise and (lambda: promise)
        if promise is not None:  # all that a task scheduler may ask of a search, or nothing
            self.limit_next_batch = lambda n_trials: None
            self.begin_next_batch = lambda: None
            self.is_ready = lambda: True
            self.forget_task = lambda: None
        self.inner = ms.search_strategy.ReplayTrace()
        self.name = ""

    def _initialize_with_tune_context(self, context):
        self.name = str(context.task_name)
        self.inner._initialize_with_tune_context(context)

    def pre_tuning(self, *args):
        self.inner.pre_tuning(*args)

    def post_tuning(self):
        self.inner.post_tuning()

    def generate_measure_candidates(self):
        return self.brings(self.name, self.inner.generate_measure_candidates)

    def notify_runner_results(self, candidates, results):
        self.inner.notify_runner_results(candidates, results)

    def clone(self):
        return OddSearch(self.brings, self.promise and self.promise())


def scheduler_in(world, policy, **options):
    return AdaptiveScheduler(policy, journal=world.journal, clock=world.clock, **options)


def test_a_policy_of_ones_own_decides(world, turns):
    world.tune(scheduler_in(world, turns()), trials=48)
    assert world.played == [0, 1, 2, 0, 1, 2]
    assert world.batches == [8] * 6


def test_seconds_ahead_are_none_of_a_slot(world, turns):
    scheduler = scheduler_in(world, turns(), slot_sec=20.0, n_lanes=2)
    world.tune(scheduler, sizes=(16, 32), trials=48)
    assert world.played == [0, 0, 0, 1, 1, 1]


@derived_object
class LimitedSearch(DelegatingSearch):
    """Follows limits; of one task, no batch is ready before it is asked for."""

    def __init__(self, late):
        super().__init__(ms.search_strategy.ReplayTrace())
        self.late = late
        self.limit = None
        self.name = ""

    def _initialize_with_tune_context(self, context):
        self.name = str(context.task_name)
        super()._initialize_with_tune_context(context)

    def generate_measure_candidates(self):
        batch = super().generate_measure_candidates()
        return batch and list(batch)[: self.limit]

    def limit_next_batch(self, n_trials):
        self.limit = n_trials

    def is_ready(self):
        return self.name != self.late

    def clone(self):
        return LimitedSearch(self.late)


@pytest.mark.parametrize("late", ["", "matmul16", "matmul32", "matmul64"])
def test_lanes_search_no_more_trials_than_the_run_has(world, turns, late):
    scheduler = scheduler_in(world, turns(), n_lanes=3)
    world.tune(scheduler, sizes=(16, 32, 64, 128), strategy=LimitedSearch(late), trials=20)
    assert sorted(world.batches) == [4, 8, 8]


def test_the_policy_sees_every_trial_and_every_second(world, turns):
    policy = turns()
    world.latency_ms = lambda size, number: None if number % 8 == 1 else size / number
    world.tune(scheduler_in(world, policy), trials=32)
    fresh, *_, last = policy.seen
    assert [arm.name for arm in fresh] == ["matmul16", "matmul32", "matmul64"]
    assert [arm.weight for arm in fresh] == [1.0, 2.0, 3.0]
    assert [arm.flop for arm in fresh] == [2.0 * size * 16 * 16 for size in (16, 32, 64)]
    assert all((arm.n_trials, arm.n_slots, arm.spent_sec) == (0, 0, 0.0) for arm in fresh)
    np.testing.assert_allclose(
        last[0].latencies_ms, [math.nan, *(16 / n for n in range(2, 9))], rtol=1e-12
    )
    assert [arm.n_slots for arm in last] == [1, 1, 1]
    assert [arm.spent_sec for arm in last] == [8.0, 8.0, 8.0]


def test_the_policy_sees_what_earlier_runs_know(world, turns):
    policy = turns()
    scheduler = scheduler_in(world, policy)
    scheduler.set_prior({"matmul32": PriorTrials((3.0, 2.0), is_proven=True)})
    world.tune(scheduler, trials=16)
    for seen in policy.seen:
        assert [tuple(arm.prior.latencies_ms) for arm in seen] == [(), (3.0, 2.0), ()]
        assert [arm.prior.is_proven for arm in seen] == [False, True, False]
        assert [arm.n_slots for arm in seen[1:]] == [0, 0]


def test_deciding_is_charged_to_the_slot_decided_on(world, script):
    policy = script([0, 1])
    choose = policy.choose

    def slowly(arms, rng):
        world.clock.now += 5.0
        return choose(arms, rng)

    policy.choose = slowly
    scheduler = scheduler_in(world, policy)
    world.tune(scheduler)
    assert [arm.spent_sec for arm in scheduler.arms] == [13.0, 13.0, 0.0]
    assert [slot["decide_sec"] for slot in world.journal.of("slot")] == [5.0, 5.0, 5.0]


def test_a_warm_up_needs_no_more_than_a_success(world, script):
    # A strategy that was asked for 20 gives batches of 8, as one does that has little to try.
    asked = [Decision(k, "warm-up", n_trials=20, until_success=k == 0) for k in (0, 1)]
    world.tune(scheduler_in(world, script(asked)), sizes=(16, 32))
    assert world.played == [0, 1, 1, 1]


def test_the_last_slot_is_counted_although_metaschedule_joins_it(world, turns):
    scheduler = scheduler_in(world, turns())
    world.tune(scheduler, trials=24)
    assert [arm.n_trials for arm in scheduler.arms] == [8, 8, 8]
    assert [arm.best_ms for arm in scheduler.arms] == pytest.approx([2.0, 4.0, 8.0])
    ends = world.journal.of("slot-end")
    assert [(end["task"], end["n_trials"], end["seconds"]) for end in ends] == [
        ("matmul16", 8, 8.0),
        ("matmul32", 8, 8.0),
        ("matmul64", 8, 8.0),
    ]
    assert ends[0]["weighted_ms"] == math.inf
    assert ends[-1]["weighted_ms"] == pytest.approx(2.0 + 2 * 4.0 + 3 * 8.0)


def test_each_decision_is_journalled_with_its_reason(world, script):
    decision = Decision(1, "index", scores=np.array([0.5, 2.0, np.nan]), unit="ms/s")
    world.tune(scheduler_in(world, script([1, decision])))
    first, second, end = world.journal.of("slot")
    assert (first["task"], first["task_id"], first["reason"]) == ("matmul32", 1, "script")
    assert (first["n_trials"], first["best_ms"], first["gain"]) == (0, math.inf, None)
    assert (second["n_trials"], second["best_ms"]) == (8, pytest.approx(4.0))
    assert (second["gain"], second["unit"], second["scores"][:2]) == (2.0, "ms/s", [0.5, 2.0])
    assert (end["task"], end["reason"]) == (None, "done")
    (stop,) = world.journal.of("stop")
    assert (stop["reason"], stop["n_trials"]) == ("done", 16)


def test_a_slot_may_have_several_rounds(world, turns):
    world.tune(scheduler_in(world, turns(), slot_rounds=2), sizes=(16, 32), trials=48)
    assert world.played == [0, 0, 1, 1, 0, 0]


def test_a_slot_in_seconds_ends_with_the_batch_that_used_them_up(world, turns):
    # A batch takes 8 s: 20 s are three of them, and 24 s are charged.
    scheduler = scheduler_in(world, turns(), slot_sec=20.0)
    world.tune(scheduler, sizes=(16, 32), trials=48)
    assert world.played == [0, 0, 0, 1, 1, 1]
    assert [end["seconds"] for end in world.journal.of("slot-end")] == [24.0, 24.0]


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "stoppable"])
def test_our_search_gives_as_many_trials_as_asked_for(world, script, wrap):
    strategy = AdaptiveSearch(**SMALL, n_initial=0, journal=world.journal)
    if wrap:
        strategy = StoppableSearch(strategy, lambda: False)
    asked = [Decision(0, "warm-up", n_trials=n) for n in (2, 3)]
    world.tune(
        scheduler_in(world, script([*asked, 0, Decision(0, "x", n_trials=11)])), strategy=strategy
    )
    # The next full batch is full again, and 11 trials are a batch and a small one.
    assert world.batches == [2, 3, 8, 8, 3]
    rounds = world.journal.of("round")
    assert [each["is_evolved"] for each in rounds] == [False, False, True, True, False]


@pytest.mark.parametrize("strategy", ["replay-trace", "evolutionary"])
def test_stock_searches_give_whole_batches(world, script, strategy):
    decisions = [Decision(k, "warm-up", n_trials=2) for k in (0, 2)]
    if strategy == "evolutionary":
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=64, init_min_unmeasured=4, genetic_num_iters=1
        )
    world.tune(scheduler_in(world, script(decisions)), strategy=strategy)
    assert world.batches == [8, 8]


def test_our_search_keeps_the_global_limit_exactly(world, turns):
    scheduler = scheduler_in(world, turns(n_trials=3))
    world.tune(scheduler, strategy=AdaptiveSearch(**SMALL), trials=10)
    assert world.batches == [3, 3, 3, 1]
    assert sum(arm.n_trials for arm in scheduler.arms) == len(world.database) == 10


@pytest.mark.parametrize(
    "strategy", ["replay-trace", AdaptiveSearch(**SMALL)], ids=["stock", "ours"]
)
def test_the_limit_per_task_is_kept(world, turns, strategy):
    scheduler = scheduler_in(world, turns())
    world.tune(scheduler, sizes=(16, 32), strategy=strategy, per_task=12)
    assert world.batches == [8, 8, 4, 4]
    assert [(arm.n_trials, arm.finished) for arm in scheduler.arms] == [(12, True), (12, True)]
    assert world.journal.of("stop")[0]["reason"] == "all-finished"


def test_a_task_that_never_builds_or_runs_does_not_stall_the_others(world):
    world.builder._inst.broken = {32}
    world.latency_ms = lambda size, number: None if size == 64 else size / number
    scheduler = scheduler_in(world, "random", seed=1)
    world.tune(scheduler, sizes=(16, 32, 64), trials=400)
    good, unbuilt, unrun = scheduler.arms
    assert good.n_trials > 200
    for arm in (unbuilt, unrun):
        assert np.isnan(arm.latencies_ms).all()
        assert 0 < arm.n_trials < 200
        assert arm.finished


def test_a_callback_that_raises_costs_nothing_but_itself(world, turns, caplog):
    world.callback = type(world.callback)(raises_for=[1])
    scheduler = scheduler_in(world, turns())
    world.tune(scheduler, trials=48)
    assert world.callback.rounds == [(0, 8), (2, 8)] * 2
    assert [arm.n_trials for arm in scheduler.arms] == [16, 16, 16]
    assert len(world.database) == 48
    errors = world.journal.of("error")
    assert [(error["task"], error["where"]) for error in errors] == [("matmul32", "callback")] * 2
    assert "a callback's own fault" in errors[0]["message"]
    assert "matmul32: callback failed; FakeCallback missed this batch" in caplog.text


def test_a_task_whose_results_cannot_be_taken_in_ends_alone(world, turns, caplog):
    def latency_ms(size, number):
        return ValueError("lost") if (size, number) == (32, 12) else size / number

    world.latency_ms = latency_ms
    scheduler = scheduler_in(world, turns())
    world.tune(scheduler, trials=72)
    assert world.played == [0, 1, 2, 0, 1, 2, 0, 2, 0]
    assert scheduler.arms[1].finished
    assert scheduler.arms[1].n_trials == 8
    (error,) = world.journal.of("error")
    assert (error["task"], error["where"]) == ("matmul32", "join")
    assert "matmul32: join failed; this task ends" in caplog.text


def test_a_sibling_of_which_the_model_promises_a_gain_gets_a_smaller_slot(world, turns, caplog):
    strategy = OddSearch(lambda task, batch: batch(), Promise(0.5, 0.9))
    world.tune(scheduler_in(world, turns(), foresee_share=0.25), strategy=strategy, trials=48)
    slots = [(slot["task_id"], slot["reason"]) for slot in world.journal.of("slot")]
    # Before its first result a task is no choice; then the largest gain is.
    assert slots[:3] == [(0, "turn"), (1, "turn"), (0, "foresee")]
    assert slots[3:5] == [(2, "turn"), (1, "foresee")]
    assert [slot["n_asked"] for slot in world.journal.of("slot")][2] == 2
    assert "foresee_share" not in caplog.text


@pytest.mark.parametrize("strategy", ["replay-trace", OddSearch(lambda task, batch: batch())])
def test_searches_that_promise_nothing_get_no_foresee_slots(world, turns, strategy, caplog):
    world.tune(scheduler_in(world, turns(), foresee_share=0.25), strategy=strategy, trials=32)
    assert {slot["reason"] for slot in world.journal.of("slot")} == {"turn"}
    assert caplog.text.count("foresee_share has added no slot") == 1


def fails_from_second_batch_of(name):
    count = {}

    def brings(task, batch):
        count[task] = count.get(task, 0) + 1
        if task == name and count[task] > 1:
            raise ValueError("a strategy's own fault")
        return batch()

    return brings


def test_a_strategy_that_raises_is_named(world, turns, caplog):
    scheduler = scheduler_in(world, turns())
    with pytest.raises(ValueError, match="a strategy's own fault"):
        world.tune(scheduler, strategy=OddSearch(fails_from_second_batch_of("matmul32")))
    assert "matmul32: tuning failed; the run ends" in caplog.text
    assert world.journal.of("error")[-1]["task"] == "matmul32"
    assert [arm.n_trials for arm in scheduler.arms] == [16, 8, 8]


def test_inside_a_run_of_ours_a_strategy_that_raises_ends_its_task_only(world, turns, caplog):
    odd = OddSearch(fails_from_second_batch_of("matmul32"))
    scheduler = scheduler_in(world, turns())
    world.tune(scheduler, strategy=StoppableSearch(odd, lambda: False, world.journal), trials=72)
    assert [arm.n_trials for arm in scheduler.arms] == [32, 8, 32]
    assert [arm.finished for arm in scheduler.arms] == [False, True, False]
    (error,) = world.journal.of("error")
    assert (error["task"], error["where"]) == ("matmul32", "search")
    assert "matmul32: the search failed; this task ends" in caplog.text


def test_a_strategy_that_ends_its_task_is_not_asked_again(world, turns):
    policy = turns()

    def brings(task, batch):
        return None if task == "matmul16" else batch()

    scheduler = scheduler_in(world, policy)
    world.tune(scheduler, strategy=OddSearch(brings), trials=32)
    assert world.played == [1, 2, 1, 2]
    assert (scheduler.arms[0].finished, scheduler.arms[0].n_slots) == (True, 1)


@pytest.mark.timeout(120)
def test_empty_batches_without_end_are_not_waited_for(world, turns):
    asked = []

    def brings(task, batch):
        asked.append(task)
        return []

    scheduler = scheduler_in(world, turns(n_trials=4))
    world.tune(scheduler, strategy=OddSearch(brings))
    assert len(asked) == 3 * MAX_EMPTY_BATCHES
    assert all(arm.finished and arm.n_trials == 0 for arm in scheduler.arms)


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (ValueError("a policy's own fault"), "a policy's own fault"),
        (3, "named arm 3; there are arms 0 to 2"),
        (Decision(0, "x", retired=(0,)), "chose arm 0 .matmul16., which is finished"),
        (Decision(0, "x", n_trials=0), "asked for 0 trials"),
        (Decision(2, "x", scores=np.zeros(2)), r"one score per arm but got shape .2,.; there"),
        (Decision(2, "x", scores=["high", "low", "low"]), "one number per arm"),
    ],
)
def test_a_policy_that_fails_is_replaced_for_a_slot(world, script, decision, text):
    scheduler = scheduler_in(world, script([0, decision, 2]))
    world.tune(scheduler)
    assert world.played == [0, 1, 2]
    assert [slot["reason"] for slot in world.journal.of("slot")][1] == "policy-failed"
    (error,) = world.journal.of("error")
    assert error["where"] == "policy"
    assert re.search(text, error["message"])


def test_a_retired_arm_is_terminated(world, script):
    policy, ended = script([0, Decision(2, "x", retired=(0, 1)), 1, 2]), []
    scheduler = scheduler_in(world, policy, on_end=ended.append)
    world.tune(scheduler)
    assert ended == ["matmul16", "matmul32"]
    assert [arm.finished for arm in policy.seen[2]] == [True, True, False]
    # Arm 1 is no choice any more.
    assert world.played == [0, 2, 2, 2]
    assert scheduler.tasks_[0].is_terminated
    assert scheduler.remaining_tasks_ == 0


def test_the_budget_ends_the_run_also_within_a_slot(world, turns):
    scheduler = scheduler_in(world, turns(), budget_sec=30.0, slot_rounds=10)
    world.tune(scheduler)
    assert world.batches == [8] * 4  # 32 s
    assert world.journal.of("stop")[0]["reason"] == "budget"
    assert [arm.n_trials for arm in scheduler.arms] == [32, 0, 0]


def test_a_plateau_ends_the_run(world, turns):
    world.latency_ms = lambda size, number: size / min(number, 20)
    scheduler = scheduler_in(world, turns(), plateau_slots=4)
    world.tune(scheduler, sizes=(16, 32))
    # From trial 20 on nothing is gained; both have had them after slot 6.
    assert len(world.batches) == 10
    assert world.journal.of("stop")[0]["reason"] == scheduler.stop_reason == "plateau"


@pytest.mark.parametrize("resets", [True, False])
def test_a_second_use_starts_afresh(world, turns, resets):
    policy = turns() if resets else Counting()
    scheduler = scheduler_in(world, policy, budget_sec=16.0)
    for sizes in ((16, 32, 64), (16, 32)):
        world.builder._inst.sizes.clear()
        world.tune(scheduler, sizes=sizes)
        assert world.played == [0, 1]
        assert [arm.n_trials for arm in scheduler.arms] == [8, 8, 0][: len(sizes)]


def test_a_run_entered_past_python_works_and_is_recorded_from_the_next(world, turns, monkeypatch):
    scheduler = scheduler_in(world, turns())
    monkeypatch.setattr(type(scheduler), "tune", ms.task_scheduler.TaskScheduler.tune)
    for sizes in ((16, 32, 64), (16, 32)):
        world.builder._inst.sizes.clear()
        world.tune(scheduler, sizes=sizes, trials=24)
        assert world.played == [k % len(sizes) for k in range(3)]
        assert len(scheduler.arms) == len(sizes)


class Counting:
    """Plays arm 0, 1, ... of its own count; has no reset."""

    def __init__(self):
        self.n = 0

    def choose(self, arms, rng):
        self.n += 1
        return Decision((self.n - 1) % len(arms), "count")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_decides_chance(world, seed):
    courses = []
    for _ in range(2):
        world.builder._inst.sizes.clear()
        world.tune(scheduler_in(world, "random", seed=seed), trials=120)
        courses.append(world.played)
    assert courses[0] == courses[1]
    assert len(set(courses[0][3:])) > 1


def test_chance_differs_between_seeds(world):
    courses = set()
    for seed in range(3):
        world.builder._inst.sizes.clear()
        world.tune(scheduler_in(world, "random", seed=seed), trials=120)
        courses.add(tuple(world.played))
    assert len(courses) > 1


OURS = registry.PARTS["task_scheduler"].constructors


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    "strategy", ["replay-trace", AdaptiveSearch(**SMALL)], ids=["stock", "ours"]
)
def test_the_names_work_in_stock_tune_tasks(world, name, strategy):
    world.tune(name, strategy=strategy, trials=64)
    assert sum(world.batches) == len(world.database) == 64
    assert set(world.played) == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "fastest"}, "Unknown policy 'fastest'; possible are default, paper, "),
        ({"slot_rounds": 0}, "slot_rounds must be at least 1 but got 0"),
        ({"slot_sec": 0.0}, "slot_sec must be above 0 but got 0.0"),
        ({"warm_up_trials": 0}, "warm_up_trials must be at least 1 but got 0"),
        ({"patience_trials": 0}, "patience_trials must be at least 1 but got 0"),
        ({"budget_sec": -1.0}, "budget_sec must be above 0 but got -1.0"),
        ({"plateau_slots": 0}, "plateau_slots must be at least 1 but got 0"),
        ({"plateau_share": 1.0}, r"plateau_share must be in \[0, 1\) but got 1.0"),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(InvalidOptionError, match=text):
        AdaptiveScheduler(**options)
