"""When to stop searching, so that the whole command ends within its budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Of the rounds so far, the next one may take as long as the longest of this many: one
# slow task must not make every later estimate pessimistic.
_RECENT_ROUNDS = 8


class Budget:
    """Wall-clock seconds and trials that a run may spend, and what it has to keep back."""

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        spent_sec: float = 0.0,
    ) -> None:
        self._clock = clock
        self.start_sec = clock()
        self.seconds = seconds
        self.spent_sec = spent_sec
        self.reserve_sec = 0.0
        self.interrupted = False
        self.reached = False
        self._round_secs: list[float] = []
        self._round_start_sec: float | None = None
        self._is_over = False

    @property
    def elapsed_sec(self) -> float:
        """Seconds since the start, and those of earlier sittings."""
        return self._clock() - self.start_sec + self.spent_sec

    @property
    def left_sec(self) -> float:
        """Seconds until the command has to end; infinite without a limit."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed_sec

    @property
    def search_left_sec(self) -> float:
        """Seconds until the search has to end: without what is kept back, never below 0."""
        return max(0.0, self.left_sec - self.reserve_sec)

    def interrupt(self) -> None:
        """Ask for a clean stop, e.g. from a signal handler."""
        self.interrupted = True

    def reach(self) -> None:
        """Note that what the user wanted is reached."""
        self.reached = True

    def round_started(self) -> None:
        """Note that a round begins; the one before has ended."""
        now = self._clock()
        if self._round_start_sec is not None:
            self._round_secs = [*self._round_secs, now - self._round_start_sec][-_RECENT_ROUNDS:]
        self._round_start_sec = now

    @property
    def next_round_sec(self) -> float:
        """Seconds that the next round may take, from the recent ones."""
        return max(self._round_secs, default=0.0)

    def should_stop(self) -> bool:
        """Say whether no further round should begin.

        True after an interrupt, when the goal is reached, and when what is left after the
        next round would not cover ``reserve_sec``, the seconds kept back for the end of
        the command. Once true it stays so: tasks that were refused are not asked again.
        """
        if self.left_sec < self.reserve_sec + self.next_round_sec:
            self._is_over = True
        return self.interrupted or self.reached or self._is_over
