import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_adaptive.task_scheduler.arm_table import ArmTable
from tvm_adaptive.task_scheduler.slot_queue import least_played


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
