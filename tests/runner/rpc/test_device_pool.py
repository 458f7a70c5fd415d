"""Which devices of a farm are used: faults, rest, and the reference kernel."""

from __future__ import annotations

import math

import pytest

from tvm_adaptive.runner.rpc.device_pool import BoardRules, DevicePool
from tvm_adaptive.values.trial import Timing

A, B, C = "a:1", "b:1", "c:1"
RULES = BoardRules()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def timing(mean_sec: float, relative: float = 0.0) -> Timing:
    return Timing(mean_sec, mean_sec * relative, 10, 5, "precise", 0.1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> list[tuple[str, dict]]:
    return []


@pytest.fixture
def boards(clock, told) -> DevicePool:
    boards = DevicePool(RULES, lambda event, **fields: told.append((event, fields)), clock)
    boards.see([A, B, C])
    return boards


def fail(boards, address, times):
    for _ in range(times):
        boards.fault(address, "no answer")


def test_one_fault_is_forgiven(boards):
    fail(boards, A, RULES.max_faults - 1)
    assert boards.avoided() == frozenset()
    boards.served(A)
    fail(boards, A, RULES.max_faults - 1)
    assert boards.avoided() == frozenset()


def test_too_many_faults_in_a_row_give_rest_that_ends(boards, clock, told):
    fail(boards, A, RULES.max_faults)
    assert boards.avoided() == {A}
    assert told[-1][1]["state"] == "quarantined"
    assert told[-1][1]["reason"] == "no answer"
    clock.now += RULES.quarantine_sec
    assert boards.avoided() == frozenset()


def test_the_rest_doubles_with_each_failure_after_it(boards, clock, told):
    fail(boards, A, RULES.max_faults)
    rests = []
    for _ in range(8):
        rests.append(told[-1][1]["seconds"])
        clock.now += rests[-1]
        boards.fault(A, "again")
    assert rests[:4] == [60.0, 120.0, 240.0, 480.0]
    assert max(rests) == RULES.max_quarantine_sec
    boards.served(A)
    fail(boards, A, RULES.max_faults)
    assert told[-1][1]["seconds"] == RULES.quarantine_sec


def test_the_last_one_is_used_whatever_it_did(boards, clock):
    for address in (A, B, C):
        fail(boards, address, RULES.max_faults)
        clock.now += 1.0
    assert boards.avoided() == {B, C}  # A rests no longer than the others
    boards.see([C])
    assert C not in boards.avoided()


def test_devices_that_are_gone_do_not_count(boards):
    boards.see([A, B])
    fail(boards, B, RULES.max_faults)
    fail(boards, A, RULES.max_faults)
    assert len({A, B} - boards.avoided()) == 1


def test_a_single_device_needs_no_calibration(boards):
    boards.see([A])
    assert not boards.needs_calibration(A)
    boards.see([A, B])
    assert boards.needs_calibration(A)


def test_a_calibration_is_believed_for_a_while(boards, clock):
    assert boards.calibrate(A, timing(1.0))
    assert not boards.needs_calibration(A)
    clock.now += RULES.calibrate_sec + 1.0
    assert boards.needs_calibration(A)


def test_times_are_given_as_the_first_device_has_them(boards):
    boards.calibrate(A, timing(1e-3))
    boards.calibrate(B, timing(2e-3))
    assert boards.speed(B) == 0.5
    assert boards.comparable(B, timing(4e-3)).mean_sec == pytest.approx(2e-3)
    assert boards.comparable(A, timing(4e-3)) == timing(4e-3)
    assert boards.comparable(C, timing(4e-3)) == timing(4e-3)


def test_the_reference_errors_are_passed_on(boards):
    boards.calibrate(A, timing(1e-3, 0.03))
    boards.calibrate(B, timing(2e-3, 0.04))
    found = boards.comparable(B, timing(4e-3, 0.12))
    assert found.stderr_sec == pytest.approx(2e-3 * 0.13)
    single = Timing(4e-3, math.nan, 1, 1, "raced", 0.1)
    assert math.isnan(boards.comparable(B, single).stderr_sec)


def test_a_device_that_is_far_too_slow_is_at_fault(boards, told):
    assert boards.calibrate(A, timing(1e-3))
    for _ in range(RULES.max_faults):
        assert boards.needs_calibration(B)
        assert not boards.calibrate(B, timing(4e-3))
    assert boards.avoided() == {B}
    assert "4.0 times slower" in told[-1][1]["reason"]


def test_the_slow_one_is_found_also_if_it_was_first(boards):
    assert boards.calibrate(A, timing(4e-3))
    assert boards.calibrate(B, timing(1e-3))
    assert boards.speed(B) == 4.0
    assert not boards.calibrate(A, timing(4e-3))


def test_the_record_of_each(boards):
    boards.served(B)
    boards.served(A)
    boards.served(B)
    assert [(each["address"], each["n_timings"]) for each in boards.as_fields()] == [(A, 1), (B, 2)]


def test_a_device_that_left_does_not_set_the_bar(boards):
    assert boards.calibrate(A, timing(1e-3))
    assert not boards.calibrate(B, timing(5e-3))
    boards.see([B, C])
    assert boards.calibrate(B, timing(5e-3))
    assert boards.calibrate(C, timing(4e-3))
    # Still as the first one would have them.
    assert boards.comparable(B, timing(5e-3)).mean_sec == pytest.approx(1e-3)


def test_slow_devices_are_used_while_the_fast_one_rests(boards, clock):
    assert boards.calibrate(A, timing(1e-3))
    fail(boards, A, RULES.max_faults)
    assert boards.calibrate(B, timing(5e-3))
    clock.now += RULES.quarantine_sec
    boards.served(A)
    assert boards.calibrate(A, timing(1e-3))
    assert boards.needs_calibration(B)
    assert not boards.calibrate(B, timing(5e-3))


@pytest.mark.parametrize("slowness", [3.5, 100.0])
def test_whoever_remains_is_accepted_in_the_end(boards, clock, slowness):
    """However devices come and go: a farm whose devices all answer measures."""
    boards.calibrate(A, timing(1e-3))
    boards.see([B, C])
    accepted = [boards.calibrate(each, timing(slowness * 1e-3)) for each in (B, C)]
    assert accepted == [True, True]
    boards.see([C])
    assert boards.calibrate(C, timing(slowness * 1e-3))


def test_the_only_device_is_calibrated_if_times_are_given_for_another(boards, clock):
    boards.see([A])
    boards.calibrate(A, timing(1e-3))
    clock.now += RULES.calibrate_sec + 1.0
    assert not boards.needs_calibration(A)
    boards.see([B])
    assert boards.needs_calibration(B)


def test_another_reference_kernel_leaves_times_comparable(boards):
    boards.calibrate(A, timing(1e-3))
    boards.calibrate(B, timing(2e-3))
    assert boards.can_restart(B)
    assert not boards.can_restart(C)  # its speed is not known
    boards.restart(B, timing(8e-3))  # another kernel, which would take 4 ms on A
    assert boards.speed(B) == pytest.approx(0.5)
    assert not boards.needs_calibration(B)
    assert boards.needs_calibration(A)
    assert boards.calibrate(A, timing(4e-3))
    assert boards.speed(A) == pytest.approx(1.0)
    boards.see([C])
    assert boards.can_restart(C)  # there is nobody to compare with
