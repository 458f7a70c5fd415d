"""Batches on their way to a record store that may fail for a while."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore, add_accepted
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback.history import SHARED_STORE
from tvm_adaptive.measure_callback.journal import JournalWriter

logger = logging.getLogger(__name__)

# A restarted server is back within seconds, a moved one within minutes.
FIRST_PAUSE_SEC = 2.0
MAX_PAUSE_SEC = 300.0
# Tries that wait for their time limit take at most a tenth of a run.
_PAUSE_PER_TRY = 10.0
# A backlog of hours is written bit by bit, between the batches of the search.
_CATCH_UP_SEC = 2.0
# Of some 10 kB each: they take at most 40 MB. What is beyond is in the run's folder only.
MAX_WAITING_TRIALS = 4096


@dataclasses.dataclass(eq=False)
class PendingWrites:
    """Writes batches to a store in their order, and retries after failures, ever less often.

    A batch may be written twice, or a part of it, if the store fails between writing and
    acknowledging it.
    """

    store: RecordStore
    journal: JournalWriter
    clock: Any = time  # or a double of that module
    where: str = SHARED_STORE  # the store's name in the journal's events

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[StoredTask, Sequence[StoredTrial]]] = deque()
        self._n_dropped = self._n_failures = 0
        self._n_late = 0  # trials that waited when the store answered again
        self._next_sec = self.clock.monotonic()

    @property
    def n_in_memory(self) -> int:
        """Trials that wait for the store."""
        return sum(len(trials) for _, trials in self._waiting)

    @property
    def n_missing(self) -> int:
        """Trials that the store does not have."""
        return self._n_dropped + self.n_in_memory

    def put(self, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        """Queue a batch, and write the queue when a try is due."""
        self._waiting.append((task, trials))
        if self.clock.monotonic() >= self._next_sec:
            self._write(self.clock.monotonic() + _CATCH_UP_SEC)
        while self.n_in_memory > MAX_WAITING_TRIALS:
            self._n_dropped += len(self._waiting.popleft()[1])

    def flush(self, limit_sec: float) -> None:
        """Write the queue, with several tries if need be."""
        if limit_sec <= 0 and self.clock.monotonic() < self._next_sec:
            return  # even one try may wait for the store's time limit
        end_sec = self.clock.monotonic() + limit_sec
        while not self._write(end_sec) and self.clock.monotonic() + FIRST_PAUSE_SEC < end_sec:
            self.clock.sleep(FIRST_PAUSE_SEC)

    def _write(self, end_sec: float) -> bool:
        """Write the queue until a deadline; return False after a failure."""
        start_sec = self.clock.monotonic()
        try:
            while self._waiting:
                if self._n_failures:
                    self._n_late = self.n_in_memory
                self._add(*self._waiting[0])
                self._waiting.popleft()
                self._n_failures = 0
                # Not before all is written: the run may be killed in between.
                if self._n_late and not self._waiting:
                    self.journal.write(
                        "store-back",
                        where=self.where,
                        n_waiting=self._n_late,
                        n_dropped=self._n_dropped,
                    )
                    self._n_late = 0
                if self.clock.monotonic() >= end_sec:
                    break
        except StoreError as error:
            self._fail(error, self.clock.monotonic() - start_sec)
            return False
        return True

    def _add(self, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        """Write trials; those that the store refuses for their content are dropped."""
        if refused := add_accepted(self.store.add, task, trials):
            self._n_dropped += len(refused)
            self._write_error(refused[-1], self.n_in_memory - len(trials))

    def _fail(self, error: StoreError, took_sec: float) -> None:
        growing_sec = FIRST_PAUSE_SEC * 2.0 ** min(self._n_failures, 16)
        pause_sec = min(MAX_PAUSE_SEC, max(growing_sec, _PAUSE_PER_TRY * took_sec))
        self._n_failures += 1
        self._next_sec = self.clock.monotonic() + pause_sec
        logger.warning("%s The next try is in %.0f s.", error, pause_sec)
        self._write_error(error, self.n_in_memory)

    def _write_error(self, error: StoreError, n_waiting: int) -> None:
        fields = {"n_waiting": n_waiting, "n_dropped": self._n_dropped}
        self.journal.write("error", where=self.where, message=str(error), **fields)
