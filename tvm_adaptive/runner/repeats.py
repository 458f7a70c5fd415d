"""Batches whose candidates are timed beside their task's anchor, in the worker they share."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive.errors import AdaptiveError, MachineError, OutOfTimeError, WorkerError
from tvm_adaptive.measure_callback.journal import JournalWriter
from tvm_adaptive.runner.duet import Batch, Duet, Look
from tvm_adaptive.runner.stopping import PrecisionRule
from tvm_adaptive.runner.summary import MIN_TRIMMED
from tvm_adaptive.values.trial import Timing
from tvm_adaptive.values.trial_log import BatchFacts, TrialLog
from tvm_adaptive.workers.pool import Step
from tvm_adaptive.workers.scratch import ScratchFolder

logger = logging.getLogger(__name__)

# As few micro-batches as a trimmed mean needs, which one disturbed one does not shift.
REPEAT_RULE = PrecisionRule(min_batches=MIN_TRIMMED, max_batches=MIN_TRIMMED)

# Most seconds of a repeat: kernels of up to a tenth of a second are run five times. A single run
# scatters by twice as much, and the allowance makes long repeats rare.
REPEAT_SEC = 0.5

# Artifact, device type and arguments of a kernel: what a measuring function takes.
MeasureArgs = tuple[str, str, Sequence[Any]]
# Makes the step that times a kernel; True for one that is timed in many batches.
MakeStep = Callable[[MeasureArgs, bool], Generator[Step, Any, Any]]


class Repeats:
    """The anchors of a runner's tasks, and copies of their artifacts.

    MetaSchedule removes a batch's own ones.
    """

    def __init__(self, trial_log: TrialLog, journal: JournalWriter) -> None:
        self.trial_log = trial_log
        self.journal = journal
        self.duet = Duet(trial_log.noise)
        self._folder: ScratchFolder | None = None
        self._numbers = itertools.count()

    def keep(self, kernel: MeasureArgs) -> MeasureArgs | None:
        """Copy a kernel's artifact; None if that fails."""
        artifact, path = Path(kernel[0]), None
        try:
            if self._folder is None:
                # Beside the candidates' own folders: libraries can be loaded from there.
                self._folder = ScratchFolder("anchors", artifact.parent.parent)
            path = self._folder.path / f"{next(self._numbers)}{artifact.suffix}"
            shutil.copyfile(artifact, path)
        except OSError as error:
            logger.debug("%s is not kept: %s", artifact, error)
            if path is not None:  # a part of it may fill the disk
                with contextlib.suppress(OSError):
                    path.unlink()
            return None
        return (str(path), *kernel[1:])

    def drop(self, kernels: Sequence[MeasureArgs]) -> None:
        """Remove copies; a worker that has loaded one keeps it."""
        for artifact, *_ in kernels:
            # TVM links what is not linked beside it.
            for path in (artifact, f"{artifact}.so"):
                with contextlib.suppress(OSError):
                    Path(path).unlink()

    def close(self) -> None:
        """Forget the anchors and remove their artifacts."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self.duet = Duet(self.trial_log.noise)


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A candidate that has a time."""

    kernel: MeasureArgs
    index: int  # of its timing event
    cost_sec: float  # wall-clock seconds that timing it again takes


