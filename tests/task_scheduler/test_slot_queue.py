import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.slot_queue import (
    ArmTable,
    RunLimits,
    Slot,
    SlotLength,
    SlotQueue,
    check_decision,
    decision_fields,
    least_played,
)


def test_a_slot_of_rounds():
    slot, length = Slot(0, 10.0), SlotLength(rounds=2)
    assert not slot.is_over(length, 1e9)
    slot.add_round(16)
    assert not slot.is_over(length, 1e9)
    slot.add_round(0)
    assert slot.is_over(length, 10.0)


def test_a_slot_of_seconds_counts_from_its_start():
    slot, length = Slot(0, 10.0), SlotLength(rounds=1, sec=5.0)
    slot.add_round(16)
    assert not slot.is_over(length, 14.9)
    assert slot.is_over(length, 15.0)


def test_a_task_of_weight_0_counts_nothing_once_it_has_a_result():
    table = ArmTable(["used", "idle"], [1.0, 0.0], [1e9, 1e9])
    table.add_trials(0, [5.0])
    assert table.weighted_ms == math.inf
    table.add_trials(1, [3.0])
    assert table.weighted_ms == 5.0


def test_trials_asked_for_come_before_the_length():
    slot, length = Slot(0, 10.0, n_asked=5), SlotLength(sec=1.0)
    slot.add_round(3)
    assert not slot.is_over(length, 1e9)
    assert slot.left() == 2
    slot.add_round(2)
    assert slot.is_over(length, 10.0)


def test_an_empty_batch_ends_a_slot_of_trials():
    slot = Slot(0, 10.0, n_asked=5)
    slot.add_round(0)
    assert slot.is_over(SlotLength(), 10.0)


def test_without_a_number_none_is_left_to_ask_for():
    assert Slot(0, 10.0).left() is None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SlotLength(rounds=0), "slot_rounds must be at least 1 but got 0"),
        (lambda: SlotLength(sec=-1.0), "slot_sec must be above 0 but got -1.0"),
        (lambda: SlotLength(sec=math.nan), "slot_sec must be above 0 but got nan"),
        (lambda: RunLimits(budget_sec=0.0), "budget_sec must be above 0 but got 0.0"),
        (lambda: RunLimits(plateau_slots=0), "plateau_slots must be at least 1 but got 0"),
        (lambda: RunLimits(plateau_share=1.0), r"plateau_share must be in \[0, 1\) but got 1.0"),
        (lambda: RunLimits(plateau_share=-0.1), r"plateau_share must be in \[0, 1\) but got -0.1"),
    ],
)
def test_options_out_of_range_are_refused(make, text):
    with pytest.raises(InvalidOptionError, match=text):
        make()


@pytest.mark.parametrize(
    ("n_slots", "share", "totals_ms", "step"),
    [
        (2, 0.01, [10.0, 10.0, 10.0], 3),
        (2, 0.01, [10.0, 10.0, 9.0, 9.0, 9.0], 5),
        # 1 % of 10 ms is 0.1 ms: exactly that is too little, more is not.
        (1, 0.01, [10.0, 9.9], 2),
        (1, 0.01, [10.0, 9.85], None),
        (2, 0.0, [3.0, 2.0, 1.0, 1.0, 1.0], 5),
        (None, 0.5, [10.0] * 99, None),
    ],
)
def test_a_plateau_is_seen_when_it_is_one(n_slots, share, totals_ms, step):
    limits = RunLimits(plateau_slots=n_slots, plateau_share=share)
    reached = [n for n in range(len(totals_ms) + 1) if limits.is_plateau(totals_ms[:n])]
    assert (reached[0] if reached else None) == step


def test_a_slot_that_waits_for_a_success_ends_with_it():
    slot, length = Slot(0, 10.0, n_asked=4, until_success=True), SlotLength()
    slot.add_round(2)
    assert not slot.is_over(length, 11.0)
    slot.add_round(1, has_success=True)
    assert slot.is_over(length, 12.0)
    patient = Slot(0, 10.0, n_asked=4)
    patient.add_round(3, has_success=True)
    assert not patient.is_over(length, 12.0)


@pytest.fixture
def arms():
    return (
        Arm("a", 1.0, 1.0, np.array([3.0, 2.0]), 1, 4.0),
        Arm("b", 2.0, 1.0, np.empty(0), 0, 0.0, finished=True),
    )


@pytest.mark.parametrize(
    "decision",
    [Decision(0, "x"), Decision(0, "x", n_trials=1), Decision(None, "x", retired=(0, 1))],
)
def test_good_decisions_pass(decision, arms):
    check_decision(decision, arms)
    json.dumps(decision_fields(decision, arms), allow_nan=False)


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision(2, "x"), "named arm 2; there are arms 0 to 1"),
        (Decision(-1, "x"), "named arm -1"),
        (Decision(None, "x", retired=(5,)), "named arm 5"),
        (Decision(1, "x"), r"chose arm 1 \(b\), which is finished"),
        (Decision(0, "x", retired=(0,)), r"chose arm 0 \(a\), which is finished"),
        (Decision(0, "x", n_trials=0), "asked for 0 trials; ask for at least 1, or None"),
        (Decision(0, "x", scores=np.zeros((2, 1))), r"one score per arm but got shape \(2, 1\)"),
    ],
)
def test_bad_decisions_are_refused(decision, text, arms):
    with pytest.raises(InvalidOptionError, match=text):
        check_decision(decision, arms)


