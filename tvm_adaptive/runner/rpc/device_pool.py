"""Which devices of a farm can be relied on, and how fast each is beside the others.

A device that fails again and again is left alone for a while, and longer each time that
it goes on failing. A *reference kernel*, timed on each, makes their times comparable.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection
from typing import Any

from tvm_adaptive.values.trial import Timing


@dataclasses.dataclass(frozen=True)
class BoardRules:
    """When a device is not used, and when its speed is measured.

    Attributes
    ----------
    max_faults : int, default 3
        In a row, until the device is left alone. One may be a lost packet.
    quarantine_sec : float, default 60.0
        How long, the first time; twice as long each time that it goes on.
    max_quarantine_sec : float, default 900.0
    calibrate_sec : float, default 300.0
        How long a reference time is believed: devices heat up and throttle.
    max_slowness : float, default 3.0
        A device that takes so many times as long as the fastest for the reference kernel
        is at fault: the time of another kernel would not scale by the same factor. The
        fastest is one that can be used now: when only slow devices are left, they are used.
    """

    max_faults: int = 3
    quarantine_sec: float = 60.0
    max_quarantine_sec: float = 900.0
    calibrate_sec: float = 300.0
    max_slowness: float = 3.0


@dataclasses.dataclass
class Board:
    """What is known of one device."""

    address: str
    n_timings: int = 0  # candidates that it measured
    n_faults: int = 0  # in a row
    n_all_faults: int = 0  # since the beginning
    n_quarantines: int = 0  # in a row: since it last measured a candidate
    free_at_sec: float = -math.inf  # monotonic time until which it is left alone
    reference: Timing | None = None  # of the reference kernel, the last time that it ran here
    calibrated_sec: float = -math.inf  # monotonic time of that


class DevicePool:
    """The devices of a farm, by their addresses."""

    def __init__(
        self,
        rules: BoardRules,
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.present: tuple[str, ...] = ()
        self._tell = tell
        self._clock = clock
        self._boards: dict[str, Board] = {}
        self._standard: Timing | None = None
        # The device that times are given for; it may have left.
        self._standard_address = ""

    def see(self, present: Collection[str]) -> None:
        """Learn which devices there are."""
        self.present = tuple(present)

    def board(self, address: str) -> Board:
        """Return what is known of a device."""
        return self._boards.setdefault(address, Board(address))

    def avoided(self) -> frozenset[str]:
        """Return the devices not to use now; if that were all, the next to be free may be."""
        now_sec = self._clock()
        resting = [board for board in self._boards.values() if board.free_at_sec > now_sec]
        avoided = {board.address for board in resting}
        if self.present and avoided >= set(self.present):
            here = [board for board in resting if board.address in self.present]
            avoided.discard(min(here, key=lambda board: board.free_at_sec).address)
        return frozenset(avoided)

    def served(self, address: str) -> None:
        """Note that a device has measured a candidate: all its faults are forgiven."""
        board = self.board(address)
        board.n_timings += 1
        board.n_faults = board.n_quarantines = 0
        board.free_at_sec = -math.inf

    def fault(self, address: str, why: str) -> None:
        """Note a fault that is the device's own, and leave it alone when there are too many."""
        board, rules = self.board(address), self.rules
        board.n_faults += 1
        board.n_all_faults += 1
        self._tell("board", address=address, state="fault", n_faults=board.n_faults, reason=why)
        # Back from there it has one chance.
        if board.n_faults < rules.max_faults and not board.n_quarantines:
            return
        rest_sec = rules.quarantine_sec * 2.0**board.n_quarantines
        rest_sec = min(rest_sec, rules.max_quarantine_sec)
        board.n_quarantines += 1
        board.free_at_sec = self._clock() + rest_sec
        self._tell("board", address=address, state="quarantined", seconds=rest_sec, reason=why)

    def needs_calibration(self, address: str) -> bool:
        """Say whether the reference kernel should run on a device.

        Not if it is the only one, unless times are given for one that has left.
        """
        if len(self.present) <= 1 and self._standard_address in ("", address):
            return False
        age_sec = self._clock() - self.board(address).calibrated_sec
        return age_sec > self.rules.calibrate_sec

    def calibrate(self, address: str, reference: Timing) -> bool:
        """Take in the time of the reference kernel; the first device sets the standard."""
        board = self.board(address)
        board.reference, board.calibrated_sec = reference, self._clock()
        if self._standard is None:
            self._standard, self._standard_address = reference, address
        self._tell("board", address=address, state="calibrated", speed=self.speed(address))
        fastest_sec = min(
            each.reference.mean_sec
            for each in self._boards.values()
            if each.reference is not None and (each is board or self._sets_bar(each))
        )
        slowness = reference.mean_sec / fastest_sec
        if slowness > self.rules.max_slowness:
            board.calibrated_sec = -math.inf
            self.fault(address, f"{slowness:.1f} times slower than the fastest")
            return False
        for other in self._boards.values():
            # One that was used while there was no faster one is looked at again.
            if other.reference is not None and (
                other.reference.mean_sec > self.rules.max_slowness * fastest_sec
            ):
                other.calibrated_sec = -math.inf
        return True

    def can_restart(self, address: str) -> bool:
        """Say whether a device may be the first one to time another reference kernel.

        One whose speed is known, as long as there is one: it says how the two compare.
        """
        known = [each for each in self._boards.values() if each.reference is not None]
        return self.board(address) in known or not any(
            each.address in self.present for each in known
        )

    def restart(self, address: str, reference: Timing) -> None:
        """Begin with another reference kernel, whose time on a calibrated device is known.

        Times are still given as the first device would have them.
        """
        standard = self.comparable(address, reference)
        for board in self._boards.values():
            board.reference, board.calibrated_sec = None, -math.inf
        self._standard = standard
        self._standard_address = self._standard_address or address
        self.calibrate(address, reference)

    def _sets_bar(self, board: Board) -> bool:
        """Say whether a device can be counted on, so that slower ones are not needed."""
        is_free = board.free_at_sec <= self._clock()
        return board.address in self.present and is_free and not board.n_faults

    def speed(self, address: str) -> float:
        """Return how many times as fast as the standard a device is; 1 while unknown."""
        reference = self.board(address).reference
        if reference is None or self._standard is None:
            return 1.0
        return self._standard.mean_sec / reference.mean_sec

    def comparable(self, address: str, timing: Timing) -> Timing:
        """Return a device's timing as the standard device would have it.

        The error of the reference times is added to the timing's own.
        """
        reference, standard = self.board(address).reference, self._standard
        if reference is None or standard is None or reference is standard:
            return timing
        parts = [
            each.stderr_sec / each.mean_sec
            for each in (timing, reference, standard)
            if math.isfinite(each.stderr_sec)
        ]
        mean_sec = timing.mean_sec * self.speed(address)
        known = math.isfinite(timing.stderr_sec)
        stderr_sec = mean_sec * math.hypot(*parts) if known else math.nan
        return dataclasses.replace(timing, mean_sec=mean_sec, stderr_sec=stderr_sec)

    def as_fields(self) -> list[dict[str, Any]]:
        """Return what is known of each device, for the journal."""
        return [
            {
                "address": address,
                "n_timings": board.n_timings,
                "n_all_faults": board.n_all_faults,
                "speed": self.speed(address),
            }
            for address, board in sorted(self._boards.items())
        ]
