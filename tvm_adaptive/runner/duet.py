"""Times relative to a kernel that is timed again with every batch; nothing here needs TVM.

A machine is not equally fast all the time: its clock changes, other tenants come and go. Two
kernels timed within a second share that speed, two timed a minute apart do not. So each task
has an *anchor*, one of its fastest kernels, which is timed again before and after each batch:

    slowness = raw seconds of the anchor now / seconds that it is known by
    corrected = raw seconds of a candidate / slowness

The slowness is the mean over all latest repeats that agree within the noise. On a quiet
machine these are many, and correcting adds hardly any error; when the speed changes, the
repeats before the change no longer count. If it changes within a batch, at an unknown moment,
the lower slowness is taken: a candidate may then look too slow, never too fast.

Repeats take a share of a run's seconds, so that short batches have one or none. A record that
has no repeat on both sides may be a change of the machine's speed: it counts with what it would
take at the highest speed that the machine has shown. On a steady machine that is no difference.

The minimum of many timings is lucky. So a candidate that seems to be the task's best is
timed once more within its batch, beside the anchor, and the slower of its times counts. A
kernel that is clearly faster becomes the *next anchor*: in the batches that follow each repeat is
followed by one of its timings, and the median of the ratios says what it is known by if it
takes the anchor's place. By the times that it was chosen for, the scale would become faster
with each change: on a noisy host fivefold in a thousand trials. The seconds that an anchor is
known by never change: times that MetaSchedule has recorded cannot be changed any more, and all
of a task's must be on one scale.

A resumed run has recorded times of its earlier attempts, when the machine may have been faster or
slower. There the first anchor is the fastest recorded kernel, *adopted* with its recorded time.
Its first repeat links the task's scale to the one of this attempt, in which all tasks begin at a
slowness of 1.

References
----------
Bulej, Horky, Tuma, Farquet & Prokopec (2020), "Duet Benchmarking: Improving Measurement
Accuracy in the Cloud", ICPE (there the two run at the same time, which the caches of one
machine do not allow here). Abedi & Brecht (2017), "Conducting Repeatable Experiments in
Highly Variable Cloud Computing Environments", ICPE (alternating trials).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from typing import Any

from tvm_adaptive.values.noise import MachineNoise

# Of the seconds since a run's first batch. A repeat saves a wrong choice now and then; it must
# not cost more than the candidates that it displaces would bring.
MAX_SHARE = 0.03
# Candidates of a batch that are timed again. The luckiest two or three of a batch stand out;
# after them, the next has no more reason to be lucky than any other.
MAX_SECOND_TIMINGS = 3
# An anchor is replaced by what is faster by so many standard errors (5 % error probability,
# one-sided: 1.6; the candidate was chosen among several).
_CLEAR_SIGMAS = 2.0
# Timings of a next anchor beside the anchor's repeats, of two batches: one disturbed does no harm.
_N_PAIRS = 4
# The speed of the machine as other tasks saw it is forgotten after that: load that comes and
# goes each minute has changed in half of all cases.
_SPEED_AGE_SEC = 30.0
# Of the latest repeats the median counts, so that one disturbed repeat does not.
_N_SPEEDS = 5
# Repeats of a task whose mean is its level: the error of a mean of so many is a quarter of a
# timing's, which adds 3 % to the error of a candidate.
_N_LEVELS = 20
# Repeats that differ by more standard errors are on two sides of a change of speed; without
# a change one in 370 does.
_CHANGE_SIGMAS = 3.0
# Anchors, each with a library of some 100 kB; networks have up to two hundred tasks.
MAX_ANCHORS = 256


@dataclasses.dataclass
class NextAnchor:
    """A kernel that may take the place of a task's anchor."""

    kernel: Any
    cost_sec: float  # wall-clock seconds that timing it takes
    # Logarithms of its times over the anchor's, made since it was chosen: luck has no part.
    log_ratios: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A kernel that a task's candidates are compared with."""

    sec: float  # what the kernel is known by, on the task's scale; one run
    cost_sec: float  # wall-clock seconds that timing it takes
    best_sec: float  # the fastest corrected time of the task
    # Whether the scale is the raw seconds of its first batch, or linked to them, not other tasks'
    # speed: only such tasks tell the machine's speed, or the luck of first batches would add up.
    is_raw: bool = True
    kernel: Any = None  # what is timed: of the adapter
    next: NextAnchor | None = None

    def kernels(self) -> list[Any]:
        """Return what must be kept for it."""
        return [self.kernel] if self.next is None else [self.kernel, self.next.kernel]


@dataclasses.dataclass(frozen=True)
class Look:
    """One timing of a kernel."""

    at_sec: float  # monotonic time, its middle
    raw_sec: float  # of one run


