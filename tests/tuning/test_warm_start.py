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
from tvm_adaptive._tvm import copy_record, json_database, te_workload, workload_key
from tvm_adaptive.database.location import RUN_STORE, displayed, url_of
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.errors import StoreDataError
from tvm_adaptive.measure_callback.history import History, TaskHistory
from tvm_adaptive.runner.playoff.finalist import Finalist
from tvm_adaptive.runner.playoff.playoff import FinalistReport
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.tuning import tune, warm_start
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.prior_trials import WarmStart
from tvm_adaptive.workers.environment import Environment


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
    session.history = History()
    session.proven = set()
    given: dict[str, Any] = {}

    def find(*_arguments: Any, **options: Any) -> WarmStart:
        given.update(options)
        return WarmStart(n_left_out=9800)

    monkeypatch.setattr(warm_start, "find_prior_trials", find)
    for hooks in ("model_hooks", "scheduler_hooks"):  # as of stock parts
        monkeypatch.setattr(warm_start, hooks, lambda part: None)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=None, task_scheduler=None)
    warm_start._warm_start(session, session.store, (), parts)
    (note,) = notes
    assert note.startswith("9800 invalid rows of ")
    assert "tvm-adaptive db --store env:TUNING_STORE prune deletes them, and all but" in note
    ((_, event),) = events
    assert event["n_left_out"] == 9800
    assert given["search_sec"] == session.budget.search_left_sec


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
        with warm_start.warm_started(session, (), parts, RunDatabase(tmp_path)):
            (stores,) = given
    assert stores["shared"] is store
    assert (stores["own"] is None) == is_link


def test_what_a_kill_kept_from_the_stores_is_added_by_the_next_attempt(
    tmp_path: Path, make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_start, "StoreCallback", lambda *_args, **_stores: Written(0))
    monkeypatch.setattr(warm_start, "_warm_start", lambda *_args: None)
    monkeypatch.setattr(warm_start, "model_hooks", lambda _part: None)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=None, trial_log=None)
    config = DEFAULT.replace(store=str(tmp_path / "shared.db"), starter=False)
    history = History(tasks={"main": TaskHistory()}, run={"run_id": "killed"})
    history.tasks["main"].add_latencies([2.0])
    mod, observer, database = te_workload("GMM"), Notes(), RunDatabase(tmp_path)
    target = make_session().target
    task, here = task_of(mod, target, "main"), Environment.current(target)
    first, second, failed = (
        make_record(mod, target, sec, seed) for seed, sec in enumerate((2e-3, 1e-3, None), start=1)
    )
    contexts: Any = [  # of equal tasks, stores and database have one
        SimpleNamespace(task_name=name, mod=mod, target=target) for name in ("main", "main_1")
    ]
    with (
        RecordStore(tmp_path / RUN_STORE, here) as own,
        RecordStore(tmp_path / "shared.db", here) as shared,
    ):
        for store in (own, shared):
            store.add(task, [dataclasses.replace(trial_of(first), run="killed")])
        for record in (first, second, failed):
            copy_record(record, database)
        session = make_session(config, store=shared, history=history, observer=observer)
        for n_notes in (2, 2):  # the second time there is nothing to add
            with warm_start.warm_started(session, contexts, parts, database):
                for store in (own, shared):
                    assert [each.seconds for each in store.latest(task)] == [2e-3, 1e-3, None]
                    assert {each.run for each in store.latest(task)} == {"killed"}
            assert len(observer.notes) == n_notes
    assert observer.notes[0].startswith("2 trials of a killed attempt were not in ")


def test_trials_of_a_store_that_was_pruned_are_not_lost(tmp_path: Path, make_session: Any) -> None:
    mod, observer, database = te_workload("GMM"), Notes(), RunDatabase(tmp_path)
    history = History(tasks={"main": TaskHistory()}, run={"run_id": "killed"})
    history.tasks["main"].add_latencies([2.0])
    session = make_session(history=history, observer=observer)
    copy_record(make_record(mod, session.target, 2e-3), database)
    context: Any = SimpleNamespace(task_name="main", mod=mod, target=session.target)
    with RecordStore(tmp_path / RUN_STORE) as own:
        warm_start._add_lost(session, own, [context], database)
        assert own.stats() == []
    assert observer.notes == []


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


