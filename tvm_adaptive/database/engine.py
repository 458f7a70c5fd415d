"""Connections to SQLite and PostgreSQL on which every wait has a bound."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL

from tvm_adaptive.workers.file_system import file_system_of, is_shared_by_network

logger = logging.getLogger(__name__)

INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

# A writer holds the file for milliseconds. After ten seconds something else is wrong, and the
# search does not wait for that: pending writes are written later.
BUSY_TIMEOUT_SEC = 10.0
# While one process switches a new file to write-ahead mode, others cannot.
_JOURNAL_LIMIT_SEC = 5.0
_JOURNAL_WAIT_SEC = 0.1

# Connecting takes milliseconds within a network, some tenths of a second from far away with TLS.
CONNECT_TIMEOUT_SEC = 5
# A batch's rows are locked for milliseconds.
_LOCK_TIMEOUT_SEC = 5
# The longest query lists the rows of one task: a million of them take some seconds.
_STATEMENT_TIMEOUT_SEC = 10
# A connection that was used so recently is taken to be there: servers restart rarely, and asking
# takes three round trips, about as many as a short query.
_TRUSTED_SEC = 1.0
_USED_SEC = "used_sec"  # of a connection in the pool: when it was used
# A client that is gone must not hold its locks for long.
_IDLE_IN_TRANSACTION_SEC = 60
# Ends what the server does not end itself (it hangs, or the network is gone); a little later,
# so that the server's own and better message comes first.
ANSWER_TIMEOUT_SEC = 15.0
# An upgrade or a pruning may rewrite tables; no search waits for it.
LONG_ANSWER_TIMEOUT_SEC = 600.0
_KEEPALIVES = {
    "keepalives": 1,
    # A lost peer is noticed after 10 + 3 x 5 s, also by an idle connection.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    # For data that was sent and never acknowledged, in milliseconds.
    "tcp_user_timeout": 15_000,
}


def engine_of(url: URL) -> sa.Engine:
    """Return the engine of a store; it opens nothing yet."""
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SEC})
        kind = file_system_of(Path(url.database)) if url.database else ""
        is_shared = is_shared_by_network(kind)
        if is_shared:
            logger.warning(
                "The record store %s lies on a network file system (%s): it is written with a "
                "rollback journal, which is slower. Better name a store on a local disk, or a "
                "PostgreSQL server.",
                url.database,
                kind,
            )
        sa.event.listen(engine, "connect", lambda each, _: _set_up_sqlite(each, is_shared))
        return engine
    defaults = {"connect_timeout": CONNECT_TIMEOUT_SEC, **_KEEPALIVES}
    given = {key: value for key, value in defaults.items() if key not in url.query}
    engine = sa.create_engine(url, connect_args=given)
    sa.event.listen(engine, "connect", _set_up_postgresql)
    sa.event.listen(engine, "checkin", _note_use)
    sa.event.listen(engine, "checkout", _check_connection)
    return engine


@contextlib.contextmanager
def connected(engine: sa.Engine, limit_sec: float = ANSWER_TIMEOUT_SEC) -> Iterator[sa.Connection]:
    """Connect for one query; a query without an answer is ended."""
    connection = engine.connect()
    with _ended_after(connection.connection.driver_connection, limit_sec):
        try:
            if limit_sec > ANSWER_TIMEOUT_SEC and engine.dialect.name == "postgresql":
                # Holds until the transaction's end.
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{limit_sec:.0f}s'")
            yield connection
        finally:
            # Asks the server to roll back what was not committed.
            connection.close()


@contextlib.contextmanager
def transaction(
    engine: sa.Engine, limit_sec: float = ANSWER_TIMEOUT_SEC
) -> Iterator[sa.Connection]:
    """Begin a transaction that writes, and commit it at the end or roll it back."""
    with connected(engine, limit_sec) as connection:
        if engine.dialect.name == "sqlite":
            # Two readers that both become writers would wait for each other for ever.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.commit()
        except BaseException:
            connection.rollback()
            raise


# By what SQLite, PostgreSQL, psycopg and the system say. A message also names files, databases
# and users, so that a single word tells nothing.
_ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("disk image is malformed", "malformed database schema", "is not a database"),
        "Nothing was changed. Move the file away, or restore a copy of it.",
    ),
    (
        ("disk is full", "no space left on device", "disk quota exceeded"),
        "Make room, or name a store on another disk.",
    ),
    (
        ("no module named", "no pq wrapper available"),
        "Install the driver: pip install 'tvm-adaptive[postgres]'.",
    ),
    (
        ("database is locked", "table is locked", "schema is locked", "due to lock timeout"),
        "Something else holds it; end that, or try again.",
    ),
)
_ADVICE_ON_OTHERS = "Check that the path or server is there and may be written to."


def advice_on(reason: str) -> str:
    """Return what the user can do about a database's error message."""
    said = reason.lower()
    found = (advice for phrases, advice in _ADVICE if any(each in said for each in phrases))
    return next(found, _ADVICE_ON_OTHERS)


