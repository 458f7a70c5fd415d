import dataclasses
from functools import partial

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.policy import PRESETS
from tvm_adaptive.task_scheduler.presets import POLICIES, check_policy_name, make_policy
from tvm_adaptive.tuning.config import PAPER, SchedulerConfig


def arms_of(n=3):
    return [
        Arm(f"t{k}", 1.0, 1e6, np.linspace(5.0, 4.0, 12), n_slots=1, spent_sec=6.0)
        for k in range(n)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_each_name_makes_a_policy_of_its_own(name):
    check_policy_name(name)
    first, second = make_policy(name, slot_trials=16), make_policy(name, slot_trials=16)
    assert first is not second
    decision = first.choose(arms_of(), np.random.default_rng(0))
    assert decision.arm in range(3)


@pytest.mark.parametrize("name", POLICIES)
def test_a_task_of_weight_0_breaks_no_policy(name):
    used, other, *_ = arms_of()
    idle = dataclasses.replace(used, weight=0.0)
    cold = [dataclasses.replace(each, latencies_ms=np.empty(0), n_slots=0) for each in (used, idle)]
    for arms in ([idle, *cold], [used, idle, cold[1]], [used, idle, other], [idle, idle]):
        policy = make_policy(name, slot_trials=16)
        decision = policy.choose(arms, np.random.default_rng(0))
        assert decision.arm in range(len(arms))


def test_every_preset_has_its_name():
    assert set(PRESETS) <= set(POLICIES)


def test_an_unknown_name_lists_the_known():
    for call in (check_policy_name, partial(make_policy, slot_trials=16)):
        with pytest.raises(InvalidOptionError, match="Unknown policy 'best'; possible are default"):
            call("best")


def test_the_horizon_is_the_slot():
    assert make_policy("default", slot_trials=48).options.slot_trials == 48


def test_the_paper_warms_up_with_whole_slots_whatever_is_given():
    ours = make_policy("default", slot_trials=16, warm_up_trials=7).options.warm_up
    assert ours.n_trials == 7
    paper = make_policy("paper", slot_trials=16, slot_sec=20.0, warm_up_trials=7).options
    assert (paper.warm_up.n_trials, paper.slot_sec) == (None, 20.0)


@pytest.mark.parametrize(("name", "own"), [("default", None), ("paper", 200)])
def test_patience_is_the_policys_own_unless_given(name, own):
    assert make_policy(name, slot_trials=16).options.patience_trials == own
    given = make_policy(name, slot_trials=16, patience_trials=64)
    assert given.options.patience_trials == 64


@pytest.mark.parametrize("name", ["random", "linear", "round-robin"])
def test_a_baseline_retires_an_arm_out_of_patience(name):
    stuck = Arm("stuck", 1.0, 1e6, np.array([1.0, 2.0, 2.0, 2.0]), 1, 1.0)
    fresh = Arm("fresh", 1.0, 1e6, np.array([1.0]), 1, 1.0)
    policy = make_policy(name, slot_trials=16, patience_trials=3)
    decision = policy.choose([stuck, fresh], np.random.default_rng(0))
    assert (decision.arm, decision.retired) == (1, (0,))


@pytest.mark.parametrize("name", ["epsilon-greedy", "softmax"])
def test_other_action_functions_share_the_default_belief(name):
    options = make_policy(name, slot_trials=16).options
    assert options.index == name
    assert options.method == PRESETS["default"].method


@pytest.mark.parametrize("config", [SchedulerConfig(), PAPER.scheduler])
def test_the_configurations_presets_exist(config):
    assert config.preset in PRESETS
