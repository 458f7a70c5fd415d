from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import shlex
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.database.conftest import make_record
from tests.journals import MemoryJournal
from tests.tuning.observers import Notes
from tvm_adaptive._tvm import (
    TVM_VERSION,
    IRModule,
    RPCConfig,
    Target,
    TuneContext,
    TuningRecord,
    json_database,
    te_workload,
)
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import VerdictFile, standing_winner
from tvm_adaptive.errors import MachineError, StoreDataError, StoreError
from tvm_adaptive.measure_callback.journal import Journal, NullJournal, read_journal
from tvm_adaptive.measure_callback.progress import RunProgress, TaskProgress
from tvm_adaptive.report import read_run
from tvm_adaptive.runner.playoff.finalist import (
    BUILD_FAILED,
    SAME,
    SCHEDULE_FAILED,
    Finalist,
    PlayoffOptions,
    Proof,
    refuted_ms,
)
from tvm_adaptive.runner.playoff.playoff import FinalistReport
from tvm_adaptive.runner.rpc.leased_worker import LeasingPool
from tvm_adaptive.search_strategy.surrogate_proposer import draft_of
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.tuning.budget import Budget, EndCosts
from tvm_adaptive.tuning.checks.library import FunctionCheck
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.finals import decision, playoffs
from tvm_adaptive.tuning.finals.finalists import Finalists
from tvm_adaptive.tuning.finals.form_choice import FormChoice
from tvm_adaptive.tuning.outcome import TaskOutcome
from tvm_adaptive.tuning.warm_start import VerdictRecorder
from tvm_adaptive.values.forms import NO_FORM, FormKey

draft = functools.partial(draft_of, transfer_pool=TransferPool())


TARGET = Target({"kind": "llvm", "num-cores": 2})


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, (1.5e-3, "")),
        ({"unchecked": "no reference"}, None),
        ({"playoff_sec": math.nan}, None),
        ({"playoff_sec": math.nan, "stderr_sec": math.nan, "in_network": True}, (1e-3, "")),
        ({"disqualified": "wrong result: 3 of 4", "playoff_sec": math.nan}, (None, "wrong result")),
        ({"disqualified": f"{BUILD_FAILED}timeout", "playoff_sec": math.nan}, None),
        ({"disqualified": f"{SCHEDULE_FAILED}bad_alloc", "playoff_sec": math.nan}, None),
        ({"disqualified": SAME, "playoff_sec": math.nan}, None),
    ],
)
def test_only_what_was_learned_of_a_finalist_is_remembered(
    tmp_path: Path, changes: dict[str, Any], kept: tuple[float | None, str] | None
) -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    record = make_record(te_workload("GMM"), target, 1e-3)
    task = task_of(record.workload.mod, target, "main")
    report = report_of(record, **changes)
    with RecordStore(tmp_path / "records.db") as store:
        recorder = VerdictRecorder(session_of(tmp_path, target, store))
        recorder.add(report)
        # On disk before the next play-off begins.
        finals = store.finals(task)
    assert VerdictFile(tmp_path, str(TVM_VERSION)).read().get(task.identity, []) == finals
    found = [(each.seconds, each.failure.partition(":")[0]) for each in finals]
    assert found == ([] if kept is None else [kept])
    assert all(each.run == "a" for each in finals)
    errors = [each.error for each in finals if each.seconds]
    assert errors == ([None if "in_network" in changes else 0.01] if kept and kept[0] else [])


def test_a_form_that_fails_with_prefetching_does_not_count_against_the_plain_one(
    tmp_path: Path,
) -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    report = report_of(make_record(te_workload("GMM"), target, 1e-3))
    (sound,) = report.finalists
    refuted = dataclasses.replace(sound, disqualified="hang: 20 s", playoff_sec=math.nan)
    report = dataclasses.replace(report, finalists=(sound, refuted))
    VerdictRecorder(session_of(tmp_path, target)).add(report)
    ((said,),) = VerdictFile(tmp_path, str(TVM_VERSION)).read().values()
    assert standing_winner([said]) == said


def test_an_earlier_verdict_is_the_runs_own_and_not_new_to_the_store(tmp_path: Path) -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    store = AwayForAWhile(0)
    recorder = VerdictRecorder(session_of(tmp_path, target, store))
    recorder.add(report_of(make_record(te_workload("GMM"), target, 1e-3)), is_earlier=True)
    recorder.close()
    assert store.taken == []
    assert len(said_in(tmp_path)) == 1


def test_a_verdict_that_is_taken_over_is_not_renewed(tmp_path: Path) -> None:
    """What has disqualified the candidate since, in another store, stands."""
    record = make_record(te_workload("GMM"), TARGET, 1e-3)
    task = task_of(record.workload.mod, TARGET, "main")
    proof = Proof(trial_of(record).record, run="old", unix_sec=100.0)
    report = report_of(record, proof=proof)
    with RecordStore(tmp_path / "records.db") as store:
        recorder = VerdictRecorder(session_of(tmp_path, TARGET, store))
        recorder.add(report, is_earlier=True)
        (kept,) = VerdictFile(tmp_path, str(TVM_VERSION)).read()[task.identity]
        assert (kept.record, kept.run, kept.unix_sec) == proof
        assert kept.seconds == 1.5e-3
        # In a play-off that it was not timed in, it is this run's winner.
        recorder.add(report)
        (taken_over,) = store.finals(task)
        assert (taken_over.run, taken_over.unix_sec) == ("a", 100.0)
        # What a check of this run finds is new.
        recorder.add(report_of(record, proof=proof, disqualified="crash", playoff_sec=math.nan))
        assert [each.unix_sec == 100.0 for each in store.finals(task)] == [True, False]


