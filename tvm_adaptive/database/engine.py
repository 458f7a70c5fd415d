"""Connections to SQLite and PostgreSQL that never make a run wait without a bound."""

from __future__ import annotations

import contextlib
import logging
import os
import re
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

logger = logging.getLogger(__name__)

INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

# A writer holds the file for milliseconds. Ten seconds mean that something else is wrong, and
# a search shall not wait for that: what it could not write is written later.
BUSY_TIMEOUT_SEC = 10.0
# While one process turns a new file to write-ahead mode, others cannot.
_JOURNAL_TRIES = 50
_JOURNAL_WAIT_SEC = 0.1

# Within a network it takes milliseconds, from far away with TLS some tenths of a second.
CONNECT_TIMEOUT_SEC = 5
# A batch's rows are locked for milliseconds.
_LOCK_TIMEOUT_SEC = 5
# The longest question lists the rows of one task: a million of them take some seconds.
_STATEMENT_TIMEOUT_SEC = 10
# Others shall not wait for the locks of a client that is gone.
_IDLE_IN_TRANSACTION_SEC = 60
# What the server does not end by itself (it hangs, or the network is gone) is ended here, a
# little later, so that the server's own and better message comes first.
ANSWER_TIMEOUT_SEC = 15.0
# An upgrade or a cleaning may rewrite tables; no search waits for it.
LONG_ANSWER_TIMEOUT_SEC = 600.0
_KEEPALIVES = {
    "keepalives": 1,
    # A peer that is gone is noticed after 10 + 3 x 5 s, also by an idle connection.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    # What was sent and never acknowledged, in milliseconds.
    "tcp_user_timeout": 15_000,
}

MOUNTINFO = Path("/proc/self/mountinfo")
# Write-ahead mode needs memory that all writers share, which a file system of several
# machines does not give; SQLite's documentation says that it must not be used there.
# fmt: off
_NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "lustre", "gpfs",
    "ceph", "9p", "virtiofs", "vboxsf", "prl_fs", "beegfs", "afs", "coda", "orangefs", "pvfs2",
    "ocfs2", "gfs2", "glusterfs", "panfs", "wekafs", "davfs", "acfs", "vmhgfs",
})
# fmt: on
# Most of what runs outside of the kernel is on another machine; this one is not.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})


def engine_of(url: URL, mountinfo: Path = MOUNTINFO) -> sa.Engine:
    """Return what connects to a store; nothing is opened yet."""
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SEC})
        kind = file_system_of(Path(url.database), mountinfo) if url.database else ""
        if is_shared_by_network(kind):
            logger.warning(
                "The record store %s lies on a network file system (%s): it is written with a "
                "rollback journal, which is slower. Better name a store on a local disk, or a "
                "PostgreSQL server.",
                url.database,
                kind,
            )
        sa.event.listen(engine, "connect", _SetUpSqlite(is_shared_by_network(kind)))
        return engine
    defaults = {"connect_timeout": CONNECT_TIMEOUT_SEC, **_KEEPALIVES}
    given = {key: value for key, value in defaults.items() if key not in url.query}
    engine = sa.create_engine(url, connect_args=given)
    sa.event.listen(engine, "connect", _set_up_postgresql)
    sa.event.listen(engine, "checkout", _see_that_it_answers)
    return engine


@contextlib.contextmanager
def connected(engine: sa.Engine, limit_sec: float = ANSWER_TIMEOUT_SEC) -> Iterator[sa.Connection]:
    """Connect for as long as a question takes; one without an answer is ended."""
    connection = engine.connect()
    with _ended_after(connection.connection.driver_connection, limit_sec):
        try:
            if limit_sec > ANSWER_TIMEOUT_SEC and engine.dialect.name == "postgresql":
                # Until the transaction's end.
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{limit_sec:.0f}s'")
            yield connection
        finally:
            # Asks the server to roll back what was not committed.
            connection.close()


