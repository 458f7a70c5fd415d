"""The options of a play-off, and the records that take part in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tvm_adaptive._tvm import TuningRecord
from tvm_adaptive.errors import check_at_least
from tvm_adaptive.runner.playoff.modules import mean_sec

# The untuned module is the slowest of all and runs only once or twice: a large convolution
# takes a minute.
REFERENCE_TIMEOUT_SEC = 120.0
# Deadline of one check or timing, unless the runner allows candidates longer ones.
CALL_TIMEOUT_SEC = 30.0
# Reasons to disqualify a record; others come from the check or the timing.
SAME = "the same schedule as a better record"
BUILD_FAILED = "build: "
SCHEDULE_FAILED = "schedule: "
# Until its results were compared, no record can win.
NOT_CHECKED = "not checked"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayoffOptions:
    """How to check and time a task's best records."""

    top_k: int = 3  # records in one play-off batch
    n_qualifiers: int = 0  # records that compete in short timings for the first batch
    qualifying_sec: float = 5.0
    prefetch: bool = True  # also time variants of the winner that prefetch weights
    timeout_sec: float = CALL_TIMEOUT_SEC
    reference_timeout_sec: float = REFERENCE_TIMEOUT_SEC
    max_sec: float = 5.0  # for the timings of one batch
    limit_sec: float = math.inf  # for everything
    repeat_ms: float = 20.0  # duration of one timing
    seed: int = 0
    scratch_dir: str | Path | None = None

    def __post_init__(self) -> None:
        check_at_least("top_k", self.top_k, 1)


class Proof(NamedTuple):
    """An earlier play-off's verdict that a record is sound, as it was written."""

    record: str  # in JSON
    run: str  # id of the run that held the play-off
    unix_sec: float  # when it was held


@dataclasses.dataclass
class Finalist:
    """A record in a play-off and its result."""

    record: TuningRecord  # as it was recorded, or its variant that prefetches weights
    recorded_sec: float  # its mean time while tuning, seconds
    playoff_sec: float = math.nan  # its time in the play-off, seconds; NaN if it was not timed
    stderr_sec: float = math.nan  # standard error of ``playoff_sec``
    disqualified: str = ""  # why it cannot win; empty if it can
    # why its results were not compared; empty if they were, and only then can it win
    unchecked: str = NOT_CHECKED
    prefetches: bool = False  # see :mod:`tvm_adaptive.models.prefetch`
    in_network: bool = False  # checked within the network, and not in a play-off
    is_draft: bool = False  # a schedule that suits the processor, of a task without trials
    proof: Proof | None = None  # where its verdict is from, if not from this run's play-off

    @property
    def is_sound(self) -> bool:
        """Whether it ran and gave the untuned module's results."""
        return not self.disqualified and not self.unchecked

    @property
    def is_refuted(self) -> bool:
        """Whether a check or a timing speaks against it."""
        return is_refutation(self.disqualified)

    def final_sec(self) -> float:
        """Return the play-off's time, or the recorded one if it was not timed."""
        return self.recorded_sec if math.isnan(self.playoff_sec) else self.playoff_sec


def is_refutation(disqualified: str) -> bool:
    """Say whether a reason to disqualify a finalist is a check or a timing that failed.

    A schedule that was not applied or built may have been short of time or memory.
    """
    no_verdict = (SAME, BUILD_FAILED, SCHEDULE_FAILED)
    return bool(disqualified) and not disqualified.startswith(no_verdict)


def refuted_ms(event: Mapping[str, Any]) -> list[float]:
    """Return the recorded milliseconds of the candidates that a ``playoff`` event says are refuted.

    Those of a draft, which was no trial, match none.
    """
    return [
        float(each["recorded_ms"])
        for each in event.get("candidates") or ()
        if is_refutation(str(each.get("disqualified") or ""))
        and each.get("recorded_ms") is not None
    ]


def as_recorded(record: TuningRecord, why: str) -> Finalist:
    """Return a record as a finalist that was not checked, and so is never deployed."""
    return Finalist(record, mean_sec(record), unchecked=why)
