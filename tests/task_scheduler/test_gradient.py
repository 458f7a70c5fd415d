import dataclasses
import math

import numpy as np
import pytest
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.baselines import GradientPolicy

FAILED = math.nan


@derived_object
class ScriptedSearch(ms.search_strategy.PySearchStrategy):
    """Gives as many candidates as the script has latencies for the next batch."""

    def __init__(self, number, script, picks, measured):
        super().__init__()
        self.number, self.script, self.picks, self.measured = number, script, picks, measured

    def _initialize_with_tune_context(self, context):
        self.context = context

    def pre_tuning(self, max_trials, num_trials_per_iter, design_spaces, database, cost_model):
        self.batches = iter(self.script)

    def post_tuning(self):
        self.context = None

    def generate_measure_candidates(self):
        self.picks.append(self.number)
        batch = next(self.batches, None)
        if batch is None:
            return None
        self.measured.extend(batch)
        candidate = ms.MeasureCandidate(tvm.s_tir.Schedule(self.context.mod), [])
        return [candidate] * len(batch)

    def notify_runner_results(self, measure_candidates, results):
        pass

    def clone(self):
        raise NotImplementedError


@derived_object
class NoBuilder(ms.builder.PyBuilder):
    def build(self, build_inputs):
        return [ms.builder.BuilderResult("nowhere", None) for _ in build_inputs]


@derived_object
class ScriptedFuture(ms.runner.PyRunnerFuture):
    def __init__(self, ms_of_run):
        super().__init__()
        self.ms_of_run = ms_of_run

    def done(self):
        return True

    def result(self):
        if math.isnan(self.ms_of_run):
            return ms.runner.RunnerResult(None, "made to fail")
        return ms.runner.RunnerResult([self.ms_of_run * 1e-3], None)


@derived_object
class ScriptedRunner(ms.runner.PyRunner):
    def __init__(self, measured):
        super().__init__()
        self.measured = measured

    def run(self, runner_inputs):
        return [ScriptedFuture(self.measured.pop(0)) for _ in runner_inputs]


def picks_of_tvm(scripts, weights):
    """Return the tasks that MetaSchedule's own scheduler picks, one after the other."""
    mod = tvm.IRModule({"main": create_te_workload("GMM", 0)})
    picks, measured = [], []
    contexts = [
        ms.TuneContext(
            mod,
            target=tvm.target.Target({"kind": "llvm", "num-cores": 1}),
            space_generator=ms.space_generator.ScheduleFn(lambda _: None),
            search_strategy=ScriptedSearch(number, script, picks, measured),
            task_name=f"task{number}",
            num_threads=1,
        )
        for number, script in enumerate(scripts)
    ]
    ms.task_scheduler.GradientBased(seed=3).tune(
        contexts,
        weights,
        max_trials_global=10**6,
        max_trials_per_task=10**6,
        num_trials_per_iter=4,
        builder=NoBuilder(),
        runner=ScriptedRunner(measured),
        measure_callbacks=[],
        database=ms.database.MemoryDatabase(),
        cost_model=ms.cost_model.RandomModel(),
    )
    return picks


def picks_of_policy(scripts, weights):
    """Return the same of our policy; as with TVM, an arm ends when it is picked in vain."""
    arms = [Arm(f"task{k}", weights[k], 1.0, np.empty(0), 0, 0.0) for k in range(len(scripts))]
    batches = [iter(script) for script in scripts]
    policy, rng, picks = GradientPolicy(), np.random.default_rng(0), []
    while (k := policy.choose(arms, rng).arm) is not None:
        picks.append(k)
        batch = next(batches[k], None)
        arm = arms[k]
        latencies = np.append(arm.latencies_ms, [] if batch is None else batch)
        arms[k] = Arm(
            arm.name, arm.weight, 1.0, latencies, arm.n_slots + (batch is not None), 0.0,
            finished=batch is None,
        )  # fmt: skip
    return picks


def scripted(seed, n_tasks):
    """Tasks that improve at their own pace; one never works, so it ties with no other."""
    rng = np.random.default_rng(seed)
    scripts = []
    for k in range(n_tasks):
        start, decay = rng.uniform(1, 20), rng.uniform(0.6, 0.98)
        script = [
            [
                FAILED if rng.random() < 0.4 else start * decay**n * rng.uniform(1, 2)
                for _ in range(rng.integers(1, 5))
            ]
            for n in range(rng.integers(3, 15))
        ]
        script[0][-1] = start
        scripts.append([[FAILED] * len(batch) for batch in script] if k == 1 else script)
    return scripts, [float(weight) for weight in rng.integers(1, 5, n_tasks)]


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_is_tvms_own(seed):
    scripts, weights = scripted(seed, n_tasks=5)
    ours = picks_of_policy(scripts, weights)
    assert ours == picks_of_tvm(scripts, weights)
    assert len(ours) == sum(len(script) + 1 for script in scripts)
    assert ours[:5] == [0, 1, 2, 3, 4]


