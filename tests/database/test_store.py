from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tvm_adaptive.database import maintenance, schema
from tvm_adaptive.database import store as store_module
from tvm_adaptive.database.engine import ANSWER_TIMEOUT_SEC, LONG_ANSWER_TIMEOUT_SEC
from tvm_adaptive.database.records import StoredTask, StoredTrial, pack_features, unpack_features
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.database.tables import ValidRows
from tvm_adaptive.errors import StoreDataError, StoreError
from tvm_adaptive.workers.environment import Environment

HERE, THERE = (Environment(name, "0.27.0", "0.1.0") for name in ("here", "there"))


def task(number: int = 0, target: str = '{"kind":"llvm"}', family: str = "matmul") -> StoredTask:
    return StoredTask(f"{number:016x}", target, family, f"matmul{number}", '["1", "mod"]')


def record(mark: object = None) -> str:
    """Return a record of a trace that does nothing, with a mark to tell it by."""
    return json.dumps([[[], []], mark])


def mark_of(trial: StoredTrial) -> object:
    return json.loads(trial.record)[1]


def trial(seconds: float | None, mark: object = None, **fields: object) -> StoredTrial:
    failure = "" if seconds is not None else "it crashed"
    return StoredTrial(record(mark), seconds, failure=failure, **fields)  # type: ignore[arg-type]


def test_what_was_added_is_there_in_another_process_life(url: str) -> None:
    features = np.arange(5, dtype=np.float32) / 3
    kept = StoredTrial(record(1), 1e-3, 0.02, "", features, 17.0, "run")
    with RecordStore(url) as store:
        store.add(task(), [kept, trial(None)])
    with RecordStore(url) as store:
        assert store.tasks() == [task()]
        first, second = store.latest(task())
    assert first.features is not None
    np.testing.assert_array_equal(first.features, features)
    fields = ("record", "seconds", "error", "failure", "unix_sec", "run")
    assert [getattr(first, name) for name in fields] == [getattr(kept, name) for name in fields]
    assert (second.seconds, second.failure, second.features) == (None, "it crashed", None)


def test_reading_all_trials_of_a_task_has_more_time_than_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    connected = store_module.connected

    def noted(engine: object, limit_sec: float) -> object:
        limits.append(limit_sec)
        return connected(engine, limit_sec)  # type: ignore[arg-type]

    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), [trial(1.0)])
        monkeypatch.setattr(store_module, "connected", noted)
        store.best(task(), 3)
        store.latest(task())
    assert limits == [ANSWER_TIMEOUT_SEC, LONG_ANSWER_TIMEOUT_SEC]


def test_an_import_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    add = RecordStore.add

    def watched(store: RecordStore, task: StoredTask, trials: Sequence[StoredTrial]) -> None:
        sizes.append(len(trials))
        add(store, task, trials)

    monkeypatch.setattr(RecordStore, "add", watched)
    with RecordStore(tmp_path / "records.db") as store:
        rows = [trial(1.0 + i, i) for i in range(600)]
        assert maintenance.add_new(store, task(), rows) == 600
        assert maintenance.add_new(store, task(), rows) == 0
        assert len(store.latest(task())) == 600
    assert sizes == [256, 256, 88, 0]


def test_what_a_store_refuses_for_its_content_holds_up_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(add: Callable[..., None]) -> Callable[..., None]:
        def adding(store: RecordStore, task: StoredTask, rows: Sequence[StoredTrial]) -> None:
            if any("\u2019" in each.failure for each in rows):
                raise StoreDataError("The character has no equivalent in LATIN1.")
            add(store, task, rows)

        return adding

    odd = dataclasses.replace(trial(None, 2), failure="gcc: \u2018x\u2019 was not declared")
    with RecordStore(tmp_path / "theirs.db") as theirs:
        theirs.add(task(), [trial(1.0, 1), odd, trial(3.0, 3)])
        theirs.add_finals(task(), [trial(1.0, 1), odd])
    for name in ("add", "add_finals"):
        monkeypatch.setattr(RecordStore, name, narrow(getattr(RecordStore, name)))
    for counts in ((2, 1), (0, 3)):
        _, *found = maintenance.import_records(str(tmp_path / "ours.db"), tmp_path / "theirs.db")
        assert tuple(found) == counts
    with RecordStore(tmp_path / "ours.db") as store:
        assert [each.seconds for each in store.latest(task())] == [1.0, 3.0]
        assert [each.seconds for each in store.finals(task())] == [1.0]


