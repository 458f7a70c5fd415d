"""A record store as MetaSchedule's database, and back and forth with its own files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import (
    TVM_VERSION,
    IRModule,
    Schedule,
    Target,
    TuningRecord,
    Workload,
    args_info_of,
    json_database,
    structural_hash,
)
from tvm_adaptive.database import maintenance, metaschedule
from tvm_adaptive.database.location import RUN_STORE
from tvm_adaptive.database.maintenance import (
    export_json,
    export_records,
    import_json,
    import_records,
    stats,
)
from tvm_adaptive.database.metaschedule import (
    StoreDatabase,
    record_of,
    target_text,
    task_of,
    trial_of,
)
from tvm_adaptive.database.records import StoredTask, StoredTrial
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import VerdictFile, proven
from tvm_adaptive.errors import InvalidOptionError, StoreError
from tvm_adaptive.runner.playoff.finalist import Finalist, Proof
from tvm_adaptive.runner.playoff.playoff import FinalistReport
from tvm_adaptive.tuning.config import DEFAULT
from tvm_adaptive.tuning.warm_start import VerdictRecorder
from tvm_adaptive.values.run_folder import FINAL_DIR, RECORD_FILE, WORKLOAD_FILE
from tvm_adaptive.workers.environment import Environment

Mods = dict[str, IRModule]


@pytest.fixture
def store(tmp_path: Path, target: Target) -> Iterator[RecordStore]:
    with RecordStore(tmp_path / "records.db", Environment.current(target)) as store:
        yield store


def test_what_one_database_commits_another_reads(
    store: RecordStore, mods: Mods, target: Target
) -> None:
    mod = mods["GMM"]
    first = StoreDatabase(store, target)
    assert not first.has_workload(mod)
    for seed, seconds in enumerate((3e-3, None, 1e-3, 2e-3), start=1):
        first.commit_tuning_record(make_record(mod, target, seconds, seed))
    assert len(first) == 4
    second = StoreDatabase(store, target, checked_only=False)
    assert second.has_workload(mod)
    assert not second.has_workload(mods["C1D"])
    top = second.get_top_k(second.commit_workload(mod), 2)
    assert [float(record.run_secs[0]) for record in top] == [1e-3, 2e-3]
    assert len(second.get_all_tuning_records()) == 4
    best = second.query_tuning_record(mod, target, "main")
    assert best is not None
    assert float(best.run_secs[0]) == 1e-3
    schedule = second.query_schedule(mod, target, "main")
    assert schedule is not None
    assert structural_hash(schedule.mod) != structural_hash(mod)
    found = second.query_ir_module(mod, target, "main")
    assert structural_hash(found) == structural_hash(schedule.mod)


def test_a_workload_is_described_once(
    store: RecordStore, mods: Mods, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[IRModule] = []

    def describe(mod: IRModule, *arguments: Any) -> StoredTask:
        described.append(mod)
        return task_of(mod, *arguments)

    monkeypatch.setattr(metaschedule, "task_of", describe)
    database = StoreDatabase(store, target)
    for seed in (1, 2, 3):
        database.commit_tuning_record(make_record(mods["GMM"], target, 1e-3, seed))
    assert (len(database), len(described)) == (3, 1)


def test_records_of_another_target_are_not_seen(
    store: RecordStore, mods: Mods, target: Target
) -> None:
    other = Target({"kind": "llvm", "num-cores": 64})
    StoreDatabase(store, other).commit_tuning_record(make_record(mods["GMM"], other, 1e-3))
    mine = StoreDatabase(store, target, checked_only=False)
    assert not mine.has_workload(mods["GMM"])
    assert len(mine) == 0
    assert mine.query_tuning_record(mods["GMM"], target, "main") is None


def test_it_stands_in_for_metaschedules_own_in_a_context(
    store: RecordStore, mods: Mods, target: Target
) -> None:
    database = StoreDatabase(store, target, checked_only=False)
    database.commit_tuning_record(make_record(mods["GMM"], target, 1e-3))
    with database:
        from tvm.s_tir.meta_schedule import database as ms_database

        current = ms_database.Database.current()
        assert current is not None
        assert current.query_tuning_record(mods["GMM"], target, "main") is not None


def test_a_record_that_cannot_be_read_is_left_out(
    store: RecordStore, mods: Mods, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(mods["GMM"], target, "main")
    StoreDatabase(store, target).commit_tuning_record(make_record(mods["GMM"], target, 1e-3))
    another = '[[[["AnotherVersions", [], [], []]], []], [1e-4], {"kind": "llvm"}, []]'
    store.add(task, [StoredTrial(another, 1e-4), StoredTrial("{", 1e-4)])
    database = StoreDatabase(store, target)
    assert len(database.get_top_k(database.commit_workload(mods["GMM"]), 9)) == 1
    assert "left out" in caplog.text
    assert record_of(StoredTrial("[", 1.0), Workload(mods["GMM"])) is None


def test_a_trace_that_changes_a_layout_is_kept(
    store: RecordStore, mods: Mods, target: Target, tmp_path: Path
) -> None:
    schedule = Schedule(mods["GMM"])
    schedule.enter_postproc()
    schedule.transform_layout("Z", ("read", 1), lambda b, i, j: (b, j, i))
    mod = mods["GMM"]
    record = TuningRecord(schedule.trace, Workload(mod), [1e-3], target, args_info_of(mod))
    StoreDatabase(store, target).commit_tuning_record(record)
    export_json(store, tmp_path / "json")
    for database in (StoreDatabase(store, target), json_database(tmp_path / "json")):
        (kept,) = database.get_all_tuning_records()
        again = Schedule(mod)
        kept.trace.apply_to_schedule(again, remove_postproc=False)
        assert structural_hash(again.mod) == structural_hash(schedule.mod)


def test_equal_workloads_are_one_task_whatever_their_origin(mods: Mods, target: Target) -> None:
    again = Workload.from_json(json.loads(task_of(mods["GMM"], target, "a").workload)).mod
    one, other = task_of(mods["GMM"], target, "a"), task_of(again, target_text(target), "b")
    assert one.identity == other.identity
    assert one.family == other.family != task_of(mods["C1D"], target, "c").family


def write_json(folder: Path, mods: Mods, target: Target) -> None:
    folder.mkdir()
    database = json_database(folder)
    for mod in mods.values():
        for seed, seconds in enumerate((3e-3, None, 1e-3), start=1):
            record = make_record(mod, target, seconds, seed)
            workload = database.commit_workload(mod)
            fields = record.as_json()
            database.commit_tuning_record(type(record).from_json(fields, workload))


def test_metaschedules_files_come_in_and_go_out_again(
    store: RecordStore, mods: Mods, target: Target, tmp_path: Path
) -> None:
    write_json(tmp_path / "theirs", mods, target)
    assert import_json(store, tmp_path / "theirs") == (6, 0)
    assert [each.n_trials for each in store.stats()] == [3, 3]
    assert [each.n_failures for each in store.stats()] == [1, 1]
    assert export_json(store, tmp_path / "ours") == 4
    database = json_database(tmp_path / "ours")
    for mod in mods.values():
        best = database.query_tuning_record(mod, target, "main")
        assert float(best.run_secs[0]) == 1e-3
    assert export_json(store, tmp_path / "best", best=1) == 2


def test_importing_twice_adds_nothing(
    store: RecordStore, mods: Mods, target: Target, tmp_path: Path
) -> None:
    write_json(tmp_path / "theirs", mods, target)
    import_json(store, tmp_path / "theirs")
    assert import_json(store, tmp_path / "theirs") == (0, 6)


def test_a_runs_verdicts_come_with_its_records(mods: Mods, target: Target, tmp_path: Path) -> None:
    folder, mod = tmp_path / "run", mods["GMM"]
    write_json(folder, mods, target)
    task = task_of(mod, target_text(target), "main")
    with RecordStore(tmp_path / "first.db") as store:
        import_json(store, folder)
        fastest = store.best(task, 1)[0]
    wrong = dataclasses.replace(fastest, seconds=None, failure="wrong result: all", run="a")
    VerdictFile(folder, str(TVM_VERSION)).add(task, [wrong])
    store_path = str(tmp_path / "team.db")
    for _ in range(2):
        import_records(store_path, folder)
    with RecordStore(store_path) as store:
        assert [each.failure for each in store.finals(task)] == ["wrong result: all"]
    n_all = sum(trial.n_trials - trial.n_failures for trial in stats(store_path)[1])
    assert export_records(store_path, tmp_path / "out") == n_all - 1


def write_run_with_winner(
    folder: Path, mods: Mods, target: Target
) -> tuple[StoredTask, StoredTrial]:
    """Write a run's JSON database and a verdict; return its task and its winner."""
    write_json(folder, mods, target)
    task = task_of(mods["GMM"], target_text(target), "main")
    winner = trial_of(make_record(mods["GMM"], target, 1e-3), run="a")
    VerdictFile(folder, str(TVM_VERSION)).add(task, [winner])
    return task, winner