class DuetBatch:
    """A batch in the queue of a runner.

    Before and after its candidates, a worker runs the steps of :meth:`open` and :meth:`close`.
    A failure there costs a repeat or the anchor; a record that fails the second time has no time.
    """

    def __init__(self, repeats: Repeats, facts: BatchFacts, device_type: str) -> None:
        self._repeats = repeats
        self._duet = repeats.duet
        self._facts = facts
        self._device_type = device_type
        self._spent_sec = 0.0
        self._timed: dict[int, _Timed] = {}  # by the candidate's place in the batch
        self._refuted: dict[int, str] = {}  # why candidates have no time after all
        self._batch = self._duet.begin(facts.task, time.monotonic())

    def note(self, place: int, index: int, kernel: MeasureArgs, timing: Timing) -> None:
        """Note the time of a candidate."""
        # A slow kernel had fewer runs than a repeat has.
        runs_sec = min(MIN_TRIMMED * timing.mean_sec, REPEAT_SEC)
        self._timed[place] = _Timed(kernel, index, max(timing.elapsed_sec, runs_sec))
        self._batch.note(place, _look(timing), timing.stderr_sec / timing.mean_sec)

    def open(self, make_step: MakeStep) -> Generator[Step, Any, None]:
        """Time the anchor, and let candidates race against what it takes at present."""
        self._adopt_earlier()
        # The last batch of the task may have ended after this one was queued.
        self._batch = self._duet.begin(self._facts.task, time.monotonic())
        yield from self._repeat(make_step)
        if self._facts.incumbent_sec is not None:
            self._facts.incumbent_sec *= self._batch.slowness()

    def close(self, make_step: MakeStep) -> Generator[Step, Any, None]:
        """Time the best candidate and the anchor once more, and correct all times."""
        try:
            if (yield from self._time_challengers(make_step)):
                yield from self._repeat(make_step)
        finally:
            self._settle()

    def corrected(self, place: int) -> float | str | None:
        """Return a candidate's time, or why it has none; None before the batch is closed."""
        if place in self._refuted:
            return self._refuted[place]
        result = self._batch.results.get(place)
        return None if result is None else result.sec

    def _adopt_earlier(self) -> None:
        """Let the fastest kernel of an earlier attempt be the first anchor of its task."""
        task, earlier = self._facts.task, self._facts.earlier
        is_first = self._duet.anchor(task) is None and not self._duet.is_placed(task)
        if earlier is None or not is_first:
            return
        kernel = self._repeats.keep((earlier.artifact, self._device_type, earlier.args_info))
        if kernel is not None:
            cost_sec = min(MIN_TRIMMED * earlier.sec, REPEAT_SEC)
            now_sec = time.monotonic()
            self._repeats.drop(self._duet.adopt(task, kernel, earlier.sec, cost_sec, now_sec))

    def _time_challengers(self, make_step: MakeStep) -> Generator[Step, Any, bool]:
        """Time records once more; return whether the worker can still time something."""
        while (place := self._batch.challenger()) is not None:
            timed = self._timed[place]
            try:
                look = yield from self._look(make_step, timed.kernel, timed.cost_sec, is_kept=False)
            except _RepeatError as error:
                logger.info("%s: a candidate failed the second time: %s", self._facts.task, error)
                self._refuted[place] = f"Error: it failed when it was timed again: {error}"
                self._batch.drop(place)
                if self._device_type != "cpu":  # after a fault, CUDA fails in the whole process
                    return False
                continue
            if look is None:
                break
            self._batch.note(place, look)
        return True

    def _repeat(self, make_step: MakeStep) -> Generator[Step, Any, None]:
        anchor = self._batch.anchor
        if anchor is None or self._batch.is_anchor_lost:
            return
        # The first repeat of an adopted anchor, without which the batch is on another scale.
        is_due = not self._duet.is_placed(self._facts.task)
        try:
            look = yield from self._look(
                make_step, anchor.kernel, anchor.cost_sec, is_kept=True, is_due=is_due
            )
            if look is not None and self._duet.is_surprising(self._facts.task, anchor, look):
                # Slow where its arguments lie, or with the machine? Others tell.
                other = yield from self._look(
                    make_step,
                    anchor.kernel,
                    anchor.cost_sec,
                    is_kept=False,
                    is_due=is_due,
                    is_confirming=True,
                )
                look = min(look, other or look, key=lambda each: each.raw_sec)
        except _RepeatError as error:
            logger.info("%s is compared with another kernel: %s", self._facts.task, error)
            self._batch.is_anchor_lost = True
        else:
            if look is not None:
                self._batch.note_repeat(look)
                yield from self._time_next_anchor(make_step)

    def _time_next_anchor(self, make_step: MakeStep) -> Generator[Step, Any, None]:
        next_anchor = self._batch.next_anchor
        if next_anchor is None:
            return
        try:
            # With new arguments each time: their place in memory is none of its merits.
            look = yield from self._look(
                make_step, next_anchor.kernel, next_anchor.cost_sec, is_kept=False
            )
        except _RepeatError as error:
            logger.info("%s keeps its anchor: %s", self._facts.task, error)
            self._batch.drop_next_anchor()
        else:
            if look is not None:
                self._batch.note_next_anchor(look)

    def _look(
        self,
        make_step: MakeStep,
        kernel: MeasureArgs,
        cost_sec: float,
        *,
        is_kept: bool,
        is_due: bool = False,
        is_confirming: bool = False,
    ) -> Generator[Step, Any, Look | None]:
        """Time a kernel if the allowance is large enough; raises _RepeatError if it fails.

        One that is due is timed in any case, and costs no allowance. One that confirms another
        look is timed in any case, too; the next ones wait until its price is saved.
        """
        start_sec = time.monotonic()
        if not (is_due or is_confirming or self._duet.allows(cost_sec, start_sec)):
            return None
        try:
            timing = yield from make_step(kernel, is_kept)
        except (OutOfTimeError, MachineError):  # which says nothing of the kernel
            return None
        except WorkerError as error:
            raise _RepeatError(str(error)) from error
        finally:
            elapsed_sec = time.monotonic() - start_sec
            self._duet.spent_sec += 0.0 if is_due else elapsed_sec
            self._spent_sec += elapsed_sec
        is_time = isinstance(timing, Timing) and 0 < timing.mean_sec < math.inf
        if not is_time:
            raise _RepeatError(f"it took {timing!r}")
        return _look(timing)

    def _settle(self) -> None:
        """Choose the next anchor, note the errors of times, write the event."""
        batch = self._batch
        place = batch.successor()
        timed = None if place is None else self._timed[place]
        kept = None if timed is None else self._repeats.keep(timed.kernel)
        cost_sec = math.nan if timed is None else timed.cost_sec
        dropped = batch.close(kept, cost_sec, floor_sec=self._facts.floor_sec)
        self._repeats.drop(dropped)
        for each, result in batch.results.items():
            error_sec = result.relative_error * result.sec
            artifact = self._timed[each].kernel[0]
            self._repeats.trial_log.note_timing(artifact, result.sec, error_sec)
        self._repeats.journal.write("duet", **self._fields(batch, place if kept else None))

    def _fields(self, batch: Batch, place: int | None) -> dict[str, Any]:
        results = list(batch.results.values())
        return {
            "task": batch.task,
            "anchor_sec": None if batch.anchor is None else batch.anchor.sec,
            "repeats_sec": [look.raw_sec for look in batch.repeats],
            "indices": [self._timed[each].index for each in batch.results],
            "raw_sec": [result.raw_sec for result in results],
            "corrected_sec": [result.sec for result in results],
            "relative_errors": [result.relative_error for result in results],
            "next_anchor": None if place is None else self._timed[place].index,
            "noise": self._duet.noise.relative_error,
            "elapsed_sec": self._spent_sec,
        }


class _RepeatError(AdaptiveError):
    """A kernel that has been timed before could not be timed again."""


def _look(timing: Timing) -> Look:
    """Return a timing that has just ended."""
    return Look(time.monotonic() - timing.elapsed_sec / 2.0, timing.mean_sec)