def test_a_store_in_use_is_imported_with_what_its_log_holds(tmp_path: Path) -> None:
    source = tmp_path / "theirs" / "records.db"
    with RecordStore(source) as store:
        store.add(task(), [trial(1.0), trial(2.0)])
        names = {path.name for path in source.parent.iterdir()}
        assert "records.db-wal" in names
        maintenance.import_records(str(tmp_path / "ours.db"), source)
        assert {path.name for path in source.parent.iterdir()} == names
        store.add(task(), [trial(3.0)])  # and goes on
    with RecordStore(tmp_path / "ours.db") as store:
        assert [each.seconds for each in store.latest(task())] == [1.0, 2.0]


def test_what_was_measured_elsewhere_is_not_known_yet(tmp_path: Path) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        rows = [trial(1.0), trial(None)]
        here, there = (
            [dataclasses.replace(each, environment=place) for each in rows]
            for place in (HERE, THERE)
        )
        assert maintenance.add_new(store, task(), rows) == 2  # nobody knows where
        assert maintenance.add_new(store, task(), here) == 2
        assert maintenance.add_new(store, task(), there) == 2
        for again in (rows, here, there):
            assert maintenance.add_new(store, task(), again) == 0
        assert len(store.at(HERE).latest(task())) == 2
        assert len(store.latest(task())) == 6


def test_rows_that_another_process_has_deleted_are_not_invalid(tmp_path: Path) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), [trial(1.0), trial(2.0)])
        with store._reading() as connection:
            found = store._valid.trials(connection, schema.trials, [1, 2, 3])
        assert [row_id for row_id, _ in found] == [1, 2]
        assert store.n_left_out == 0


def test_the_fastest_come_first_and_failures_never(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(3.0), trial(None), trial(1.0)])
        store.add(task(), [trial(2.0)])
        store.add(task(1), [trial(0.1)])
        assert [each.seconds for each in store.best(task(), 2)] == [1.0, 2.0]
        assert [each.seconds for each in store.latest(task())] == [3.0, None, 1.0, 2.0]
        assert store.best(task(2), 5) == []


def test_failed_trials_count_and_those_of_elsewhere_do_not(url: str) -> None:
    with RecordStore(url, HERE) as store:
        store.add(task(), [trial(1.0), trial(None)])
        store.add(task(), [dataclasses.replace(trial(2.0), environment=THERE)])
        assert store.has_trials(task(), 2)
        assert not store.has_trials(task(), 3)
        assert store.at(None).has_trials(task(), 3)
        assert not store.has_trials(task(1), 1)


def test_only_the_wanted_ones_of_thousands_of_rows_are_read(tmp_path: Path) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        store.add(task(), [trial(float(number)) for number in range(1, 600)])
        ids = iter(range(1, 600))
        with store._engine.connect() as connection:
            found = ValidRows().trials(connection, schema.trials, ids, 4)
        assert [row_id for row_id, _ in found] == [1, 2, 3, 4]
        assert next(ids) == 5


