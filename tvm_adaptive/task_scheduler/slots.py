"""How long a slot lasts, and when the run has spent or gained enough."""

from __future__ import annotations

import dataclasses
import math

from tvm_adaptive.errors import InvalidOptionError


@dataclasses.dataclass(frozen=True)
class SlotLength:
    """How long a slot lasts unless the policy asks for a number of trials."""

    rounds: int = 1  # batches of the search. Not used when ``sec`` is given
    # wall-clock seconds. Looked at between batches, so a slot ends with the batch during which they
    # run out; what it really took is charged
    sec: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidOptionError(f"slot_rounds must be at least 1 but got {self.rounds}.")
        if self.sec is not None and not self.sec > 0:
            raise InvalidOptionError(f"slot_sec must be above 0 but got {self.sec}.")


@dataclasses.dataclass
class Slot:
    """A slot that is being played."""

    arm: int
    start_sec: float  # monotonic time; deciding on the slot belongs to it
    # trials that the policy asked for; None to leave the length to the options
    n_asked: int | None = None
    until_success: bool = False  # whether the slot ends with the first batch that has a success
    n_rounds: int = 0  # played so far
    n_trials: int = 0
    is_dry: bool = False  # whether the last batch was empty
    has_success: bool = False  # whether any trial so far succeeded

    def add_round(self, n_trials: int, *, has_success: bool = False) -> None:
        """Count a batch that was measured."""
        self.n_rounds += 1
        self.n_trials += n_trials
        self.is_dry = n_trials == 0
        self.has_success |= has_success

    def left(self) -> int | None:
        """Return the trials that are missing of those asked for; None without a number."""
        return None if self.n_asked is None else max(1, self.n_asked - self.n_trials)

    def ends_with(self, n_trials: int, length: SlotLength) -> bool:
        """Say whether a batch that was sent is the last, whatever its results will be."""
        if self.n_asked is not None:
            return self.n_trials + n_trials >= self.n_asked
        return length.sec is None and self.n_rounds + 1 >= length.rounds

    def is_over(self, length: SlotLength, now_sec: float) -> bool:
        """Say whether the slot has had what it was given."""
        if self.until_success and self.has_success:
            return True
        if self.n_asked is not None:
            # An empty batch would be asked for again and again.
            return self.is_dry or self.n_trials >= self.n_asked
        if length.sec is not None:
            return now_sec - self.start_sec >= length.sec
        return self.n_rounds >= length.rounds


class Plateau:
    """Says when a run of slots has brought too little to go on."""

    def __init__(self, n_slots: int | None, share: float) -> None:
        if n_slots is not None and n_slots < 1:
            raise InvalidOptionError(f"plateau_slots must be at least 1 but got {n_slots}.")
        if not 0.0 <= share < 1.0:
            raise InvalidOptionError(f"plateau_share must be in [0, 1) but got {share}.")
        self.n_slots = n_slots
        self.share = share
        self._history_ms: list[float] = []

    def add(self, weighted_ms: float) -> None:
        """Note the network's milliseconds after a slot.

        Slots before each task has a result (infinite milliseconds) count for nothing.
        """
        if math.isfinite(weighted_ms):
            self._history_ms.append(weighted_ms)

    def is_reached(self) -> bool:
        """Say whether the last ``n_slots`` slots saved no more than the share."""
        if self.n_slots is None or len(self._history_ms) <= self.n_slots:
            return False
        before_ms = self._history_ms[-1 - self.n_slots]
        return before_ms - self._history_ms[-1] <= self.share * before_ms
