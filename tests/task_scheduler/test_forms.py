"""Slots for tasks that compete as forms of one part of a network."""

from __future__ import annotations

import numpy as np
import pytest

from tests.task_scheduler.test_policy import Script
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.forms import FormArms
from tvm_adaptive.task_scheduler.policy import DynaTunePolicy, PolicyOptions
from tvm_adaptive.task_scheduler.stages import end_to_end_ms
from tvm_adaptive.values.forms import NO_FORM, FormKey

DIRECT, FORM = FormKey("conv", ""), FormKey("conv", "winograd")


def arm(key=NO_FORM, latencies=(), *, weight=1.0, flop=1e9, n_slots=None, finished=False):
    latencies = np.array(latencies, dtype=float)
    n_slots = len(latencies) if n_slots is None else n_slots
    spent_sec = float(len(latencies))
    return Arm("arm", weight, flop, latencies, n_slots, spent_sec, finished, key=key)


def policy(ratio):
    return DynaTunePolicy(PolicyOptions(), Script(dict.fromkeys(range(1, 20), ratio)))


def test_forms_begin_when_all_that_is_needed_has_a_result(rng):
    arms = [arm(DIRECT, [4.0]), arm(), arm(FORM, flop=1e8), arm(FORM, flop=1e7)]
    assert policy(1.01).choose(arms, rng).arm == 1


def test_a_promising_form_goes_before_small_gains_and_is_then_completed(rng):
    arms = [arm(DIRECT, [4.0]), arm(NO_FORM, [1.0]), arm(FORM, flop=2e8), arm(FORM, flop=1e7)]
    decision = policy(1.01).choose(arms, rng)
    assert (decision.arm, decision.reason, decision.until_success) == (2, "warm-up", True)
    arms[2] = arm(FORM, [0.8], flop=2e8)
    assert policy(1.01).choose(arms, rng).arm == 3


def test_a_form_with_as_many_operations_is_never_begun(rng):
    arms = [arm(DIRECT, [4.0], flop=1e9), arm(FORM, flop=9e8), arm(FORM, flop=1e7)]
    assert policy(1.2).choose(arms, rng).arm == 0


def test_the_tasks_of_the_slower_form_share_what_they_lack():
    arms = [arm(DIRECT, [4.0]), arm(FORM, [3.0]), arm(FORM, [2.0])]
    # 1 ms behind: together they may gain 1.5 ms, of which a third counts.
    worth = FormArms(arms).worth({0: 1.0, 1: 1.0, 2: 0.5})
    assert worth == pytest.approx({0: 1.0, 1: 1.0 / 3.0, 2: 0.5 / 3.0})
    assert FormArms(arms).worth({0: 1.0, 1: 0.6, 2: 0.2}) == {0: 1.0, 1: 0.0, 2: 0.0}


def test_a_form_that_failed_is_left_alone(rng):
    lost = arm(FORM, [np.nan], n_slots=9, finished=True)
    arms = [arm(DIRECT, [4.0]), lost, arm(FORM, flop=1e7)]
    assert FormArms(arms).begun([0, 2]) == []
    assert policy(1.2).choose(arms, rng).arm == 0


def test_the_network_takes_as_long_as_its_fastest_forms():
    arms = [arm(NO_FORM, [1.0]), arm(DIRECT, [4.0]), arm(FORM, [1.0]), arm(FORM, [0.5])]
    assert end_to_end_ms(arms) == 2.5
    arms[3] = arm(FORM)
    assert end_to_end_ms(arms) == 5.0


def test_when_nothing_is_left_the_run_ends(rng):
    arms = [arm(DIRECT, [4.0], finished=True), arm(FORM, finished=True)]
    assert policy(1.2).choose(arms, rng).arm is None