class Duet:
    """The anchors of a run's tasks, the machine's noise and its present speed."""

    def __init__(self, noise: MachineNoise | None = None, share: float = MAX_SHARE) -> None:
        self.noise = MachineNoise() if noise is None else noise
        # Repeats may take this share of all seconds since the first batch.
        self.share = share
        self.start_sec: float | None = None
        self.spent_sec = 0.0
        self._anchors: dict[str, Anchor] = {}
        # When, and the slowness.
        self._speeds: collections.deque[tuple[float, float]] = collections.deque(maxlen=_N_SPEEDS)
        # Logarithms of a task's slowness, one per repeat, the latest last.
        self._levels: dict[str, collections.deque[float]] = {}
        self._first_levels: dict[str, float] = {}  # those of tasks' first batches
        # Of tasks with an adopted anchor: slowness on the task's scale over that of this attempt's.
        self._links: dict[str, float] = {}

    def anchor(self, task: str) -> Anchor | None:
        """Return a task's anchor; None before its first batch with a success."""
        return self._anchors.get(task)

    def begin(self, task: str, now_sec: float) -> Batch:
        """Return a new batch of a task."""
        if self.start_sec is None:
            self.start_sec = now_sec
        return Batch(self, task, now_sec)

    def allows(self, cost_sec: float, now_sec: float) -> bool:
        """Say whether a repeat of that price may be made now.

        What a short batch does not allow, the next one may: where batches take less than
        thirty repeats, a repeat is made as soon as its price is saved.
        """
        assert self.start_sec is not None  # of the first batch
        return self.spent_sec + cost_sec <= self.share * (now_sec - self.start_sec)

    def set_anchor(self, task: str, anchor: Anchor | None) -> list[Any]:
        """Replace a task's anchor; return the kernels that are not needed any more."""
        old = self._anchors.pop(task, None)
        kept = [] if anchor is None else anchor.kernels()
        dropped = [] if old is None else [each for each in old.kernels() if each not in kept]
        if anchor is not None:
            self._anchors[task] = anchor
        if len(self._anchors) > MAX_ANCHORS:
            dropped += self.set_anchor(next(iter(self._anchors)), None)
        return dropped

    def adopt(
        self, task: str, kernel: Any, sec: float, cost_sec: float, now_sec: float
    ) -> list[Any]:
        """Let a kernel that an earlier attempt timed be a task's anchor; return what to drop."""
        is_raw = self.slowness(task, now_sec) == 1.0
        return self.set_anchor(task, Anchor(sec, cost_sec, sec, is_raw, kernel))

    def is_placed(self, task: str) -> bool:
        """Say whether this attempt knows how slow the machine is on a task's scale."""
        return task in self._first_levels

    def note_repeat(self, task: str, anchor: Anchor, look: Look) -> None:
        """Learn how slow the machine is now."""
        slowness = look.raw_sec / anchor.sec
        if not self.is_placed(task):  # the first repeat of an adopted anchor
            self._links[task] = slowness / self.slowness(task, look.at_sec)
            self.note_first(task, slowness)
        levels = self._levels.setdefault(task, collections.deque(maxlen=_N_LEVELS))
        levels.append(math.log(slowness))
        if anchor.is_raw:
            self._speeds.append((look.at_sec, slowness / self._links.get(task, 1.0)))

    def level(self, task: str) -> float:
        """Return the slowness that a task's latest repeats agree on; it must have one."""
        noise, mean = self.noise.quiet_error, 0.0
        for n, log in enumerate(reversed(self._levels[task])):
            # Of the difference of one from the mean of n others.
            error = noise * math.sqrt(1.0 + 1.0 / n) if n else math.inf
            if abs(log - mean) > _CHANGE_SIGMAS * error:
                break
            mean += (log - mean) / (n + 1)
        return math.exp(mean)

    @property
    def least_change(self) -> float:
        """The logarithm of the ratio of two timings from which on it is no noise."""
        return _CHANGE_SIGMAS * math.sqrt(2.0) * self.noise.quiet_error

    def is_surprising(self, task: str, anchor: Anchor, look: Look) -> bool:
        """Say whether an anchor is slower than its latest repeats, or its time, let expect."""
        level = self.level(task) if self._levels.get(task) else 1.0
        return math.log(look.raw_sec / (anchor.sec * level)) > self.least_change

    def slowness(self, task: str, at_sec: float) -> float:
        """Return raw seconds per corrected second by what tasks saw before a moment.

        That is what tasks saw lately, or else what this one saw at its last repeats; 1 without
        either.
        """
        late = [slowness for when, slowness in self._speeds if at_sec - when <= _SPEED_AGE_SEC]
        if late:
            return statistics.median(late) * self._links.get(task, 1.0)
        return self.level(task) if self._levels.get(task) else 1.0

    def note_first(self, task: str, slowness: float) -> None:
        """Learn how slow the machine was when a task got its scale."""
        self._first_levels.setdefault(task, math.log(slowness))

    def least_slowness(self, task: str) -> float:
        """Return the slowness at the highest speed that a task has seen of late, or at first."""
        logs = [self._first_levels.get(task, 0.0), *self._levels.get(task, ())]
        least = min(logs)
        return math.exp(statistics.mean(log for log in logs if log - least <= self.least_change))


