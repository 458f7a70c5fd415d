"""A run's database answers as MetaSchedule's own of the same files, from an index alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.database.conftest import make_record
from tvm_adaptive._tvm import (
    Database,
    IRModule,
    Schedule,
    Target,
    TuningRecord,
    Workload,
    args_info_of,
    json_database,
    python_side,
    record_as_json,
    structural_hash,
    workload_key,
)
from tvm_adaptive.database.metaschedule import readable_database, task_of, trial_of
from tvm_adaptive.database.repair import repair_database
from tvm_adaptive.database.run_database import RunDatabase
from tvm_adaptive.database.verdicts import VerdictFile
from tvm_adaptive.runner.playoff.modules import MAX_RECORDS, sane_records
from tvm_adaptive.search_strategy.schedules import measured_schedules
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE

Mods = dict[str, IRModule]
FAILED = [1e10]


@pytest.fixture(scope="module")
def templates(mods: Mods, target: Target) -> dict[str, list[TuningRecord]]:
    """Some schedules of each workload, to be committed with other times; one does nothing."""
    found = {}
    for name, mod in mods.items():
        idle = Schedule(mod)
        idle.enter_postproc()
        found[name] = [make_record(mod, target, 1e-3, seed) for seed in range(1, 8)]
        infos = args_info_of(mod)
        found[name].append(TuningRecord(idle.trace, Workload(mod), [1e-3], target, infos))
    return found


def commit(
    database: Database, template: TuningRecord, run_secs: list[float], target: Target
) -> None:
    workload = database.commit_workload(template.workload.mod)
    database.commit_tuning_record(
        TuningRecord(template.trace, workload, run_secs, target, template.args_info)
    )


def plain(records: list[TuningRecord]) -> list[str]:
    return [json.dumps(record_as_json(record), sort_keys=True) for record in records]


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / RECORD_FILE).read_text().splitlines()]


def make_both(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], target: Target, n: int
) -> tuple[Database, Database]:
    """Return our database and MetaSchedule's after the same random commits."""
    rng = np.random.default_rng(3)
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    databases = RunDatabase(tmp_path / "ours"), json_database(tmp_path / "theirs")
    for _ in range(n):
        some = templates[("GMM", "C1D")[int(rng.integers(2))]]
        template = some[int(rng.integers(len(some)))]
        # Few different times, so that many are equal: then the oldest comes first.
        secs = (1e-4 * rng.integers(1, 40, size=int(rng.integers(1, 3)))).tolist()
        run_secs = (secs, FAILED, [], [*FAILED, 1e-3])[
            int(rng.choice(4, p=[0.85, 0.05, 0.05, 0.05]))
        ]
        for database in databases:
            commit(database, template, run_secs, target)
    return databases


def assert_alike(ours: Database, theirs: Database, mods: Mods, target: Target) -> None:
    assert len(ours) == len(theirs)
    for mod in mods.values():
        assert ours.has_workload(mod)
        assert theirs.has_workload(mod)
        mine, stock = ours.commit_workload(mod), theirs.commit_workload(mod)
        for n in (0, 7, len(theirs)):
            assert plain(ours.get_top_k(mine, n)) == plain(theirs.get_top_k(stock, n))
        best = ours.query_tuning_record(mod, target, "main")
        assert plain([best]) == plain([theirs.query_tuning_record(mod, target, "main")])
        schedules = [each.query_schedule(mod, target, "main") for each in (ours, theirs)]
        assert len({structural_hash(each.mod) for each in schedules}) == 1
        modules = [each.query_ir_module(mod, target, "main") for each in (ours, theirs)]
        assert len({structural_hash(each) for each in modules}) == 1


