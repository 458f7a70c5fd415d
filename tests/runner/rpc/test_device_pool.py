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
def events() -> list[tuple[str, dict]]:
    return []


@pytest.fixture
def pool(clock, events) -> DevicePool:
    pool = DevicePool(RULES, lambda event, **fields: events.append((event, fields)), clock)
    pool.present = [A, B, C]
    return pool


def fail(pool, address, times):
    for _ in range(times):
        pool.note_fault(address, "no answer")


def test_one_fault_is_forgiven(pool):
    fail(pool, A, RULES.max_faults - 1)
    assert pool.avoided() == frozenset()
    pool.note_success(A)
    fail(pool, A, RULES.max_faults - 1)
    assert pool.avoided() == frozenset()


@pytest.mark.parametrize("present", [[A], [A, B]])
def test_failures_in_a_row_ask_for_the_reference_kernel(pool, present):
    pool.present = present
    pool.restart(A, timing(1.0))
    pool.note_success(A)
    pool.note_failure(A)
    assert not pool.needs_calibration(A)
    pool.note_success(A)
    pool.note_failure(A)
    assert not pool.needs_calibration(A)
    pool.note_failure(A)
    assert pool.needs_calibration(A)
    assert pool.calibrate(A, timing(1.0))
    assert not pool.needs_calibration(A)


def test_a_device_that_has_measured_nothing_is_suspected_while_there_are_others(pool, clock):
    pool.note_success(B)
    assert not pool.suspect(B)
    assert pool.suspect(A)
    pool.rest(A)
    assert pool.avoided() == {A}
    assert pool.rests() == {A: 20.0}  # others that are held do not make it wait for longer
    clock.now += 30.0
    assert pool.avoided() == frozenset()
    assert pool.rests() == {}
    pool.present = [A]
    assert not pool.suspect(A)


def test_a_device_that_loses_a_candidate_is_in_doubt_until_it_times_something(pool):
    pool.restart(A, timing(1.0))
    assert not pool.may_be_at_fault(A)
    pool.note_loss(A)
    assert pool.may_be_at_fault(A)
    assert pool.needs_calibration(A)
    pool.calibrate(A, timing(1.0))
    assert not pool.may_be_at_fault(A)
    pool.note_loss(A)
    pool.note_success(A)
    assert not pool.may_be_at_fault(A)
    pool.note_loss(A)
    pool.present = [A]  # no other one could say more
    assert not pool.may_be_at_fault(A)


def test_too_many_faults_in_a_row_give_rest_that_ends(pool, clock, events):
    fail(pool, A, RULES.max_faults)
    assert pool.avoided() == {A}
    assert events[-1][1]["state"] == "quarantined"
    assert events[-1][1]["reason"] == "no answer"
    clock.now += RULES.quarantine_sec
    assert pool.avoided() == frozenset()


def test_the_rest_doubles_with_each_failure_after_it(pool, clock, events):
    fail(pool, A, RULES.max_faults)
    rests = []
    for _ in range(8):
        rests.append(events[-1][1]["seconds"])
        clock.now += rests[-1]
        pool.note_fault(A, "again")
    assert rests[:4] == [60.0, 120.0, 240.0, 480.0]
    assert max(rests) == RULES.max_quarantine_sec
    pool.note_success(A)
    fail(pool, A, RULES.max_faults)
    assert events[-1][1]["seconds"] == RULES.quarantine_sec


def test_the_last_one_is_used_whatever_it_did(pool, clock):
    for address in (A, B, C):
        fail(pool, address, RULES.max_faults)
        clock.now += 1.0
    assert pool.avoided() == {B, C}  # A rests no longer than the others
    pool.present = [C]
    assert C not in pool.avoided()


def test_devices_that_are_gone_do_not_count(pool):
    pool.present = [A, B]
    fail(pool, B, RULES.max_faults)
    fail(pool, A, RULES.max_faults)
    assert len({A, B} - pool.avoided()) == 1