@dataclasses.dataclass(frozen=True)
class Corrected:
    """A candidate's time on the scale of its task."""

    sec: float  # of one run
    relative_error: float  # its standard error over it
    raw_sec: float  # as measured first


class Batch:
    """The timings of one batch: those of its task's anchor, and its candidates'."""

    def __init__(self, duet: Duet, task: str, start_sec: float) -> None:
        self.task = task
        self.anchor = duet.anchor(task)
        self.is_anchor_lost = False  # it failed: it gives the scale, and another one follows
        self.repeats: list[Look] = []  # of the anchor, in the order of time
        self.results: dict[int, Corrected] = {}  # by the candidate's index, once it is closed
        self._duet = duet
        self._start_sec = start_sec
        self._looks: dict[int, list[Look]] = {}
        self._errors: dict[int, float] = {}  # relative standard errors of the first looks

    def note_repeat(self, look: Look) -> None:
        """Note a timing of the anchor."""
        assert self.anchor is not None
        if self.repeats:
            self._duet.noise.add_pair(self.repeats[-1].raw_sec, look.raw_sec)
        self.repeats.append(look)
        self._duet.note_repeat(self.task, self.anchor, look)

    @property
    def next_anchor(self) -> NextAnchor | None:
        """What is timed beside the anchor, to take its place."""
        return None if self.anchor is None else self.anchor.next

    def note_next_anchor(self, look: Look) -> None:
        """Note a timing of the next anchor, which follows one of the anchor."""
        assert self.next_anchor is not None
        ratio = look.raw_sec / self.repeats[-1].raw_sec
        self.next_anchor.log_ratios.append(math.log(ratio))

    def drop_next_anchor(self) -> None:
        """Forget the next anchor, which failed."""
        assert self.anchor is not None
        self.anchor = dataclasses.replace(self.anchor, next=None)

    def note(self, index: int, look: Look, relative_error: float = math.nan) -> None:
        """Note a timing of a candidate; NaN as the error of a single micro-batch."""
        self._looks.setdefault(index, []).append(look)
        self._errors.setdefault(index, relative_error)

    def drop(self, index: int) -> None:
        """Forget a candidate, which has no time after all."""
        del self._looks[index], self._errors[index]

    @property
    def change(self) -> float:
        """The logarithm of the factor by which the speed changed within the batch; 0 if not."""
        raw_secs = [look.raw_sec for look in self.repeats]
        if len(raw_secs) < 2:
            return 0.0
        factor = math.log(max(raw_secs) / min(raw_secs))
        return factor if factor > self._duet.least_change else 0.0

    def slowness(self, at_sec: float | None = None) -> float:
        """Return raw seconds per corrected second.

        If the speed changed: by the lower one of the repeats before and after a moment, or of
        all without a moment. Without a repeat it is what was known before the batch.
        """
        if self.anchor is None or not self.repeats:
            return self._duet.slowness(self.task, self._start_sec)
        if not self.change:
            return self._duet.level(self.task)
        looks = self.repeats
        if at_sec is not None:
            before = [look for look in self.repeats if look.at_sec <= at_sec]
            after = [look for look in self.repeats if look.at_sec > at_sec]
            looks = [*before[-1:], *after[:1]]
        return min(look.raw_sec for look in looks) / self.anchor.sec

    def corrected_sec(self, index: int) -> float:
        """Return a candidate's time on the scale of its task."""
        first, *again = self._looks[index]
        secs = [first.raw_sec / self.slowness()]
        # Made close to a repeat.
        secs += [look.raw_sec / self.slowness(look.at_sec) for look in again]
        return max(secs)

    def _settled_sec(self, index: int) -> float:
        """Return a candidate's time once no repeat can follow; see the module's text."""
        sec, looks = self.corrected_sec(index), self._looks[index]
        is_record = self.anchor is not None and sec < self.anchor.best_sec
        if not is_record or any(map(self._is_between_repeats, looks)):
            return sec
        return max(sec, looks[0].raw_sec / self._duet.least_slowness(self.task))

    def _is_between_repeats(self, look: Look) -> bool:
        later = [repeat.at_sec > look.at_sec for repeat in self.repeats]
        return any(later) and not all(later)

    def relative_error(self, index: int) -> float:
        """Return the relative standard error of a corrected time.

        That of the candidate is at least the machine's noise, as another moment has another
        one. The anchor's adds to it, and what a change of speed at an unknown moment leaves
        (uniform between 0 and its logarithm).
        """
        noise, own = self._duet.noise, self._errors[index]
        own = noise.micro_batch_error if math.isnan(own) else max(own, noise.relative_error)
        if not self.repeats:
            return own
        anchor = noise.relative_error / math.sqrt(len(self.repeats))
        return math.hypot(own, anchor, self.change / math.sqrt(3.0))

    def challenger(self) -> int | None:
        """Return the candidate to time again: the best, as a record or as a next anchor."""
        best = self._best()
        if self.anchor is None or self.is_anchor_lost or best is None:
            return None
        if len(self._looks[best]) > 1:
            return None
        n_again = sum(len(looks) > 1 for looks in self._looks.values())
        is_record = self.corrected_sec(best) < self.anchor.best_sec
        # A record that could not be timed again leaves an anchor that is slower than all others.
        is_wanted = is_record or (self.next_anchor is None and self._is_clearly_faster(best))
        return best if is_wanted and n_again < MAX_SECOND_TIMINGS else None

    def successor(self) -> int | None:
        """Return the candidate that becomes the task's anchor, or the next one; None for none.

        The first anchor is the first batch's best: any kernel will do. A next one has to be
        clearly faster, by both its timings.
        """
        best = self._best()
        if self.anchor is None or self.is_anchor_lost or best is None:
            return best
        if self.next_anchor is not None:
            return None
        return best if self._is_clearly_faster(best) and len(self._looks[best]) > 1 else None

    def _is_clearly_faster(self, index: int) -> bool:
        """Say whether a candidate beats the anchor by more than the noise of two timings."""
        assert self.anchor is not None
        error = math.sqrt(2.0) * self._duet.noise.relative_error
        return self.corrected_sec(index) < self.anchor.sec * math.exp(-_CLEAR_SIGMAS * error)

    def close(
        self, kernel: Any = None, cost_sec: float = math.nan, *, floor_sec: float = 0.0
    ) -> list[Any]:
        """Settle times and who is the anchor, with the successor's kernel; return what to drop."""
        index, anchor = self.successor(), self.anchor
        # No kernel is faster than the floor, whatever a correction says.
        self.results = {
            each: Corrected(
                max(self._settled_sec(each), floor_sec), self.relative_error(each), looks[0].raw_sec
            )
            for each, looks in self._looks.items()
        }
        best_sec = min([each.sec for each in self.results.values()], default=math.inf)
        if anchor is not None and not self.is_anchor_lost:
            anchor = dataclasses.replace(anchor, best_sec=min(best_sec, anchor.best_sec))
            if index is not None and kernel is not None:
                anchor = dataclasses.replace(anchor, next=NextAnchor(kernel, cost_sec))
            return self._duet.set_anchor(self.task, self._judged(anchor))
        if index is None or kernel is None:
            return self._duet.set_anchor(self.task, None)
        self._duet.note_first(self.task, self.slowness())  # which later anchors keep
        is_raw = self.slowness() == 1.0 if anchor is None else anchor.is_raw
        old_sec = math.inf if anchor is None else anchor.best_sec
        # On the scale that the batch was corrected by, which later ones keep.
        sec = self.corrected_sec(index)
        anchor = Anchor(sec, cost_sec, min(best_sec, old_sec), is_raw, kernel)
        return self._duet.set_anchor(self.task, anchor)

    def _judged(self, anchor: Anchor) -> Anchor:
        """Return the anchor or, once it has been timed often enough, the next one."""
        successor = anchor.next
        if successor is None or len(successor.log_ratios) < _N_PAIRS:
            return anchor
        log_ratio = statistics.median(successor.log_ratios)
        sec = anchor.sec * math.exp(log_ratio)
        # The time that it was chosen for may have been luck.
        best_sec = max(anchor.best_sec, min(sec, anchor.sec))
        error = math.sqrt(2.0 / _N_PAIRS) * self._duet.noise.relative_error
        if log_ratio > -_CLEAR_SIGMAS * error:
            return dataclasses.replace(anchor, best_sec=best_sec, next=None)
        return Anchor(sec, successor.cost_sec, best_sec, anchor.is_raw, successor.kernel)

    def _best(self) -> int | None:
        return min(self._looks, key=self.corrected_sec, default=None)
