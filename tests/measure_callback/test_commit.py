from __future__ import annotations

from tvm_adaptive.errors import MACHINE_FAILURE
from tvm_adaptive.measure_callback.commit import MAX_FAILED_ROUNDS, MachineHealth

NO_PROCESS = f"{MACHINE_FAILURE}no process could be started"


def test_a_sound_machine_gives_no_reason_to_end():
    health = MachineHealth()
    assert health.add_round([None, "crash", None]) == ""
    assert health.add_round([]) == ""


def test_a_whole_round_that_the_machine_failed_is_one():
    assert MachineHealth().add_round([NO_PROCESS, NO_PROCESS]) == NO_PROCESS


def test_so_are_several_rounds_in_a_row_with_a_failure():
    health = MachineHealth()
    rounds = [[None, NO_PROCESS]] * MAX_FAILED_ROUNDS
    assert [bool(health.add_round(each)) for each in rounds] == [False] * 2 + [True]


def test_a_sound_round_between_forgives_them():
    health = MachineHealth()
    for messages in [[None, NO_PROCESS], [None]] * MAX_FAILED_ROUNDS:
        assert health.add_round(messages) == ""
