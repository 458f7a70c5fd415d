import json
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import tvm
from hypothesis import example, given
from hypothesis import strategies as st
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing.te_workload import create_te_workload

from tvm_adaptive.database.repair import copy_readable, repair_database
from tvm_adaptive.values.run_folder import RECORD_FILE, WORKLOAD_FILE

RECORDS = [json.dumps([n % 2, [[], [1e-3 * n], {"kind": "llvm"}, []]]) for n in range(1, 5)]
WORKLOADS = ['["1","aaaa"]', '["2","bbbb"]']


def write(directory, workloads=WORKLOADS, records=RECORDS):
    (directory / WORKLOAD_FILE).write_text("".join(line + "\n" for line in workloads))
    (directory / RECORD_FILE).write_text("".join(line + "\n" for line in records))


def lines(directory, name):
    return (directory / name).read_text().splitlines()


def test_a_sound_database_is_left_alone(tmp_path):
    write(tmp_path)
    before = (tmp_path / RECORD_FILE).stat().st_mtime_ns
    assert repair_database(tmp_path) == 0
    assert (tmp_path / RECORD_FILE).stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*.damaged"))


def test_missing_files_are_fine(tmp_path):
    assert repair_database(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_record_file_survives_a_cut_at_every_byte(tmp_path):
    write(tmp_path)
    whole = (tmp_path / RECORD_FILE).read_bytes()
    for offset in range(len(whole) + 1):
        (tmp_path / RECORD_FILE).write_bytes(whole[:offset])
        repair_database(tmp_path)
        kept = lines(tmp_path, RECORD_FILE)
        n_whole = whole[:offset].count(b"\n")
        # A line that lacks only its newline is whole, too.
        assert kept in (RECORDS[:n_whole], RECORDS[: n_whole + 1])
        assert (tmp_path / RECORD_FILE).read_bytes()[-1:] in (b"\n", b"")


@pytest.mark.parametrize(
    "bad",
    [
        *("", "   ", "[0,[[],[nan],{},[]]]", "[0,[[],[NaN],{},[]]]", "{"),
        "[0,[[],[1e999],{},[]]]",
        *("[]", "[0]", "{}", "5", "[0,[]]", "[2,[[],[1],{},[]]]", "[-1,[[],[1],{},[]]]"),
        '["0",[[],[1],{},[]]]',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_bad_line_in_the_middle_is_moved(tmp_path, bad):
    write(tmp_path, records=[*RECORDS[:2], bad, *RECORDS[2:]])
    assert repair_database(tmp_path) == (1 if bad.strip() else 0)
    assert lines(tmp_path, RECORD_FILE) == RECORDS
    if bad.strip():
        assert lines(tmp_path, RECORD_FILE + ".damaged") == [bad]


def test_records_of_a_lost_workload_go_with_it(tmp_path):
    # Line numbers are the keys: with the first line gone, its records would be the
    # second workload's.
    write(tmp_path, workloads=['["1","aa', WORKLOADS[1]])
    repair_database(tmp_path)
    assert lines(tmp_path, WORKLOAD_FILE) == []
    assert lines(tmp_path, RECORD_FILE) == []
    assert len(lines(tmp_path, RECORD_FILE + ".damaged")) == len(RECORDS)


@pytest.mark.parametrize("bad", ["[]", "{}", "7", '["1"', "[1,2]"])
def test_what_is_no_workload_ends_the_workloads(tmp_path, bad):
    write(tmp_path, workloads=[WORKLOADS[0], bad, WORKLOADS[1]])
    repair_database(tmp_path)
    assert lines(tmp_path, WORKLOAD_FILE) == WORKLOADS[:1]
    assert lines(tmp_path, RECORD_FILE) == [line for line in RECORDS if line.startswith("[0")]


@given(st.binary(max_size=200), st.binary(max_size=200))
@example(b"[]", b"[]")
def test_any_bytes_can_be_repaired(workloads, records):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / WORKLOAD_FILE).write_bytes(workloads)
        (folder / RECORD_FILE).write_bytes(records)
        repair_database(folder)
        assert repair_database(folder) == 0, "once is enough"


def test_a_copy_leaves_the_original_alone(tmp_path):
    original, copy = tmp_path / "run", tmp_path / "copy"
    original.mkdir()
    copy.mkdir()
    write(original)
    torn = (original / RECORD_FILE).read_bytes()[:-9] + b"\n\n"
    (original / RECORD_FILE).write_bytes(torn)
    assert copy_readable(original, copy)
    assert lines(copy, RECORD_FILE) == RECORDS[:-1]
    assert (original / RECORD_FILE).read_bytes() == torn
    assert sorted(path.name for path in original.iterdir()) == sorted([WORKLOAD_FILE, RECORD_FILE])
    assert not copy_readable(tmp_path, copy), "there is none"


def test_metaschedule_opens_what_was_repaired(tmp_path):
    mod = tvm.IRModule({"main": create_te_workload("GMM", 0)})
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    workload = database.commit_workload(mod)
    trace = tvm.s_tir.Schedule(mod).trace
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    for seconds in (1.0, 2.0):
        database.commit_tuning_record(
            ms.database.TuningRecord(trace, workload, [seconds], target, None)
        )
    del database
    path = tmp_path / RECORD_FILE
    path.write_bytes(path.read_bytes()[:-20] + b"\n\n")
    assert repair_database(tmp_path) == 1
    again = ms.database.JSONDatabase(work_dir=str(tmp_path))
    assert len(again) == 1


def test_a_long_run_is_not_read_whole(tmp_path):
    line = json.dumps([0, [["x" * 4000], [1e-3], {"kind": "llvm"}, []]])
    write(tmp_path, records=[line] * 2000)
    tracemalloc.start()
    assert repair_database(tmp_path) == 0
    with open(tmp_path / RECORD_FILE, "a") as file:
        file.write(line[:100])
    assert repair_database(tmp_path) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines(tmp_path, RECORD_FILE)) == 2000
    assert peak < (tmp_path / RECORD_FILE).stat().st_size / 4
