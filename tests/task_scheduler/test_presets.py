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
    first, second = make_policy(name), make_policy(name)
    assert first is not second
    decision = first.choose(arms_of(), np.random.default_rng(0))
    assert decision.arm in range(3)


def test_every_preset_has_its_name():
    assert set(PRESETS) <= set(POLICIES)


@pytest.mark.parametrize("call", [check_policy_name, make_policy])
def test_an_unknown_name_lists_the_known(call):
    with pytest.raises(InvalidOptionError, match="Unknown policy 'best'; possible are default, "):
        call("best")


@pytest.mark.parametrize(
    ("given", "slot_trials"),
    [({"batch": 16}, 16), ({"batch": 16, "slot_rounds": 3}, 48), ({}, 64)],
)
def test_the_horizon_is_the_slot(given, slot_trials):
    assert make_policy("default", **given).options.slot_trials == slot_trials


def test_the_paper_warms_up_with_whole_slots_whatever_is_given():
    ours = make_policy("default", warm_up_trials=7).options.warm_up
    assert ours.n_trials == 7
    paper = make_policy("paper", slot_sec=20.0, warm_up_trials=7).options
    assert (paper.warm_up.n_trials, paper.slot_sec) == (None, 20.0)


@pytest.mark.parametrize(("name", "own"), [("default", None), ("paper", 200)])
def test_patience_is_the_policys_own_unless_given(name, own):
    assert make_policy(name).options.patience_trials == own
    assert make_policy(name, patience_trials=64).options.patience_trials == 64


@pytest.mark.parametrize("name", ["random", "linear", "round-robin"])
def test_a_baseline_retires_an_arm_out_of_patience(name):
    stuck = Arm("stuck", 1.0, 1e6, np.array([1.0, 2.0, 2.0, 2.0]), 1, 1.0)
    fresh = Arm("fresh", 1.0, 1e6, np.array([1.0]), 1, 1.0)
    decision = make_policy(name, patience_trials=3).choose([stuck, fresh], np.random.default_rng(0))
    assert (decision.arm, decision.retired) == (1, (0,))


@pytest.mark.parametrize("name", ["epsilon-greedy", "softmax"])
def test_other_action_functions_share_the_default_belief(name):
    options = make_policy(name).options
    assert options.index == name
    assert options.method == PRESETS["default"].method


def test_further_options_reach_the_policy():
    assert make_policy("default", retire_share=0.01).options.retire_share == 0.01


@pytest.mark.parametrize("config", [SchedulerConfig(), PAPER.scheduler])
def test_the_configurations_presets_exist(config):
    assert config.preset in PRESETS
