"""Batches on their way to a record store that may fail for a while."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreDataError, StoreError
from tvm_adaptive.measure_callback.journal import JournalWriter

logger = logging.getLogger(__name__)

# A restarted server is back within seconds, a moved one within minutes.
FIRST_PAUSE_SEC = 2.0
MAX_PAUSE_SEC = 300.0
# Tries that wait for their time limit take at most a tenth of a run.
_PAUSE_PER_TRY = 10.0
# A backlog of hours is written bit by bit, between the batches of the search.
_CATCH_UP_SEC = 2.0
# Trials per query of the spill store.
_PAGE_TRIALS = 256
# Of some 10 kB each: what cannot be spilled takes at most 40 MB.
MAX_WAITING_TRIALS = 4096


class _Batch(NamedTuple):
    """Trials of one task, in memory."""

    task: StoredTask
    trials: Sequence[StoredTrial]


# A batch in memory, or the ids of rows in the spill store.
_Pending = _Batch | range


def _n_trials(pending: _Pending) -> int:
    return len(pending.trials if isinstance(pending, _Batch) else pending)


@dataclasses.dataclass(eq=False)
class PendingWrites:
    """Writes batches to a store in their order, and retries after failures, ever less often.

    A batch may be written twice if the store fails between writing and acknowledging it.
    """

    store: RecordStore
    journal: JournalWriter
    clock: Any = time  # or a double of that module
    spill: RecordStore | None = None

    def __post_init__(self) -> None:
        self._waiting: deque[_Pending] = deque()
        self._n_dropped = self._n_failures = 0
        self._next_sec = self.clock.monotonic()

    @property
    def n_missing(self) -> int:
        """Trials that the store does not have."""
        return self._n_dropped + sum(map(_n_trials, self._waiting))

    @property
    def n_in_memory(self) -> int:
        """Trials kept in memory."""
        return sum(len(each.trials) for each in self._waiting if isinstance(each, _Batch))

    def put(
        self, task: StoredTask, trials: Sequence[StoredTrial], *, is_spilled: bool = False
    ) -> bool:
        """Queue a batch and write the queue when a try is due; return whether it is empty."""
        if trials:  # without any, pending batches are still written
            self._waiting.append(_Batch(task, trials))
        if self.clock.monotonic() >= self._next_sec:
            self._write(self.clock.monotonic() + _CATCH_UP_SEC)
        if trials and self._waiting and is_spilled:
            self._release_last()
        while self.n_in_memory > MAX_WAITING_TRIALS:
            oldest = next(i for i, each in enumerate(self._waiting) if isinstance(each, _Batch))
            self._n_dropped += _n_trials(self._waiting[oldest])
            del self._waiting[oldest]
        return not self._waiting

    def flush(self, limit_sec: float) -> None:
        """Write the queue, with several tries if need be."""
        end_sec = self.clock.monotonic() + limit_sec
        while not self._write(end_sec) and self.clock.monotonic() + FIRST_PAUSE_SEC < end_sec:
            self.clock.sleep(FIRST_PAUSE_SEC)

    def _write(self, end_sec: float) -> bool:
        """Write the queue until a deadline; return False after a failure."""
        start_sec = self.clock.monotonic()
        try:
            while self._waiting:
                self._write_first()
                if self._n_failures:
                    self.journal.write("store-back", n_waiting=self.n_missing)
                self._n_failures = 0
                if self.clock.monotonic() >= end_sec:
                    break
        except StoreError as error:
            self._fail(error, self.clock.monotonic() - start_sec)
            return False
        return True

    def _write_first(self) -> None:
        first = self._waiting[0]
        if isinstance(first, _Batch):
            self._add(first.task, first.trials)
            self._waiting.popleft()
            return
        assert self.spill is not None
        found = self.spill.after(first.start - 1, _PAGE_TRIALS)
        rows = [row for row in found if row[0] < first.stop]
        for task, group in itertools.groupby(rows, key=lambda row: row[1]):
            batch = list(group)
            self._add(task, [trial for _, _, trial in batch])
            # If the next batch fails, this one is not written again.
            self._waiting[0] = range(batch[-1][0] + 1, first.stop)
        if not rows or not self._waiting[0]:
            self._waiting.popleft()

    def _add(self, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        """Write trials; those that the store refuses for their content are dropped."""
        try:
            self.store.add(task, trials)
        except StoreDataError as error:
            logger.warning("%s %d trials of %s are left out.", error, len(trials), task.name)
            self._n_dropped += len(trials)
            self.journal.write("error", where="store", message=str(error), n_waiting=self.n_missing)

    def _fail(self, error: StoreError, took_sec: float) -> None:
        growing_sec = FIRST_PAUSE_SEC * 2.0 ** min(self._n_failures, 16)
        pause_sec = min(MAX_PAUSE_SEC, max(growing_sec, _PAUSE_PER_TRY * took_sec))
        self._n_failures += 1
        self._next_sec = self.clock.monotonic() + pause_sec
        logger.warning("%s The next try is in %.0f s.", error, pause_sec)
        self.journal.write("error", where="store", message=str(error), n_waiting=self.n_missing)

    def _release_last(self) -> None:
        """Replace the last batch in memory by its rows in the spill store."""
        assert self.spill is not None
        try:
            stop = self.spill.last_id() + 1
        except StoreError:  # the batch stays in memory
            return
        start = stop - _n_trials(self._waiting.pop())
        before = self._waiting[-1] if self._waiting else None
        if isinstance(before, range) and before.stop == start:
            self._waiting[-1] = range(before.start, stop)
        else:
            self._waiting.append(range(start, stop))
