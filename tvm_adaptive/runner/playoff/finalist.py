"""A record in a play-off, and what became of it."""

from __future__ import annotations

import dataclasses
import math

from tvm_adaptive._tvm import TuningRecord
from tvm_adaptive.runner.playoff.modules import mean_sec

# Why a record cannot win; others are what check or timing said.
SAME = "the same schedule as a better record"
BUILD_FAILED = "build: "
# Until its results were compared, nothing may win.
NOT_CHECKED = "not checked"


@dataclasses.dataclass
class Finalist:
    """A record in the play-off and what became of it."""

    record: TuningRecord  # as it was recorded while tuning, or its form that asks for weights ahead
    recorded_sec: float  # its mean time then, seconds, lower is better
    playoff_sec: float = math.nan  # its time in the play-off, seconds; ``nan`` if it was not timed
    stderr_sec: float = math.nan  # standard error of ``playoff_sec``
    disqualified: str = ""  # why it can't win; empty if it can
    # why its results were not compared with the untuned module's; empty if they were
    unchecked: str = NOT_CHECKED
    # whether it is a form that asks for its weights ahead, and faster for it; see
    # :mod:`tvm_adaptive.models.prefetch`
    prefetches: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether it was run and gives the untuned module's results."""
        return not self.disqualified and not self.unchecked

    def final_sec(self) -> float:
        """Return the play-off's time, or the recorded one if there was no play-off."""
        return self.recorded_sec if math.isnan(self.playoff_sec) else self.playoff_sec


def as_recorded(record: TuningRecord, why: str) -> Finalist:
    """Return a record as a finalist that was neither checked nor timed, and say why.

    It is never deployed.
    """
    return Finalist(record, mean_sec(record), unchecked=why)