@pytest.mark.parametrize("present", [[A], [A, B]])
def test_a_calibration_is_believed_for_a_while(pool, clock, present):
    """Also on the only device: it heats up, and another one may join it."""
    pool.present = present
    pool.restart(A, timing(1.0))
    assert not pool.needs_calibration(A)
    clock.now += RULES.calibrate_sec + 1.0
    assert pool.needs_calibration(A)


def test_times_are_given_as_the_first_device_has_them(pool):
    pool.calibrate(A, timing(1e-3))
    pool.calibrate(B, timing(2e-3))
    assert pool.speed(B) == 0.5
    assert pool.comparable(B, timing(4e-3)).mean_sec == pytest.approx(2e-3)
    assert pool.comparable(A, timing(4e-3)) == timing(4e-3)
    assert pool.comparable(C, timing(4e-3)) == timing(4e-3)


def test_the_reference_errors_are_passed_on(pool):
    pool.calibrate(A, timing(1e-3, 0.03))
    pool.calibrate(B, timing(2e-3, 0.04))
    found = pool.comparable(B, timing(4e-3, 0.12))
    assert found.stderr_sec == pytest.approx(2e-3 * 0.13)
    single = Timing(4e-3, math.nan, 1, 1, "raced", 0.1)
    assert math.isnan(pool.comparable(B, single).stderr_sec)


def test_a_device_that_is_far_too_slow_is_at_fault(pool, events):
    assert pool.calibrate(A, timing(1e-3))
    for _ in range(RULES.max_faults):
        assert pool.needs_calibration(B)
        assert not pool.calibrate(B, timing(4e-3))
    assert pool.avoided() == {B}
    assert "4.0 times slower" in events[-1][1]["reason"]


def test_the_slow_one_is_found_also_if_it_was_first(pool):
    assert pool.calibrate(A, timing(4e-3))
    assert pool.calibrate(B, timing(1e-3))
    assert pool.speed(B) == 4.0
    assert not pool.calibrate(A, timing(4e-3))


def test_the_record_of_each(pool):
    pool.note_success(B)
    pool.note_success(A)
    pool.note_success(B)
    assert [(each["address"], each["n_timings"]) for each in pool.as_fields()] == [(A, 1), (B, 2)]


def test_a_device_that_left_does_not_set_the_bar(pool):
    assert pool.calibrate(A, timing(1e-3))
    assert not pool.calibrate(B, timing(5e-3))
    pool.present = [B, C]
    assert pool.calibrate(B, timing(5e-3))
    assert pool.calibrate(C, timing(4e-3))
    # Still as the first one would have them.
    assert pool.comparable(B, timing(5e-3)).mean_sec == pytest.approx(1e-3)


def test_slow_devices_are_used_while_the_fast_one_rests(pool, clock):
    assert pool.calibrate(A, timing(1e-3))
    fail(pool, A, RULES.max_faults)
    assert pool.calibrate(B, timing(5e-3))
    clock.now += RULES.quarantine_sec
    pool.note_success(A)
    assert pool.calibrate(A, timing(1e-3))
    assert pool.needs_calibration(B)
    assert not pool.calibrate(B, timing(5e-3))


@pytest.mark.parametrize("slowness", [3.5, 100.0])
def test_whoever_remains_is_accepted_in_the_end(pool, clock, slowness):
    """However devices come and go: a farm whose devices all answer measures."""
    pool.calibrate(A, timing(1e-3))
    pool.present = [B, C]
    accepted = [pool.calibrate(each, timing(slowness * 1e-3)) for each in (B, C)]
    assert accepted == [True, True]
    pool.present = [C]
    assert pool.calibrate(C, timing(slowness * 1e-3))


def test_the_only_device_is_calibrated_if_times_are_given_for_another(pool):
    pool.present = [A]
    pool.calibrate(A, timing(1e-3))
    assert not pool.needs_calibration(A)
    pool.present = [B]
    assert pool.needs_calibration(B)