def report_of(record: TuningRecord, **changes: Any) -> FinalistReport:
    fields = {
        "recorded_sec": 1e-3,
        "playoff_sec": 1.5e-3,
        "stderr_sec": 1.5e-5,
        "unchecked": "",
        **changes,
    }
    return FinalistReport("main", (Finalist(record, **fields),), "tied", 1.0)


def session_of(work_dir: Path, target: Target, store: Any = None, **more: Any) -> Any:
    return SimpleNamespace(
        work_dir=work_dir,
        target=target,
        store=store,
        run_id="a",
        config=DEFAULT,
        observer=Notes(),
        journal=NullJournal(),
        **more,
    )


class AwayForAWhile:
    """A store that refuses the first ``n`` appends."""

    def __init__(self, n: int) -> None:
        self.n_refused = n
        self.taken: list[str] = []

    def add_finals(self, task: StoredTask, finals: Sequence[StoredTrial]) -> None:
        if self.n_refused:
            self.n_refused -= 1
            raise StoreError("the server is gone.")
        self.taken.append(task.name)


@pytest.mark.parametrize(("n_refused", "n_notes"), [(0, 0), (1, 0), (2, 1)])
def test_what_a_store_refused_is_offered_again_at_the_end(
    tmp_path: Path, n_refused: int, n_notes: int
) -> None:
    target = Target({"kind": "llvm", "num-cores": 2})
    report = report_of(make_record(te_workload("GMM"), target, 1e-3))
    store = AwayForAWhile(n_refused)
    session = session_of(tmp_path, target, store)
    recorder = VerdictRecorder(session)
    for name in "abc":
        recorder.add(dataclasses.replace(report, task_name=name))
    recorder.close()
    assert store.taken == ([] if n_notes else ["a", "b", "c"])
    assert len(session.observer.notes) == n_notes
    for note in session.observer.notes:
        assert note.endswith(f"tvm-adaptive db --store user import {shlex.quote(str(tmp_path))}")
    (said,) = VerdictFile(tmp_path, str(TVM_VERSION)).read().values()
    assert len(said) == 3, "the run itself knows"


def test_what_a_store_refuses_for_its_content_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    class Latin(AwayForAWhile):
        def add_finals(self, task: StoredTask, finals: Sequence[StoredTrial]) -> None:
            if task.name == "a":
                raise StoreDataError("a character has no equivalent.")
            super().add_finals(task, finals)

    for n_refused in (0, 1):
        store = Latin(n_refused)
        session = session_of(tmp_path, TARGET, store)
        recorder = VerdictRecorder(session)
        report = report_of(make_record(te_workload("GMM"), TARGET, 1e-3))
        for name in "zabc":
            recorder.add(dataclasses.replace(report, task_name=name))
        recorder.close()
        assert store.taken == ["z", "b", "c"]
        assert not session.observer.notes


@pytest.mark.parametrize(
    ("reason", "rtol", "changes", "is_shared"),
    [
        ("network", 1e-3, {}, True),
        ("network", 1e-2, {}, False),
        ("network", 1e-2, {"disqualified": "crash: SIGSEGV"}, True),
        ("tied", 1e-2, {}, True),
    ],
)
def test_what_a_loosened_tolerance_lets_pass_stays_with_its_run(
    tmp_path: Path, reason: str, rtol: float, changes: dict[str, Any], is_shared: bool
) -> None:
    report = report_of(make_record(te_workload("GMM"), TARGET, 1e-3), **changes)
    store = AwayForAWhile(0)
    session = session_of(tmp_path, TARGET, store)
    session.config = dataclasses.replace(
        DEFAULT, finish=dataclasses.replace(DEFAULT.finish, rtol=rtol)
    )
    VerdictRecorder(session).add(dataclasses.replace(report, reason=reason))
    assert bool(store.taken) == is_shared
    assert VerdictFile(tmp_path, str(TVM_VERSION)).read(), "the run itself knows"


def budget_with(left_sec: float, seconds: float = 600.0) -> Budget:
    now = [0.0]
    budget = Budget(seconds, lambda: now[0])
    now[0] = seconds - left_sec
    return budget


def reserve(budget: Budget, seconds: float) -> None:
    nothing = dataclasses.replace(DEFAULT.finish, n_qualifiers=0)
    budget.plan_reserve(nothing, 0, EndCosts(seconds, seconds))
    budget.release_playoffs(0.0)


