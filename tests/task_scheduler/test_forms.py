"""Slots for tasks that compete as forms of one part of a network."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.task_scheduler.test_policy import Script
from tvm_adaptive.task_scheduler.arms import Arm
from tvm_adaptive.task_scheduler.forms import FormArms
from tvm_adaptive.task_scheduler.policy import DynaTunePolicy, PolicyOptions
from tvm_adaptive.task_scheduler.stages import end_to_end_ms
from tvm_adaptive.values.forms import NO_FORM, FormKey

DIRECT, FORM = FormKey("conv", ""), FormKey("conv", "winograd")


def arm(
    key=NO_FORM,
    latencies=(),
    *,
    weight=1.0,
    flop=1e9,
    n_bytes=0.0,
    n_slots=None,
    finished=False,
):
    latencies = np.array(latencies, dtype=float)
    n_slots = len(latencies) if n_slots is None else n_slots
    spent_sec = float(len(latencies))
    return Arm(
        "arm", weight, flop, latencies, n_slots, spent_sec, finished, key=key, n_bytes=n_bytes
    )


def policy(ratio):
    return DynaTunePolicy(PolicyOptions(), Script(dict.fromkeys(range(1, 20), ratio)))


def test_a_part_starts_in_the_form_of_clearly_least_work(rng):
    arms = [arm(DIRECT), arm(), arm(FORM, flop=5e8), arm(FORM, flop=1e7, n_bytes=2.5e7)]
    assert FormArms(arms).first(range(4)) == [1, 2, 3]
    assert policy(1.01).choose(arms, rng).arm == 1
    arms[3] = arm(FORM, flop=1e7, n_bytes=9e7)
    assert FormArms(arms).first(range(4)) == [0, 1]


def test_where_it_failed_a_part_starts_anew_in_its_direct_form():
    lost = arm(FORM, [np.nan], flop=1e8, n_slots=9, finished=True)
    arms = [arm(DIRECT), arm(FORM, [0.3], flop=2e8), lost]
    assert FormArms(arms).first([0, 1]) == [0]
    # It has a result that nothing needs.
    assert FormArms(arms).worth({1: 0.2}) == {1: 0.0}


def test_a_form_whose_first_batch_is_measured_has_not_failed():
    sent = dataclasses.replace(arm(FORM, flop=1e8, n_slots=1, finished=True), is_under_way=True)
    arms = [arm(DIRECT), arm(FORM, flop=2e8), sent]
    assert FormArms(arms).first([0, 1]) == [1]
    ended = dataclasses.replace(sent, is_under_way=False)
    assert FormArms([*arms[:2], ended]).first([0, 1]) == [0]


def test_a_promising_form_goes_before_small_gains_and_is_then_completed(rng):
    arms = [arm(DIRECT, [4.0]), arm(NO_FORM, [1.0]), arm(FORM, flop=2e8), arm(FORM, flop=1e7)]
    decision = policy(1.01).choose(arms, rng)
    assert (decision.arm, decision.reason, decision.until_success) == (2, "warm-up", True)
    arms[2] = arm(FORM, [0.8], flop=2e8)
    assert policy(1.01).choose(arms, rng).arm == 3


def test_a_form_waits_until_it_may_save_more_than_others_gain(rng):
    # As large as the direct one for its operations and bytes: it may still be the faster one.
    arms = [arm(DIRECT, [4.0], flop=1e9), arm(FORM, flop=6e8, n_bytes=1e8)]
    (saved_ms, sec) = FormArms(arms).openings([0, 1], 4, 1.0)[1]
    assert 0.1 < saved_ms < 1.0
    assert sec == 4.0
    assert policy(9.0).choose(arms, rng).arm == 0
    assert policy(1.01).choose(arms, rng).arm == 1


def test_what_a_form_may_save_follows_from_the_rate_of_the_network():
    arms = [arm(DIRECT, [4.0]), arm(FORM), arm(NO_FORM, [1.0], flop=1e8)]
    (slow, _) = FormArms(arms).openings([0, 1, 2], 4, 1.0)[1]
    arms[2] = arm(NO_FORM, [1.0], flop=1e10)
    (fast, _) = FormArms(arms).openings([0, 1, 2], 4, 1.0)[1]
    assert fast > 3.0 > slow
    unknown = [arm(DIRECT), arm(FORM), arm(NO_FORM, [1.0])]
    assert FormArms(unknown).openings([0, 1, 2], 4, 1.0) == {}


def test_a_part_of_weight_0_has_nothing_to_save():
    idle = [arm(DIRECT, [4.0], weight=0.0), arm(FORM, weight=0.0)]
    for other in (arm(NO_FORM, [1.0]), arm(NO_FORM, [1.0], weight=0.0)):
        assert FormArms([*idle, other]).openings([0, 1, 2], 4, 1.0) == {}
    assert FormArms(idle).worth({0: 0.0}) == {0: 0.0}


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
