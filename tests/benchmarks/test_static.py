import numpy as np
import pytest

from benchmarks.scheduler.static import STATIC, static
from tests.task_scheduler.test_baselines import Slots
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.testing.conformance import check_policy


@pytest.mark.parametrize("name", STATIC)
def test_without_reallocation_a_share_lapses(name):
    slots = Slots(ends={0: 2})
    picks = slots.play(static(name, 30), 100)
    assert slots.counts[0] == 2
    assert len(picks) < 30


def test_shares_are_equal_or_linear():
    equal, by_flop = Slots(flops=(1e9, 2e9, 3e9)), Slots(flops=(1e9, 2e9, 3e9))
    equal.play(static("round-robin", 30), 100)
    assert equal.counts == [10, 10, 10]
    by_flop.play(static("linear", 30), 100)
    assert by_flop.counts == [5, 10, 15]


def test_an_arm_is_retired_when_its_share_is_used():
    arms = [Arm(f"arm{k}", 1.0, 1e9, np.full(2, 5.0), 2, 2.0) for k in range(2)]
    policy, rng = static("round-robin", 4), np.random.default_rng(0)
    decision = policy.choose(arms, rng)
    assert (decision.arm, decision.retired) == (None, (0, 1))
    assert policy.choose(arms, rng).retired == ()


def test_a_static_policy_conforms():
    assert check_policy(lambda: static("round-robin", 100)).n_decisions > 4
