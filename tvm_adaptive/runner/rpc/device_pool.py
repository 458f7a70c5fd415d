"""Which devices of a farm to use, and how fast each is, by a *reference kernel*."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tvm_adaptive.values.trial import Timing

# Rest of a device that may be unfit: the others' leases end meanwhile, and one of them takes the
# candidate that failed.
_SUSPECTED_SEC = 20.0
# Candidates in a row that fail on a device which has measured others: then the reference kernel
# says whether it still works.
_MAX_FAILURES = 2
# Such rests of a device of unknown speed while one of known speed has yet to measure, which others
# may use for hours.
_MAX_WAITS = 6


@dataclasses.dataclass(frozen=True)
class BoardRules:
    """When a device is not used, and when its speed is measured."""

    max_faults: int = 3  # in a row, until the device is quarantined; one may be a lost packet
    quarantine_sec: float = 60.0  # of the first quarantine; each one that follows is twice as long
    max_quarantine_sec: float = 900.0
    calibrate_sec: float = 300.0  # validity of a reference time: devices heat up and throttle
    # A device so many times slower than the fastest usable one has a fault: other kernels would
    # not scale by the same factor. When only slow devices are left, they are used.
    max_slowness: float = 3.0


@dataclasses.dataclass
class Device:
    """What is known of one device."""

    address: str
    n_timings: int = 0  # candidates that it measured
    n_failures: int = 0  # of candidates, in a row
    is_in_doubt: bool = False  # it has lost a candidate, and timed nothing since
    n_faults: int = 0  # in a row
    last_fault: str = ""  # why
    n_quarantines: int = 0  # since it last measured a candidate
    n_waits: int = 0  # rests in a row for a device of known speed
    free_at_sec: float = -math.inf  # end of its quarantine, monotonic time
    reference: Timing | None = None  # the last one of the reference kernel
    calibrated_sec: float = -math.inf  # when, monotonic time


class DevicePool:
    """The devices of a farm by their addresses."""

    def __init__(
        self,
        rules: BoardRules,
        log: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        *,
        earlier_speeds: Mapping[str, float] | None = None,
    ) -> None:
        self.rules = rules
        # Of devices in earlier attempts, relative to the first of them: their times are recorded.
        self._earlier_speeds = dict(earlier_speeds or {})
        self.present: Collection[str] = ()  # devices that the tracker knows
        self._log = log
        self._clock = clock
        self._devices: dict[str, Device] = {}
        # The reference timing of the first device, for which all times are given. It may have
        # left, or be of an earlier attempt.
        self._standard: Timing | None = None
        self._is_anchored = False  # whether that is on the scale of earlier attempts

    def device(self, address: str) -> Device:
        """Return what is known of a device."""
        return self._devices.setdefault(address, Device(address))

    def avoided(self) -> frozenset[str]:
        """Return the quarantined devices; if all are, not the one that is free first."""
        now_sec = self._clock()
        free_at_sec = {each.address: each.free_at_sec for each in self._devices.values()}
        avoided = {address for address, free_sec in free_at_sec.items() if free_sec > now_sec}
        if self.present and avoided >= set(self.present):
            avoided.discard(min(self.present, key=free_at_sec.__getitem__))
        return frozenset(avoided)

    def rests(self) -> dict[str, float]:
        """Return the seconds until each of the avoided devices may be used again."""
        now_sec = self._clock()
        return {address: self.device(address).free_at_sec - now_sec for address in self.avoided()}

    def suspect(self, address: str) -> bool:
        """Say whether a failure may be the device's own, so that another is to try."""
        return not self.device(address).n_timings and len(self.present) > 1

    def rest(self, address: str) -> None:
        """Let other devices try first, for a while."""
        device = self.device(address)
        device.free_at_sec = max(device.free_at_sec, self._clock() + _SUSPECTED_SEC)

    def may_be_at_fault(self, address: str) -> bool:
        """Say whether one of several devices has timed nothing since it lost a candidate."""
        return len(self.present) > 1 and self.device(address).is_in_doubt

    def note_success(self, address: str) -> None:
        """Note that a device has measured a candidate, which ends its series of faults."""
        device = self.device(address)
        device.n_timings += 1
        device.n_failures = device.n_faults = device.n_quarantines = 0
        device.is_in_doubt = False
        device.free_at_sec = -math.inf

    def note_failure(self, address: str) -> None:
        """Note that a candidate has failed on a device."""
        device = self.device(address)
        device.n_failures += 1
        if device.n_failures >= _MAX_FAILURES:
            device.calibrated_sec = -math.inf

    def note_loss(self, address: str) -> None:
        """Note that a device has lost a candidate.

        The reference kernel says if it still works; of the only device, the next candidates do.
        """
        if len(self.present) > 1:
            device = self.device(address)
            device.is_in_doubt, device.calibrated_sec = True, -math.inf

    def note_fault(self, address: str, why: str) -> None:
        """Note a fault of the device itself, and quarantine it after too many."""
        device, rules = self.device(address), self.rules
        device.n_faults += 1
        device.last_fault = why
        self._log("board", address=address, state="fault", n_faults=device.n_faults, reason=why)
        # After a quarantine one fault is enough.
        if device.n_faults < rules.max_faults and not device.n_quarantines:
            return
        rest_sec = rules.quarantine_sec * 2.0**device.n_quarantines
        rest_sec = min(rest_sec, rules.max_quarantine_sec)
        device.n_quarantines += 1
        device.free_at_sec = self._clock() + rest_sec
        self._log("board", address=address, state="quarantined", seconds=rest_sec, reason=why)

    def needs_calibration(self, address: str) -> bool:
        """Say whether to time the reference kernel on a device."""
        # Also on the only device: it may heat up, and others may join it.
        age_sec = self._clock() - self.device(address).calibrated_sec
        return age_sec > self.rules.calibrate_sec

    def calibrate(self, address: str, reference: Timing) -> bool:
        """Take a device's time of the reference kernel; return whether to use the device."""
        device = self.device(address)
        is_anchor = not self._earlier_speeds or address in self._earlier_speeds
        if self._standard is None or (is_anchor and not self._is_anchored):
            # In a resumed run it is scaled to the first device of the first attempt.
            self._standard = self.comparable(address, reference)
            self._is_anchored = is_anchor
        device.reference, device.calibrated_sec = reference, self._clock()
        device.n_failures = device.n_waits = 0
        device.is_in_doubt = False
        self._log("board", address=address, state="calibrated", speed=self.speed(address))
        known = [(each, each.reference) for each in self._devices.values() if each.reference]
        fastest_sec = min(
            timing.mean_sec for each, timing in known if each is device or self._is_usable(each)
        )
        slowness = reference.mean_sec / fastest_sec
        if slowness > self.rules.max_slowness:
            device.calibrated_sec = -math.inf
            self.note_fault(address, f"{slowness:.1f} times slower than the fastest")
            return False
        for each, timing in known:
            # A slow device that was accepted without a faster one is tested again.
            if timing.mean_sec > self.rules.max_slowness * fastest_sec:
                each.calibrated_sec = -math.inf
        return True

    def can_restart(self, address: str) -> bool:
        """Say whether a device may be the first to time another reference kernel."""
        # Its speed says how the two kernels compare, unless no present device has one.
        known = {each.address for each in self._devices.values() if each.reference is not None}
        known |= self._earlier_speeds.keys()
        has_waited = self.device(address).n_waits >= _MAX_WAITS
        return has_waited or address in known or known.isdisjoint(self.present)

    def waits_for_others(self, address: str) -> bool:
        """Say whether a device of known speed is to measure first; then this one rests.

        Without a reference kernel, there is nothing to convert its times by.
        """
        device = self.device(address)
        if self.can_restart(address):
            return False
        device.n_waits += 1
        device.last_fault = "its speed is not known yet"
        self.rest(address)
        return True

    def restart(self, address: str, reference: Timing) -> None:
        """Begin with another reference kernel; times are still given for the first device."""
        standard = self.comparable(address, reference)
        for device in self._devices.values():
            device.reference, device.calibrated_sec = None, -math.inf
        self._standard = standard
        self.calibrate(address, reference)

    def speed(self, address: str) -> float:
        """Return a device's speed relative to the first one.

        While unknown, it is that of earlier attempts, or 1.
        """
        reference = self.device(address).reference
        if reference is None or self._standard is None:
            return self._earlier_speeds.get(address, 1.0)
        return self._standard.mean_sec / reference.mean_sec

    def comparable(self, address: str, timing: Timing) -> Timing:
        """Return a device's timing scaled to the first device, with the added error."""
        speed = self.speed(address)
        if speed == 1.0:  # it is the first, or nothing is known of it
            return timing
        mean_sec, stderr_sec = timing.mean_sec * speed, math.nan
        if math.isfinite(timing.stderr_sec):
            compared = (timing, self.device(address).reference, self._standard)
            errors = [each.stderr_sec / each.mean_sec for each in compared if each is not None]
            stderr_sec = mean_sec * math.hypot(*filter(math.isfinite, errors))
        return dataclasses.replace(timing, mean_sec=mean_sec, stderr_sec=stderr_sec)

    def as_fields(self) -> list[dict[str, Any]]:
        """Return what is known of each device, for the journal."""
        return [
            {
                "address": address,
                "n_timings": device.n_timings,
                "speed": self.speed(address),
            }
            for address, device in sorted(self._devices.items())
        ]

    def _is_usable(self, device: Device) -> bool:
        is_free = device.free_at_sec <= self._clock()
        return device.address in self.present and is_free and not device.n_faults
