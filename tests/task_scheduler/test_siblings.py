from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tvm_adaptive import AdaptiveSearch
from tvm_adaptive._tvm import te_workload
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.foresight import Foresight
from tvm_adaptive.task_scheduler.siblings import with_foresight
from tvm_adaptive.values.trial import Promise


class Always:
    """Plays arm 0."""

    def choose(self, arms: Any, rng: np.random.Generator) -> Decision:
        return Decision(0, "index")


def record(name: str, promise: Promise | None) -> Any:
    strategy = AdaptiveSearch()
    strategy._inst.promise = lambda: promise
    return SimpleNamespace(ctx=SimpleNamespace(mod=te_workload(name), search_strategy=strategy))


def test_siblings_are_tasks_of_one_anchor_and_promise_by_their_searches() -> None:
    believed = Promise(0.5, 0.9)
    records = [record("GMM", None), record("C1D", believed), record("GMM", believed)]
    policy = with_foresight(Always(), records, 0.25, 16, 1)
    assert isinstance(policy, Foresight)
    arms = [Arm("a", 1.0, 1e9, np.array([1.0]), 1, 1.0) for _ in records]
    rng = np.random.default_rng(0)
    policy.choose(arms, rng)
    second = policy.choose(arms, rng)
    assert (second.arm, second.reason, second.n_trials) == (2, "foresee", 4)


def test_without_a_share_the_policy_stays_as_it_is() -> None:
    policy = Always()
    assert with_foresight(policy, [], None, 16, 1) is policy


def test_searches_that_promise_nothing_get_no_foresee_slots() -> None:
    from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch

    stock = SimpleNamespace(
        ctx=SimpleNamespace(mod=te_workload("GMM"), search_strategy=EvolutionarySearch())
    )
    policy = with_foresight(Always(), [stock, stock], 0.25, None, 1)
    arms = [Arm("a", 1.0, 1e9, np.array([1.0]), 1, 1.0) for _ in range(2)]
    rng = np.random.default_rng(0)
    assert [policy.choose(arms, rng).reason for _ in range(2)] == ["index", "index"]
