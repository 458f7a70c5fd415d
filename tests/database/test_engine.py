"""Time limits of stores, and SQLite on network file systems."""

from __future__ import annotations

import contextlib
import logging
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from tests.database.conftest import drop_all
from tests.database.test_store import task, trial
from tvm_adaptive.database import engine as engines
from tvm_adaptive.database import schema
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError

# Only tells what ends from what hangs: on a busy machine anything takes seconds.
MUCH_SEC = 60.0


@pytest.fixture
def server(postgres: str) -> Iterator[str]:
    drop_all(postgres)
    yield postgres
    drop_all(postgres)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_LOCK_TIMEOUT_SEC", 1)
    monkeypatch.setattr(engines, "_STATEMENT_TIMEOUT_SEC", 2)
    monkeypatch.setattr(engines, "CONNECT_TIMEOUT_SEC", 2)
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_SEC", 0.5)


@pytest.mark.usefixtures("hurried")
def test_a_table_that_another_session_has_locked_is_an_error_soon(server: str) -> None:
    with RecordStore(server) as store:
        store.add(task(), [trial(1.0)])
        other = sa.create_engine(server)
        with other.connect() as session:
            session.exec_driver_sql("LOCK TABLE tvm_adaptive_trials IN ACCESS EXCLUSIVE MODE")
            start_sec = time.monotonic()
            with pytest.raises(StoreError, match=r"lock timeout.*Something else holds it"):
                store.add(task(), [trial(2.0)])
            with pytest.raises(StoreError, match="lock timeout"):
                store.best(task(), 1)
            assert time.monotonic() - start_sec < MUCH_SEC
            session.rollback()
        other.dispose()
        store.add(task(), [trial(3.0)])  # and goes on
        assert [each.seconds for each in store.latest(task())] == [1.0, 3.0]


@pytest.mark.usefixtures("hurried")
def test_one_who_never_ends_making_the_tables_is_not_waited_for(server: str) -> None:
    other = sa.create_engine(server)
    with other.connect() as session:
        session.execute(sa.select(sa.func.pg_advisory_xact_lock(schema._CREATE_LOCK)))
        with pytest.raises(StoreError, match="lock timeout"):
            RecordStore(server)
        session.rollback()
    other.dispose()
    RecordStore(server).close()


@pytest.mark.usefixtures("hurried")
def test_a_question_that_takes_too_long_is_ended_by_the_server(server: str) -> None:
    with (
        RecordStore(server) as store,
        pytest.raises(sa.exc.OperationalError, match="statement timeout"),
        engines.connected(store._engine) as connection,
    ):
        connection.exec_driver_sql("SELECT pg_sleep(600)")


def test_a_server_that_does_not_end_it_is_left_after_a_while(server: str) -> None:
    with RecordStore(server) as store:
        start_sec = time.monotonic()
        with (
            pytest.raises(sa.exc.OperationalError),
            engines.connected(store._engine, 0.5) as connection,
        ):
            connection.exec_driver_sql("SET statement_timeout = 0; SELECT pg_sleep(600)")
        assert time.monotonic() - start_sec < MUCH_SEC
        assert store.tasks() == []  # with another connection


def test_a_connection_that_the_server_has_ended_is_made_anew(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_TRUSTED_SEC", 0.0)  # as if it was not used for a while
    other = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with RecordStore(server) as store, other.connect() as session:
        store.add(task(), [trial(1.0)])
        session.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
        store.add(task(), [trial(2.0)])
        assert len(store.latest(task())) == 2
    other.dispose()


def test_a_connection_that_was_just_used_is_not_asked_whether_it_is_there() -> None:
    asked: list[str] = []
    cursor = contextlib.nullcontext(SimpleNamespace(execute=asked.append))
    connection: Any = SimpleNamespace(cursor=lambda: cursor, rollback=lambda: None)
    record: Any = SimpleNamespace(info={})
    engines._check_connection(connection, record, None)
    assert len(asked) == 1
    engines._note_use(connection, record)
    engines._check_connection(connection, record, None)
    assert len(asked) == 1
    record.info[engines._USED_SEC] -= engines._TRUSTED_SEC
    engines._check_connection(connection, record, None)
    assert len(asked) == 2


ROOM, HELD, DRIVER, MOVE = "Make room", "Something else holds it", "Install the driver", "Move the"
OTHERS = "Check that the path or server is there"


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("database or disk is full", ROOM),
        ("[Errno 28] No space left on device: '/srv/x'", ROOM),
        ('could not extend file "base/5/2608": No space left on device', ROOM),
        ("[Errno 122] Disk quota exceeded", ROOM),
        ("database is locked", HELD),
        ("database table is locked: tvm_adaptive_trials", HELD),
        ("database schema is locked: main", HELD),
        ("canceling statement due to lock timeout", HELD),
        ("No module named 'psycopg'", DRIVER),
        ("no pq wrapper available.", DRIVER),
        ("file is not a database", MOVE),
        ("database disk image is malformed", MOVE),
        ("malformed database schema (tvm_adaptive_meta)", MOVE),
        ("unable to open database file", OTHERS),
        ("[Errno 13] Permission denied: '/srv/full-models/x'", OTHERS),
        ("[Errno 13] Permission denied: '/srv/locked/malformed.db'", OTHERS),
        ('connection failed: FATAL:  database "full" does not exist', OTHERS),
    ],
)
def test_advice_follows_what_is_said_and_no_name(reason: str, advice: str) -> None:
    assert engines.advice_on(reason).removeprefix("Nothing was changed. ").startswith(advice)


