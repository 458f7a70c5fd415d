import itertools
import json
import math

import numpy as np
import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.arm_table import ArmTable, check_decision
from tvm_adaptive.task_scheduler.arms import Arm, Decision
from tvm_adaptive.task_scheduler.slot_queue import (
    RunLimits,
    Slot,
    SlotLength,
    SlotQueue,
    decision_fields,
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