def test_what_the_journal_keeps_of_a_decision(arms):
    scores = np.array([0.25, math.nan])
    fields = decision_fields(Decision(0, "index", 4, scores, "ms/s", retired=(1,)), arms)
    assert math.isnan(fields["scores"].pop())
    assert fields == {
        "task": "a",
        "task_id": 0,
        "reason": "index",
        "n_asked": 4,
        "n_trials": 2,
        "best_ms": 2.0,
        "gain": 0.25,
        "unit": "ms/s",
        "scores": [0.25],
        "retired": ["b"],
    }


class Events(list):
    def write(self, event, **fields):
        self.append({"event": event, **fields})


@pytest.fixture
def queue():
    """Two arms, a policy that is never asked, and a clock that adds a second per look."""
    arm_table = ArmTable(["a", "b"], [1.0, 2.0], [1.0, 1.0])
    clock = itertools.count(10.0).__next__
    rng = np.random.default_rng(0)
    limits = RunLimits(budget_sec=4.0, plateau_slots=1)
    return SlotQueue(
        arm_table,
        None,
        rng,
        limits=limits,
        journal=Events(),
        clock=clock,
        terminate=lambda index: None,
    )


def test_what_the_journal_keeps_of_a_slot(queue):
    slot = Slot(0, 10.0, n_rounds=2, n_trials=8)
    queue.arm_table.add_trials(0, [3.0, 2.0])
    queue.charge(slot)
    queue.close(slot)
    assert queue.journal == [
        {
            "event": "slot-end",
            "task": "a",
            "task_id": 0,
            "n_rounds": 2,
            "n_trials": 8,
            "seconds": 1.0,
            "best_ms": 2.0,
            "weighted_ms": math.inf,
            "finished": False,
        }
    ]


def test_a_run_without_a_total_is_on_no_plateau(queue):
    for _ in range(9):
        queue.close(Slot(0, 10.0))
    assert queue.reason_to_stop() == ""
    for index in (0, 1):
        queue.arm_table.add_trials(index, [1.0])
    queue.close(Slot(0, 10.0))
    assert queue.reason_to_stop() == ""
    queue.close(Slot(0, 10.0))
    assert queue.reason_to_stop() == "plateau"
    for _ in range(4):
        queue.charge(Slot(1, 10.0))
    assert queue.reason_to_stop() == "budget"
    for index in (0, 1):
        queue.finish(index)
    assert queue.reason_to_stop() == "all-finished"


def arm_table_of(n=3):
    return ArmTable([f"t{k}" for k in range(n)], [1.0, 2.0, 3.0][:n], [0.0, 1e6, 1e9][:n])


def test_a_fresh_table_has_played_nothing():
    arm_table = arm_table_of()
    assert [arm.name for arm in arm_table.arms] == ["t0", "t1", "t2"]
    # A task that only moves data has no flop; one is what it is said to have.
    assert [arm.flop for arm in arm_table.arms] == [1.0, 1e6, 1e9]
    assert arm_table.live == [0, 1, 2]
    assert arm_table.weighted_ms == math.inf
    assert ArmTable([], [], []).weighted_ms == math.inf


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ArmTable(["a", "b"], [1.0], [1.0, 1.0])


def test_a_change_leaves_the_records_handed_out_alone():
    arm_table = arm_table_of()
    before = arm_table.arms
    arm_table.open_slot(1)
    arm_table.add_trials(1, [5.0, math.nan])
    arm_table.charge(1, 2.5)
    arm_table.charge(1, 1.5)
    after = arm_table.arms
    assert (before[1].n_trials, before[1].n_slots, before[1].spent_sec) == (0, 0, 0.0)
    assert (after[1].n_trials, after[1].n_slots, after[1].spent_sec) == (2, 1, 4.0)
    assert after[0] is before[0]
    assert after[2] is before[2]


def test_the_networks_latency_waits_for_all_but_the_given_up():
    arm_table = arm_table_of()
    arm_table.add_trials(0, [5.0, 4.0])
    arm_table.add_trials(1, [math.nan])
    arm_table.add_trials(2, [2.0])
    assert arm_table.weighted_ms == math.inf
    arm_table.finish(1)
    assert arm_table.weighted_ms == 1 * 4.0 + 3 * 2.0
    # One that finished with a result is still part of the network.
    arm_table.finish(2)
    assert arm_table.weighted_ms == 1 * 4.0 + 3 * 2.0
    assert arm_table.live == [0]


def test_least_played_is_live_and_first():
    arm_table = arm_table_of()
    arm_table.open_slot(0)
    assert least_played(arm_table.arms) == 1
    arm_table.finish(1)
    assert least_played(arm_table.arms) == 2
    arm_table.finish(2)
    assert least_played(arm_table.arms) == 0
    arm_table.finish(0)
    with pytest.raises(ValueError, match="empty"):
        least_played(arm_table.arms)


@given(
    st.lists(
        st.lists(st.floats(0.01, 100.0) | st.just(math.nan), min_size=1, max_size=6), max_size=8
    )
)
def test_the_order_of_trials_is_kept_and_latency_never_rises(batches):
    arm_table = ArmTable(["t"], [2.0], [1.0])
    totals = [math.inf]
    for batch in batches:
        arm_table.add_trials(0, batch)
        totals.append(arm_table.weighted_ms)
    flat = [value for batch in batches for value in batch]
    np.testing.assert_array_equal(arm_table.arms[0].latencies_ms, flat)
    assert totals == sorted(totals, reverse=True)