def test_of_a_large_store_only_the_tasks_with_verdicts_are_read(
    mods: Mods, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    task, winner = write_run_with_winner(folder, mods, target)
    read: list[StoredTask] = []
    tasks = RecordStore.tasks

    def watched(store: RecordStore, **options: Any) -> list[StoredTask]:
        found = tasks(store, **options)
        read.extend(found)
        return found

    monkeypatch.setattr(RecordStore, "tasks", watched)
    import_records(str(tmp_path / "team.db"), folder)
    assert [each.identity for each in read] == [task.identity]
    with RecordStore(tmp_path / "team.db") as store:
        assert proven(store.finals(task)) == winner


def test_a_damaged_store_of_a_run_hides_none_of_its_other_files(
    mods: Mods, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    task, winner = write_run_with_winner(folder, mods, target)
    damaged, garbage = folder / RUN_STORE, b"no database at all" * 100
    damaged.write_bytes(garbage)
    assert import_records(str(tmp_path / "team.db"), folder)[1:] == (6, 0)
    assert f"open the record store {damaged}: file is not a database" in caplog.text
    assert damaged.read_bytes() == garbage
    with RecordStore(tmp_path / "team.db") as store:
        assert proven(store.finals(task)) == winner
    # Where there is nothing else, it is an error.
    (folder / RECORD_FILE).unlink()
    for source in (folder, damaged):
        with pytest.raises(StoreError, match=f"{re.escape(str(damaged))}: file is not a database"):
            import_records(str(tmp_path / "team.db"), source)


def test_a_store_that_takes_nothing_is_no_damaged_source(
    mods: Mods, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StoreError("the server is gone.")

    folder, task = tmp_path / "run", task_of(mods["GMM"], target_text(target), "main")
    write_json(folder, mods, target)
    with RecordStore(folder / RUN_STORE) as own:
        own.add(task, [trial_of(make_record(mods["GMM"], target, 1e-3))])
    monkeypatch.setattr(RecordStore, "add", away)
    monkeypatch.setattr(maintenance, "import_json", lambda *_: (0, 0))
    with pytest.raises(StoreError, match="the server is gone"):
        import_records(str(tmp_path / "team.db"), folder)


def test_verdicts_of_another_tvm_come_with_its_records(
    mods: Mods, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Environment("another processor, 2 cores", "0.26.0", "0.1.14")
    monkeypatch.setattr(maintenance, "_environment_of", lambda _: there)
    folder, task = tmp_path / "run", task_of(mods["GMM"], target_text(target), "main")
    write_json(folder, mods, target)
    winner = trial_of(make_record(mods["GMM"], target, 1e-3), run="a")
    VerdictFile(folder, there.tvm).add(task, [winner])
    import_records(str(tmp_path / "team.db"), folder)
    with RecordStore(tmp_path / "team.db", there) as store:
        assert proven(store.finals(task)) == winner


def test_an_older_runs_verdicts_do_not_outlive_later_ones(
    mods: Mods, target: Target, tmp_path: Path
) -> None:
    folder, mod = tmp_path / "run", mods["GMM"]
    write_json(folder, mods, target)
    task, store_path = task_of(mod, target_text(target), "main"), tmp_path / "team.db"
    with RecordStore(store_path) as store:
        import_json(store, folder)
        fastest = store.best(task, 1)[0]
        wrong = dataclasses.replace(
            fastest, seconds=None, failure="wrong result: all", run="late", unix_sec=200.0
        )
        store.add_finals(task, [wrong])
    right = dataclasses.replace(fastest, run="early", unix_sec=100.0)
    VerdictFile(folder, str(TVM_VERSION)).add(task, [right])
    import_records(str(store_path), folder)
    with RecordStore(store_path) as store:
        assert [each.run for each in store.finals(task)] == ["early", "late"]
        assert proven(store.finals(task)) is None


def test_a_proof_that_a_run_took_over_does_not_outlive_later_verdicts(
    mods: Mods, target: Target, tmp_path: Path
) -> None:
    folder, mod = tmp_path / "run", mods["GMM"]
    write_json(folder, mods, target)
    task, store_path = task_of(mod, target_text(target), "main"), tmp_path / "team.db"
    record = make_record(mod, target, 1e-3)
    right = trial_of(record, run="old", unix_sec=100.0)
    wrong = dataclasses.replace(
        right, seconds=None, failure="wrong result: all", run="late", unix_sec=200.0
    )
    with RecordStore(store_path) as store:
        store.add_finals(task, [right])
        store.add_finals(task, [wrong])
    session: Any = SimpleNamespace(
        work_dir=folder, target=target, store=None, run_id="new", config=DEFAULT
    )
    proof = Proof(right.record, right.run, right.unix_sec)
    finalist = Finalist(record, 1e-3, 1e-3, unchecked="", proof=proof)
    report = FinalistReport("main", (finalist,), "not-held", 0.0)
    VerdictRecorder(session).add(report, is_earlier=True)
    import_records(str(store_path), folder)
    with RecordStore(store_path) as store:
        assert [each.run for each in store.finals(task)] == ["old", "late"]
        assert proven(store.finals(task)) is None


def test_a_runs_verdicts_on_drafts_come_without_trials(
    mods: Mods, target: Target, tmp_path: Path
) -> None:
    folder, mod = tmp_path / "run", mods["C1D"]
    write_json(folder, {"GMM": mods["GMM"]}, target)
    write_json(folder / FINAL_DIR, mods, target)
    task = task_of(mod, target_text(target), "main")
    draft = trial_of(make_record(mod, target, 2e-3), run="a")
    VerdictFile(folder, str(TVM_VERSION)).add(task, [draft])
    import_records(str(tmp_path / "team.db"), folder)
    with RecordStore(tmp_path / "team.db") as store:
        assert store.latest(task) == []
        assert proven(store.finals(task)) == draft
        assert task.identity in {each.identity for each in store.tasks()}


def test_a_slow_clock_does_not_outlive_a_disqualification(
    mods: Mods, target: Target, tmp_path: Path
) -> None:
    task = task_of(mods["GMM"], target_text(target), "main")
    right = trial_of(make_record(mods["GMM"], target, 1e-3), unix_sec=200.0, run="a")
    wrong = dataclasses.replace(
        right, seconds=None, failure="wrong result: all", run="b", unix_sec=100.0
    )
    with RecordStore(tmp_path / "team.db") as store:
        store.add_finals(task, [right])
        store.add_finals(task, [wrong])
        assert proven(store.finals(task)) is None


def test_lines_that_cannot_be_read_cost_themselves_only(
    store: RecordStore, mods: Mods, target: Target, tmp_path: Path
) -> None:
    write_json(tmp_path / "theirs", mods, target)
    path = tmp_path / "theirs" / RECORD_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "", "[9, []]", lines[2][:40], *lines[3:]]))
    assert import_json(store, tmp_path / "theirs") == (5, 2)


def test_what_is_no_database_is_reported(store: RecordStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="holds no database"):
        import_json(store, tmp_path)
    (tmp_path / WORKLOAD_FILE).touch()
    with pytest.raises(InvalidOptionError, match="holds a database already"):
        export_json(store, tmp_path)
