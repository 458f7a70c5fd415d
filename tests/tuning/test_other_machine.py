from __future__ import annotations

import json
import logging
from unittest.mock import Mock

import pytest

from tests.database.conftest import make_record
from tests.tuning.observers import Notes
from tests.tuning.runs import QUICK
from tvm_adaptive._tvm import Target, TuneContext, copy_record, json_database, te_workload
from tvm_adaptive.database.metaschedule import task_of, trial_of
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.search_strategy.transfer import TransferPool
from tvm_adaptive.tuning.other_machine import (
    seed_from_set_aside,
    set_aside,
)
from tvm_adaptive.tuning.prior_trials import find_prior_trials
from tvm_adaptive.tuning.session import RunOptions, open_session
from tvm_adaptive.workers.environment import Environment

HERE = Environment("EPYC, 2 cores", "0.27.0", "0.1.14")
TIMED = ("database_workload.json", "database_tuning_record.json", "records.db", "records.db-wal")


def test_files_with_times_are_set_aside_and_nothing_is_lost(tmp_path):
    for attempt in (1, 2):
        for name in TIMED:
            (tmp_path / name).write_text(f"{name} {attempt}")
        (tmp_path / "final").mkdir()
        (tmp_path / "final" / "record").write_text(str(attempt))
        (tmp_path / "journal.jsonl").write_text("events")
        folder = set_aside(tmp_path)
        assert folder == tmp_path / f"other-machine-{attempt}"
        assert {path.name for path in folder.iterdir()} == {*TIMED, "final"}
        assert not any((tmp_path / name).exists() for name in (*TIMED, "final"))
        assert (tmp_path / "journal.jsonl").exists()
    for attempt in (1, 2):
        kept = tmp_path / f"other-machine-{attempt}"
        assert (kept / "final" / "record").read_text() == str(attempt)
        assert (kept / TIMED[0]).read_text() == f"{TIMED[0]} {attempt}"
    assert set_aside(tmp_path) is None


def test_what_was_set_aside_was_not_measured_here(tmp_path):
    folder, mod = tmp_path / "other-machine-1", te_workload("GMM")
    folder.mkdir()
    target, pool = Target({"kind": "llvm", "num-cores": 2}), TransferPool()
    copy_record(make_record(mod, target, 1e-3), json_database(folder))
    context = TuneContext(mod, target=target, task_name="main")
    assert seed_from_set_aside(tmp_path, [context], pool) == ["main"]
    (tasks,) = pool._before.values()
    assert [record.is_here for record in tasks["main"]] == [False]


def test_a_store_does_not_replace_what_was_set_aside(tmp_path):
    mod, target, pool = te_workload("GMM"), Target({"kind": "llvm", "num-cores": 2}), TransferPool()
    folder = tmp_path / "other-machine-1"
    folder.mkdir()
    copy_record(make_record(mod, target, 1e-3, 1), json_database(folder))
    context = TuneContext(mod, target=target, task_name="main")
    seed_from_set_aside(tmp_path, [context], pool)
    with RecordStore(tmp_path / "records.db", HERE) as store:
        store.add(task_of(mod, target, "main"), [trial_of(make_record(mod, target, 9e-3, 2))])
        find_prior_trials(store, [context], pool, None)
    (tasks,) = pool._before.values()
    assert [each.seconds for each in tasks["main"]] == [9e-3, 1e-3]


def test_what_was_disqualified_before_it_was_set_aside_is_no_seed(tmp_path):
    mod, target, pool = te_workload("GMM"), Target({"kind": "llvm", "num-cores": 2}), TransferPool()
    liar, honest = (make_record(mod, target, sec, seed) for sec, seed in ((1e-6, 1), (1e-3, 2)))
    for number, record in ((1, liar), (2, honest), (3, liar)):
        folder = tmp_path / f"other-machine-{number}"
        folder.mkdir()
        copy_record(record, json_database(folder))
    finals = [trial_of(liar, failure="wrong result")]
    VerdictFile(tmp_path / "other-machine-3", "0.1").add(task_of(mod, target, "main"), finals)
    context = TuneContext(mod, target=target, task_name="main")
    assert seed_from_set_aside(tmp_path, [context], pool) == ["main"]
    (tasks,) = pool._before.values()
    assert [record.seconds for record in tasks["main"]] == [1e-3]


def test_a_database_that_cannot_be_read_seeds_nothing(tmp_path, caplog):
    empty, odd = tmp_path / "other-machine-1", tmp_path / "other-machine-2"
    empty.mkdir()
    odd.mkdir()
    (odd / "database_workload.json").write_text('["hash", "no module"]\n')
    (odd / "database_tuning_record.json").write_text('[0, [["odd"], [1.0], {}, []]]\n')
    with caplog.at_level(logging.WARNING):
        assert seed_from_set_aside(tmp_path, [], TransferPool()) == []
    assert str(odd) in caplog.text
    assert str(empty) not in caplog.text


def test_a_record_that_tvm_cannot_apply_costs_itself_only(tmp_path):
    mod, target, pool = te_workload("GMM"), Target({"kind": "llvm", "num-cores": 2}), TransferPool()
    folder = tmp_path / "other-machine-1"
    folder.mkdir()
    for sec, seed in ((1e-3, 1), (2e-3, 2)):
        copy_record(make_record(mod, target, sec, seed), json_database(folder))
    path = folder / "database_tuning_record.json"
    first, second = path.read_text().splitlines()
    number, fields = json.loads(first)
    fields[0] = [[["AnotherVersions", [], [], []]], []]
    path.write_text(f"{json.dumps([number, fields])}\n{second}\n")
    context = TuneContext(mod, target=target, task_name="main")
    assert seed_from_set_aside(tmp_path, [context], pool) == ["main"]
    (tasks,) = pool._before.values()
    assert [record.seconds for record in tasks["main"]] == [2e-3]


@pytest.mark.parametrize("is_resumed", [True, False])
def test_records_of_an_unknown_machine_count_as_another_ones(tmp_path, is_resumed):
    target, observer = Target({"kind": "llvm", "num-cores": 2}), Notes()
    record = make_record(te_workload("GMM"), target, 1e-3)
    copy_record(record, json_database(tmp_path))
    options = RunOptions(
        what="net",
        work_dir=tmp_path,
        trials=4,
        config=QUICK,
        observer=observer,
        resume=is_resumed,
    )
    with open_session(options, server=Mock()):
        assert len(RunDatabase(tmp_path)) == 0
    folder = tmp_path / "other-machine-1"
    assert len(json_database(folder)) == 1
    (note,) = observer.notes
    assert note == f"records of an unknown machine are in {folder}"
    # From now on there is a journal, which says where its records were measured.
    copy_record(record, RunDatabase(tmp_path))
    with open_session(options, server=Mock()):
        assert len(RunDatabase(tmp_path)) == 1
    assert len(observer.notes) == 1
