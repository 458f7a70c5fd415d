from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tests.journals import MemoryJournal
from tvm_adaptive._tvm import IRModule, Schedule, Target, args_info_of, te_workload
from tvm_adaptive.database import pending_writes
from tvm_adaptive.database.pending_writes import FIRST_PAUSE_SEC, MAX_PAUSE_SEC
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.store_callback import StoreCallback
from tvm_adaptive.errors import OUT_OF_TIME, StoreDataError, StoreError
from tvm_adaptive.search_strategy.schedules import key_of
from tvm_adaptive.values.trial_log import TrialLog


class Refusing:
    """A store that refuses the first few times."""

    def __init__(self, n_refusals: int) -> None:
        self.n_refusals = n_refusals
        self.n_asked = 0
        self.kept: list[StoredTrial] = []

    def add(self, task: StoredTask, trials: list[StoredTrial]) -> None:
        self.n_asked += 1
        if self.n_asked <= self.n_refusals:
            raise StoreError("full")
        self.kept += trials


class FakeClock:
    def __init__(self) -> None:
        self.sec = 0.0

    def monotonic(self) -> float:
        return self.sec

    def sleep(self, seconds: float) -> None:
        self.sec += seconds


class Hanging:
    """A store that fails after its time limit."""

    def __init__(self, clock: FakeClock, limit_sec: float) -> None:
        self.clock = clock
        self.limit_sec = limit_sec
        self.n_asked = 0

    def add(self, task: StoredTask, trials: list[StoredTrial]) -> None:
        self.n_asked += 1
        self.clock.sec += self.limit_sec
        raise StoreError("no answer")


def callback_of(contexts: list[Any], **given: Any) -> Any:
    """Return a store callback, with stores and a clock of the test."""
    clock = given.pop("clock", FakeClock())
    defaults = {"own": None, "shared": None, "run": "run"}
    return StoreCallback(
        contexts,
        **{**defaults, "trial_log": TrialLog(), "journal": MemoryJournal(), **given},
        clock=clock,
    )


@pytest.fixture(scope="module")
def mod() -> IRModule:
    return te_workload("GMM")


@pytest.fixture
def contexts(mod: IRModule) -> list[Any]:
    target = Target({"kind": "llvm", "num-cores": 2})
    return [SimpleNamespace(mod=mod, target=target, task_name="gmm")]