def test_another_reference_kernel_leaves_times_comparable(pool):
    pool.calibrate(A, timing(1e-3))
    pool.calibrate(B, timing(2e-3))
    assert pool.can_restart(B)
    assert not pool.can_restart(C)  # its speed is not known
    pool.restart(B, timing(8e-3))  # another kernel, which would take 4 ms on A
    assert pool.speed(B) == pytest.approx(0.5)
    assert not pool.needs_calibration(B)
    assert pool.needs_calibration(A)
    assert pool.calibrate(A, timing(4e-3))
    assert pool.speed(A) == pytest.approx(1.0)
    pool.present = [C]
    assert pool.can_restart(C)  # there is nobody to compare with


def resumed(clock, events, *present):
    """Return the pool of a resumed run, whose earlier attempt had some events."""
    speeds = {
        fields["address"]: fields["speed"]
        for _, fields in events
        if fields["state"] == "calibrated"
    }
    later = DevicePool(RULES, lambda *_, **__: None, clock, earlier_speeds=speeds)
    later.present = present
    return later


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_resumed_run_gives_times_for_the_same_device(pool, clock, events, is_chosen):
    pool.calibrate(A, timing(1e-3))
    pool.calibrate(B, timing(2e-3))
    expected = pool.comparable(B, timing(4e-3))
    later = resumed(clock, events, A, B)
    assert later.speed(B) == 0.5  # candidates race with it
    assert later.comparable(B, timing(4e-3)).mean_sec == pytest.approx(expected.mean_sec)
    begin = later.restart if is_chosen else later.calibrate
    begin(B, timing(6e-3, 0.03))  # it answers first, with another kernel
    assert later.speed(B) == pytest.approx(0.5)
    found = later.comparable(B, timing(4e-3, 0.04))
    assert found.mean_sec == pytest.approx(expected.mean_sec)
    assert found.stderr_sec >= 0.04 * found.mean_sec
    assert later.calibrate(A, timing(3e-3))
    assert later.comparable(A, timing(4e-3)).mean_sec == pytest.approx(4e-3)
    # One that earlier attempts did not have is as fast as it is.
    assert later.calibrate(C, timing(1.5e-3))
    assert later.speed(C) == pytest.approx(2.0)


def test_a_resumed_run_begins_anew_with_a_device_that_nothing_is_known_of(pool, clock, events):
    pool.calibrate(A, timing(1e-3))
    later = resumed(clock, events, C)
    later.restart(C, timing(2e-3))
    assert later.speed(C) == 1.0
    assert later.comparable(C, timing(4e-3, 0.1)) == timing(4e-3, 0.1)


def test_a_device_of_unknown_speed_waits_for_one_of_known_speed(pool, clock, events):
    pool.calibrate(A, timing(1e-3))
    later = resumed(clock, events, A, C)
    assert later.can_restart(A)
    assert not later.can_restart(C)
    assert not later.waits_for_others(A)
    start_sec = clock.now
    while later.waits_for_others(C):
        assert later.rests() == {C: 20.0}
        clock.now += 20.0
    assert clock.now - start_sec == 120.0  # the other one may be in use for hours
    later.restart(A, timing(2e-3))
    later.calibrate(C, timing(1e-3))
    assert later.speed(C) == pytest.approx(2.0)


def test_a_device_that_has_waited_is_the_standard_until_one_of_known_speed_comes(
    pool, clock, events
):
    pool.calibrate(A, timing(1e-3))
    pool.calibrate(B, timing(2e-3))
    later = resumed(clock, events, A, B, C)
    while later.waits_for_others(C):
        clock.now += 20.0
    assert later.can_restart(C)  # two such devices compare with each other at least
    later.restart(C, timing(1e-3))
    assert later.speed(C) == 1.0
    assert later.calibrate(B, timing(2.5e-3))
    assert (later.speed(B), later.speed(C)) == (0.5, pytest.approx(1.25))
