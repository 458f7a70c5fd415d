import math

import pytest

from tvm_adaptive.errors import InvalidOptionError
from tvm_adaptive.task_scheduler.slots import Plateau, Slot, SlotLength


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
        (lambda: Plateau(0, 0.1), "plateau_slots must be at least 1 but got 0"),
        (lambda: Plateau(1, 1.0), r"plateau_share must be in \[0, 1\) but got 1.0"),
        (lambda: Plateau(None, -0.1), r"plateau_share must be in \[0, 1\) but got -0.1"),
    ],
)
def test_options_out_of_range_are_refused(make, text):
    with pytest.raises(InvalidOptionError, match=text):
        make()


def steps_until_plateau(plateau, totals_ms):
    for n, total in enumerate(totals_ms, start=1):
        plateau.add(total)
        if plateau.is_reached():
            return n
    return None


@pytest.mark.parametrize(
    ("n_slots", "share", "totals_ms", "step"),
    [
        (2, 0.01, [10.0, 10.0, 10.0], 3),
        (2, 0.01, [10.0, 10.0, 9.0, 9.0, 9.0], 5),
        # 1 % of 10 ms is 0.1 ms: exactly that is too little, more is not.
        (1, 0.01, [10.0, 9.9], 2),
        (1, 0.01, [10.0, 9.85], None),
        (2, 0.0, [3.0, 2.0, 1.0, 1.0, 1.0], 5),
        # Before the first total nothing can be said to stand still.
        (2, 0.01, [math.inf] * 9, None),
        (2, 0.01, [math.inf] * 9 + [10.0] * 3, 12),
        (None, 0.5, [10.0] * 99, None),
    ],
)
def test_a_plateau_is_seen_when_it_is_one(n_slots, share, totals_ms, step):
    assert steps_until_plateau(Plateau(n_slots, share), totals_ms) == step


def test_a_slot_that_waits_for_a_success_ends_with_it():
    slot, length = Slot(0, 10.0, n_asked=4, until_success=True), SlotLength()
    slot.add_round(2)
    assert not slot.is_over(length, 11.0)
    slot.add_round(1, has_success=True)
    assert slot.is_over(length, 12.0)
    patient = Slot(0, 10.0, n_asked=4)
    patient.add_round(3, has_success=True)
    assert not patient.is_over(length, 12.0)
