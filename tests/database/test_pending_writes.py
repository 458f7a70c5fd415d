"""How a backlog is written; tests/database/test_store_callback.py has what is lost and retried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.journals import MemoryJournal
from tvm_adaptive.database import pending_writes
from tvm_adaptive.database.pending_writes import FIRST_PAUSE_SEC, PendingWrites
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback.history import History


class Slow:
    """A store that is away at first, and takes 1.5 s for each batch; also the clock."""

    def __init__(self) -> None:
        self.sec = 0.0
        self.is_away = True
        self.n_refused = 0
        self.kept: list[Any] = []

    def monotonic(self) -> float:
        return self.sec

    def add(self, _task: Any, trials: list[Any]) -> None:
        if self.is_away:
            self.n_refused += 1
            raise StoreError("the server is gone.")
        self.sec += 1.5
        self.kept += trials


def test_a_slow_store_holds_the_search_up_for_seconds_only() -> None:
    slow: Any = Slow()
    task: Any = SimpleNamespace(name="gmm")
    pending = PendingWrites(slow, MemoryJournal(), clock=slow)
    for number in range(6):
        pending.put(task, [number])
    slow.is_away, slow.sec = False, 1000.0
    pending.put(task, [6])
    assert slow.kept == [0, 1]
    pending.put(task, [7])
    assert slow.kept == [0, 1, 2, 3]
    pending.flush(2.0)
    assert slow.kept == [0, 1, 2, 3, 4, 5]
    assert pending.n_missing == 2


def test_a_store_is_back_when_it_has_all_that_waited_for_it() -> None:
    slow: Any = Slow()
    journal, task = MemoryJournal(), SimpleNamespace(name="gmm")
    pending: Any = PendingWrites(slow, journal, clock=slow)
    for number in range(3):
        pending.put(task, [number])
    slow.is_away, slow.sec = False, 1000.0
    pending.put(task, [3])
    assert slow.kept == [0, 1]
    assert journal.of("store-back") == [], "a run that is killed now has not delivered all"
    pending.put(task, [4])
    pending.flush(2.0)
    assert slow.kept == [0, 1, 2, 3, 4]
    (event,) = journal.of("store-back")
    assert (event["where"], event["n_waiting"]) == ("store", 4)


def test_trials_that_were_dropped_are_missing_also_after_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_writes, "MAX_WAITING_TRIALS", 4)
    slow: Any = Slow()
    journal, task = MemoryJournal(), SimpleNamespace(name="gmm")
    pending: Any = PendingWrites(slow, journal, clock=slow)
    for number in range(6):
        pending.put(task, [number])
    slow.is_away, slow.sec = False, 1000.0
    pending.flush(1000.0)
    assert pending.n_missing == 2
    history = History()
    for event in journal.events:
        history.add({"time_sec": 0.0, **event})
    assert history.n_waiting == 2


def test_without_time_a_store_that_has_just_failed_is_not_tried_again() -> None:
    slow: Any = Slow()
    task: Any = SimpleNamespace(name="gmm")
    pending = PendingWrites(slow, MemoryJournal(), clock=slow)
    pending.put(task, [1])
    pending.flush(0.0)
    assert (slow.n_refused, pending.n_missing) == (1, 1)
    slow.is_away, slow.sec = False, FIRST_PAUSE_SEC
    pending.flush(0.0)
    assert (slow.kept, pending.n_missing) == ([1], 0)