@pytest.mark.parametrize(
    ("left_sec", "expected"),
    [
        (200.0, {"top_k": 3, "n_qualifiers": 32, "prefetch": True, "max_sec": 8.0}),
        (30.0, {"top_k": 3, "n_qualifiers": 32, "prefetch": True, "max_sec": 0.5}),
        (20.6, {"top_k": 3, "n_qualifiers": 32, "prefetch": True, "max_sec": 0.2}),
        (20.4, {"top_k": 1, "n_qualifiers": 0, "prefetch": False, "max_sec": 0.2}),
    ],
)
def test_a_task_is_only_checked_where_the_seconds_would_not_suffice_for_the_others(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, left_sec: float, expected: dict[str, Any]
) -> None:
    given: list[PlayoffOptions] = []

    def play_off(_records: Any, _target: Any, options: PlayoffOptions, **_parts: Any) -> None:
        given.append(options)

    monkeypatch.setattr(playoffs, "play_off", play_off)
    budget = budget_with(left_sec)
    reserve(budget, 10.0)
    session = make_session(budget=budget)
    mine: Any = SimpleNamespace(records=(), name="main")
    nothing: Any = None
    allowance = playoffs.Allowance(share=0.5, n_left=10, due_sec=9.0)
    playoffs.hold_playoff(session, mine, allowance, builder=nothing, pool=nothing)
    (options,) = given
    assert {key: getattr(options, key) for key in expected} == pytest.approx(expected)


def test_a_round_that_closes_the_last_gap_ends_the_hurry(make_session: Any) -> None:
    session = make_session(budget=budget_with(1e3, 1e3))
    finish = dataclasses.replace(DEFAULT.finish, n_qualifiers=0, max_task_sec=14.0)
    session.budget.plan_reserve(finish, 2, EndCosts(10.0, 10.0))
    session.proven.add("b")
    progress = RunProgress([TaskProgress("a", 1.0), TaskProgress("b", 1.0)])
    session.update_reserve(progress)
    assert session.budget.reserve_sec == 10.0
    progress.tasks[0].best_sec = 1e-3
    session.round_done(progress)
    assert session.budget.reserve_sec == 10.0 + 2 * (1.5 + 14.0)


@pytest.mark.parametrize(
    ("left_sec", "is_proven", "expected"),
    [
        (50.0, False, "played"),
        (10.0, False, "no-time"),  # the reserve: nobody can check it
        (-5.0, False, "no-time"),
        (10.0, True, "no-record"),
        (50.0, True, "played"),
    ],
)
def test_what_there_is_no_time_to_check_stays_untuned(
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    left_sec: float,
    is_proven: bool,
    expected: str,
) -> None:
    given: list[PlayoffOptions] = []

    def play_off(
        _records: Any, _target: Any, options: PlayoffOptions, **_parts: Any
    ) -> FinalistReport:
        given.append(options)
        return FinalistReport("main", (), "played", 1.0)

    monkeypatch.setattr(playoffs, "play_off", play_off)
    seen: list[FinalistReport] = []

    def outcome(_task: Any, report: FinalistReport, **_options: Any) -> TaskOutcome:
        seen.append(report)
        return TaskOutcome("main", 1.0, 4, 0, math.inf)

    monkeypatch.setattr(decision, "outcome_of", outcome)
    mine: Any = SimpleNamespace(
        name="main",
        mod=None,
        records=(),
        proven=None,
        importance_sec=1.0,
        is_proven=is_proven,
        is_due=not is_proven,
    )
    monkeypatch.setattr(decision, "finalists_of", lambda *_args, **_options: [mine])
    budget = budget_with(left_sec, 100.0)
    reserve(budget, 10.0)
    nothing: Any = None
    any_check: Any = Check()
    task: Any = SimpleNamespace(name="main", weight=1.0, n_trials=4, n_errors=0)
    database, _ = decision.decide(
        make_session(budget=budget),
        [nothing],
        [nothing],
        RunProgress([task]),
        any_check,
        run_database=nothing,
        draft=draft,
    )
    assert [report.reason for report in seen] == [expected]
    assert len(database) == 0
    if expected == "played":
        assert given[0].limit_sec == pytest.approx(left_sec - 10.0)


def test_a_play_off_leaves_the_others_the_time_to_be_checked() -> None:
    assert playoffs.Allowance(0.5, n_left=10, due_sec=5.4).limit_sec(20.0) == pytest.approx(14.6)
    # There is not even that much: the first ones are checked.
    hurried = playoffs.Allowance(0.5, n_left=40, due_sec=39.0)
    assert hurried.limit_sec(20.0) == 5.0
    assert hurried.limit_sec(2.0) == 2.0


class Check:
    """A check within the network that gives scripted verdicts on the best records of tasks."""

    def __init__(self, *verdicts: str | None) -> None:
        self.verdicts = list(verdicts)
        self.databases: list[list[float]] = []
        self.forms: dict[str, FormKey] = {}
        self.is_direct = False

    def check_functions(self, database: Any, mods: Sequence[Any]) -> list[FunctionCheck]:
        records = database.get_all_tuning_records()
        self.databases.append(sorted(float(each.run_secs[0]) for each in records))
        assert len(mods) == len(self.verdicts)
        return [FunctionCheck(problem, 0.5e-3) for problem in self.verdicts]