@pytest.mark.parametrize(("shared", "n_restored"), [("shared.db", 2), (RUN_STORE, 1)])
def test_rows_without_an_environment_are_the_run_s_own_unless_others_write_to_its_store(
    tmp_path: Path, make_session: Any, shared: str, n_restored: int
) -> None:
    mod, journal = te_workload("GMM"), MemoryJournal()
    history = History(tasks={"main": TaskHistory()})
    history.tasks["main"].add_latencies([1.0, 2.0])
    session = make_session(journal=journal, history=history)
    task, here = task_of(mod, session.target, "main"), Environment.current(session.target)
    former, present = (
        dataclasses.replace(
            trial_of(make_record(mod, session.target, sec, seed)),
            features=np.zeros(3, dtype=np.float32),
        )
        for sec, seed in ((1e-3, 1), (2e-3, 2))
    )
    context: Any = SimpleNamespace(task_name="main", mod=mod, target=session.target)
    model: Any = SimpleNamespace(n_features=3, restore=lambda *_: None)
    with (
        RecordStore(tmp_path / RUN_STORE, here) as own,
        RecordStore(tmp_path / shared, here) as store,
    ):
        own.at(None).add(task, [former])
        own.add(task, [present])
        session = dataclasses.replace(session, store=store)
        warm_start._restore(session, own, [context], model)
    assert [event["n_samples"] for event in journal.of("restored")] == [n_restored]