@contextlib.contextmanager
def transaction(
    engine: sa.Engine, limit_sec: float = ANSWER_TIMEOUT_SEC
) -> Iterator[sa.Connection]:
    """Begin a transaction that writes; it is committed at the end, or nothing of it is."""
    with connected(engine, limit_sec) as connection:
        if engine.dialect.name == "sqlite":
            # Two readers that both become writers would wait for one another for ever.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.commit()
        except BaseException:
            connection.rollback()
            raise


def advice_on(reason: str) -> str:
    """Return what to do about an error, by what the database said of it."""
    lowered = reason.lower()
    if "malformed" in lowered or "not a database" in lowered:
        return "Nothing was changed. Move the file away, or restore a copy of it."
    if "full" in lowered:
        return "Make room, or name a store on another disk."
    if "no module named" in lowered:
        return "Install the driver: pip install 'tvm-adaptive[postgres]'."
    if "locked" in lowered or "lock timeout" in lowered:
        return "Something else holds it; end that, or try again."
    return "Check that the path or server is there and may be written to."


def file_system_of(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type of the file system that a file is or would be in; empty if not known."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place = Path(os.path.realpath(path))
    found, depth = "", -1
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        # Of two that are mounted at one place the later one covers the other.
        if place.is_relative_to(mounted) and len(mounted.parts) >= depth:
            found, depth = after.split(" ")[0], len(mounted.parts)
    return found


def is_shared_by_network(kind: str) -> bool:
    """Say whether several machines may write to a file system of a type."""
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    return kind in _NETWORK_FILE_SYSTEMS or (is_fuse and kind not in _LOCAL_FUSE)


class _SetUpSqlite:
    """Prepares connections of SQLite's driver; for SQLAlchemy's event of that."""

    def __init__(self, is_shared: bool) -> None:
        # What is acknowledged survives a power cut, too; one write per batch can afford it.
        self._mode, self._synchronous = ("DELETE", "EXTRA") if is_shared else ("WAL", "FULL")

    def __call__(self, connection: Any, _: Any) -> None:
        # Transactions are begun by us: Python's own driver begins them too late.
        connection.isolation_level = None
        # Text that is none would make the rows beside it unreadable, too.
        connection.text_factory = _text_of
        cursor = connection.cursor()
        for n_left in reversed(range(_JOURNAL_TRIES)):
            try:
                cursor.execute(f"PRAGMA journal_mode={self._mode}")
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or not n_left:
                    raise
                time.sleep(_JOURNAL_WAIT_SEC)
        cursor.execute(f"PRAGMA synchronous={self._synchronous}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()


def _text_of(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _set_up_postgresql(connection: Any, _: Any) -> None:
    """Bound what the server does for us; not by start-up options, which poolers refuse."""
    with _ended_after(connection, ANSWER_TIMEOUT_SEC), connection.cursor() as cursor:
        for name, seconds in (
            ("lock_timeout", _LOCK_TIMEOUT_SEC),
            ("statement_timeout", _STATEMENT_TIMEOUT_SEC),
            ("idle_in_transaction_session_timeout", _IDLE_IN_TRANSACTION_SEC),
        ):
            cursor.execute(f"SET {name} = '{seconds}s'")
        connection.commit()


def _see_that_it_answers(connection: Any, _record: Any, _proxy: Any) -> None:
    """Let the pool make a connection anew that the server has dropped, as overnight."""
    try:
        with _ended_after(connection, CONNECT_TIMEOUT_SEC), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            connection.rollback()
    except Exception as error:  # whatever a driver raises for a connection that is gone
        raise sa.exc.DisconnectionError(str(error)) from error


@contextlib.contextmanager
def _ended_after(connection: Any, seconds: float) -> Iterator[None]:
    """Shut a connection to a server that takes longer than some seconds to answer.

    The server's own limits do not help against a server that hangs, and keepalives are
    answered by its kernel.
    """
    # SQLite's has its busy timeout, and no socket.
    number = connection.fileno() if hasattr(connection, "fileno") else None
    if number is None:
        yield
        return
    # A number of our own: the driver's may be closed, and taken by others, meanwhile.
    with socket.socket(fileno=os.dup(number)) as ours:
        timer = threading.Timer(seconds, _shut, (ours,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _shut(ours: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed just now
        ours.shutdown(socket.SHUT_RDWR)