def test_a_tie_goes_to_the_first_unless_all_are_alike():
    arms = [
        Arm(f"arm{k}", 1.0, 1.0, np.array([latency]), 1, 1.0)
        for k, latency in enumerate((1.0, 3.0, 3.0))
    ]
    fresh = [Arm(arm.name, 1.0, 1.0, np.empty(0), 0, 0.0) for arm in arms]
    policy, rng = GradientPolicy(), np.random.default_rng(0)
    assert [policy.choose(fresh, rng).arm for _ in arms] == [0, 1, 2]
    decision = policy.choose(arms, rng)
    assert (decision.arm, decision.reason, decision.unit) == (1, "gradient", "ms/batch")
    assert decision.scores == pytest.approx([0.8, 2.4, 2.4])


def test_all_alike_are_drawn_from():
    alike = [Arm(f"arm{k}", 1.0, 1.0, np.array([2.0]), 1, 1.0) for k in range(3)]
    fresh = [Arm(arm.name, 1.0, 1.0, np.empty(0), 0, 0.0) for arm in alike]
    drawn = set()
    for seed in range(20):
        policy, rng = GradientPolicy(), np.random.default_rng(seed)
        for _ in fresh:
            policy.choose(fresh, rng)
        decision = policy.choose(alike, rng)
        assert decision.reason == "tie"
        drawn.add(decision.arm)
    assert drawn == {0, 1, 2}


def test_a_batch_counts_once_its_results_are_there():
    """With batches in the background, a slot has begun long before its trials are known."""
    policy, rng = GradientPolicy(), np.random.default_rng(0)
    fresh = [Arm(f"arm{k}", 1.0, 1.0, np.empty(0), 0, 0.0) for k in range(3)]
    measured = [Arm(f"arm{k}", 1.0, 1.0, np.array([1.0 + k]), 1, 1.0) for k in range(3)]
    for k in range(3):  # the one before is measured while the next is chosen
        arms = [*measured[: max(k - 1, 0)], *fresh[max(k - 1, 0) :]]
        if k:
            sent = dataclasses.replace(fresh[k - 1], n_slots=1, finished=True, is_under_way=True)
            arms[k - 1] = sent
        assert policy.choose(arms, rng).arm == k
    decision = policy.choose(measured, rng)
    assert (decision.arm, decision.reason) == (2, "gradient")
    assert decision.scores == pytest.approx([0.8, 1.6, 2.4])


def test_a_resumed_run_goes_on_from_its_histories():
    policy, rng = GradientPolicy(), np.random.default_rng(0)
    arms = [Arm(f"arm{n}", 1.0, 1.0, np.array([4.0] * n), n, 1.0) for n in (1, 4)]
    decision = policy.choose(arms, rng)
    assert (decision.arm, decision.reason) == (0, "gradient")
    assert decision.scores == pytest.approx([0.8 * 4.0, 0.8 * 4.0 / 4])


def test_a_slot_that_was_killed_after_its_first_batch_counts():
    arms = [
        Arm("killed", 1.0, 1.0, np.array([9.0]), 0, 0.0),
        Arm("other", 1.0, 1.0, np.array([1.0]), 1, 1.0),
    ]
    assert GradientPolicy().choose(arms, np.random.default_rng(0)).arm == 0


def test_the_recent_drop_is_taken_over_the_window():
    policy, rng = GradientPolicy(), np.random.default_rng(0)
    history = [[], [8.0], [8.0, 6.0], [8.0, 6.0, 5.0], [8.0, 6.0, 5.0, 2.0]]
    for n, falling in enumerate(history):
        arms = [
            Arm("falling", 2.0, 1.0, np.array(falling), n, 1.0),
            Arm("flat", 1.0, 1.0, np.array([1.0][:n]), min(n, 1), 1.0),
        ]
        decision = policy.choose(arms, rng)
    # A fifth of the drop over three batches, and the rest of the best over all four.
    expected = 2.0 * (0.2 * (8.0 - 2.0) / 3 + 0.8 * 2.0 / 4)
    assert decision.scores == pytest.approx([expected, 0.8 * 1.0])