def test_what_trials_took_is_reported_in_order_and_without_some_runs(url: str) -> None:
    mine = dataclasses.replace(trial(0.5), run="mine")
    with RecordStore(url) as store:
        store.add(task(), [trial(3.0), trial(None), trial(1.0), mine])
        store.add(task(1), [trial(0.1)])
        store.add(task(), [trial(2.0)])
        np.testing.assert_array_equal(store.seconds(task()), [3.0, np.nan, 1.0, 0.5, 2.0])
        without = store.seconds(task(), without={"mine", "another"})
        np.testing.assert_array_equal(without, [3.0, np.nan, 1.0, 2.0])
        assert store.seconds(task(2)) == []


def test_tasks_are_distinguished_by_workload_and_target(url: str) -> None:
    other = task(0, '{"kind":"cuda"}')
    conv = task(1, family="conv2d")
    with RecordStore(url) as store:
        for number, each in enumerate((task(), other, conv)):
            store.add(each, [trial(1.0 + number)])
        assert store.tasks() == [task(), other, conv]
        assert store.tasks(family="matmul") == [task(), other]
        assert store.tasks(target=other.target) == [other]
        assert store.tasks(family="matmul", target=other.target) == [other]
        assert [each.seconds for each in store.best(other, 9)] == [2.0]
        assert store.tasks(workload_keys=[conv.workload_key, "another"]) == [conv]
        assert store.tasks(workload_keys=[]) == []
        bare = [dataclasses.replace(each, workload="") for each in (task(), other)]
        assert store.tasks(family="matmul", newest=9, with_workload=False) == bare


def test_statistics_are_per_task(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(3.0, unix_sec=5.0), trial(None, unix_sec=9.0)])
        store.add(task(1), [])
        first, second = store.stats()
    assert first.task == dataclasses.replace(task(), workload="")
    assert (first.n_trials, first.n_failures) == (2, 1)
    assert (first.best_sec, first.last_unix_sec) == (3.0, 9.0)
    assert (second.n_trials, second.best_sec) == (0, None)


def test_pruning_keeps_the_fastest_of_each_task(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(sec) for sec in (5.0, None, 1.0, 3.0)])
        store.add(task(1), [trial(None)])
        assert store.prune(2) == 2
        assert [each.seconds for each in store.latest(task())] == [1.0, 3.0]
        assert len(store.latest(task(1))) == 1
        assert store.prune(2) == 0


def test_pruning_counts_apart_only_what_changes_times(url: str) -> None:
    here = Environment("a processor, 2 cores", "0.27.0", "0.1.14", "0.1.0")
    for where, seconds in (
        (here, [3.0, 4.0]),
        (dataclasses.replace(here, tvm_adaptive="0.2.0"), [1.0, 2.0]),
        (dataclasses.replace(here, device="another"), [5.0]),
        (None, [6.0]),
    ):
        with RecordStore(url, where) as store:
            store.add(task(), [trial(sec) for sec in seconds])
    with RecordStore(url) as store:
        assert store.prune(1) == 3
        assert [each.seconds for each in store.latest(task())] == [1.0, 5.0, 6.0]