def keep(
    callback: Any,
    contexts: list[Any],
    seconds: list[float | None],
    failure: str = "Traceback\n  somewhere\nBoom: it crashed",
    *,
    learned: Sequence[Mapping[str, Any]] = (),
    build_failure: str | None = None,
) -> None:
    """Hand a batch to a callback, and what the log has of it."""
    candidates, built, run = [], [], []
    for number, sec in enumerate(seconds):
        context = contexts[0]
        record = make_record(context.mod, context.target, 1.0, number + 1)
        schedule = Schedule(context.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        candidates.append(SimpleNamespace(sch=schedule, args_info=args_info_of(context.mod)))
        if number < len(learned):
            callback._inst._trial_log.note(key_of(schedule), **learned[number])
        built.append(SimpleNamespace(error_msg=build_failure))
        message = None if sec is not None else failure
        run.append(SimpleNamespace(error_msg=message, run_secs=[sec] if sec else None))
    callback._inst.apply(None, 0, candidates, built, run)


def test_a_batch_is_kept_with_what_the_model_learned_of_it(
    tmp_path: Path, contexts: list[Any]
) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    errors = (0.1, math.nan, 0.2)
    learned = [
        {"features": row, "relative_error": error} for row, error in zip(rows, errors, strict=True)
    ]
    with RecordStore(tmp_path / "records.db") as store:
        callback = callback_of(contexts, own=store)
        keep(callback, contexts, [1e-3, None, 2e-3, 3e-3], learned=learned)
        (task,) = store.tasks()
        kept = store.latest(task)
    assert task.name == "gmm"
    assert [trial.seconds for trial in kept] == [1e-3, None, 2e-3, 3e-3]
    assert [trial.failure for trial in kept] == ["", "Boom: it crashed", "", ""]
    assert [trial.error for trial in kept] == [0.1, None, 0.2, None]
    features = [trial.features for trial in kept]
    assert features[3] is None
    np.testing.assert_array_equal(np.stack([f for f in features[:3] if f is not None]), rows)
    assert {trial.run for trial in kept} == {"run"}


def test_nothing_was_learned_of_what_did_not_compile(tmp_path: Path, contexts: list[Any]) -> None:
    learned = [{"features": np.zeros(2, dtype=np.float32), "relative_error": 0.1}]
    with RecordStore(tmp_path / "records.db") as store:
        callback = callback_of(contexts, own=store)
        keep(callback, contexts, [None], learned=learned, build_failure="no such instruction")
        (trial,) = store.latest(store.tasks()[0])
    assert trial.failure == "no such instruction"
    assert (trial.features, trial.error) == (None, None)


def test_what_could_not_be_written_is_written_later(contexts: list[Any]) -> None:
    store, journal, clock = Refusing(2), MemoryJournal(), FakeClock()
    callback = callback_of(contexts, shared=store, journal=journal, clock=clock)
    keep(callback, contexts, [1e-3])
    clock.sec += FIRST_PAUSE_SEC
    keep(callback, contexts, [2e-3])
    assert store.kept == []
    keep(callback, contexts, [3e-3])  # too early for another try
    assert store.n_asked == 2
    clock.sec += 2 * FIRST_PAUSE_SEC
    keep(callback, contexts, [4e-3])
    assert [trial.seconds for trial in store.kept] == [1e-3, 2e-3, 3e-3, 4e-3]
    assert [each["event"] for each in journal.events] == ["error", "error", "store-back"]
    assert [each["n_waiting"] for each in journal.events] == [1, 2, 4]


def test_a_server_that_is_away_for_hours_gets_all_in_the_end(
    tmp_path: Path, contexts: list[Any]
) -> None:
    """Meanwhile it is asked ever less."""
    store, clock = Refusing(10**6), FakeClock()
    with RecordStore(tmp_path / "records.db") as own:
        callback = callback_of(contexts, own=own, shared=store, clock=clock)
        asked_sec = []
        for number in range(200):
            n_before = store.n_asked
            keep(callback, contexts, [1e-3 * (number + 1), None])
            if store.n_asked > n_before:
                asked_sec.append(clock.sec)
            clock.sec += 60.0
        pauses = np.diff(asked_sec)
        assert (np.diff(pauses) >= 0).all()
        assert pauses[-1] == MAX_PAUSE_SEC
        store.n_refusals = 0
        assert callback._inst.close(30.0) == 0
    assert [each.seconds for each in store.kept] == [
        seconds for number in range(200) for seconds in (1e-3 * (number + 1), None)
    ]


def test_a_store_that_hangs_costs_a_tenth_of_the_time(contexts: list[Any]) -> None:
    clock = FakeClock()
    store = Hanging(clock, 15.0)
    callback = callback_of(contexts, shared=store, clock=clock)
    while clock.sec < 3600.0:
        keep(callback, contexts, [1e-3])
        clock.sec += 5.0
    assert 0.0 < store.n_asked * 15.0 < 0.12 * 3600.0


def test_what_neither_store_takes_is_kept_in_memory_up_to_a_bound(
    contexts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_writes, "MAX_WAITING_TRIALS", 4)
    own, shared = Refusing(10**6), Refusing(10**6)
    callback = callback_of(contexts, own=own, shared=shared, clock=FakeClock())
    for number in range(6):
        keep(callback, contexts, [1e-3 * (number + 1)])
    assert callback._inst._shared.n_in_memory == 4
    shared.n_refusals = 0
    # Two are in MetaSchedule's own database only.
    assert callback._inst.close(1.0) == 2
    assert [each.seconds for each in shared.kept] == [3e-3, 4e-3, 5e-3, 6e-3]


def test_at_the_end_a_store_that_is_away_for_seconds_is_waited_for(contexts: list[Any]) -> None:
    clock = FakeClock()
    store = Refusing(4)
    callback = callback_of(contexts, shared=store, clock=clock)
    keep(callback, contexts, [1e-3])
    assert callback._inst.close(30.0) == 0
    assert len(store.kept) == 1
    gone = Refusing(10**6)
    callback = callback_of(contexts, shared=gone, clock=clock)
    keep(callback, contexts, [1e-3])
    start_sec = clock.sec
    assert callback._inst.close(30.0) == 1
    assert clock.sec - start_sec <= 30.0


class Narrow(Refusing):
    """A database that lacks a character."""

    def add(self, task: Any, trials: Any) -> None:
        if any("\u2019" in each.failure for each in trials):
            raise StoreDataError("The character has no equivalent in LATIN1.")
        super().add(task, trials)


def test_what_a_store_refuses_for_its_content_does_not_hold_up_the_rest(
    contexts: list[Any],
) -> None:
    store, journal, clock = Narrow(0), MemoryJournal(), FakeClock()
    callback = callback_of(contexts, shared=store, journal=journal, clock=clock)
    keep(callback, contexts, [None], build_failure="gcc: \u2018x\u2019 was not declared")
    keep(callback, contexts, [2e-3])
    assert [trial.seconds for trial in store.kept] == [2e-3]
    assert callback._inst.close(30.0) == 1
    assert [each["event"] for each in journal.events] == ["error"]
    assert journal.events[0]["n_waiting"] == 0


def test_what_a_store_refuses_for_its_content_costs_no_other_trial_of_its_batch(
    contexts: list[Any],
) -> None:
    store, journal = Narrow(0), MemoryJournal()
    callback = callback_of(contexts, shared=store, journal=journal)
    keep(callback, contexts, [1e-3, None, 2e-3], "gcc: \u2018x\u2019 was not declared")
    assert [trial.seconds for trial in store.kept] == [1e-3, 2e-3]
    assert callback._inst.close(30.0) == 1
    (event,) = journal.events
    assert (event["event"], event["n_waiting"], event["n_dropped"]) == ("error", 0, 1)


def test_two_stores_that_fail_share_the_time_at_the_end(contexts: list[Any]) -> None:
    clock = FakeClock()
    callback = callback_of(contexts, own=Refusing(10**6), shared=Refusing(10**6), clock=clock)
    keep(callback, contexts, [1e-3])
    start_sec = clock.sec
    assert callback._inst.close(30.0) == 1
    assert clock.sec - start_sec <= 30.0


def test_one_store_that_fails_does_not_keep_from_another(contexts: list[Any]) -> None:
    for own, shared in ((Refusing(10**6), Refusing(0)), (Refusing(0), Refusing(10**6))):
        callback = callback_of(contexts, own=own, shared=shared)
        for _ in range(5):
            keep(callback, contexts, [1e-3])
        assert sorted([len(own.kept), len(shared.kept)]) == [0, 5]


def test_the_journal_tells_the_runs_own_store_from_the_shared_one(contexts: list[Any]) -> None:
    for names in (["own"], ["shared"], ["own", "shared"]):
        journal, clock = MemoryJournal(), FakeClock()
        stores = {name: Refusing(1) for name in names}
        callback = callback_of(contexts, journal=journal, clock=clock, **stores)
        keep(callback, contexts, [1e-3])
        clock.sec += FIRST_PAUSE_SEC
        keep(callback, contexts, [1e-3])
        places = [{"own": "own store", "shared": "store"}[name] for name in names]
        for kind in ("error", "store-back"):
            assert [event["where"] for event in journal.of(kind)] == places


def test_whatever_goes_wrong_does_not_end_the_run(contexts: list[Any]) -> None:
    journal = MemoryJournal()
    callback = callback_of([], shared=Refusing(0), journal=journal)
    keep(callback, contexts, [1e-3])
    assert [each["where"] for each in journal.events] == ["store"]


def test_what_was_not_tried_for_want_of_time_is_not_kept(contexts: list[Any]) -> None:
    store: Any = Refusing(0)
    callback = callback_of(contexts, shared=store)
    keep(callback, contexts, [1e-3, None], failure=f"AdaptiveRunner: Error: {OUT_OF_TIME}")
    assert [trial.seconds for trial in store.kept] == [1e-3]
    keep(callback, contexts, [None], failure=OUT_OF_TIME)
    assert store.n_asked == 1