def mods_of(n: int) -> list[IRModule]:
    return [te_workload("GMM"), te_workload("C1D"), te_workload("NRM")][:n]


def contexts_of_mods(finalists: Sequence[Finalists]) -> list[TuneContext]:
    return [
        TuneContext(
            each.mod, target=TARGET, space_generator="post-order-apply", task_name=each.name
        )
        for each in finalists
    ]


def decided(
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
    check: Check,
    secs: Sequence[Sequence[float]],
    *,
    reason: str = "won",
    proven_tasks: Container[int] = (),  # of which the best is proven
    n_read: int | None = None,  # records of each task that are read at first
    is_second: bool = False,
) -> tuple[list[TaskOutcome], list[float], list[str]]:
    """Return outcomes, the final database's times, and the tasks that had play-offs."""
    mine, played = [], []
    for number, (mod, times) in enumerate(zip(mods_of(len(secs)), secs, strict=True)):
        records = tuple(make_record(mod, TARGET, sec, i) for i, sec in enumerate(times, 1))
        is_proven = number in proven_tasks
        proven = Finalist(records[0], times[0], times[0], unchecked="") if is_proven else None
        found = Finalists(mod, str(number), records, times[0] if times else 0.0, proven, is_proven)
        read_all = functools.partial(lambda each: each, found)
        mine.append(dataclasses.replace(found, records=records[:n_read], read_all=read_all))
    monkeypatch.setattr(decision, "finalists_of", lambda *_args, **_options: mine)

    def play_off(records: Any, *_args: Any, task_name: str, **_parts: Any) -> FinalistReport:
        if not records:
            return FinalistReport(task_name, (), "no-record", 0.0)
        played.append(task_name)
        sec = float(records[0].run_secs[0]) if records[0].run_secs else 1.5e-3  # a draft
        return FinalistReport(task_name, (Finalist(records[0], sec, sec, unchecked=""),), reason, 1)

    monkeypatch.setattr(playoffs, "play_off", play_off)
    progress = RunProgress(
        [
            TaskProgress(
                each.name,
                1.0,
                4 * bool(each.records),
                best_sec=each.importance_sec or math.inf,
                key=check.forms.get(each.name, NO_FORM),
            )
            for each in mine
        ]
    )
    any_check: Any = check
    nothing: Any = None
    _, outcomes = decision.decide(
        session,
        [],
        contexts_of_mods(mine),
        progress,
        any_check,
        run_database=nothing,
        draft=draft,
        is_second=is_second,
    )
    final = json_database(session.work_dir / "final").get_all_tuning_records()
    return outcomes, sorted(float(each.run_secs[0]) for each in final), played


def session_with_check(make_session: Any) -> Any:
    budget = budget_with(500.0, 1000.0)
    budget.plan_reserve(DEFAULT.finish, 2, EndCosts(20.0, 5.0, network_check_sec=3.0))
    return make_session(budget=budget, target=TARGET)


def said_in(folder: Path) -> dict[str, list[str]]:
    found = VerdictFile(folder, str(TVM_VERSION)).read().values()
    return {each.record: each.failure for finals_of in found for each in finals_of}