@pytest.mark.usefixtures("hurried")
def test_a_server_that_accepts_and_never_answers_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        start_sec = time.monotonic()
        with pytest.raises(StoreError, match=r"Could not open the record store.*timeout"):
            RecordStore(f"postgresql+psycopg://me:secret@127.0.0.1:{port}/name")
        assert time.monotonic() - start_sec < MUCH_SEC


def test_the_bounds_are_what_the_server_and_libpq_get(server: str) -> None:
    with (
        RecordStore(f"{server}&keepalives_idle=77") as store,
        engines.connected(store._engine) as connection,
    ):
        settings = {
            name: connection.exec_driver_sql(f"SHOW {name}").scalar()
            for name in (
                "lock_timeout",
                "statement_timeout",
                "idle_in_transaction_session_timeout",
            )
        }
        info = connection.connection.driver_connection.info  # type: ignore[union-attr]
        reported = info.get_parameters()
    assert settings == {
        "lock_timeout": "5s",
        "statement_timeout": "10s",
        "idle_in_transaction_session_timeout": "1min",
    }
    assert reported["connect_timeout"] == "5"
    assert (reported["keepalives_interval"], reported["tcp_user_timeout"]) == ("5", "15000")
    assert reported["keepalives_idle"] == "77", "what a URL says goes before"


@pytest.mark.usefixtures("hurried")
def test_a_file_that_another_writer_holds_is_an_error_soon(tmp_path: Path) -> None:
    with RecordStore(tmp_path / "records.db") as store:
        other = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"locked.*Something else holds it"):
            store.add(task(), [trial(1.0)])
        other.execute("ROLLBACK")
        other.close()
        store.add(task(), [trial(1.0)])


def test_a_held_file_without_a_log_is_an_error_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_SEC", 1.0)
    monkeypatch.setattr(engines, "_JOURNAL_LIMIT_SEC", 0.5)
    monkeypatch.setattr(engines, "file_system_of", lambda _path: "nfs4")
    path = tmp_path / "records.db"
    RecordStore(path).close()
    tries: list[float] = []
    monkeypatch.setattr(engines.time, "sleep", tries.append)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked"):
            RecordStore(path)
    assert len(tries) <= 1  # each try waits itself


def modes(path: Path) -> tuple[object, object]:
    with RecordStore(path) as store, engines.connected(store._engine) as connection:
        store.add(task(), [trial(1.0)])
        return (
            connection.exec_driver_sql("PRAGMA journal_mode").scalar(),
            connection.exec_driver_sql("PRAGMA synchronous").scalar(),
        )


def test_on_a_network_file_system_there_is_no_write_ahead_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.db"
    monkeypatch.setattr(engines, "file_system_of", lambda _: "ext4")
    assert modes(path) == ("wal", 2)
    assert caplog.text == ""
    # Also of one that was made before with it.
    monkeypatch.setattr(engines, "file_system_of", lambda _: "nfs4")
    assert modes(path) == ("delete", 3)
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "nfs4" in line.message
    assert "local disk, or a PostgreSQL server" in line.message
    assert not list(tmp_path.glob("*-wal"))
    with RecordStore(path) as store:
        assert len(store.latest(task())) == 2


def test_several_threads_write_without_a_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "file_system_of", lambda _: "cifs")
    stores = [RecordStore(tmp_path / "records.db") for _ in range(3)]

    def write(store: RecordStore) -> None:
        for number in range(5):
            store.add(task(), [trial(1.0 + number)])

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(stores[0].latest(task())) == 15
    for store in stores:
        store.close()