def test_pruning_makes_the_file_smaller(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with RecordStore(path) as store:
        store.add(task(), [trial(1.0 + i, "x" * 1000) for i in range(500)])
        store.prune(10)
        assert len(store.latest(task())) == 10
    assert path.stat().st_size < 100_000


def test_what_playoffs_said_is_kept_beside_the_trials(url: str) -> None:
    with RecordStore(url) as store:
        store.add(task(), [trial(1.0)])
        store.add_finals(task(), [trial(2.0, "[2]", error=0.01, unix_sec=5.0, run="a")])
        store.add_finals(
            task(), [trial(None, "[3]", unix_sec=6.0), trial(1.5, "[2]", unix_sec=6.0)]
        )
        store.add_finals(task(1), [])
    with RecordStore(url) as store:
        first, second, third = store.finals(task())
        assert first == trial(2.0, "[2]", error=0.01, unix_sec=5.0, run="a")
        assert (second.seconds, second.failure, third.seconds) == (None, "it crashed", 1.5)
        assert store.finals(task(1)) == []
        assert [each.seconds for each in store.latest(task())] == [1.0]
        assert store.prune(1) == 0
        assert len(store.finals(task())) == 3  # they say what may be deployed


def test_a_store_knows_which_models_were_tuned_into_it(url: str) -> None:
    with RecordStore(url) as store:
        store.note_tuned("a" * 64)
        store.note_tuned("a" * 64)
    with RecordStore(url) as store:
        assert store.was_tuned("a" * 64)
        assert not store.was_tuned("b" * 64)
        assert not store.was_tuned("version")


def test_a_sample_holds_the_fastest_and_some_of_all_times(url: str) -> None:
    seconds = np.random.default_rng(0).permutation(np.arange(1.0, 201.0)).tolist()
    with RecordStore(url) as store:
        store.add(task(), [trial(sec, i) for i, sec in enumerate(seconds)])
        store.add(task(1), [trial(0.5), trial(None)])
        sample = store.sample(task(), 40)
        assert len(store.sample(task(1), 40)) == 2
        assert store.sample(task(2), 40) == []
        assert len(store.sample(task(), 1)) == 1
    places = [mark_of(each) for each in sample]
    assert places == sorted(set(places))
    assert 30 <= len(places) <= 40
    assert {0, 199} <= set(places)
    assert set(range(1, 21)) <= {each.seconds for each in sample}
    assert sum(each.seconds > 20 for each in sample if each.seconds) >= 15


def test_a_sample_without_a_run_is_as_large_as_one_of_all(url: str) -> None:
    mine, others = (
        [trial(sec + i / 1000, [run, i], run=run) for i in range(n)]
        for run, sec, n in (("mine", 1.0, 200), ("other", 5.0, 64))
    )
    with RecordStore(url) as store:
        store.add(task(), [*mine, *others])
        sample = store.sample(task(), 64, without={"mine", "another"})
        assert [each.run for each in sample] == ["other"] * 64
        assert len(store.sample(task(), 64)) == 64


def test_what_is_left_of_a_crash_can_be_stored(url: str) -> None:
    odd = StoredTrial(record(), None, failure="half\0a \udcff line")
    with RecordStore(url) as store:
        store.add(task(), [odd])
        assert store.latest(task())[0].failure == "halfa ? line"


def append(url: str, number: int, n: int) -> None:
    with RecordStore(url) as store:
        for i in range(n):
            mark = [number, i]
            store.add(task(i % 3), [trial(1.0 + i, mark), trial(None, mark)])


@pytest.mark.slow
@pytest.mark.parametrize(("n_writers", "n"), [(4, 25), (8, 200)])
def test_several_processes_write_at_once_and_nothing_is_lost(
    url: str, n_writers: int, n: int
) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=append, args=(url, number, n)) for number in range(n_writers)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0] * n_writers
    with RecordStore(url) as store:
        assert len(store.tasks()) == 3
        kept = [
            json.dumps(mark_of(each)) for number in range(3) for each in store.latest(task(number))
        ]
    assert len(kept) == 2 * n_writers * n
    assert set(kept) == {json.dumps([k, i]) for k in range(n_writers) for i in range(n)}


def append_until_killed(url: str, acknowledged: str) -> None:
    with RecordStore(url) as store, open(acknowledged, "ab", buffering=0) as log:
        i = 0
        while True:
            store.add(task(), [trial(1.0, i), trial(2.0, i)])
            log.write(b"%d\n" % i)
            i += 1