def _set_up_sqlite(connection: Any, is_shared: bool) -> None:
    """Set the mode of a new SQLite connection.

    Write-ahead mode needs memory that all writers share, so that SQLite's documentation
    excludes it on network file systems. What is acknowledged survives a power cut: one
    write per batch can afford that.
    """
    mode, synchronous = ("DELETE", "EXTRA") if is_shared else ("WAL", "FULL")
    # `transaction` begins transactions; Python's driver begins them too late.
    connection.isolation_level = None
    # Text that is not UTF-8 would make the rows beside it unreadable, too.
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    cursor = connection.cursor()
    end_sec = time.monotonic() + _JOURNAL_LIMIT_SEC
    while True:
        try:
            cursor.execute(f"PRAGMA journal_mode={mode}")
            break
        except sqlite3.OperationalError as error:
            # A try fails at once, or after the time that SQLite waits for the file.
            if "locked" not in str(error) or time.monotonic() >= end_sec:
                raise
            time.sleep(_JOURNAL_WAIT_SEC)
    cursor.execute(f"PRAGMA synchronous={synchronous}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _set_up_postgresql(connection: Any, _: Any) -> None:
    """Set the server's time limits by statements: poolers refuse start-up options."""
    with _ended_after(connection, ANSWER_TIMEOUT_SEC), connection.cursor() as cursor:
        for name, seconds in (
            ("lock_timeout", _LOCK_TIMEOUT_SEC),
            ("statement_timeout", _STATEMENT_TIMEOUT_SEC),
            ("idle_in_transaction_session_timeout", _IDLE_IN_TRANSACTION_SEC),
        ):
            cursor.execute(f"SET {name} = '{seconds}s'")
        connection.commit()


def _note_use(_: Any, record: Any) -> None:
    """Note when a connection was used last; the pool forgets it with the connection."""
    record.info[_USED_SEC] = time.monotonic()


def _check_connection(connection: Any, record: Any, _proxy: Any) -> None:
    """Make the pool replace a connection that the server has dropped, as overnight."""
    if time.monotonic() - record.info.get(_USED_SEC, -math.inf) < _TRUSTED_SEC:
        return
    try:
        with _ended_after(connection, CONNECT_TIMEOUT_SEC), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            connection.rollback()
    except Exception as error:  # drivers raise anything for a connection that is gone
        raise sa.exc.DisconnectionError(str(error)) from error


@contextlib.contextmanager
def _ended_after(connection: Any, seconds: float) -> Iterator[None]:
    """Shut the socket of a server that does not answer in time.

    The server's own limits do not help when it hangs: its kernel answers keepalives.
    """
    # SQLite's connection has its busy timeout, and no socket.
    number = connection.fileno() if hasattr(connection, "fileno") else None
    if number is None:
        yield
        return
    # A duplicate: the driver may close its descriptor, and others reuse the number, meanwhile.
    with socket.socket(fileno=os.dup(number)) as duplicate:
        timer = threading.Timer(seconds, _shut, (duplicate,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _shut(duplicate: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        duplicate.shutdown(socket.SHUT_RDWR)