def test_it_answers_as_metaschedules_own(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    ours, theirs = make_both(tmp_path, templates, target, 300)
    assert_alike(ours, theirs, mods, target)
    everything = plain(ours.get_all_tuning_records())
    assert sorted(everything) == sorted(plain(theirs.get_all_tuning_records()))
    # The same lines, and each class reads what the other has written.
    assert lines(tmp_path / "ours") == lines(tmp_path / "theirs")
    workloads = [(tmp_path / name / WORKLOAD_FILE).read_text() for name in ("ours", "theirs")]
    assert workloads[0] == workloads[1]
    assert_alike(RunDatabase(tmp_path / "theirs"), json_database(tmp_path / "ours"), mods, target)
    assert repair_database(tmp_path / "ours") == 0


def test_an_unknown_workload_has_no_records(tmp_path: Path, mods: Mods, target: Target) -> None:
    database = RunDatabase(tmp_path)
    assert not database.has_workload(mods["GMM"])
    assert database.query_tuning_record(mods["GMM"], target, "main") is None
    assert list(python_side(database).records_of(mods["GMM"])) == []
    assert len(database) == 0
    assert database.get_top_k(Workload(mods["GMM"]), 3) == []


def test_of_records_it_keeps_an_index_only(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for number in range(400):
        commit(database, templates["GMM"][number % 8], [1e-3 + 1e-6 * number], target)
    inner = python_side(database)
    inner.get_top_k(inner.commit_workload(templates["GMM"][0].workload.mod), 300)
    assert inner._recent.cache_info().currsize <= 128
    assert not inner._unwritten
    (index,) = inner._indices.values()
    assert index.mean_secs.itemsize + index.offsets.itemsize == 16


def test_records_of_a_workload_come_in_the_order_written(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for secs in ([3e-3], FAILED, [1e-3]):
        commit(database, templates["GMM"][0], secs, target)
        commit(database, templates["C1D"][0], [1.0], target)
    found = python_side(database).records_of(mods["GMM"])
    assert [[float(sec) for sec in record.run_secs] for record in found] == [[3e-3], FAILED, [1e-3]]
    last = python_side(database).records_of(mods["GMM"], last=2)
    assert [[float(sec) for sec in record.run_secs] for record in last] == [FAILED, [1e-3]]
    assert (database.n_records_of(mods["GMM"]), database.n_records_of(mods["C1D"])) == (3, 3)


def test_what_a_play_off_has_disqualified_counts_as_failed(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for name, seed, sec in (("GMM", 0, 1e-5), ("GMM", 1, 2e-3), ("C1D", 0, 3e-3), ("GMM", 0, 4e-3)):
        commit(database, templates[name][seed], [sec], target)
    (liar,) = database.get_top_k(database.commit_workload(mods["GMM"]), 1)
    finals = [trial_of(liar, failure="wrong result")]
    VerdictFile(tmp_path, "0.1").add(task_of(mods["GMM"], target, "main"), finals)
    again = RunDatabase(tmp_path)
    found = python_side(again).records_of(mods["GMM"])
    assert [[float(sec) for sec in each.run_secs] for each in found] == [FAILED, [2e-3], FAILED]
    top = {name: again.get_top_k(again.commit_workload(mod), 9) for name, mod in mods.items()}
    secs = {name: [float(each.run_secs[0]) for each in found] for name, found in top.items()}
    assert secs == {"GMM": [2e-3], "C1D": [3e-3]}
    assert again.disqualified_secs == {workload_key(mods["GMM"]): [1e-5, 4e-3]}
    assert [each[1][1] for each in lines(tmp_path)] == [[1e-5], [2e-3], [3e-3], [4e-3]]


def test_times_that_json_has_no_word_for_are_failures(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for run_secs in ([np.nan], [np.inf], [2e-3]):
        commit(database, templates["GMM"][0], run_secs, target)
    assert [each[1][1] for each in lines(tmp_path)] == [FAILED, FAILED, [2e-3]]
    assert len(database.get_top_k(database.commit_workload(mods["GMM"]), 9)) == 1


@pytest.mark.parametrize("n_lost", [1, 40, 400])
def test_a_killed_writer_leaves_whole_lines_but_for_the_last(
    tmp_path: Path,
    templates: dict[str, list[TuningRecord]],
    mods: Mods,
    target: Target,
    n_lost: int,
) -> None:
    database = RunDatabase(tmp_path)
    for number in range(1, 6):
        commit(database, templates["GMM"][0], [1e-3 * number], target)
    path = tmp_path / RECORD_FILE
    os.truncate(path, path.stat().st_size - n_lost)
    # A lost line break alone costs no record.
    n_left = 5 if n_lost == 1 else 4
    # Without repair the half line costs itself only, also when others follow it.
    again = RunDatabase(tmp_path)
    assert len(again) == n_left
    commit(again, templates["GMM"][1], [1e-4], target)
    assert len(RunDatabase(tmp_path)) == n_left + 1
    assert repair_database(tmp_path) == 5 - n_left
    for repaired in (RunDatabase(tmp_path), json_database(tmp_path)):
        top = repaired.get_top_k(repaired.commit_workload(mods["GMM"]), 9)
        assert [float(record.run_secs[0]) for record in top][:2] == [1e-4, 1e-3]
        assert len(top) == n_left + 1


def test_a_damaged_workload_costs_its_own_records_only(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for name, template in templates.items():
        commit(database, template[0], [1e-3], target)
        assert name
    path = tmp_path / WORKLOAD_FILE
    first, second = path.read_text().splitlines()
    path.write_text(f"{first[:50]}\n{second}\n")
    again = RunDatabase(tmp_path)
    assert not again.has_workload(mods["GMM"])
    assert [workload_key(each.mod) for each in again.readable_workloads] == [
        workload_key(mods["C1D"])
    ]
    assert len(again.get_top_k(again.commit_workload(mods["C1D"]), 9)) == 1


@pytest.mark.parametrize("is_workload_known", [True, False])
def test_a_full_disk_loses_no_record(
    is_workload_known: bool,
    make_disk: Callable[[int], Path],
    templates: dict[str, list[TuningRecord]],
    mods: Mods,
    target: Target,
) -> None:
    disk = make_disk(256 << 10)
    database = RunDatabase(disk)
    if is_workload_known:
        commit(database, templates["GMM"][0], [5e-3], target)
    filler = disk / "somebody-elses"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for number in range(1, 9):
        commit(database, templates["GMM"][0], [1e-3 * number], target)
    assert RunDatabase(disk).has_workload(mods["GMM"]) == is_workload_known
    n_written = len(lines(disk))
    assert n_written < 9
    filler.unlink()
    commit(database, templates["GMM"][0], [9e-3], target)
    assert [each[1][1] for each in lines(disk)][-1] == [9e-3]
    assert len(lines(disk)) == len(database) == 9 + is_workload_known
    assert RunDatabase(disk).has_workload(mods["GMM"])


def test_a_copy_is_read_and_written_in_place_of_the_files(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    commit(RunDatabase(tmp_path), templates["GMM"][0], [1e-3], target)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    database = readable_database(tmp_path)
    commit(database, templates["GMM"][1], [2e-3], target)
    assert len(database.get_top_k(database.commit_workload(mods["GMM"]), 9)) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_trace_that_changes_a_layout_is_kept(tmp_path: Path, mods: Mods, target: Target) -> None:
    schedule = Schedule(mods["GMM"])
    schedule.split(schedule.get_loops(schedule.get_sblock("Z"))[1], [None, 4])
    schedule.enter_postproc()
    schedule.transform_layout("Z", ("read", 1), lambda b, i, j: (b, j, i))
    mod = mods["GMM"]
    ours = RunDatabase(tmp_path)
    workload = ours.commit_workload(mod)
    ours.commit_tuning_record(
        TuningRecord(schedule.trace, workload, [1e-3], target, args_info_of(mod))
    )
    for database in (ours, RunDatabase(tmp_path), json_database(tmp_path)):
        found = database.query_ir_module(mod, target, "main")
        assert structural_hash(found) == structural_hash(schedule.mod)


def test_a_play_off_reads_no_more_than_the_best(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for number in range(300, 0, -1):
        commit(database, templates["GMM"][0], [1e-6 * number], target)
    best = sane_records(database, mods["GMM"], target)
    seconds = [float(record.run_secs[0]) for record in best]
    assert seconds == [1e-6 * number for number in range(1, MAX_RECORDS + 1)]
    assert len(sane_records(database, mods["GMM"], target, 7)) == 7


def test_records_are_replayed_a_few_at_a_time(
    tmp_path: Path, templates: dict[str, list[TuningRecord]], mods: Mods, target: Target
) -> None:
    database = RunDatabase(tmp_path)
    for number in range(1, 101):
        run_secs = FAILED if number % 10 == 0 else [1e-6 * number]
        commit(database, templates["GMM"][number % 7], run_secs, target)
    inner = python_side(database)
    read: list[int] = []
    make = inner._record_at
    inner._record_at = lambda place, offset: read.append(offset) or make(place, offset)
    found = measured_schedules(database, mods["GMM"], n_threads=2)
    seconds, schedule = next(found)
    assert 0 < len(read) <= 32
    record = templates["GMM"][1].as_measure_candidate()
    assert structural_hash(schedule.mod) == structural_hash(record.sch.mod)
    rest = [sec for sec, _ in found]
    assert [round(sec * 1e6) if sec < 1e9 else None for sec in [seconds, *rest]] == [
        None if number % 10 == 0 else number for number in range(1, 101)
    ]