def test_a_verdict_that_a_store_refuses_for_its_content_costs_no_other(
    tmp_path: Path, make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_finals = RecordStore.add_finals

    def narrow(store: RecordStore, task: Any, finals: Any) -> None:
        if any("\u2019" in each.failure for each in finals):
            raise StoreDataError("The character has no equivalent in LATIN1.")
        add_finals(store, task, finals)

    monkeypatch.setattr(RecordStore, "add_finals", narrow)
    mod, journal = te_workload("GMM"), MemoryJournal()
    with RecordStore(tmp_path / "shared.db") as store:
        session = make_session(journal=journal, store=store)
        first, second = (make_record(mod, session.target, 1e-3, seed) for seed in (1, 2))
        winner = Finalist(first, 1e-3, 1.5e-3, 1.5e-5, unchecked="")
        loser = Finalist(second, 1e-3, disqualified="crash: \u2018x\u2019")
        report = FinalistReport("main", (winner, loser), "tied", 1.0)
        warm_start.VerdictRecorder(session).add(report)
        (kept,) = store.finals(task_of(mod, session.target, "main"))
    assert kept.seconds == 1.5e-3
    assert len(journal.of("error")) == 1


class Scheduler:
    """Keeps what it is given."""

    def set_prior(self, prior: Any) -> None:
        self.prior = dict(prior)


def attempt(run_id: str, n_stored: int | None, n_trials: int) -> list[dict[str, Any]]:
    """Return the events of an attempt at a run, None without a store."""
    recalled = [] if n_stored is None else [{"event": "recalled", "n_trials": {"main": n_stored}}]
    measured = {"event": "measured", "task": "main", "latencies_ms": [2.0] * n_trials}
    return [{"event": "journal"}, {"event": "run", "run_id": run_id}, *recalled, measured]


@pytest.mark.parametrize(
    ("events", "n_left"),
    [
        ([], 3),
        (attempt("mine", 0, 2), 0),
        (attempt("mine", None, 2), 0),
        (attempt("mine", 1, 2), 1),
        (attempt("mine", 1, 0), 3),  # it is begun now
        ([*attempt("mine", 1, 2), *attempt("again", 3, 2)], 1),
        ([*attempt("mine", 1, 0), *attempt("again", 2, 2)], 2),
        ([*attempt("mine", 1, 0), *attempt("again", None, 2)], 0),
    ],
)
def test_what_other_runs_did_since_a_run_began_a_task_is_no_history_of_its_own(
    tmp_path: Path,
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    events: list[dict[str, Any]],
    n_left: int,
) -> None:
    mod, history, scheduler = te_workload("GMM"), History(), Scheduler()
    for event in events:
        history.add(event)
    monkeypatch.setattr(warm_start, "model_hooks", lambda _part: None)
    monkeypatch.setattr(warm_start, "scheduler_hooks", lambda part: part)
    context: Any = SimpleNamespace(task_name="main", mod=mod)
    parts: Any = SimpleNamespace(
        cost_model=None, transfer_pool=TransferPool(), task_scheduler=scheduler
    )
    with RecordStore(tmp_path / "records.db") as store:
        session = make_session(journal=MemoryJournal(), store=store, history=history)
        context.target = session.target
        task = task_of(mod, session.target, "then")
        made = [trial_of(make_record(mod, session.target, 1e-3 * n, n)) for n in (1, 2, 3)]
        store.add(task, [dataclasses.replace(each, run="other") for each in made])
        store.add_finals(task, made[:1])  # a play-off has proven it
        warm_start._warm_start(session, store, [context], parts)
    prior = scheduler.prior["main"]
    assert prior.is_proven
    assert prior.latencies_ms == pytest.approx([1.0, 2.0, 3.0][:n_left])


@pytest.mark.parametrize(("run_id", "is_known"), [("mine", False), ("other", True)])
def test_what_this_run_has_measured_is_not_said_to_be_tuned_before(
    tmp_path: Path,
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    run_id: str,
    is_known: bool,
) -> None:
    mod, observer, history = te_workload("GMM"), Notes(), History(run_ids={"mine"})
    for hooks in ("model_hooks", "scheduler_hooks"):  # as of stock parts
        monkeypatch.setattr(warm_start, hooks, lambda _part: None)
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=TransferPool(), task_scheduler=None)
    with RecordStore(tmp_path / "records.db") as store:
        session = make_session(store=store, history=history, observer=observer)
        context: Any = SimpleNamespace(task_name="main", mod=mod, target=session.target)
        trial = trial_of(make_record(mod, session.target, 1e-3))
        store.add(task_of(mod, session.target, "main"), [dataclasses.replace(trial, run=run_id)])
        warm_start._warm_start(session, store, [context], parts)
    note = f"1 of 1 tasks were tuned before, 0 more have related tasks in {store.name}"
    assert observer.notes == ([note] if is_known else [])


@pytest.mark.parametrize("has_begun", [False, True])
def test_only_tasks_without_trials_measure_again_what_was_set_aside(
    tmp_path: Path, make_session: Any, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    mod, observer, journal = te_workload("GMM"), Notes(), MemoryJournal()
    history = History(tasks={"main": TaskHistory(name="main")})
    if has_begun:
        history.tasks["main"].add_latencies([1.0, 2.0])
    monkeypatch.setattr(warm_start, "model_hooks", lambda _part: None)
    session = make_session(
        DEFAULT.replace(starter=False), history=history, observer=observer, journal=journal
    )
    folder = tmp_path / "other-machine-1"
    folder.mkdir()
    copy_record(make_record(mod, session.target, 1e-3), json_database(folder))
    contexts: Any = [SimpleNamespace(task_name="main", mod=mod, target=session.target)]
    pool = TransferPool()
    parts: Any = SimpleNamespace(cost_model=None, transfer_pool=pool)
    with warm_start.warm_started(session, contexts, parts, RunDatabase(tmp_path)):
        pass
    assert [list(tasks) for tasks in pool._before.values()] == [["main"]]
    assert observer.notes == (
        [] if has_begun else ["the best records of 1 tasks are measured again"]
    )
    assert [event["tasks"] for event in journal.of("hinted")] == ([] if has_begun else [["main"]])
