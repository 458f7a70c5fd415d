"""What a resumed run knows, and messages about a store that could not be written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.database.conftest import make_record
from tests.journals import MemoryJournal
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import te_workload, workload_key
from tvm_adaptive.database.location import RUN_STORE, displayed, url_of
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.measure_callback.history import History, TaskHistory
from tvm_adaptive.tuning import tune, warm_start
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.prior_trials import WarmStart


class Written:
    def __init__(self, n_missing: int) -> None:
        self.n_missing = n_missing
        self.limits_sec: list[float] = []

    def close(self, limit_sec: float) -> int:
        self.limits_sec.append(limit_sec)
        return self.n_missing


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "python_side", lambda callback: callback)


def session_of(
    tmp_path: Path,
    notes: list[str],
    events: list[Any],
    *,
    interrupted: bool = False,
    left_sec: float = 60.0,
) -> Any:
    name = displayed(url_of("postgresql://me:hunter2@host/name"))
    return SimpleNamespace(
        config=SimpleNamespace(store="env:TUNING_STORE"),
        store=SimpleNamespace(name=name),
        work_dir=tmp_path / "my run",
        budget=SimpleNamespace(interrupted=interrupted, search_left_sec=left_sec),
        observer=SimpleNamespace(note=notes.append),
        journal=SimpleNamespace(write=lambda event, **fields: events.append((event, fields))),
    )


@pytest.mark.parametrize(
    ("interrupted", "left_sec", "limit_sec"),
    [(False, 60.0, 30.0), (False, 7.0, 7.0), (False, -1.0, 0.0), (True, 60.0, 5.0)],
)
def test_what_a_store_lacks_is_reported_with_what_to_do(
    tmp_path: Path, interrupted: bool, left_sec: float, limit_sec: float
) -> None:
    notes: list[str] = []
    events: list[Any] = []
    session = session_of(tmp_path, notes, events, interrupted=interrupted, left_sec=left_sec)
    written = Written(17)
    warm_start._flush(session, written)
    (note,) = notes
    assert note.startswith("17 trials are not in the record store postgresql://me:***@host/name")
    assert note.endswith(f"db --store env:TUNING_STORE import '{tmp_path}/my run'")
    assert "hunter2" not in note
    assert events == [("undelivered", {"store": session.store.name, "n_trials": 17})]
    assert written.limits_sec == [limit_sec]


def test_nothing_is_said_where_nothing_is_missing(tmp_path: Path) -> None:
    notes: list[str] = []
    events: list[Any] = []
    session = session_of(tmp_path, notes, events)
    warm_start._flush(session, Written(0))
    assert notes == events == []


@pytest.mark.parametrize("n_waiting", [0, 17])
def test_what_waited_for_the_store_when_a_run_was_killed_is_reported_on_resume(
    make_session: Any, n_waiting: int
) -> None:
    observer, journal, nothing = Notes(), MemoryJournal(), cast(Any, None)
    store = SimpleNamespace(name="postgresql://host/name")
    session = make_session(
        DEFAULT.replace(store="env:TUNING_STORE"),
        observer=observer,
        journal=journal,
        store=store,
        history=History(n_waiting=n_waiting),
    )
    # Also where nothing is left to search.
    tune._search(session, [], [], nothing, {}, database=nothing)
    *notes, no_search = observer.notes
    assert no_search.startswith("no search: ")
    if not n_waiting:
        assert notes == journal.of("undelivered") == []
        return
    (note,) = notes
    assert note.startswith(
        "at least 17 trials of an earlier attempt were not written to the record store "
        "postgresql://host/name. "
    )
    assert note.endswith(f"db --store env:TUNING_STORE import {session.work_dir}")
    (event,) = journal.of("undelivered")
    assert (event["store"], event["n_trials"]) == (store.name, 17)


def test_rows_that_were_left_out_are_counted_where_the_user_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    events: list[Any] = []
    session = session_of(tmp_path, notes, events)
    session.history = SimpleNamespace(run_ids=())
    session.proven = set()
    found = WarmStart(n_left_out=9800)
    monkeypatch.setattr(warm_start, "find_prior_trials", lambda *args, **options: found)
    for hooks in ("model_hooks", "scheduler_hooks"):  # as of stock parts
        monkeypatch.setattr(warm_start, hooks, lambda part: None)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=None, task_scheduler=None)
    warm_start._warm_start(session, session.store, (), parts)
    (note,) = notes
    assert note.startswith("9800 invalid rows of ")
    assert "tvm-adaptive db --store env:TUNING_STORE prune deletes them, and all but" in note
    ((_, event),) = events
    assert event["n_left_out"] == 9800


@pytest.mark.parametrize("is_link", [False, True])
def test_a_store_that_is_the_runs_own_under_another_name_gets_each_trial_once(
    tmp_path: Path, make_session: Any, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    RecordStore(tmp_path / RUN_STORE).close()
    shared = tmp_path / "shared.db"
    if is_link:
        shared.symlink_to(tmp_path / RUN_STORE)
    given: list[dict[str, Any]] = []

    def callback(_contexts: Any, **stores: Any) -> Written:
        given.append(stores)
        return Written(0)

    monkeypatch.setattr(warm_start, "StoreCallback", callback)
    monkeypatch.setattr(warm_start, "_warm_start", lambda *_args: None)
    monkeypatch.setattr(warm_start, "model_hooks", lambda _part: None)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=None, trial_log=None)
    config = DEFAULT.replace(store=str(shared), starter=False)
    with RecordStore(shared) as store:
        session = make_session(config, store=store)
        with warm_start.warm_started(session, (), parts):
            (stores,) = given
    assert stores["shared"] is store
    assert (stores["own"] is None) == is_link


def test_a_disqualified_candidate_reaches_no_goal_of_a_resumed_run(make_session: Any) -> None:
    mod, nothing = te_workload("GMM"), cast(Any, None)
    history = History(tasks={"main": TaskHistory()})
    history.tasks["main"].add_latencies([0.1, 2.0])
    session = make_session(history=history)
    options = dataclasses.replace(session.options, until_ms=1.0)
    session = dataclasses.replace(session, options=options)
    tasks: Any = [SimpleNamespace(task_name="main", weight=1)]
    contexts: Any = [SimpleNamespace(task_name="main", mod=mod)]
    database: Any = SimpleNamespace(disqualified_secs={workload_key(mod): [1e-4]})
    progress = tune._search(session, tasks, contexts, nothing, {}, database=database)
    assert progress.weighted_sec == 2e-3
    assert session.budget.stop_reason == ""


def test_a_resumed_cost_model_learns_no_disqualified_candidate(
    tmp_path: Path, make_session: Any
) -> None:
    mod, journal = te_workload("GMM"), MemoryJournal()
    session = make_session(journal=journal, history=History(tasks={"main": TaskHistory()}))
    session.history.tasks["main"].add_latencies([0.1, 2.0])
    task = task_of(mod, session.target, "main")
    liar, honest = (
        dataclasses.replace(
            trial_of(make_record(mod, session.target, sec, seed)),
            features=np.zeros(3, dtype=np.float32),
        )
        for sec, seed in ((1e-4, 1), (2e-3, 2))
    )
    wrong = dataclasses.replace(liar, seconds=None, failure="wrong result")
    VerdictFile(tmp_path, "0.1").add(task, [wrong])
    learned: list[float] = []
    model: Any = SimpleNamespace(
        n_features=3, restore=lambda _context, _rows, seconds, _errors: learned.extend(seconds)
    )
    context: Any = SimpleNamespace(task_name="main", mod=mod, target=session.target)
    with RecordStore(tmp_path / RUN_STORE) as own:
        own.add(task, [liar, honest])
        warm_start._restore(session, own, [context], model)
    assert learned == [2e-3]
    assert journal.of("restored") == [{"event": "restored", "n_samples": 1}]