def test_what_hardly_matters_is_checked_within_the_network(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check("", "")
    outcomes, final, played = decided(session, monkeypatch, check, [[2e-3, 4e-3], [1e-3, 3e-3]])
    assert (final, played) == ([1e-3, 2e-3], [])
    assert check.databases == [[1e-3, 2e-3]]
    assert [(each.played_off, each.in_network, each.best_sec) for each in outcomes] == [
        (False, True, 2e-3),
        (False, True, 1e-3),
    ]
    assert list(said_in(session.work_dir).values()) == ["", ""]


def test_a_playoff_that_is_worth_its_time_is_held_and_its_winner_in_the_network(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check("", "")
    # Of the first one the two best are close; so much of a search has gone into it.
    session.budget.spent_sec += 300.0
    outcomes, final, played = decided(session, monkeypatch, check, [[2e-3, 2e-3], [1e-3, 3e-3]])
    assert (final, played) == ([1e-3, 2e-3], ["0"])
    assert check.databases == [[1e-3, 2e-3]]
    assert [(each.played_off, each.in_network) for each in outcomes] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(("left_sec", "n_held"), [(15.0, 2), (1.5, 0)])
def test_a_play_off_saves_no_time_for_what_is_checked_within_the_network(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, left_sec: float, n_held: int
) -> None:
    budget, due_secs, hold = budget_with(left_sec, 1000.0), [], playoffs.hold_playoff
    budget.plan_reserve(DEFAULT.finish, 2, EndCosts(200.0, 5.0, network_check_sec=1.0))
    budget.spent_sec += 300.0
    budget.seconds = 1300.0

    def watched(session: Any, mine: Any, allowance: playoffs.Allowance, **parts: Any) -> Any:
        due_secs.append(allowance.due_sec)
        return hold(session, mine, allowance, **parts)

    monkeypatch.setattr(playoffs, "hold_playoff", watched)
    session, check = make_session(budget=budget, target=TARGET), Check("", "")
    outcomes, *_ = decided(session, monkeypatch, check, [[2e-3, 2e-3], [2e-3, 2e-3]])
    assert due_secs == [0.0] * n_held
    assert [each.played_off for each in outcomes] == [n_held > 0] * 2
    assert [each.in_network for each in outcomes] == [n_held == 0] * 2


def test_candidates_of_play_offs_are_removed_when_their_workers_have_ended(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, found = make_session(target=TARGET), list[bool]()
    left = session.work_dir / "artifacts" / "candidate-x"
    part = SimpleNamespace(close=lambda: found.append(left.exists()))
    for name in ("kernel_worker", "make_playoff_builder"):
        monkeypatch.setattr(playoffs, name, lambda *_: part)
    with playoffs._builder_and_pool(session, session.work_dir):
        left.mkdir(parents=True)
    assert found == [True, True]
    assert not left.exists()


@pytest.mark.parametrize("n_lost", [0, 1, 2])
def test_a_task_whose_device_was_lost_plays_once_more_after_the_others(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, n_lost: int
) -> None:
    nothing: Any = None
    pool = LeasingPool(RPCConfig("nowhere", 1, "board", 1, 5))
    monkeypatch.setattr(
        playoffs, "_builder_and_pool", lambda *_: contextlib.nullcontext((nothing, pool))
    )
    held, ends = [], ["error"] * n_lost

    def hold(_session: Any, mine: Any, _allowance: Any, **_parts: Any) -> FinalistReport:
        held.append(mine.name)
        reason = ends.pop() if mine.name == "0" and ends else "separated"
        pool._retry_sec = time.monotonic() + (0.3 if reason == "error" else -1.0)
        return FinalistReport(mine.name, (), reason, 1.0)

    monkeypatch.setattr(playoffs, "hold_playoff", hold)
    session = make_session(target=TARGET)
    finalists = {n: Finalists(nothing, f"{n}", (), 3.0 - n) for n in range(3)}
    recorder: Any = SimpleNamespace(add=lambda _: None)
    start_sec = time.monotonic()
    reports = playoffs.hold_playoffs(session, finalists, recorder)
    assert held == ["0", "1", "2"] + ["0"] * bool(n_lost)
    assert (time.monotonic() - start_sec > 0.3) == bool(n_lost)
    assert reports[0].reason == ("error" if n_lost == 2 else "separated")
    pool.close()


def test_a_play_off_that_the_time_ended_keeps_the_winner_that_it_has(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check("", "")
    session.budget.spent_sec += 300.0
    secs = [[2e-3, 2e-3], [1e-3, 3e-3]]
    outcomes, final, played = decided(session, monkeypatch, check, secs, reason="no-time")
    assert (final, played) == ([1e-3, 2e-3], ["0"])
    assert [each.played_off for each in outcomes] == [True, False]


def test_a_winner_that_is_wrong_within_the_network_is_lost_and_the_others_play(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check("", "crash: SIGSEGV")
    session.budget.spent_sec += 300.0
    secs = [[2e-3, 2.1e-3], [1e-3, 3e-3]]
    outcomes, final, played = decided(session, monkeypatch, check, secs)
    assert (final, played) == ([1e-3, 2.1e-3], ["0", "0"])
    assert [(each.played_off, each.n_disqualified) for each in outcomes] == [(True, 1), (False, 0)]
    assert "crash: SIGSEGV" in said_in(session.work_dir).values()


@pytest.mark.parametrize("verdict", ["wrong result: 3 of 4", "crash: SIGSEGV", "hang: timeout"])
def test_what_fails_within_the_network_is_disqualified_and_the_next_one_plays(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    session, check = session_with_check(make_session), Check("", verdict, "")
    secs = [[2e-3, 4e-3], [1e-3, 3e-3], [5e-3]]
    outcomes, final, played = decided(session, monkeypatch, check, secs)
    assert (final, played) == ([2e-3, 3e-3, 5e-3], ["1"])
    assert [(each.in_network, each.n_disqualified) for each in outcomes] == [
        (True, 0),
        (False, 1),
        (True, 0),
    ]
    assert sorted(said_in(session.work_dir).values()) == sorted(["", "", "", verdict])


def test_a_task_whose_best_are_refuted_has_its_next_checked(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only two records of a task are read at first; its play-off had no time for a third."""
    session, check = session_with_check(make_session), Check("")
    session.budget.spent_sec += 300.0  # a play-off is worth its time

    def refute(_session: Any, wanted: Any, *_rest: Any) -> dict[int, FinalistReport]:
        return {
            index: FinalistReport(
                mine.name,
                tuple(
                    Finalist(each, 1e-3, disqualified="wrong result: 3 of 4", unchecked="")
                    for each in mine.records[:2]
                ),
                "no-time",
                1.0,
            )
            for index, mine in wanted.items()
        }

    monkeypatch.setattr(decision, "hold_playoffs", refute)
    outcomes, final, _ = decided(session, monkeypatch, check, [[2e-3, 2.1e-3, 2.5e-3]], n_read=2)
    assert (final, check.databases) == ([2.5e-3], [[2.5e-3]])
    assert (outcomes[0].in_network, outcomes[0].n_disqualified) == (True, 2)


def test_what_was_not_wrong_is_not_counted_as_out() -> None:
    record = make_record(te_workload("GMM"), TARGET, 1e-3, 1)
    winner, same = Finalist(record, 1e-3, 1e-3, unchecked=""), Finalist(record, 1e-3)
    report = FinalistReport(
        "main", (winner, dataclasses.replace(same, disqualified=SAME)), "won", 1.0
    )
    task = TaskProgress("main", 1.0, 4, best_sec=1e-3, key=NO_FORM)
    assert decision.outcome_of(task, report).n_disqualified == 0


@pytest.mark.parametrize(
    ("spent_sec", "secs", "verdicts", "lost"),
    [
        (0.0, [[2e-3, 4e-3], [1e-3, 3e-3], [5e-3]], ["", "wrong result: 3 of 4", ""], ("1", 1.0)),
        (300.0, [[2e-3, 2.1e-3], [1e-3, 3e-3]], ["", "crash: SIGSEGV"], ("0", 2.0)),  # a winner
    ],
)
def test_what_fails_within_the_network_is_disqualified_in_the_journal(
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    spent_sec: float,
    secs: list[list[float]],
    verdicts: list[str],
    lost: tuple[str, float],
) -> None:
    path, (name, lost_ms) = tmp_path / "journal.jsonl", lost
    with contextlib.closing(Journal(path)) as journal:
        for number, times in enumerate(secs):
            latencies_ms = [1e3 * sec for sec in times]
            journal.write("measured", task=str(number), latencies_ms=latencies_ms)
        session = dataclasses.replace(session_with_check(make_session), journal=journal)
        session.budget.spent_sec += spent_sec
        decided(session, monkeypatch, Check(*verdicts), secs)
    # The play-offs of this test write none.
    (event,) = [event for event in read_journal(path) if event["event"] == "playoff"]
    assert (event["task"], event["reason"], event["seconds"]) == (name, "network", 0.0)
    assert refuted_ms(event) == pytest.approx([lost_ms])
    history = read_run(tmp_path)
    assert history.tasks[name].best_ms > lost_ms
    (trial,) = [trial for trial in history.trials if trial.reason == "disqualified"]
    assert (trial.task, trial.improves) == (name, False)
    assert math.isnan(trial.ms)


def test_what_is_compiled_and_checked_leaves_its_time_to_the_play_offs_of_what_failed(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_with(20.0, 1000.0)
    budget.plan_reserve(DEFAULT.finish, 2, EndCosts(20.0, 5.0, network_check_sec=3.0))
    tasks = [TaskProgress(name, 1.0, 4, best_sec=1e-3, build_sec=10.0) for name in "01"]
    budget.update_reserve(RunProgress(tasks), (), 16)
    assert budget.spare_sec < 0
    session, check = make_session(budget=budget, target=TARGET), Check("", "wrong result")
    _, final, played = decided(session, monkeypatch, check, [[2e-3, 4e-3], [1e-3, 3e-3]])
    assert (final, played) == ([2e-3, 3e-3], ["1"])


@pytest.mark.parametrize(("is_second", "reserved_sec"), [(False, 5.0), (True, 23.0)])
def test_a_second_decision_reserves_what_is_compiled_and_checked_again(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, is_second: bool, reserved_sec: float
) -> None:
    session, check = session_with_check(make_session), Check("", "")
    tasks = [TaskProgress(name, 1.0, 4, best_sec=1e-3) for name in "01"]
    session.update_reserve(RunProgress(tasks))
    session.budget.network_checked(0)  # in the first decision
    found, reserved = check.check_functions, list[float]()

    def watched(*arguments: Any) -> list[FunctionCheck]:
        reserved.append(session.budget.reserve_sec)
        return found(*arguments)

    monkeypatch.setattr(check, "check_functions", watched)
    secs = [[2e-3, 4e-3], [1e-3, 3e-3]]
    decided(session, monkeypatch, check, secs, is_second=is_second)
    assert reserved == [reserved_sec]


def test_a_task_without_another_record_stays_untuned(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check("wrong result: 3 of 4")
    outcomes, final, _ = decided(session, monkeypatch, check, [[2e-3]])
    assert (final, outcomes[0].in_network, outcomes[0].played_off) == ([], False, False)


def test_where_the_check_fails_every_task_plays(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check(None, None)
    _, final, played = decided(session, monkeypatch, check, [[2e-3, 4e-3], [1e-3, 3e-3]])
    assert (final, played) == ([1e-3, 2e-3], ["0", "1"])


def test_without_time_no_further_records_are_read(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check, read = session_with_check(make_session), Check(None, None), []
    found = check.check_functions

    def late(*arguments: Any) -> list[FunctionCheck]:
        session.budget.spent_sec += 1e3
        return found(*arguments)

    monkeypatch.setattr(check, "check_functions", late)
    monkeypatch.setattr(Finalists, "complete", lambda self: read.append(self.name) or self)
    _, final, played = decided(session, monkeypatch, check, [[2e-3, 4e-3], [1e-3, 3e-3]])
    assert (final, played, read) == ([], [], [])


def test_where_the_check_fails_a_draft_plays_too(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check(None, None)
    _, final, played = decided(session, monkeypatch, check, [[2e-3, 4e-3], []])
    assert played == ["0", "1"]
    assert len(final) == 2


def with_forms(check: Check) -> Check:
    check.forms = {"0": FormKey("conv", ""), "1": FormKey("conv", "a"), "2": FormKey("conv", "a")}
    return check


def test_the_tasks_of_another_form_are_checked_and_those_of_the_direct_one_left_out(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), with_forms(Check("", ""))
    outcomes, final, played = decided(session, monkeypatch, check, [[5e-3], [1e-3], [2e-3]])
    assert (final, played, check.databases) == ([1e-3, 2e-3], [], [[1e-3, 2e-3]])
    assert [each.checked for each in outcomes] == ["not used", "network", "network"]
    assert [each.form for each in outcomes] == ["", "a", "a"]


def test_where_a_task_of_another_form_loses_the_direct_one_is_deployed(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), with_forms(Check("", "wrong result"))
    outcomes, final, played = decided(session, monkeypatch, check, [[5e-3], [1e-3], [2e-3]])
    assert played == ["0"]
    assert [each.checked for each in outcomes] == ["play-off", "not used", "not used"]
    assert 5e-3 in final


def test_a_direct_form_without_trials_is_drafted_where_another_does_not_pass(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = itertools.chain([100.0], itertools.repeat(1.0))  # the direct form's is the largest
    monkeypatch.setattr(decision, "work_of", lambda _mod: next(works))
    session, check = session_with_check(make_session), with_forms(Check("", "wrong result"))
    outcomes, final, played = decided(session, monkeypatch, check, [[], [1e-3], [2e-3]])
    assert (played, outcomes[0].checked) == (["0"], "play-off")
    assert len(final) == 2


def test_an_interrupt_leaves_out_what_was_not_checked(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check()
    session.budget.interrupt()
    outcomes, final, played = decided(session, monkeypatch, check, [[2e-3, 4e-3], [1e-3, 3e-3]])
    assert (final, played, check.databases) == ([], [], [])
    assert not any(each.in_network or each.played_off for each in outcomes)
    assert said_in(session.work_dir) == {}


def test_an_interrupt_keeps_the_form_that_an_earlier_attempt_has_proven(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The direct kernel is recorded as faster, and unchecked."""
    session, check = session_with_check(make_session), with_forms(Check())
    session.budget.interrupt()
    secs = [[1e-3], [2e-3], [2e-3]]
    outcomes, final, played = decided(session, monkeypatch, check, secs, proven_tasks=(1, 2))
    assert (final, played) == ([2e-3, 2e-3], [])
    assert [each.checked for each in outcomes] == ["not used", "play-off", "play-off"]


@pytest.mark.parametrize(("proven_tasks", "is_kept"), [((1, 2), True), ((1,), False)])
def test_a_proven_form_is_deployed_where_the_direct_one_cannot_be_checked_in_time(
    make_session: Any,
    monkeypatch: pytest.MonkeyPatch,
    proven_tasks: tuple[int, ...],
    is_kept: bool,
) -> None:
    session, check = session_with_check(make_session), with_forms(Check(None))
    found = check.check_functions

    def late(*arguments: Any) -> list[FunctionCheck]:
        session.budget.spent_sec += 1e3
        return found(*arguments)

    monkeypatch.setattr(check, "check_functions", late)
    secs = [[1e-3], [2e-3], [2e-3]]
    outcomes, final, _ = decided(session, monkeypatch, check, secs, proven_tasks=proven_tasks)
    assert final == [2e-3, 2e-3] * is_kept
    assert [each.is_used for each in outcomes] == [not is_kept, is_kept, is_kept]


def test_where_a_proven_form_is_refuted_the_direct_one_is_left() -> None:
    nothing: Any = None
    proven: Any = object()
    finalists = [
        Finalists(nothing, "0", (nothing,), 3e-3),
        Finalists(nothing, "1", (nothing,), 1e-3),
        Finalists(nothing, "2", (nothing,), 2e-3, proven=proven),
    ]
    forms = {"0": FormKey("conv"), "1": FormKey("conv", "a"), "2": FormKey("conv", "b")}
    choice = FormChoice.of(finalists, forms)
    assert choice.used == [False, True, False]
    unchecked = FinalistReport("", (), "no-time", 0.0)
    reports = dict.fromkeys(range(3), unchecked)
    held: list[list[int]] = []

    def hold(finalists: dict[int, Finalists]) -> dict[int, FinalistReport]:
        held.append(list(finalists))
        return dict.fromkeys(finalists, unchecked)

    left = decision._hold_replacements(choice, reports, hold)
    assert held == [[2], [0]]
    assert left.used == [True, False, False]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_disk_that_does_not_take_the_winners_ends_the_run_as_an_interrupt_does(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, *, is_interrupted: bool
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise MachineError("final cannot be written: no space is left")

    monkeypatch.setattr(decision, "final_database", refuse)
    observer, journal = Notes(), MemoryJournal()
    session = make_session(observer=observer, journal=journal)
    if is_interrupted:
        session.budget.interrupt()
    report = report_of(make_record(te_workload("GMM"), TARGET, 1e-3))
    database = decision._final_database(session, [report])
    assert [float(each.run_secs[0]) for each in database.get_all_tuning_records()] == [1.5e-3]
    assert session.budget.interrupted
    (note,) = observer.notes
    assert note.startswith("final cannot be written: no space is left")
    assert ("--resume" in note) == (not is_interrupted)
    (error,) = journal.of("error")
    assert error["where"] == "machine"


def test_what_earlier_runs_have_proven_is_among_the_verdicts_of_the_run(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = dataclasses.replace(session_with_check(make_session), store=AwayForAWhile(0))
    session.budget.interrupt()
    outcomes, final, _ = decided(session, monkeypatch, Check(), [[2e-3, 4e-3]], proven_tasks=(0,))
    assert (final, outcomes[0].played_off) == ([2e-3], True)
    assert list(said_in(session.work_dir).values()) == [""]
    assert session.store.taken == []  # which has it already


def test_a_task_without_trials_runs_with_a_draft_that_was_checked(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check, written = session_with_check(make_session), Check("", ""), []
    monkeypatch.setattr(
        session.journal, "write", lambda event, **fields: written.append((event, fields))
    )
    outcomes, final, played = decided(session, monkeypatch, check, [[2e-3], []])
    # The draft has no time but that of its only call.
    assert (final, played, check.databases) == ([0.5e-3, 2e-3], [], [[2e-3, 1.0]])
    found = [(each.n_trials, each.in_network, each.is_drafted, each.best_sec) for each in outcomes]
    assert found == [(4, True, False, 2e-3), (0, True, True, 0.5e-3)]
    assert written.count(("drafted", {"n_tasks": 1, "n_without": 0})) == 1


def test_of_equal_functions_what_was_compiled_is_said_to_be_checked(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two groups of convolutions have: the network calls one function for both."""
    monkeypatch.setattr(sys.modules[__name__], "mods_of", lambda n: [te_workload("GMM")] * n)
    session, check = session_with_check(make_session), Check("", "")
    outcomes, final, played = decided(session, monkeypatch, check, [[], [1e-3]])
    assert (set(final), played, check.databases) == ({1e-3}, [], [[1e-3]])
    assert [(each.in_network, each.is_drafted) for each in outcomes] == [(True, False)] * 2
    assert list(said_in(session.work_dir).values()) == [""]


def test_a_draft_that_is_wrong_or_has_no_time_leaves_its_task_untuned(
    make_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, check = session_with_check(make_session), Check("", "output 0 is wrong")
    outcomes, final, played = decided(session, monkeypatch, check, [[2e-3], []])
    assert (final, played) == ([2e-3], [])
    assert (outcomes[1].checked, outcomes[1].n_disqualified) == ("no", 1)
    monkeypatch.setattr(session.budget, "reserve_drafts", lambda *_args: 0)
    outcomes, final, _ = decided(session, monkeypatch, Check(""), [[2e-3], []])
    assert (final, outcomes[1].checked, outcomes[1].best_sec) == ([2e-3], "no", math.inf)


@pytest.mark.parametrize("n_lost", [0, 1, 2])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_is_deployed_without_a_search_plays_once_more_where_its_device_was_lost(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, n_lost: int, *, is_interrupted: bool
) -> None:
    nothing: Any = None
    pool = LeasingPool(RPCConfig("nowhere", 1, "board", 1, 5))
    monkeypatch.setattr(
        playoffs, "_builder_and_pool", lambda *_: contextlib.nullcontext((nothing, pool))
    )
    session = make_session(target=TARGET)
    played, ends = [], ["error"] * n_lost

    def play(_context: Any, mine: Finalists, *_parts: Any) -> FinalistReport:
        played.append(mine.name)
        reason = ends.pop() if mine.name == "0" and ends else "separated"
        pool._retry_sec = time.monotonic() + (0.3 if reason == "error" else -1.0)
        if is_interrupted and mine.name == "1":
            session.budget.interrupt()
        return FinalistReport(mine.name, (), reason, 1.0)

    monkeypatch.setattr(playoffs, "_play_off", play)
    finalists = {n: Finalists(nothing, f"{n}", (), 1.0) for n in range(3)}
    start_sec = time.monotonic()
    reports = playoffs.checked_now(session, finalists)
    assert (time.monotonic() - start_sec > 0.3) == bool(n_lost)
    if is_interrupted:
        assert played == ["0", "1"]
    else:
        assert played == ["0", "1", "2"] + ["0"] * bool(n_lost)
        assert reports[0].reason == ("error" if n_lost == 2 else "separated")
    assert list(reports) == list(range(2 if is_interrupted else 3))
    pool.close()