@pytest.mark.slow
@pytest.mark.parametrize("wait_sec", [0.05, 0.11, 0.23])
def test_a_writer_that_is_killed_leaves_whole_batches_and_all_acknowledged_ones(
    tmp_path: Path, wait_sec: float
) -> None:
    url, acknowledged = str(tmp_path / "records.db"), tmp_path / "acknowledged"
    RecordStore(url).close()
    spawn = multiprocessing.get_context("spawn")
    writer = spawn.Process(target=append_until_killed, args=(url, str(acknowledged)))
    writer.start()
    while not acknowledged.exists() or not acknowledged.read_bytes():
        time.sleep(0.01)
    time.sleep(wait_sec)
    writer.kill()
    writer.join()
    reported = [int(line) for line in acknowledged.read_bytes().split(b"\n")[:-1]]
    with RecordStore(url) as store:
        kept = [mark_of(each) for each in store.latest(task())]
        store.add(task(), [trial(3.0)])  # and goes on
    assert reported
    assert kept == [i for i in range(len(kept) // 2) for _ in range(2)]
    assert len(kept) // 2 >= len(reported)


def test_a_full_disk_is_an_error_and_costs_nothing_that_was_there(tmp_path: Path) -> None:
    url = str(tmp_path / "records.db")
    with RecordStore(url) as store:
        store.add(task(), [trial(1.0)])
        n_pages = sqlite3.connect(url).execute("PRAGMA page_count").fetchone()[0]

        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count={n_pages + 2}")

        import sqlalchemy as sa

        sa.event.listen(store._engine, "connect", limit)
        store._engine.dispose()
        with pytest.raises(StoreError, match=r"full.*Make room"):
            store.add(task(), [trial(2.0, "x" * 100_000)])
    with RecordStore(url) as store:
        assert store.best(task(), 1)[0].seconds == 1.0


def test_on_a_disk_that_fills_up_all_acknowledged_trials_stay(
    make_disk: Callable[[int], Path],
) -> None:
    small_disk = make_disk(512 << 10)
    n_acknowledged = 0
    with RecordStore(small_disk / "records.db") as store:
        refused = ""
        while not refused:
            try:
                store.add(task(), [trial(1.0, "x" * 2000), trial(2.0, "y" * 2000)])
                n_acknowledged += 1
            except StoreError as error:
                refused = str(error)
    assert "full" in refused
    assert 10 < n_acknowledged < 1000
    with RecordStore(small_disk / "records.db") as store:
        kept = store.latest(task())
    assert len(kept) == 2 * n_acknowledged
    assert all(len(each.record) > 2000 for each in kept)


@pytest.mark.parametrize(
    "content",
    [b"no database at all" * 100, np.random.default_rng(0).bytes(8192)],
    ids=["text", "bytes"],
)
def test_a_file_that_is_no_store_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "records.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"not a database\. Nothing was changed"):
        RecordStore(path)
    assert path.read_bytes() == content


def test_a_store_of_another_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    RecordStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tvm_adaptive_meta SET value = '99'")
        connection.execute("DROP TABLE tvm_adaptive_finals")
    with pytest.raises(StoreError, match=r"version 99, this package reads 2"):
        RecordStore(path)
    with sqlite3.connect(path) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "tvm_adaptive_finals" not in names


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mysql://me:hunter2@host/name", "can be sqlite or postgresql"),
        ("postgresql+psycopg://me:hunter2@127.0.0.1:1/name", "Could not open the record store"),
        ("://", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_used_is_reported_without_its_password(url: str, text: str) -> None:
    with pytest.raises(StoreError, match=text) as caught:
        RecordStore(url)
    assert "hunter2" not in str(caught.value)


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Could not open the record store"):
        RecordStore(tmp_path / "file" / "records.db")


def test_damaged_features_cost_the_features_only(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with RecordStore(path) as store:
        store.add(task(), [trial(1.0, features=np.ones(3, dtype=np.float32))])
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE tvm_adaptive_trials SET features = x'00'")
        (found,) = store.latest(task())
    assert found.features is None
    assert found.seconds == 1.0


def test_features_are_kept_to_the_bit() -> None:
    features = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    unpacked = unpack_features(pack_features(features))
    assert unpacked is not None
    np.testing.assert_array_equal(unpacked, features)
    assert unpack_features(pack_features(None)) is None
