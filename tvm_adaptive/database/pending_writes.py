"""Batches on their way to a record store that may fail for a while."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback.journal import JournalWriter

logger = logging.getLogger(__name__)

# A server that is restarted is back within seconds, one that is moved within minutes; after
# that, a try each five minutes costs nothing.
FIRST_PAUSE_SEC = 2.0
MAX_PAUSE_SEC = 300.0
# A try that waits for its time limit shall not take more than a tenth of a run.
_PAUSE_PER_TRY = 10.0
# What has gathered for hours is written little by little, between the batches of the search.
_CATCH_UP_SEC = 2.0
# Trials that are read back at once.
_PAGE_TRIALS = 256
# Some 10 kB each: what cannot be spilled takes 40 MB at the most.
MAX_WAITING_TRIALS = 4096


@dataclasses.dataclass(frozen=True)
class Clock:
    """Tells the time and lets it pass."""

    now_sec: Callable[[], float]  # seconds from any moment on
    sleep: Callable[[float], None]  # takes seconds


SYSTEM_CLOCK = Clock(time.monotonic, time.sleep)


@dataclasses.dataclass(eq=False)
class _Batch:
    """Trials of one task, in memory."""

    task: StoredTask
    trials: Sequence[StoredTrial]

    @property
    def n_trials(self) -> int:
        return len(self.trials)


@dataclasses.dataclass(eq=False)
class _Spilled:
    """Trials that lie in another store, by the numbers of their rows."""

    first: int
    last: int

    @property
    def n_trials(self) -> int:
        return self.last - self.first + 1


class PendingWrites:
    """Writes batches to a store in their order; after a failure it tries again, ever later.

    A batch may be written twice if the store fails between writing and saying so.
    """

    def __init__(
        self,
        store: RecordStore,
        journal: JournalWriter,
        clock: Clock = SYSTEM_CLOCK,
        spill: RecordStore | None = None,
    ) -> None:
        self._store = store
        self._journal = journal
        self._clock = clock
        self._spill = spill
        self._waiting: deque[_Batch | _Spilled] = deque()
        self._n_dropped = 0
        self._n_failures = 0
        self._next_sec = clock.now_sec()

    @property
    def n_missing(self) -> int:
        """Trials that the store does not have."""
        return self._n_dropped + sum(each.n_trials for each in self._waiting)

    @property
    def n_in_memory(self) -> int:
        """Trials that are kept in memory."""
        return sum(each.n_trials for each in self._waiting if isinstance(each, _Batch))

    def put(
        self, task: StoredTask, trials: Sequence[StoredTrial], *, is_spilled: bool = False
    ) -> bool:
        """Take a batch, and write what waits unless it is too early for another try."""
        if trials:  # without any, it is still a time to write what waits
            self._waiting.append(_Batch(task, trials))
        if self._clock.now_sec() >= self._next_sec:
            self._write(self._clock.now_sec() + _CATCH_UP_SEC)
        if trials and self._waiting and is_spilled:
            self._forget_last()
        while self.n_in_memory > MAX_WAITING_TRIALS:
            self._drop_oldest()
        return not self._waiting

    def flush(self, limit_sec: float) -> None:
        """Write what waits, with several tries if need be."""
        end_sec = self._clock.now_sec() + limit_sec
        while not self._write(end_sec) and self._clock.now_sec() + FIRST_PAUSE_SEC < end_sec:
            self._clock.sleep(FIRST_PAUSE_SEC)

    def _write(self, end_sec: float) -> bool:
        """Write what waits until then; return whether no other try is of use now."""
        start_sec = self._clock.now_sec()
        try:
            while self._waiting:
                self._write_first()
                if self._n_failures:
                    self._journal.write("store-back", n_waiting=self.n_missing)
                self._n_failures = 0
                if self._clock.now_sec() >= end_sec:
                    break
        except StoreError as error:
            self._fail(error, self._clock.now_sec() - start_sec)
            return False
        return True

    def _write_first(self) -> None:
        first = self._waiting[0]
        if isinstance(first, _Batch):
            self._store.add(first.task, first.trials)
            self._waiting.popleft()
            return
        assert self._spill is not None
        found = self._spill.after(first.first - 1, _PAGE_TRIALS)
        rows = [row for row in found if row[0] <= first.last]
        for task, same in itertools.groupby(rows, key=lambda row: row[1]):
            some = list(same)
            self._store.add(task, [trial for _, _, trial in some])
            # If the next ones fail, these are not written again.
            first.first = some[-1][0] + 1
        if first.n_trials < 1 or not rows:
            self._waiting.popleft()

    def _fail(self, error: StoreError, took_sec: float) -> None:
        growing_sec = FIRST_PAUSE_SEC * 2.0 ** min(self._n_failures, 16)
        pause_sec = min(MAX_PAUSE_SEC, max(growing_sec, _PAUSE_PER_TRY * took_sec))
        self._n_failures += 1
        self._next_sec = self._clock.now_sec() + pause_sec
        logger.warning("%s It is tried again after %.0f s.", error, pause_sec)
        self._journal.write("error", where="store", message=str(error), n_waiting=self.n_missing)

    def _forget_last(self) -> None:
        """Keep only where the last batch lies; neighbours are one."""
        batch = self._waiting[-1]
        assert self._spill is not None
        try:
            last = self._spill.last_id()
        except StoreError:  # then it stays in memory
            return
        spilled = _Spilled(last - batch.n_trials + 1, last)
        self._waiting.pop()
        before = self._waiting[-1] if self._waiting else None
        if isinstance(before, _Spilled) and before.last + 1 == spilled.first:
            before.last = spilled.last
        else:
            self._waiting.append(spilled)

    def _drop_oldest(self) -> None:
        batch = next(each for each in self._waiting if isinstance(each, _Batch))
        self._waiting.remove(batch)
        self._n_dropped += batch.n_trials
